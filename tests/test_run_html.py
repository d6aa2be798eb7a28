"""Tests of the view of a runner in a notebook: its state, its last metrics, and curves that need no other files."""

import re
import threading
import time
from html.parser import HTMLParser

import pytest

from runnerkit import dl
from runnerkit.history.curve_svg import COLORS, MOST_POINTS, curve_svg
from runnerkit.history.run_html import MOST_CURVES, MOST_ROWS
from tests.tiny import loader, mlp, train

VOID = {"br", "hr", "img", "input", "link", "meta"}


class View(HTMLParser):
    """Parsed view: rows of the table, exact values, curves by title, tags, attributes, and the text."""

    def __init__(self, html):
        super().__init__()
        self.html, self.rows, self.exact, self.tags, self.attributes, self.text = html, [], [], set(), [], ""
        self.curves, self._open, self._lines = {}, [], None
        self.feed(html)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        given = dict(attributes)
        if tag == "svg":
            self._lines = self.curves.setdefault(given["aria-label"].removeprefix("curves of "), [])
        elif tag in ("polyline", "circle"):
            self._lines.append(given)
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.exact += [given["title"]] if "title" in given else []
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & {*self._open}:
            self.rows[-1][-1] += data


def view(runner):
    return View(runner._repr_html_())


def shown_metrics(**loaders):
    """Return the view of a runner with these metrics, {loader: [{metric: value} per epoch]}."""
    runner = dl.SupervisedRunner()
    num_epochs = max(map(len, loaders.values()))
    runner.experiment_metrics = {
        epoch: {name: epochs[epoch - 1] for name, epochs in loaders.items() if epoch <= len(epochs)}
        for epoch in range(1, num_epochs + 1)
    }
    return view(runner)


def test_a_runner_that_has_not_run_has_neither_metrics_nor_curves():
    shown = view(dl.SupervisedRunner())

    assert shown.text == "SupervisedRunner has not run"
    assert (shown.rows, shown.curves) == ([], {})


def test_after_a_run_the_last_metrics_and_the_curves_are_shown():
    """The table has the numbers of `epoch_metrics`, in all digits as titles; constant metrics are not drawn."""
    runner = train(num_epochs=3, loaders={"train": loader(16, 4), "valid": loader(10, 5, seed=1)})

    shown = view(runner)

    assert shown.text.startswith("SupervisedRunner finished in epoch 3, after 12 optimizer steps (CPUEngine)")
    assert shown.rows[0] == ["metric", "■ train, epoch 3", "■ valid, epoch 3"]
    metrics = runner.epoch_metrics
    assert [row[0] for row in shown.rows[1:]] == list(dict.fromkeys([*metrics["train"], *metrics["valid"]]))
    assert shown.rows[1] == ["loss", *(f"{metrics[key]['loss']:.4g}" for key in ("train", "valid"))]
    assert {repr(metrics[key]["loss"]) for key in metrics} <= set(shown.exact)
    assert set(shown.curves) == {"loss"} and metrics["train"]["lr"] == 0.1
    assert [line["stroke"] for line in shown.curves["loss"]] == list(COLORS[:2])


class Watch(dl.Callback):
    """Keep the views that a callback, or another thread, would show."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.External)
        self.views = []

    def on_batch_end(self, runner):
        if runner.epoch_step == 2 and runner.loader_batch_step == 3:
            self.views.append(runner._repr_html_())


def test_within_a_run_the_place_is_shown_and_the_metrics_so_far():
    watch = Watch()

    runner = train(num_epochs=2, callbacks=[watch], loaders={"train": loader(16, 4), "valid": loader(9, 3, seed=1)})

    in_train, in_valid = map(View, watch.views)
    place = "SupervisedRunner running: stage train, epoch 2 of 2, loader"
    assert in_train.text.startswith(f"{place} train, batch 3 of 4 (CPUEngine)")
    assert in_valid.text.startswith(f"{place} valid, batch 3 of 3 (CPUEngine)")
    assert in_train.rows[0] == ["metric", "■ train, epoch 1", "■ valid, epoch 1"]
    assert in_valid.rows[0] == ["metric", "■ train, epoch 2", "■ valid, epoch 1"]
    first = runner.experiment_metrics[1]
    assert in_train.rows[1] == ["loss", f"{first['train']['loss']:.4g}", f"{first['valid']['loss']:.4g}"]
    assert "polyline" not in in_train.tags and "circle" in in_train.tags


def test_the_caller_of_two_processes_shows_all_processes_metrics(tmp_path):
    """Before they end, their metrics are unknown here; afterwards they are those of one process with larger batches."""
    runner, in_between = dl.SupervisedRunner(), []
    waits = threading.Event()

    class Signal(dl.Callback):
        def on_epoch_start(self, runner):
            (tmp_path / f"began_{runner.engine.rank}").touch()
            for _ in range(10_000):
                if (tmp_path / "seen").exists():
                    return
                time.sleep(0.01)

    def look():
        while not (tmp_path / "began_0").exists() and not waits.wait(0.01):
            pass
        in_between.append(view(runner).text)
        (tmp_path / "seen").touch()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        train(runner=runner, num_processes=2, num_epochs=2, callbacks=[Signal()])
    finally:
        waits.set()
        thread.join()
    alone = train(num_epochs=2, loaders={"train": loader(16, 8)})

    by = "(DistributedDataParallelEngine, 2 processes)"
    assert in_between == [f"SupervisedRunner running {by}; metrics arrive at the end"]
    shown = view(runner)
    assert shown.text.startswith(f"SupervisedRunner finished in epoch 2, after 4 optimizer steps {by}")
    assert shown.rows[1] == view(alone).rows[1]


class Refuses(dl.Callback):
    def on_epoch_end(self, runner):
        if runner.epoch_step == 2:
            raise ArithmeticError("<b>loss</b> is odd")


@pytest.mark.parametrize(("num_processes", "state"), [(1, "failed in epoch 2, after 8 optimizer steps"), (2, "failed")])
def test_after_a_failure_its_message_is_shown(num_processes, state):
    """In this process, with the metrics of the epochs before; of other processes only the message is known."""
    runner = dl.SupervisedRunner()
    with pytest.raises(ArithmeticError):
        train(runner=runner, num_processes=num_processes, num_epochs=3, callbacks=[Refuses()])

    shown = view(runner)

    assert shown.text.startswith(f"SupervisedRunner {state} (")
    assert "ArithmeticError: " in shown.text and "<b>loss</b> is odd" in shown.text
    assert "b" not in shown.tags
    assert bool(shown.rows) == (num_processes == 1)


def test_a_second_run_forgets_the_failure():
    runner = dl.SupervisedRunner()
    with pytest.raises(ArithmeticError):
        train(runner=runner, num_epochs=3, callbacks=[Refuses()])

    train(runner=runner, num_epochs=1)

    assert "finished in epoch 1" in view(runner).text and "ArithmeticError" not in view(runner).text


def test_an_evaluation_leaves_the_view_unchanged():
    runner = train(num_epochs=2)
    before = runner._repr_html_()

    runner.evaluate_loader(loader(8, 4))

    assert runner._repr_html_() == before


HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "&lt;b&gt;",
    "</svg></table></div>",
    "\udc80",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_shown_as_they_are(name):
    """Names of classes, loaders and metrics are text: they add no element and no attribute, and are not decoded."""
    hostile = type(name.replace("\udc80", "Own"), (dl.SupervisedRunner,), {})()
    hostile.experiment_metrics = {epoch: {name: {name: epoch / 2}} for epoch in (1, 2)}
    plain = type("Own", (dl.SupervisedRunner,), {})()
    plain.experiment_metrics = {epoch: {"loader": {"metric": epoch / 2}} for epoch in (1, 2)}

    shown, expected = view(hostile), view(plain)

    readable = name.replace("\udc80", "?")
    assert shown.tags == expected.tags
    assert [key for key, _ in shown.attributes] == [key for key, _ in expected.attributes]
    assert shown.rows == [["metric", f"■ {readable}, epoch 2"], [readable, "1"]]
    assert list(shown.curves) == [readable]


def test_the_view_needs_no_other_files_and_no_style_sheet():
    """It lacks links, scripts, styles for the page, or ids that would be there twice in a notebook of two runs."""
    shown = view(train(num_epochs=2))

    assert shown.tags == {
        "div", "strong", "span", "table", "thead", "tbody", "tr", "th", "td", "svg", "path", "text", "polyline",
    }  # fmt: skip
    assert {key for key, _ in shown.attributes} & {"src", "href", "xlink:href", "id", "onload"} == set()
    assert re.findall(r"https?:[^\"]*", shown.html) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in shown.html


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("background", ["#ffffff", "#111111", "#1e1e1e"])
def test_curves_are_legible_on_light_and_dark_pages(background):
    """Text has the color of the page; the contrast of curves is at least the 3 that WCAG demands of graphics."""
    html = train(num_epochs=2)._repr_html_()

    for color in COLORS:
        low, high = sorted([luminance(color), luminance(background)])
        assert (high + 0.05) / (low + 0.05) >= 3
    own = set(re.findall(r"(?:fill|stroke|color)[=:]\s*\"?([\w#]+)", html))
    assert own <= {"none", "currentColor", "inherit", *COLORS}


def points(line):
    return [tuple(map(float, pair.split(","))) for pair in line["points"].split()]


def test_a_curve_goes_through_its_points():
    """Equal steps of x and y are equal steps in the picture, y grows upwards, and gaps interrupt the line."""
    svg = View(curve_svg("loss", {"a": [(1, 4.0), (2, 3.0), (3, float("nan")), (5, 0.0)], "b": [(1, 2.0), (5, 4.0)]}))

    first, single, second = svg.curves["loss"]
    (left, top), (x_2, y_3) = points(first)
    (_, y_2), (right, _) = points(second)
    assert x_2 - left == pytest.approx((right - left) / 4, abs=0.2)
    assert (y_3 - top, y_2 - top) == pytest.approx(((y_2 - top) / 2, 2 * (y_3 - top)), abs=0.2)
    assert (float(single["cx"]), float(single["cy"]) - top) == (right, pytest.approx(2 * (y_2 - top), abs=0.2))
    assert re.findall(r">([^<]+)</text>", svg.html) == ["loss", "4", "1", "0", "5"]


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf"), float("nan")], [1e308, -1e308], [5e-324, 0.0]])
def test_extreme_values_are_drawn_within_the_picture_or_not_at_all(values):
    svg = View(curve_svg("loss", {"train": list(enumerate(values, start=1))}))

    places = [each for line in svg.curves["loss"] if "points" in line for each in points(line)]
    assert len(places) == (len(values) if "nan" not in map(str, values) else 0)
    assert all(0 <= x <= 280 and 0 <= y <= 150 for x, y in places)


def test_a_long_curve_keeps_its_peaks_and_its_ends_stay_small():
    values = [0.5] * 10_000
    values[1234], values[8000] = 7.0, -3.0

    svg = View(curve_svg("loss", {"train": list(enumerate(values))}))

    [line] = svg.curves["loss"]
    heights = [y for _, y in points(line)]
    assert len(heights) <= MOST_POINTS
    assert (heights.count(min(heights)), heights.count(max(heights))) == (1, 1)
    assert min(heights) == 24 and max(heights) == 130


@pytest.mark.parametrize("place", [500, 504, 509])
def test_a_long_curve_keeps_its_gaps(place):
    """The line is interrupted where a value is NaN, as in a short curve."""
    values = [float(each % 7) for each in range(1_000)]
    values[place] = float("nan")

    svg = View(curve_svg("loss", {"train": list(enumerate(values))}))

    left, right = ([x for x, _ in points(line)] for line in svg.curves["loss"])
    assert max(left) < 52 + (272 - 52) * place / 999 < min(right)


def test_many_metrics_are_cut_with_their_number():
    """A confusion matrix would fill the page; the loss comes first, "_private" metrics are not shown."""
    epochs = [{**{f"m{index:03d}": index + epoch for index in range(50)}, "loss": 1 / epoch} for epoch in (1, 2)]
    epochs[1]["_timer/_fps"] = 3.0

    shown = shown_metrics(train=epochs)

    assert len(shown.rows) == 1 + MOST_ROWS and shown.rows[1][0] == "loss"
    assert list(shown.curves) == ["loss", "m000", "m001", "m002"] and len(shown.curves) == MOST_CURVES
    assert f"and {51 - MOST_ROWS} more metrics" in shown.text and f"and {51 - MOST_CURVES} more curves" in shown.text
    assert "_fps" not in shown.html


def test_a_loader_without_values_in_the_last_epoch_shows_its_last_ones():
    shown = shown_metrics(train=[{"loss": 2.0}, {"loss": 1.0}], valid=[{"accuracy": float("nan")}])

    assert shown.rows[0] == ["metric", "■ train, epoch 2", "■ valid, epoch 1"]
    assert shown.rows[1:] == [["loss", "1", ""], ["accuracy", "", "nan"]]


def test_a_long_name_and_a_long_message_are_shortened():
    runner = dl.SupervisedRunner()
    with pytest.raises(RuntimeError):
        train(mlp(), runner=runner, callbacks=[Fails()])
    runner.experiment_metrics = {1: {"train": {"m" * 500: 1.0}}}

    shown = view(runner)

    assert shown.rows[1][0] == "m" * 59 + "…"
    assert len(shown.text) < 2500


class Fails(dl.Callback):
    def on_epoch_start(self, runner):
        raise RuntimeError("x" * 10_000)
