"""Laws of all loggers that write files: the same files whether or not the run was killed, and no logs of two runs."""

from functools import partial

import pytest

from runnerkit.logger import Step
from runnerkit.loggers import CSVLogger, JSONLLogger, TensorboardLogger
from tests.loggers.records import RUN, log
from tests.loggers.test_tensorboard import read as read_events

LOGGERS = {
    "csv": partial(CSVLogger, log_batch_metrics=True),
    "jsonl": partial(JSONLLogger, log_batch_metrics=True),
    "tensorboard by epoch": partial(TensorboardLogger, log_batch_metrics=True, x_axis="epoch"),
    "tensorboard by step": partial(TensorboardLogger, log_batch_metrics=True, x_axis="step"),
}


def read(logdir):
    """Return the text of all files, and the curves that TensorBoard shows."""
    paths = [path for path in logdir.rglob("*") if path.is_file() and "tfevents" not in path.name]
    curves = {key: [(x, repr(value)) for x, value in points] for key, points in read_events(logdir).items()}
    return {str(path.relative_to(logdir)): path.read_text() for path in paths}, curves


@pytest.mark.parametrize(
    ("name", "killed_after"),
    [(name, num) for name in LOGGERS for num in ([3, 8, 12, 16] if "tensor" in name else range(len(RUN) + 1))],
)
def test_killed_and_resumed_run_leaves_the_same_files(tmp_path, name, killed_after):
    """For any checkpoint and kill, files and curves are exactly those of an uninterrupted run."""
    make = LOGGERS[name]
    log(make(tmp_path / "unkilled"), RUN)
    expected = read(tmp_path / "unkilled")

    for last in range(killed_after + 1):
        scope, _, epoch, step, _ = RUN[last - 1] if last else ("loader", "", 0, 0, {})
        logdir = tmp_path / f"killed_{last}"
        log(make(logdir), RUN[:killed_after])
        log(make(logdir), RUN[last:], resumed_at=Step("train", "train" if scope == "batch" else "", epoch, step))

        assert read(logdir) == expected, f"checkpoint after {last} records"


@pytest.mark.parametrize("name", LOGGERS)
def test_epochs_without_training_steps_are_told_apart(tmp_path, name):
    """The step does not advance without training, so the epoch determines what is after the checkpoint."""
    records = [("loader", "valid", epoch, 0, {"loss": float(epoch)}) for epoch in (1, 2, 3)]
    log(LOGGERS[name](tmp_path / "two"), records[:2])
    log(LOGGERS[name](tmp_path / "three"), records)

    log(LOGGERS[name](tmp_path / "three"), [], resumed_at=Step("train", "", 2, 0))

    assert read(tmp_path / "three") == read(tmp_path / "two")


@pytest.mark.parametrize("name", LOGGERS)
def test_logs_of_another_run_are_refused(tmp_path, name):
    """The message names the folder and both solutions; the logs do not change."""
    log(LOGGERS[name](tmp_path), RUN)
    before = read(tmp_path)

    with pytest.raises(FileExistsError, match=r'resume="auto".*another logdir') as caught:
        LOGGERS[name](tmp_path).setup()

    assert str(tmp_path) in str(caught.value)
    assert read(tmp_path) == before


@pytest.mark.parametrize("name", LOGGERS)
def test_logdir_that_is_a_file_is_refused(tmp_path, name):
    """The message names the folder and says what to do."""
    (tmp_path / "logs").write_text("not a folder")

    with pytest.raises(OSError, match=r"logs.*pass another logdir"):
        LOGGERS[name](tmp_path / "logs").setup()


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_numbers_are_on_the_disk_before_close(tmp_path, name):
    """Nothing is created before setup; logged rows and lines can be read during the run."""
    logger = LOGGERS[name](tmp_path / "logs")
    assert not (tmp_path / "logs").exists()
    logger.setup()

    for step in (1, 2):
        logger.log_scalars({"loss": 1.5}, step=Step("train", "train", 1, step), scope="loader")
        [text] = read(tmp_path / "logs")[0].values()
        assert text.count("1.5") == step
    logger.close()
