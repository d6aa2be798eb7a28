"""Tests of plot_metrics, which draws the logged curves."""

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.cbook import is_math_text
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread

from runnerkit.callbacks.metrics.parts.figures import draw_curves, draw_matrix, draw_table
from runnerkit.history.plot import plot_metrics
from runnerkit.logger import Step
from runnerkit.loggers import CSVLogger
from tests.runs import judge_run


def write(logdir: Path, metrics_of_epoch: Callable[[int], dict[str, float]], epochs: Iterable[int]) -> None:
    logger = CSVLogger(logdir)
    logger.setup()
    for epoch in epochs:
        logger.log_scalars(metrics_of_epoch(epoch), step=Step("train", "train", epoch, epoch), scope="loader")
    logger.close()


def log(logdir: Path, *, num_epochs: int = 5, evaluations_per_epoch: int = 1) -> None:
    logger = CSVLogger(logdir)
    logger.setup()
    for epoch in range(1, num_epochs + 1):
        for part in range(evaluations_per_epoch):
            step = 100 * (epoch - 1) + 100 * (part + 1) // evaluations_per_epoch
            metrics = {"loss": 1 / step, "accuracy": 1 - 1 / step}
            logger.log_scalars(metrics, step=Step("train", "valid", epoch, step), scope="loader")
        metrics = {"loss": 2 / epoch, "accuracy": 1 - 1 / epoch, "lr": 0.1, "momentum": 0.9, "norm": epoch}
        logger.log_scalars(metrics, step=Step("train", "train", epoch, 100 * epoch), scope="loader")
    logger.close()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the list to which saved figures are added."""
    saved: list[Figure] = []
    save = Figure.savefig

    def remember(figure: Figure, *args: object, **kwargs: object) -> None:
        saved.append(figure)
        save(figure, *args, **kwargs)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(Figure, "savefig", remember)
    return saved


def test_picture_is_saved_in_the_logdir(tmp_path: Path) -> None:
    """By default, the picture is a PNG called metrics.png, with content."""
    log(tmp_path)

    path = plot_metrics(tmp_path)

    assert path == tmp_path / "metrics.png"
    pixels = imread(path)
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 600
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


def test_the_loss_and_what_is_monitored_are_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    """By default; without a monitored metric, the loss and what evaluation loaders log; "all" leaves out constants."""
    log(tmp_path / "run")
    plot_metrics(tmp_path / "run")
    plot_metrics(tmp_path / "run", metrics="all")
    judge_run(tmp_path / "run", "train", "norm", minimize=False)
    plot_metrics(tmp_path / "run")
    plot_metrics(tmp_path / "run", log_scale=["lr"])

    drawn = [[axes.get_ylabel() for axes in figure.axes] for figure in figures]
    assert drawn[0] == ["loss", "accuracy"]
    assert drawn[1] == ["loss", "accuracy", "norm"]
    assert drawn[2] == ["loss", "norm"]
    assert drawn[3] == ["loss", "norm", "lr"]


def test_a_monitored_metric_may_have_a_slash_in_its_name(tmp_path: Path, figures: list[Figure]) -> None:
    """It is drawn like any other, also if the key of its loader has one."""
    write(tmp_path, lambda epoch: {"loss": 1 / epoch, "other": epoch, "f1/_macro": epoch}, range(1, 4))

    for monitored in ("valid/f1/_macro", "valid/easy/f1/_macro"):
        (tmp_path / "environment.json").write_text(json.dumps({"settings": {"monitored": [monitored]}}))
        plot_metrics(tmp_path)

    assert [[axes.get_ylabel() for axes in figure.axes] for figure in figures] == [["loss", "f1/_macro"]] * 2


def test_many_metrics_do_not_make_a_tall_picture(tmp_path: Path, figures: list[Figure]) -> None:
    """Of a run with 105 metrics and no monitored one, four are drawn; of a run without a loss, too."""
    write(tmp_path / "a", lambda epoch: {f"m{each}": epoch * each for each in range(105)}, range(4))
    write(tmp_path / "b", lambda epoch: {"d_loss": epoch, "lossy": epoch, "g/loss": 1.0}, range(4))

    plot_metrics(tmp_path / "a")
    plot_metrics(tmp_path / "b")

    assert [axes.get_ylabel() for axes in figures[0].axes] == ["m1", "m2", "m3", "m4"]
    assert [axes.get_ylabel() for axes in figures[1].axes] == ["d_loss", "g/loss", "lossy"]


def test_a_single_point_and_a_run_of_constants_are_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    """After one epoch nothing is constant; if nothing changes, something is drawn nevertheless."""
    write(tmp_path / "one", lambda _: {"a": 1.0, "b": 2.0}, range(1))
    write(tmp_path / "constant", lambda _: {"a": 1.0, "b": 2.0}, range(3))

    for name in ("one", "constant"):
        plot_metrics(tmp_path / name)

    assert [[axes.get_ylabel() for axes in each.axes] for each in figures] == [["a", "b"]] * 2


def test_an_svg_has_the_width_of_its_page(tmp_path: Path, figures: list[Figure]) -> None:
    """It has one column and no fixed size."""
    log(tmp_path)

    svg = plot_metrics(tmp_path, path=tmp_path / "curves.svg", metrics=["loss", "accuracy", "norm"]).read_text()

    root = svg[svg.index("<svg") : svg.index(">", svg.index("<svg"))]
    assert 'viewBox="0 0 ' in root and 'width="100%"' in root and " height=" not in root
    assert len({round(axes.get_position().x0, 1) for axes in figures[0].axes}) == 1


def test_each_metric_has_a_subplot_and_each_loader_a_curve(tmp_path: Path, figures: list[Figure]) -> None:
    """Each metric has a subplot with a curve of the logged values per loader, over whole epochs."""
    log(tmp_path)

    plot_metrics(tmp_path, metrics=["loss", "accuracy", "lr"])

    subplots = {axes.get_ylabel(): axes for axes in figures[0].axes}
    assert list(subplots) == ["loss", "accuracy", "lr"]
    curves = {str(line.get_label()): line for line in subplots["loss"].lines}
    assert set(curves) == {"train", "valid"}
    np.testing.assert_array_equal(curves["train"].get_xdata(), [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(curves["train"].get_ydata(), [2 / epoch for epoch in range(1, 6)])
    assert [line.get_label() for line in subplots["lr"].lines] == ["train"]
    assert subplots["loss"].get_xlabel() == "epoch"
    log(tmp_path / "short", num_epochs=2)
    plot_metrics(tmp_path / "short")
    ticks = figures[1].axes[0].get_xticks()
    np.testing.assert_array_equal(ticks, np.round(ticks))


def test_evaluations_within_an_epoch_are_drawn_by_step(tmp_path: Path, figures: list[Figure]) -> None:
    """With several evaluations per epoch, the x-axis shows steps, because the points of an epoch would overlap."""
    log(tmp_path, num_epochs=2, evaluations_per_epoch=2)

    plot_metrics(tmp_path, metrics=["loss"])

    (axes,) = figures[0].axes
    curves = {line.get_label(): line for line in axes.lines}
    assert axes.get_xlabel() == "step"
    np.testing.assert_array_equal(curves["valid"].get_xdata(), [50, 100, 150, 200])
    np.testing.assert_array_equal(curves["train"].get_xdata(), [100, 200])


def test_several_runs_are_told_apart(tmp_path: Path, figures: list[Figure]) -> None:
    """Each run and loader has a curve labeled with both names, one color per run and one line style per loader."""
    log(tmp_path / "a")
    log(tmp_path / "b")

    path = plot_metrics([tmp_path / "a", tmp_path / "b"], path=tmp_path / "new" / "both.png", metrics=["loss"])

    assert path.is_file()
    lines = {str(line.get_label()): line for line in figures[0].axes[0].lines}
    assert set(lines) == {"a: train", "a: valid", "b: train", "b: valid"}
    assert lines["a: train"].get_color() == lines["a: valid"].get_color() != lines["b: valid"].get_color()
    assert lines["a: train"].get_linestyle() == lines["b: train"].get_linestyle() != lines["b: valid"].get_linestyle()
    [legend] = figures[0].legends
    assert {text.get_text() for text in legend.get_texts()} == set(lines)
    assert figures[0].axes[0].get_legend() is None


def test_names_with_dollar_signs_are_not_formulas(tmp_path: Path, figures: list[Figure]) -> None:
    """Matplotlib would draw them in italics, or raise; names of classes in pictures are treated alike."""
    name, classes = "$\\cost$", ["$0-$10", "$\\cost$"]
    for run in ("a$1$", "b"):
        write(tmp_path / run, lambda epoch: {name: 1 / epoch}, range(1, 4))

    plot_metrics([tmp_path / "a$1$", tmp_path / "b"], path=tmp_path / "both.svg", metrics=[name])
    curve = {"false_positive_rate": [0.0, 1.0], "true_positive_rate": [0.0, 1.0], "precision": [0.5, 0.5]}
    drawn = [
        draw_matrix(np.eye(2), names=classes, title=name, is_fraction=False, options={}),
        draw_curves(dict.fromkeys(classes, curve), title=name),
        draw_table({name: classes, "f1": [0.5, 1.0]}, title=name),
    ]
    for figure in drawn:
        figure.savefig(tmp_path / "picture.png")

    [legend] = figures[0].legends
    texts = [text.get_text() for text in legend.get_texts()] + [figures[0].axes[0].get_ylabel()]
    assert [is_math_text(text) for text in texts] == [False] * 3
    assert [text.replace("\\$", "$") for text in texts] == ["a$1$: train", "b: train", name]


def test_many_runs_have_colors_of_their_own(tmp_path: Path, figures: list[Figure]) -> None:
    """Each run has its own color, even with more runs than Matplotlib's ten colors."""
    for number in range(12):
        log(tmp_path / f"run{number}", num_epochs=1)

    plot_metrics(tmp_path, metrics=["loss"], loaders=["valid"])

    lines = figures[0].axes[0].lines
    assert len({line.get_label() for line in lines}) == len({to_rgba(line.get_color()) for line in lines}) == 12


def test_only_the_loaders_asked_for_are_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    """`loaders` selects the curves, and metrics without a curve are omitted."""
    log(tmp_path)

    plot_metrics(tmp_path, loaders=["valid"])

    assert [axes.get_ylabel() for axes in figures[0].axes] == ["loss", "accuracy"]
    assert [line.get_label() for line in figures[0].axes[0].lines] == ["valid"]


def test_an_axis_may_be_logarithmic(tmp_path: Path, figures: list[Figure]) -> None:
    """`log_scale` names metrics with logarithmic axes; an axis without positive values stays linear."""
    values = [1.0, 0.0, -1.0, 0.01]
    write(tmp_path, lambda epoch: {"loss": values[epoch], "below": -1.0, "lr": 0.1}, range(4))

    plot_metrics(tmp_path, metrics=["loss", "below", "lr"], log_scale=["loss", "below"])

    assert [axes.get_yscale() for axes in figures[0].axes] == ["log", "linear", "linear"]


@pytest.mark.parametrize(("name", "begin"), [("curves.svg", b"<?xml"), ("curves.pdf", b"%PDF"), ("curves", b"\x89PNG")])
def test_the_ending_says_the_format(tmp_path: Path, name: str, begin: bytes) -> None:
    """The suffix of the path determines the format; without one, Matplotlib would append one to the name."""
    log(tmp_path)

    path = plot_metrics(tmp_path, path=tmp_path / name)

    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"metrics": ["loss", "lossy"]}, KeyError, r"'lossy'.*'loss', 'accuracy', 'lr'"),
        ({"log_scale": ["lossy"]}, KeyError, r"'lossy'.*'loss', 'accuracy', 'lr'"),
        ({"path": "file/curves.png"}, OSError, r"cannot write .*/file/curves.png: "),
        ({"twice": True}, ValueError, "got 2 folders: choose the output file with path= or -o"),
    ],
)
def test_what_cannot_be_drawn_is_named(tmp_path: Path, options: Any, error: type[Exception], words: str) -> None:
    """An unknown metric, a path below a file, and several folders without a path."""
    log(tmp_path)
    (tmp_path / "file").touch()
    folders = [tmp_path, tmp_path] if options.pop("twice", False) else tmp_path
    more = {"path": tmp_path / options.pop("path")} if "path" in options else {}

    with pytest.raises(error, match=words):
        plot_metrics(folders, **options, **more)


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    """A diverged run can be drawn, even if all values of a metric are NaN."""
    values = [1.0, math.nan, math.inf, 0.5]
    write(tmp_path, lambda epoch: {"loss": values[epoch], "lost": math.nan}, range(4))

    assert plot_metrics(tmp_path).is_file()


def test_missing_matplotlib_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Matplotlib, which is optional, the error gives the install command."""
    log(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ImportError, match=r"pip install runnerkit\[metrics\]"):
        plot_metrics(tmp_path)
