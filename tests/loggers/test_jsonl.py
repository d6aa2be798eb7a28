"""JSONLLogger: strict JSON, one line per position, and the same file whether or not the run was killed."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from runnerkit.logger import Step
from runnerkit.loggers import JSONLLogger
from tests.loggers.test_csv import RUN, Record


def log(logdir: Path, records: list[Record], *, resumed_at: Step | None = None) -> None:
    logger = JSONLLogger(logdir, log_batch_metrics=True)
    logger.setup(resumed_at=resumed_at)
    for scope, loader, epoch, step, metrics in records:
        logger.log_scalars(metrics, step=Step("train", loader, epoch, step), scope=scope)
    logger.close()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(logdir: Path) -> list[dict[str, Any]]:
    """Read strict JSON; Python's reader accepts NaN by default."""
    text = (logdir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_each_place_is_a_line_in_the_order_of_the_run(tmp_path: Path) -> None:
    """A line has stage, loader, epoch and step; metrics logged twice at one position are written once."""
    log(tmp_path, RUN)

    lines = read(tmp_path)
    assert lines[0] == {
        "scope": "batch", "stage": "train", "loader": "train", "epoch": 1, "step": 1, "metrics": {"loss": 1.1}
    }  # fmt: skip
    places = [(each["scope"], each["loader"], each["step"]) for each in lines]
    assert places == list(dict.fromkeys((scope, loader, step) for scope, loader, _, step, _ in RUN))


def test_floats_read_back_exactly(tmp_path: Path) -> None:
    """All bits are kept; values that JSON cannot represent are strings that float() parses."""
    values = [0.1 + 0.2, 1e-300, -1 / 3, 5e-324, math.inf, -math.inf, math.nan]

    log(tmp_path, [("loader", "train", 1, 10, {f"m{index}": value for index, value in enumerate(values)})])

    [line] = read(tmp_path)
    written = list(line["metrics"].values())
    assert written[4:] == ["Infinity", "-Infinity", "NaN"]
    assert [float(value).hex() for value in written] == [value.hex() for value in values]


def test_pandas_reads_the_file(tmp_path: Path) -> None:
    """Any reader of JSON Lines can read the file."""
    log(tmp_path, [("loader", "valid", 1, 4, {"loss": 0.5, "größe": 1.0}), ("loader", "valid", 2, 8, {"loss": 0.25})])

    table = pd.json_normalize(pd.read_json(tmp_path / "metrics.jsonl", lines=True).to_dict("records"))

    assert table["metrics.loss"].tolist() == [0.5, 0.25]
    assert table["metrics.größe"][0] == 1.0


def test_new_metrics_of_a_place_are_a_line_of_their_own(tmp_path: Path) -> None:
    """Metrics of another loader or scope are not treated as repetitions."""
    log(tmp_path, [
        ("loader", "valid", 1, 4, {"loss": 1.0}),
        ("loader", "valid", 1, 4, {"loss": 9.0, "auc": 0.5}),
        ("loader", "test", 1, 4, {"loss": 2.0}),
        ("batch", "valid", 1, 4, {"loss": 3.0}),
        ("loader", "valid", 1, 4, {"loss": 9.0}),
    ])  # fmt: skip

    assert [line["metrics"] for line in read(tmp_path)] == [{"loss": 1.0}, {"auc": 0.5}, {"loss": 2.0}, {"loss": 3.0}]


def test_lines_are_on_the_disk_before_close(tmp_path: Path) -> None:
    """Logged lines can be read during the run."""
    logger = JSONLLogger(tmp_path)
    logger.setup()

    for step in (1, 2):
        logger.log_scalars({"loss": 1.5}, step=Step("train", "train", 1, step), scope="loader")

        assert len(read(tmp_path)) == step
    logger.close()


@pytest.mark.parametrize("killed_after", range(len(RUN) + 1))
def test_killed_and_resumed_run_leaves_the_same_file(tmp_path: Path, killed_after: int) -> None:
    """For any checkpoint and kill, the file of a resumed run is byte for byte that of an uninterrupted run."""
    log(tmp_path / "unkilled", RUN)
    expected = (tmp_path / "unkilled" / "metrics.jsonl").read_bytes()

    for last in range(killed_after + 1):
        scope, _, epoch, step, _ = RUN[last - 1] if last else ("loader", "", 0, 0, {})
        logdir = tmp_path / f"killed_{last}"
        log(logdir, RUN[:killed_after])
        log(logdir, RUN[last:], resumed_at=Step("train", "train" if scope == "batch" else "", epoch, step))

        assert (logdir / "metrics.jsonl").read_bytes() == expected, f"checkpoint after {last} records"


@pytest.mark.parametrize("torn", ['{"scope": "load', "\0\0\0\n", '{"scope": "loader"}\n', "[]\n"])
def test_a_line_torn_by_a_power_failure_is_dropped(tmp_path: Path, torn: str) -> None:
    """An incomplete line or a block of zeros does not prevent the run from resuming."""
    log(tmp_path, RUN[:1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)

    log(tmp_path, RUN[1:2], resumed_at=Step("train", "train", 1, 1))

    assert [line["step"] for line in read(tmp_path)] == [1, 2]


def test_logs_of_another_run_are_refused(tmp_path: Path) -> None:
    """The message names the folder and both solutions; the file does not change."""
    log(tmp_path, RUN[:1])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    with pytest.raises(FileExistsError, match=r'resume="auto".*another logdir') as caught:
        JSONLLogger(tmp_path).setup()

    assert f"{tmp_path} holds the logs of another run (metrics.jsonl)" in str(caught.value)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_logdir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """The message names the folder and says what to do."""
    (tmp_path / "logs").write_text("not a folder")

    with pytest.raises(OSError, match=r"logs.*pass another logdir"):
        JSONLLogger(tmp_path / "logs").setup()


def test_nothing_is_made_before_the_first_number(tmp_path: Path) -> None:
    """A run that ends before that does not leave an empty file."""
    logger = JSONLLogger(tmp_path / "logs")
    assert not (tmp_path / "logs").exists()

    logger.setup()
    logger.close()

    assert list((tmp_path / "logs").iterdir()) == []
