"""Tests of read_metrics, which reads one run or several into a tidy table."""

import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from runnerkit.history.frame import by_pass, read_metrics
from runnerkit.logger import Scope, Step
from runnerkit.loggers import CSVLogger, JSONLLogger


def log(logdir: Path, *, num_epochs: int = 2, kind: type[CSVLogger | JSONLLogger] = CSVLogger) -> None:
    """Log the loss of both loaders, the AUC of valid from epoch 2 on, and training steps."""
    logger = kind(logdir, log_batch_metrics=True)
    logger.setup()
    for epoch in range(1, num_epochs + 1):
        for batch in (1, 2):
            place = Step("train", "train", epoch, 2 * epoch - 2 + batch)
            logger.log_scalars({"loss": 1 / place.batch}, step=place, scope="batch")
        logger.log_scalars({"loss": 1 / 3 / epoch}, step=Step("train", "train", epoch, 2 * epoch), scope="loader")
        late = {"auc": math.nan if epoch == 2 else 0.1 + 0.2} if epoch > 1 else {}
        valid = Step("train", "valid", epoch, 2 * epoch)
        logger.log_scalars({"loss": 2 / 3 / epoch, **late}, step=valid, scope="loader")
    logger.close()


def test_each_number_is_a_row(tmp_path: Path) -> None:
    """Each logged value, NaN included, has a row with its exact float; columns are strings, int64 and float64."""
    log(tmp_path / "run", num_epochs=3)

    table = read_metrics(tmp_path / "run")

    expected = pd.DataFrame(
        [
            ("run", "train", "train", 1, 2, "loss", 1 / 3),
            ("run", "train", "train", 2, 4, "loss", 1 / 3 / 2),
            ("run", "train", "train", 3, 6, "loss", 1 / 3 / 3),
            ("run", "train", "valid", 1, 2, "loss", 2 / 3),
            ("run", "train", "valid", 2, 4, "loss", 2 / 3 / 2),
            ("run", "train", "valid", 2, 4, "auc", math.nan),
            ("run", "train", "valid", 3, 6, "loss", 2 / 3 / 3),
            ("run", "train", "valid", 3, 6, "auc", 0.1 + 0.2),
        ],
        columns=["run", "stage", "loader", "epoch", "step", "metric", "value"],
    )
    pd.testing.assert_frame_equal(table, expected, check_exact=True)
    assert all(pd.api.types.is_string_dtype(table[name].dtype) for name in ("run", "stage", "loader", "metric"))


@pytest.mark.parametrize("scope", ["loader", "batch"])
def test_json_lines_are_read_where_there_is_no_csv(tmp_path: Path, scope: Scope) -> None:
    """JSONL files alone give the same table; with CSV files beside them, no value is repeated."""
    log(tmp_path / "csv" / "run", num_epochs=3)
    log(tmp_path / "jsonl" / "run", num_epochs=3, kind=JSONLLogger)
    expected = read_metrics(tmp_path / "csv" / "run", scope=scope)

    alone = read_metrics(tmp_path / "jsonl" / "run", scope=scope)
    log(tmp_path / "csv" / "run", num_epochs=3, kind=JSONLLogger)
    both = read_metrics(tmp_path / "csv" / "run", scope=scope)

    pd.testing.assert_frame_equal(alone, expected, check_exact=True)
    pd.testing.assert_frame_equal(both, expected, check_exact=True)


def test_lines_without_single_steps_are_no_log_of_them(tmp_path: Path) -> None:
    """If a JSONL file lacks steps, the error for scope "batch" names both kinds of files."""
    logger = JSONLLogger(tmp_path)
    logger.setup()
    logger.log_scalars({"loss": 0.5}, step=Step("train", "train", 1, 1), scope="loader")
    logger.close()

    with pytest.raises(FileNotFoundError, match=r"no logs of scope 'batch' .*csv/<loader>.csv or metrics.jsonl"):
        read_metrics(tmp_path, scope="batch")


def test_single_steps_are_read_on_demand(tmp_path: Path) -> None:
    """scope="batch" gives the logged steps only."""
    log(tmp_path / "run")

    table = read_metrics(tmp_path / "run", scope="batch")

    assert table["step"].tolist() == [1, 2, 3, 4]
    assert table["value"].tolist() == [1 / 1, 1 / 2, 1 / 3, 1 / 4]
    assert set(table["loader"]) == {"train"}


def test_runs_below_a_folder_are_named_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of both kinds, at any depth, are named by their relative path; one in the folder by the folder's name."""
    for logdir, kind in {"sweep": CSVLogger, "sweep/a": JSONLLogger, "sweep/deep/er/b": CSVLogger}.items():
        log(tmp_path / logdir, kind=kind)
    monkeypatch.chdir(tmp_path / "sweep")

    for folder in (tmp_path / "sweep", "."):
        assert set(read_metrics(folder)["run"]) == {"sweep", "a", "deep/er/b"}


def test_a_folder_named_csv_is_a_run_only_with_logs_of_its_own(tmp_path: Path) -> None:
    """It may hold runs, be one or have other tables: each run is read once, by its name."""
    for logdir in ("one", "csv", "csv/two", "csv/deep/csv/three"):
        log(tmp_path / logdir)
    for name in ("csv/tables/confusion.csv", "csv/prices.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("stage,loader,epoch,step\ntrain,valid,1,3\n")

    train = tmp_path / "one" / "csv" / "train.csv"
    train.write_text("\ufeff" + train.read_text())  # as spreadsheets save it

    table = read_metrics(tmp_path)

    assert set(table["run"]) == {"one", "csv", "csv/two", "csv/deep/csv/three"}
    assert set(table["loader"]) == {"train", "valid"}


@pytest.mark.parametrize("row", [b"train,3,x,0.5\n", b"train,3,6,0.5,0.5,0.5\n", b"train,3,6,\xff\n", b'train,"3\0\n'])
def test_a_damaged_table_is_named(tmp_path: Path, row: bytes) -> None:
    """The error names the file and the command that says where it is damaged."""
    log(tmp_path / "run")
    with (tmp_path / "run" / "csv" / "train.csv").open("ab") as file:
        file.write(row)

    with pytest.raises(ValueError, match=r"run/csv/train\.csv is damaged, see runnerkit doctor: "):
        read_metrics(tmp_path)


def test_several_folders_are_one_table(tmp_path: Path) -> None:
    """Runs with the same name are identified by their paths; one that is given twice, by a link too, is read once."""
    for logdir in ("a/logs", "b/logs", "b/other"):
        log(tmp_path / logdir)

    table = read_metrics([tmp_path / "a/logs", str(tmp_path / "b/logs"), tmp_path / "b/other"])

    assert set(table["run"]) == {f"{tmp_path}/a/logs", f"{tmp_path}/b/logs", "other"}
    (tmp_path / "link").symlink_to(tmp_path / "b")
    twice = read_metrics([tmp_path / "b", tmp_path / "b/logs", tmp_path / "link"])
    assert twice.equals(read_metrics(tmp_path / "b"))


@pytest.mark.parametrize("num_bytes", range(1, 30))
def test_a_line_that_is_being_written_is_left_out(tmp_path: Path, num_bytes: int) -> None:
    """An incomplete last line is ignored wherever it ends, because a truncated number has another value."""
    log(tmp_path / "run")
    whole = read_metrics(tmp_path / "run")
    line = b"train,3,6,0.123456789012345678\n"

    with (tmp_path / "run" / "csv" / "train.csv").open("ab") as file:
        file.write(line[:num_bytes])

    assert read_metrics(tmp_path / "run").equals(whole)


def test_passes_are_in_time_with_a_column_for_each_metric(tmp_path: Path) -> None:
    """Passes are in chronological order with one column per metric, NaN for values that were not logged."""
    log(tmp_path / "run", num_epochs=3)
    table = read_metrics(tmp_path / "run")

    passes = by_pass(table)

    assert list(passes) == ["stage", "epoch", "step", "loader", "loss", "auc"]
    order = [(epoch, key) for epoch in (1, 2, 3) for key in ("train", "valid")]
    assert list(zip(passes["epoch"], passes["loader"], strict=True)) == order
    numbers = {(row.epoch, row.loader, row.metric): row.value for row in table.itertuples()}
    for row in passes.to_dict("records"):
        for metric in ("loss", "auc"):
            expected = numbers.get((row["epoch"], row["loader"], metric), math.nan)
            assert row[metric] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_metric_may_have_the_name_of_a_column(tmp_path: Path) -> None:
    """A metric may be called `epoch`, like a column of the table."""
    logger = CSVLogger(tmp_path / "run")
    logger.setup()
    logger.log_scalars({"epoch": 0.5, "a,b": 1.5}, step=Step("train", "valid/easy", 7, 70), scope="loader")
    logger.close()

    table = read_metrics(tmp_path / "run")

    rows = list(table.drop(columns="run").itertuples(index=False, name=None))
    assert rows == [("train", "valid/easy", 7, 70, "epoch", 0.5), ("train", "valid/easy", 7, 70, "a,b", 1.5)]


@pytest.mark.parametrize("logdir", ["empty", "nowhere"])
def test_folder_without_logs_is_named(tmp_path: Path, logdir: str) -> None:
    """A folder without logs raises an error, because an empty table would hide a misspelled path."""
    (tmp_path / "empty").mkdir()

    with pytest.raises(FileNotFoundError, match=logdir):
        read_metrics(tmp_path / logdir)


def test_an_unknown_scope_and_missing_pandas_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pandas, which is optional, the error gives the install command."""
    log(tmp_path / "run")
    with pytest.raises(ValueError, match='"loader" or "batch", got \'epoch\''):
        read_metrics(tmp_path, scope="epoch")  # type: ignore[arg-type]  # the mistake
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(ImportError, match=r"pip install runnerkit\[metrics\]"):
        read_metrics(tmp_path / "run")


@pytest.mark.cold
def test_optional_packages_are_not_imported_early() -> None:
    """Importing loggers, reader, plots and reports does not import their optional packages."""
    script = """
import sys
import runnerkit.loggers, runnerkit.history.frame, runnerkit.history.plot, runnerkit.history.report
import runnerkit.commands.watch
print(sorted({"tensorboard", "pandas", "matplotlib", "rich", "torch.utils.tensorboard"} & set(sys.modules)))
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"
