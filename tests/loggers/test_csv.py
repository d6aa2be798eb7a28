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

Record = tuple[Scope, str, int, int, dict[str, float]]  # scope, loader, epoch, step, metrics

# Two epochs of four steps, evaluated every second step and at each epoch's end; one metric comes late.
RUN: list[Record] = [
    ("batch", "train", 1, 1, {"loss": 1.1}),
    ("batch", "train", 1, 2, {"loss": 1.2}),
    ("loader", "valid", 1, 2, {"loss": 2.2}),
    ("batch", "train", 1, 3, {"loss": 1.3}),
    ("batch", "train", 1, 4, {"loss": 1.4, "clipped": 0.5}),
    ("loader", "valid", 1, 4, {"loss": 2.4}),
    ("loader", "train", 1, 4, {"loss": 1.25}),
    ("loader", "valid", 1, 4, {"loss": 2.4}),
    ("batch", "train", 2, 5, {"loss": 1.5}),
    ("batch", "train", 2, 6, {"loss": 1.6}),
    ("loader", "valid", 2, 6, {"loss": 2.6, "auc": math.nan}),
    ("batch", "train", 2, 7, {"loss": 1.7}),
    ("batch", "train", 2, 8, {"loss": 1.8, "norm": math.inf}),
    ("loader", "valid", 2, 8, {"loss": 2.8, "auc": 0.8}),
    ("loader", "train", 2, 8, {"loss": 1.65}),
    ("loader", "valid", 2, 8, {"loss": 2.8, "auc": 0.8}),
]


def write(logger: CSVLogger, records: list[Record]) -> None:
    for scope, loader, epoch, step, metrics in records:
        logger.log_scalars(metrics, step=Step("train", loader, epoch, step), scope=scope)


def log(logdir: Path, records: list[Record], *, resumed_at: Step | None = None) -> None:
    logger = CSVLogger(logdir, log_batch_metrics=True)
    logger.setup(resumed_at=resumed_at)
    write(logger, records)
    logger.close()


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
    assert [(row["stage"], row["epoch"], row["step"]) for row in rows[:2]] == [
        ("train", "1", "10"),
        ("train", "2", "20"),
    ]


def test_each_loader_and_scope_has_a_file(tmp_path: Path) -> None:
    """Passes over a loader and single steps are written to separate files."""
    log(tmp_path, RUN)

    assert set(files(tmp_path)) == {"train.csv", "valid.csv", "train.batch.csv"}
    assert [row["loss"] for row in read(tmp_path / "csv" / "train.batch.csv")] == [f"1.{step}" for step in range(1, 9)]


def test_rows_are_on_the_disk_before_close(tmp_path: Path) -> None:
    """Logged rows can be read during the run."""
    logger = CSVLogger(tmp_path)
    logger.setup()

    for step in (1, 2):
        logger.log_scalars({"loss": 1.5}, step=Step("train", "train", 1, step), scope="loader")

        assert len(read(tmp_path / "csv" / "train.csv")) == step
    logger.close()


def test_late_metric_adds_a_column(tmp_path: Path) -> None:
    """Earlier rows get an empty cell, later rows stay aligned."""
    log(tmp_path, [
        ("loader", "train", 1, 1, {"loss": 1.0}),
        ("loader", "train", 2, 2, {"auc": 0.5, "loss": 2.0}),
        ("loader", "train", 3, 3, {"loss": 3.0}),
    ])  # fmt: skip

    text = (tmp_path / "csv" / "train.csv").read_text()
    assert text == "stage,epoch,step,loss,auc\ntrain,1,1,1.0,\ntrain,2,2,2.0,0.5\ntrain,3,3,3.0,\n"


def test_any_metric_name_is_kept_apart(tmp_path: Path) -> None:
    """Names may contain commas and quotes, or equal the names of the first columns."""
    metrics = {"a,b": 1.0, 'quo"ted': 2.0, "epoch": 3.0, "größe": 4.0}

    log(tmp_path, [("loader", "train", 1, 1, metrics), ("loader", "train", 2, 2, metrics)])

    with (tmp_path / "csv" / "train.csv").open(newline="", encoding="utf-8") as file:
        header, first, second = csv.reader(file)
    assert header == ["stage", "epoch", "step", *metrics]
    assert first == ["train", "1", "1", "1.0", "2.0", "3.0", "4.0"]
    assert second == ["train", "2", "2", "1.0", "2.0", "3.0", "4.0"]


def test_one_place_has_one_row(tmp_path: Path) -> None:
    """A metric logged twice at one training step keeps its first value; new metrics are added to the row."""
    log(tmp_path, [
        ("loader", "valid", 1, 4, {"loss": 1.0, "time": 10.0}),
        ("loader", "valid", 2, 8, {"loss": 2.0}),
        ("loader", "valid", 2, 8, {"loss": 99.0}),
        ("loader", "valid", 2, 8, {"loss": 99.0, "auc": 0.5}),  # a new column
        ("loader", "valid", 2, 8, {"time": 20.0}),
        ("loader", "valid", 3, 12, {"loss": 3.0}),
        ("loader", "valid", 3, 12, {"auc": 0.75}),
    ])  # fmt: skip

    text = (tmp_path / "csv" / "valid.csv").read_text()
    assert text == "stage,epoch,step,loss,time,auc\ntrain,1,4,1.0,10.0,\ntrain,2,8,2.0,20.0,0.5\ntrain,3,12,3.0,,0.75\n"


def test_loader_key_may_have_slashes(tmp_path: Path) -> None:
    """A key such as valid/easy creates a folder instead of failing after the first epoch."""
    log(tmp_path, [("loader", "valid/easy", 1, 4, {"loss": 1.0})])

    assert len(read(tmp_path / "csv" / "valid" / "easy.csv")) == 1


@pytest.mark.parametrize("killed_after", range(len(RUN) + 1))
def test_killed_and_resumed_run_leaves_the_same_files(tmp_path: Path, killed_after: int) -> None:
    """For any checkpoint and kill, the files of a resumed run are byte for byte those of an uninterrupted run."""
    log(tmp_path / "unkilled", RUN)

    for last in range(killed_after + 1):
        scope, loader, epoch, step, _ = RUN[last - 1] if last else ("loader", "", 0, 0, {})
        within = "train" if scope == "batch" else ""
        logdir = tmp_path / f"killed_{last}"
        log(logdir, RUN[:killed_after])
        log(logdir, RUN[last:], resumed_at=Step("train", within, epoch, step))

        assert files(logdir) == files(tmp_path / "unkilled"), (
            f"checkpoint after {last} records, at {loader} {epoch} {step}"
        )


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """A run resumed from the end of an epoch starts with the files of that time, without columns added later."""
    log(tmp_path / "killed", RUN)
    log(tmp_path / "one_epoch", RUN[:8])

    log(tmp_path / "killed", [], resumed_at=Step("train", "", 1, 4))

    assert files(tmp_path / "killed") == files(tmp_path / "one_epoch")


def test_epochs_without_training_steps_are_told_apart(tmp_path: Path) -> None:
    """The step does not advance without training, so the epoch determines which rows are after the checkpoint."""
    log(tmp_path, [("loader", "valid", epoch, 0, {"loss": float(epoch)}) for epoch in (1, 2, 3)])

    log(tmp_path, [], resumed_at=Step("train", "", 2, 0))

    assert [row["epoch"] for row in read(tmp_path / "csv" / "valid.csv")] == ["1", "2"]


def test_row_torn_by_a_power_failure_is_dropped(tmp_path: Path) -> None:
    """An incomplete row does not prevent the run from resuming."""
    log(tmp_path, [("loader", "train", 1, 1, {"loss": 1.0, "lr": 0.1})])
    with (tmp_path / "csv" / "train.csv").open("a") as file:
        file.write("train,1")

    log(tmp_path, [("loader", "train", 2, 2, {"loss": 2.0, "lr": 0.1})], resumed_at=Step("train", "", 1, 1))

    assert (
        tmp_path / "csv" / "train.csv"
    ).read_text() == "stage,epoch,step,loss,lr\ntrain,1,1,1.0,0.1\ntrain,2,2,2.0,0.1\n"


@pytest.mark.parametrize("trace", ["csv/train.csv", "hparams.yml"])
def test_logs_of_another_run_are_refused(tmp_path: Path, trace: str) -> None:
    """The message names the folder and both solutions; the logs do not change."""
    (tmp_path / "csv").mkdir()
    (tmp_path / trace).write_text("theirs")

    with pytest.raises(FileExistsError, match=r'resume="auto".*another logdir') as caught:
        CSVLogger(tmp_path).setup()

    assert str(tmp_path) in str(caught.value)
    assert (tmp_path / trace).read_text() == "theirs"


def test_nothing_is_made_before_setup(tmp_path: Path) -> None:
    """A logger that is created but not used does not create a folder."""
    CSVLogger(tmp_path / "logs")

    assert not (tmp_path / "logs").exists()


def test_logdir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """The message names the folder and says what to do."""
    (tmp_path / "logs").write_text("not a folder")

    with pytest.raises(OSError, match=r"logs.*pass another logdir"):
        CSVLogger(tmp_path / "logs").setup()


def test_unwritable_logdir_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before training, not after the first epoch."""
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # root may write anywhere, so a read-only folder would not raise

    with pytest.raises(PermissionError, match="pass another logdir") as caught:
        CSVLogger(tmp_path).setup()

    assert str(tmp_path) in str(caught.value)


class Color(Enum):
    RED = 1


def test_hparams_and_environment_read_back(tmp_path: Path) -> None:
    """Plain values keep their type, others become strings; a resumed run writes them again."""
    logger = CSVLogger(tmp_path)
    logger.setup()
    hparams = {
        "lr": 1e-5,
        "layers": (64, np.int64(32)),
        "name": "größe",
        "deep": {"path": Path("data"), 1: None},
        "c": Color.RED,
    }

    logger.log_hparams(hparams, environment={"torch": "2.13.0", "engine": {"num_processes": 2}})

    written = yaml.safe_load((tmp_path / "hparams.yml").read_text(encoding="utf-8"))
    assert written == {
        "lr": 1e-5, "layers": [64, 32], "name": "größe", "deep": {"path": "data", 1: None}, "c": "Color.RED"
    }  # fmt: skip
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment == {"torch": "2.13.0", "engine": {"num_processes": 2}}

    again = CSVLogger(tmp_path)
    again.setup(resumed_at=Step("train", "", 1, 4))
    again.log_hparams({"lr": 0.5}, environment={})

    assert yaml.safe_load((tmp_path / "hparams.yml").read_text(encoding="utf-8")) == {"lr": 0.5}


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    """The resumed run deletes its own temporary files and keeps those of others."""
    logger = CSVLogger(tmp_path)
    logger.setup()
    logger.log_scalars({"loss": 0.5}, step=Step("train", "a[1]", epoch=1, batch=10), scope="loader")
    logger.close()
    left = [
        tmp_path / "csv" / ".a[1].csv.7.tmp",
        tmp_path / "csv" / ".b.csv.7.tmp",
        tmp_path / ".hparams.yml.7.tmp",
        tmp_path / ".environment.json.7.tmp",
    ]
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
    ("name", "table", "message"),
    [
        ("../x", {"a": [1]}, r"a table's tag names a file in .*tables, which '../x' cannot"),
        ("/x", {"a": [1]}, "cannot"),
        ("x:y", {"a": [1]}, "cannot"),
        ("x", {"epoch": [1]}, r"table 'x': rename columns \['epoch'\], which hold the rows' place in the run"),
        ("again", {"b": [1]}, r"columns of a table in .*again.csv must stay \['a'\], got \['b'\]"),
    ],
)
def test_a_table_that_no_file_can_hold_is_refused(
    tmp_path: Path, name: str, table: dict[str, list[int]], message: str
) -> None:
    logger = CSVLogger(tmp_path)
    logger.setup()
    logger.log_table("again", {"a": [1]}, step=Step("train", "valid", 1, 1), scope="loader")

    with pytest.raises(ValueError, match=message):
        logger.log_table(name, table, step=Step("train", "valid", 1, 2), scope="loader")
    logger.close()
