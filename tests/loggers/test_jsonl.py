"""JSONLLogger: strict JSON, one line per position, and the same file whether or not the run was killed."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from runnerkit.logger import Step
from runnerkit.loggers import JSONLLogger
from tests.loggers.records import RUN, Record
from tests.loggers.records import log as log_records


def log(logdir: Path, records: list[Record], *, resumed_at: Step | None = None) -> None:
    log_records(JSONLLogger(logdir, log_batch_metrics=True), records, resumed_at=resumed_at)


def read(logdir: Path) -> list[dict[str, Any]]:
    """Read strict JSON; Python's reader accepts NaN by default."""
    text = (logdir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_each_place_is_a_line_in_the_order_of_the_run(tmp_path: Path) -> None:
    """A line has stage, loader, epoch and step; metrics logged twice at one position are written once."""
    log(tmp_path, RUN)

    lines = read(tmp_path)
    place = {"scope": "batch", "stage": "train", "loader": "train", "epoch": 1, "step": 1}
    assert lines[0] == {**place, "metrics": {"loss": 1.1}}
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


@pytest.mark.parametrize("torn", ['{"scope": "load', "\0\0\0\n", '{"scope": "loader"}\n', "[]\n"])
def test_a_line_torn_by_a_power_failure_is_dropped(tmp_path: Path, torn: str) -> None:
    """An incomplete line or a block of zeros does not prevent the run from resuming."""
    log(tmp_path, RUN[:1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)

    log(tmp_path, RUN[1:2], resumed_at=Step("train", "train", 1, 1))

    assert [line["step"] for line in read(tmp_path)] == [1, 2]


def test_nothing_is_made_before_the_first_number(tmp_path: Path) -> None:
    """A run that ends before that does not leave an empty file."""
    log(tmp_path / "logs", [])

    assert list((tmp_path / "logs").iterdir()) == []
