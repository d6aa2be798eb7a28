"""CSVLogger: exact numbers, aligned rows, and the same files whether or not the run was killed."""

import csv
import json
import math
import os
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import yaml

from runnerkit.logger import Scope, Step
from runnerkit.loggers import CSVLogger
from tests.loggers.records import RUN, Record
from tests.loggers.records import log as log_records


def log(logdir: Path, records: list[Record], *, resumed_at: Step | None = None) -> None:
    log_records(CSVLogger(logdir, log_batch_metrics=True), records, resumed_at=resumed_at)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def files(logdir: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (logdir / "csv").iterdir()}


def test_floats_read_back_exactly(tmp_path: Path) -> None:
    """All bits of a float are kept, also NaN and infinities."""
    values = [0.1 + 0.2, 1e-300, -1 / 3, 5e-324, math.inf, -math.inf, math.nan]

    log(tmp_path, [("loader", "train", epoch, 10 * epoch, {"loss": value}) for epoch, value in enumerate(values, 1)])

    rows = read(tmp_path / "csv" / "train.csv")
    np.testing.assert_array_equal([float(row["loss"]) for row in rows], values)
    places = [(row["stage"], row["epoch"], row["step"]) for row in rows[:2]]
    assert places == [("train", "1", "10"), ("train", "2", "20")]


def test_each_loader_and_scope_has_a_file(tmp_path: Path) -> None:
    """Passes over a loader and single steps are written to separate files."""
    log(tmp_path, RUN)

    assert set(files(tmp_path)) == {"train.csv", "valid.csv", "train.batch.csv"}
    assert [row["loss"] for row in read(tmp_path / "csv" / "train.batch.csv")] == [f"1.{step}" for step in range(1, 9)]


def of(epoch: int, **metrics: float) -> Record:
    return "loader", "valid/easy", epoch, 4 * epoch, metrics


@pytest.mark.parametrize(
    ("records", "text"),
    [
        (
            [of(1, loss=1.0), of(2, auc=0.5, loss=2.0), of(3, loss=3.0)],
            "loss,auc\ntrain,1,4,1.0,\ntrain,2,8,2.0,0.5\ntrain,3,12,3.0,\n",
        ),
        (
            [
                of(1, loss=1.0, time=10.0),
                of(2, loss=2.0),
                of(2, loss=99.0),
                of(2, loss=99.0, auc=0.5),
                of(2, time=20.0),
            ],
            "loss,time,auc\ntrain,1,4,1.0,10.0,\ntrain,2,8,2.0,20.0,0.5\n",
        ),
        ([of(3, loss=3.0), of(3, auc=0.75)], "loss,auc\ntrain,3,12,3.0,0.75\n"),
    ],
    ids=["late metric", "one place", "new metric"],
)
def test_one_place_has_one_row_and_a_late_metric_a_column(tmp_path: Path, records: list[Record], text: str) -> None:
    """Earlier rows get an empty cell; a metric logged twice at one step keeps its first value.

    The loader's key may have slashes, which create folders.
    """
    log(tmp_path, records)

    assert (tmp_path / "csv" / "valid" / "easy.csv").read_text() == f"stage,epoch,step,{text}"


def test_any_metric_name_is_kept_apart(tmp_path: Path) -> None:
    """Names may contain commas and quotes, or equal the names of the first columns."""
    metrics = {"a,b": 1.0, 'quo"ted': 2.0, "epoch": 3.0, "größe": 4.0}

    log(tmp_path, [("loader", "train", 1, 1, metrics), ("loader", "train", 2, 2, metrics)])

    with (tmp_path / "csv" / "train.csv").open(newline="", encoding="utf-8") as file:
        header, first, second = csv.reader(file)
    assert header == ["stage", "epoch", "step", *metrics]
    assert first == ["train", "1", "1", "1.0", "2.0", "3.0", "4.0"]
    assert second == ["train", "2", "2", "1.0", "2.0", "3.0", "4.0"]


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """A run resumed from the end of an epoch starts with the files of that time, without columns added later."""
    log(tmp_path / "killed", RUN)
    log(tmp_path / "one_epoch", RUN[:8])

    log(tmp_path / "killed", [], resumed_at=Step("train", "", 1, 4))

    assert files(tmp_path / "killed") == files(tmp_path / "one_epoch")


def test_row_torn_by_a_power_failure_is_dropped(tmp_path: Path) -> None:
    """An incomplete row does not prevent the run from resuming."""
    path = tmp_path / "csv" / "train.csv"
    log(tmp_path, [("loader", "train", 1, 1, {"loss": 1.0, "lr": 0.1})])
    path.write_text(path.read_text() + "train,1")

    log(tmp_path, [("loader", "train", 2, 2, {"loss": 2.0, "lr": 0.1})], resumed_at=Step("train", "", 1, 1))

    assert path.read_text() == "stage,epoch,step,loss,lr\ntrain,1,1,1.0,0.1\ntrain,2,2,2.0,0.1\n"


def test_hyperparameters_of_another_run_are_refused(tmp_path: Path) -> None:
    """They alone show that the folder is that of a run; the file does not change."""
    (tmp_path / "hparams.yml").write_text("theirs")

    with pytest.raises(FileExistsError, match=r'resume="auto".*another logdir'):
        CSVLogger(tmp_path).setup()

    assert (tmp_path / "hparams.yml").read_text() == "theirs"


def test_unwritable_logdir_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before training, not after the first epoch."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere

    with pytest.raises(PermissionError, match="pass another logdir") as caught:
        CSVLogger(tmp_path).setup()

    assert str(tmp_path) in str(caught.value)


class Color(Enum):
    RED = 1


def test_hparams_and_environment_read_back(tmp_path: Path) -> None:
    """Plain values keep their type, others become strings; a resumed run writes them again."""
    logger = CSVLogger(tmp_path)
    logger.setup()
    deep = {"path": Path("data"), 1: None}
    hparams = {"lr": 1e-5, "layers": (64, np.int64(32)), "name": "größe", "deep": deep, "c": Color.RED}

    logger.log_hparams(hparams, environment={"torch": "2.13.0", "engine": {"num_processes": 2}})

    written = yaml.safe_load((tmp_path / "hparams.yml").read_text(encoding="utf-8"))
    deep = {"path": "data", 1: None}
    assert written == {"lr": 1e-5, "layers": [64, 32], "name": "größe", "deep": deep, "c": "Color.RED"}
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment == {"torch": "2.13.0", "engine": {"num_processes": 2}}

    again = CSVLogger(tmp_path)
    again.setup(resumed_at=Step("train", "", 1, 4))
    again.log_hparams({"lr": 0.5}, environment={})

    assert yaml.safe_load((tmp_path / "hparams.yml").read_text(encoding="utf-8")) == {"lr": 0.5}


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    """The resumed run deletes its own temporary files and keeps those of others."""
    log(tmp_path, [("loader", "a[1]", 1, 10, {"loss": 0.5})])
    names = ("csv/.a[1].csv.7.tmp", "csv/.b.csv.7.tmp", ".hparams.yml.7.tmp", ".environment.json.7.tmp")
    left = [tmp_path / name for name in names]
    others = tmp_path / ".notes.tmp"
    for path in (*left, others):
        path.touch()

    CSVLogger(tmp_path).setup(resumed_at=Step("train", "", epoch=1, batch=10))

    assert others.exists() and not any(path.exists() for path in left)


# Tables of `log_table`: name, scope, loader, epoch, step.
TABLES: list[tuple[str, Scope, str, int, int]] = [
    ("classes", "loader", "valid", 1, 2),
    ("classes", "loader", "valid", 1, 4),
    ("classes", "loader", "train", 1, 4),
    ("classes", "loader", "valid", 1, 4),  # a second one at its place is ignored
    ("a/b", "loader", "valid", 2, 6),
    ("classes", "batch", "train", 2, 7),
    ("classes", "loader", "valid", 2, 8),
]


def log_tables(
    logdir: Path, tables: list[tuple[str, Scope, str, int, int]], *, resumed_at: Step | None = None
) -> dict[str, str]:
    """Return the files by path."""
    logger = CSVLogger(logdir)
    logger.setup(resumed_at=resumed_at)
    for name, scope, loader, epoch, step in tables:
        table = {"class": ["cat, dog", "bird"], "recall": [step / 3, math.nan], "support": [step, 0]}
        logger.log_table(name, table, step=Step("train", loader, epoch, step), scope=scope)
    logger.close()
    folder = logdir / "tables"
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.csv")}


def test_rows_of_a_table_have_their_place_in_the_run(tmp_path: Path) -> None:
    """A file for each name, which pandas reads back with the same floats."""
    found = log_tables(tmp_path, TABLES)

    assert sorted(found) == ["a/b.csv", "classes.batch.csv", "classes.csv"]
    rows = list(csv.DictReader(found["classes.csv"].splitlines()))
    places = [(row["loader"], int(row["epoch"]), int(row["step"])) for row in rows[::2]]
    assert places == [("valid", 1, 2), ("valid", 1, 4), ("train", 1, 4), ("valid", 2, 8)]
    assert [*rows[2].values()] == ["train", "valid", "1", "4", "cat, dog", repr(4 / 3), "4"]
    assert rows[3]["recall"] == "nan"


@pytest.mark.parametrize("killed_after", range(len(TABLES) + 1))
def test_tables_of_a_killed_and_resumed_run_are_the_same(tmp_path: Path, killed_after: int) -> None:
    """Also if the kill left half of a table."""
    expected = log_tables(tmp_path / "whole", TABLES)
    log_tables(tmp_path / "killed", TABLES[:killed_after])
    torn = tmp_path / "killed" / "tables" / "classes.csv"
    if torn.exists():
        torn.write_text(torn.read_text() + "train,valid,2,8,bi")
    num_done = sum(epoch == 1 for *_, epoch, _ in TABLES)

    resumed = log_tables(tmp_path / "killed", TABLES[min(killed_after, num_done) :], resumed_at=Step("train", "", 1, 4))

    assert resumed == expected


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("../x", "a", r"a table's tag names a file in .*tables, which '../x' cannot"),
        ("/x", "a", "cannot"),
        ("x:y", "a", "cannot"),
        ("x", "epoch", r"table 'x': rename columns \['epoch'\]"),
        ("again", "b", r"columns of a table in .*again.csv must stay \['a'\], got \['b'\]"),
    ],
)
def test_a_table_that_no_file_can_hold_is_refused(tmp_path: Path, name: str, column: str, message: str) -> None:
    logger = CSVLogger(tmp_path)
    logger.setup()
    logger.log_table("again", {"a": [1]}, step=Step("train", "valid", 1, 1), scope="loader")

    with pytest.raises(ValueError, match=message):
        logger.log_table(name, {column: [1]}, step=Step("train", "valid", 1, 2), scope="loader")
    logger.close()
