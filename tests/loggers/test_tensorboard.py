"""TensorboardLogger: TensorBoard shows exactly the logged values, even if the run was killed and resumed."""

import io
import math
import os
import subprocess
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import pytest
from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]  # no types
    data_provider,
    plugin_event_multiplexer,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]  # no types
from tensorboard.context import RequestContext  # type: ignore[import-untyped]  # no types
from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]  # no types
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups  # type: ignore[import-untyped]  # no types
from tensorboard.plugins.pr_curve.metadata import parse_plugin_metadata as parse_pr_curve  # type: ignore[import-untyped]  # no types
from tensorboard.util.tensor_util import make_ndarray  # type: ignore[import-untyped]  # no types

from runnerkit.logger import Histogram, Scope, Step
from runnerkit.loggers import CSVLogger, TensorboardLogger
from runnerkit.loop.media import pr_curve_of
from tests.loggers.records import RUN, Record
from tests.loggers.records import log as log_records
from tests.loggers.served import fetch, serve

Series = dict[tuple[str, str], list[tuple[int, float]]]  # (run, tag) -> [(x, value)]


def log(
    logdir: Path, records: list[Record], *, resumed_at: Step | None = None, x_axis: Literal["epoch", "step"] = "epoch"
) -> None:
    log_records(TensorboardLogger(logdir, log_batch_metrics=True, x_axis=x_axis), records, resumed_at=resumed_at)


def load(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def read(logdir: Path) -> Series:
    """Read events with TensorBoard's own reader."""
    series: Series = {}
    for folder in sorted({path.parent for path in logdir.rglob("*tfevents*")}):
        events = load(folder)
        for tag in events.Tags()["scalars"]:
            points = sorted(events.Scalars(tag), key=lambda event: event.wall_time)
            series[folder.name, tag] = [(point.step, point.value) for point in points]
    return series


def of(loader: str, epoch: int, step: int, scope: Scope = "loader", **metrics: float) -> Record:
    return scope, loader, epoch, step, metrics


@pytest.mark.parametrize(
    ("x_axis", "records", "expected"),
    [
        (
            "epoch",
            [of("train", 1, 4, loss=0.5), of("valid", 1, 4, loss=0.25, auc=0.75)],
            {("train", "loss"): [(1, 0.5)], ("valid", "loss"): [(1, 0.25)], ("valid", "auc"): [(1, 0.75)]},
        ),
        (
            "epoch",
            [of("train", 2, 30, "batch", loss=0.5), of("train", 2, 40, loss=0.25)],
            {("train", "batch/loss"): [(30, 0.5)], ("train", "loss"): [(2, 0.25)]},
        ),
        (
            "step",
            [of("valid", 1, 50, loss=0.5), of("valid", 1, 100, loss=0.25)],
            {("valid", "loss"): [(50, 0.5), (100, 0.25)]},
        ),
        (
            "epoch",
            [of("valid", 1, 4, loss=0.5), of("valid", 1, 4, loss=0.75, auc=0.25), of("valid", 2, 8, loss=0.125)],
            {("valid", "loss"): [(1, 0.5), (2, 0.125)], ("valid", "auc"): [(1, 0.25)]},
        ),
    ],
    ids=["runs", "single steps", "by step", "one place has one point"],
)
def test_each_loader_is_a_run_with_a_curve_for_each_metric(
    tmp_path: Path, x_axis: Literal["epoch", "step"], records: list[Record], expected: Series
) -> None:
    """Curves overlay in one chart; those of single steps have their own tags and always the step as x.

    With x_axis="step", each evaluation within an epoch has its own point. A metric logged twice keeps its first value.
    """
    log(tmp_path, records, x_axis=x_axis)

    assert read(tmp_path) == expected


def test_numbers_that_are_not_finite_arrive(tmp_path: Path) -> None:
    """A diverged loss is visible."""
    log(tmp_path, [("loader", "train", 1, 1, {"a": math.nan, "b": math.inf, "c": -math.inf})])

    values = [points[0][1] for points in read(tmp_path).values()]
    np.testing.assert_array_equal(values, [math.nan, math.inf, -math.inf])


def test_metrics_of_one_call_are_one_event(tmp_path: Path) -> None:
    """Ten metrics of a step are one event, not ten."""
    log(tmp_path, [("loader", "train", 1, 1, {f"metric{number}": float(number) for number in range(10)})])

    events = load(tmp_path / "tensorboard" / "train")
    assert len({events.Scalars(f"metric{number}")[0].wall_time for number in range(10)}) == 1


def test_torn_event_is_cut_off(tmp_path: Path) -> None:
    """An incomplete event of a killed run does not hide the events of the resumed run."""
    log(tmp_path, RUN[:8])
    (path,) = (tmp_path / "tensorboard" / "valid").iterdir()
    os.truncate(path, path.stat().st_size - 5)

    log(tmp_path, RUN[8:], resumed_at=Step("train", "", 1, 4))

    expected = np.array([[1, 2.2], [2, 2.6], [2, 2.8]])
    np.testing.assert_allclose(read(tmp_path)["valid", "loss"], expected, rtol=1e-7)


def test_a_clock_that_was_set_back_does_not_change_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are sorted by name, which starts with the time; two runs may also start in the same second."""
    now = time.time()
    for last, seconds in ((0, 0), (6, -1e6), (8, -1e6), (13, -2e6)):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        until = {0: 7, 6: 10, 8: 13, 13: len(RUN)}[last]
        resumed_at = Step("train", "", RUN[last - 1][2], RUN[last - 1][3]) if last else None
        log(tmp_path, RUN[last:until], resumed_at=resumed_at)

    events = load(tmp_path / "tensorboard" / "train").Scalars("batch/loss")
    assert [event.step for event in events] == list(range(1, 9))


def test_pictures_come_back_level_by_level(tmp_path: Path) -> None:
    """Gray, color and transparent images keep their size and pixel values."""
    generator = np.random.default_rng(0)
    images = {f"{shape}": generator.integers(0, 256, shape, dtype=np.uint8) for shape in [(4, 6), (5, 7, 3), (3, 2, 4)]}
    logger = TensorboardLogger(tmp_path)
    logger.setup()

    for tag, image in images.items():
        logger.log_image(tag, image, step=Step("train", "valid", 3, 12), scope="loader")
    logger.close()

    events = load(tmp_path / "tensorboard" / "valid")
    for tag, image in images.items():
        [event] = events.Images(tag)
        assert (event.step, event.height, event.width) == (3, *image.shape[:2])
        shown = np.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))
        np.testing.assert_array_equal(shown, image if image.ndim == 3 else np.stack([image] * 3, axis=2))


MEDIA_STEPS = [(1, 2), (1, 4), (2, 6), (2, 8)]
HISTOGRAM = Histogram(counts=np.array([3, 0, 1]), edges=np.array([0.0, 0.5, 1.0, 1.5]))
CURVE = pr_curve_of(np.array([0.2, 0.7, 0.9]), np.array([0, 1, 1]))


def log_media(logdir: Path, steps: list[tuple[int, int]], *, resumed_at: Step | None = None) -> None:
    logger = TensorboardLogger(logdir)
    logger.setup(resumed_at=resumed_at)
    for epoch, step in steps:
        place = Step("train", "train", epoch, step)
        for _ in range(2):  # the second image at one step is dropped
            logger.log_image("image", np.full((2, 2), step, dtype=np.uint8), step=place, scope="batch")
            logger.log_text("text", f"at *{step}*", step=place, scope="batch")
            logger.log_histogram("values", HISTOGRAM, step=place, scope="loader")
            logger.log_pr_curve("curve", CURVE, step=place, scope="batch")
        logger.log_scalars({"loss": 1.0}, step=place, scope="loader")
    logger.close()


def read_media(logdir: Path) -> dict[str, list[tuple[int, Any]]]:
    """Read like TensorBoard's plugins: {tag: [(x, value)]}."""
    events = load(logdir / "tensorboard" / "train")
    tensors = {tag: [(each.step, make_ndarray(each.tensor_proto)) for each in events.Tensors(tag)]
               for tag in ("text/text_summary", "values", "curve")}  # fmt: skip
    return {**tensors, "image": [(each.step, each.encoded_image_string) for each in events.Images("image")]}


def test_texts_histograms_and_curves_arrive_in_their_plugins(tmp_path: Path) -> None:
    """Their x is the training step if they are logged within one, else the epoch."""
    log_media(tmp_path, MEDIA_STEPS)

    events, media = load(tmp_path / "tensorboard" / "train"), read_media(tmp_path)
    plugins = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in media if tag != "image"}
    assert plugins == {"text/text_summary": "text", "values": "histograms", "curve": "pr_curves"}
    texts = [(x, text.tolist()) for x, text in media["text/text_summary"]]
    assert texts == [(step, [f"at *{step}*".encode()]) for _, step in MEDIA_STEPS]
    assert [x for x, _ in media["values"]] == [1, 1, 2, 2]
    assert media["values"][0][1].tolist() == [[0.0, 0.5, 3.0], [0.5, 1.0, 0.0], [1.0, 1.5, 1.0]]
    rows = media["curve"][0][1]
    assert rows.shape == (6, 127)
    np.testing.assert_array_equal(rows[0], CURVE.true_positives)
    np.testing.assert_allclose(rows[4:], [CURVE.precision, CURVE.recall], rtol=1e-6)
    assert parse_pr_curve(events.SummaryMetadata("curve").plugin_data.content).num_thresholds == 127


@pytest.mark.parametrize("killed_after", [2, 3, 4])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_resumed_run_shows_each_picture_once(tmp_path: Path, killed_after: int, last: int) -> None:
    """Media logged after the checkpoint are removed, like scalars."""
    log_media(tmp_path / "unkilled", MEDIA_STEPS)
    log_media(tmp_path / "killed", MEDIA_STEPS[:killed_after])

    resumed_at = Step("train", "train", *(MEDIA_STEPS[last - 1] if last else (0, 0)))
    log_media(tmp_path / "killed", MEDIA_STEPS[last:], resumed_at=resumed_at)

    expected, resumed = read_media(tmp_path / "unkilled"), read_media(tmp_path / "killed")
    for tag, points in expected.items():
        assert [x for x, _ in resumed[tag]] == [x for x, _ in points]
        for (_, value), (_, other) in zip(resumed[tag], points, strict=True):
            np.testing.assert_array_equal(value, other)


class Kind(Enum):
    """A value that is not plain."""

    BIG = 1


def sessions(logdir: Path) -> dict[str, Any]:
    """Query the backend of the HPARAMS tab, which reads the files as TensorBoard does."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=api_pb2.Status.values(), start_index=0, slice_size=100)
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    return {group.name: group for group in groups}


def log_run(
    logdir: Path, hparams: dict[str, Any], losses: list[float], *, resumed_at: Step | None = None
) -> TensorboardLogger:
    logger = TensorboardLogger(logdir)
    logger.setup(resumed_at=resumed_at)
    logger.log_hparams(hparams, environment={})
    first = resumed_at.epoch + 1 if resumed_at else 1
    for epoch, loss in enumerate(losses, start=first):
        for loader, value in (("train", loss), ("valid", 2 * loss)):
            logger.log_scalars({"loss": value}, step=Step("train", loader, epoch, 10 * epoch), scope="loader")
    return logger


def end(logger: TensorboardLogger, error: BaseException | None = None) -> None:
    logger.log_end(error)
    logger.close()


def test_the_hparams_tab_compares_runs_with_their_last_metrics(tmp_path: Path) -> None:
    """Each run has a row with its numbers, bools and strings, other values as strings, and the loss of each loader."""
    hparams = {
        "lr": 0.1, "layers": [64, 32], "amp": True, "name": "größe", "kind": Kind.BIG, "data": Path("data"),
        "size": np.int64(3), "none": None, "never": math.inf, "optimizer": {"betas": (0.9, 0.99), "fused": False},
    }  # fmt: skip
    end(log_run(tmp_path / "a", hparams, [4.0, 1.0]))
    end(log_run(tmp_path / "b", {"lr": 0.2, "other": 1}, [4.0, 2.0]))

    found = sessions(tmp_path)

    assert set(found) == {"a/tensorboard", "b/tensorboard"}
    values = {name: getattr(each, each.WhichOneof("kind")) for name, each in found["a/tensorboard"].hparams.items()}
    assert values == {
        "lr": 0.1, "layers": "[64, 32]", "amp": True, "name": "größe", "kind": "Kind.BIG", "data": "data", "size": 3.0,
        "none": "None", "never": "inf", "optimizer/betas": "[0.9, 0.99]", "optimizer/fused": False,
    }  # fmt: skip
    for name, loss in (("a", 1.0), ("b", 2.0)):
        [session] = found[f"{name}/tensorboard"].sessions
        assert session.status == api_pb2.STATUS_SUCCESS and session.end_time_secs >= session.start_time_secs > 0
        metrics = {(each.name.group, each.name.tag): each.value for each in session.metric_values}
        assert metrics == {("train", "loss"): loss, ("valid", "loss"): 2 * loss}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, api_pb2.STATUS_SUCCESS),
        (ValueError("x"), api_pb2.STATUS_FAILURE),
        (SystemExit(75), api_pb2.STATUS_UNKNOWN),
        (KeyboardInterrupt(), api_pb2.STATUS_UNKNOWN),
    ],
    ids=["well", "failed", "preempted", "stopped"],
)
def test_the_hparams_tab_says_how_the_run_ended(tmp_path: Path, error: BaseException | None, status: int) -> None:
    """The status of a stopped run stays unknown, since it may be resumed."""
    logger = log_run(tmp_path, {"lr": 0.1}, [1.0])
    assert sessions(tmp_path)["tensorboard"].sessions[0].status == api_pb2.STATUS_UNKNOWN

    end(logger, error)

    assert sessions(tmp_path)["tensorboard"].sessions[0].status == status


def test_a_resumed_run_shows_the_hyperparameters_that_it_goes_on_with(tmp_path: Path) -> None:
    """One row has the last metrics and the current hyperparameters, without the earlier values."""
    log_run(tmp_path, {"lr": 0.1, "old": 1}, [4.0, 3.0]).close()  # killed

    end(log_run(tmp_path, {"lr": 0.2}, [2.0], resumed_at=Step("train", "", 1, 10)))

    group = sessions(tmp_path)["tensorboard"]
    assert {name: each.number_value for name, each in group.hparams.items()} == {"lr": 0.2}
    last = [(each.name.group, each.value, each.training_step) for each in group.sessions[0].metric_values]
    assert last == [("train", 2.0, 2), ("valid", 4.0, 2)]
    assert len(list((tmp_path / "tensorboard").glob("*tfevents*"))) == 1


def test_a_run_without_hyperparameters_has_no_run_of_its_own_for_them(tmp_path: Path) -> None:
    """TensorBoard's list of runs contains the loaders only."""
    end(log_run(tmp_path, {}, [1.0]))

    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == ["train", "valid"]


@pytest.mark.slow
def test_nothing_flushed_is_lost_when_killed(tmp_path: Path) -> None:
    """All values logged before flush() survive SIGKILL, in TensorBoard and in CSV."""
    script = """
import os, signal, sys
from runnerkit.logger import Step
from runnerkit.loggers import CSVLogger, TensorboardLogger
loggers = [TensorboardLogger(sys.argv[1]), CSVLogger(sys.argv[1])]
for logger in loggers:
    logger.setup()
for epoch in range(1, 101):
    for logger in loggers:
        logger.log_scalars({"loss": 0.5}, step=Step("train", "train", epoch, epoch), scope="loader")
for logger in loggers:
    logger.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""

    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)

    assert done.returncode == -9
    assert read(tmp_path) == {("train", "loss"): [(epoch, 0.5) for epoch in range(1, 101)]}
    assert len((tmp_path / "csv" / "train.csv").read_text().splitlines()) == 101


@pytest.mark.slow
def test_tensorboard_serves_what_the_csv_holds(tmp_path: Path) -> None:
    """The served numbers equal those in the CSV files for every loader, even if the run was killed and resumed."""
    losses = {"train": [1 / epoch for epoch in range(1, 1201)], "valid": [2 / epoch for epoch in range(1, 1201)]}
    for first, last, resumed_at in ((1, 900, None), (601, 1200, Step("train", "", 600, 6000))):
        for logger in (TensorboardLogger(tmp_path), CSVLogger(tmp_path)):
            logger.setup(resumed_at=resumed_at)
            for epoch in range(first, last + 1):
                for loader in ("train", "valid"):
                    place = Step("train", loader, epoch, 10 * epoch)
                    logger.log_scalars({"loss": losses[loader][epoch - 1]}, step=place, scope="loader")
            logger.close()

    with serve(tmp_path / "tensorboard") as address:
        for loader in ("train", "valid"):
            points = fetch(address, loader, "loss", num_points=1200)

            rows = [line.split(",") for line in (tmp_path / "csv" / f"{loader}.csv").read_text().splitlines()[1:]]
            # TensorBoard holds float32, the CSV float64.
            assert points == [(int(epoch), float(np.float32(loss))) for _, epoch, _, loss in rows]
            assert [float(loss) for *_, loss in rows] == losses[loader]
