"""Log directories like those of real runs, written without a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from runnerkit.checkpoints.index import Record, to_json
from runnerkit.logger import Step
from runnerkit.loggers import CSVLogger
from runnerkit.storage.status_file import Status, now


def log_run(logdir: Path, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Log `curves`, {loader: {metric: value per epoch}}, with ten steps per epoch."""
    logger = CSVLogger(logdir)
    logger.setup()
    num_epochs = max(len(values) for metrics in curves.values() for values in metrics.values())
    for epoch in range(1, num_epochs + 1):
        for loader, metrics in curves.items():
            now = {name: values[epoch - 1] for name, values in metrics.items() if epoch <= len(values)}
            logger.log_scalars(now, step=Step("train", loader, epoch, 10 * epoch), scope="loader")
    logger.close()


def judge_run(logdir: Path, loader: str, metric: str, *, minimize: bool) -> None:
    """Write the index of one checkpoint that was selected by this metric."""
    judge = {"loader": loader, "metric": metric, "minimize": minimize}
    (logdir / "checkpoints").mkdir()
    record = Record("model.0001.pth", "runner", 1, 10, 5, "", 0.5, judged_by=judge)
    (logdir / "checkpoints" / "index.json").write_text(to_json([record]))


def fail_run(logdir: Path, message: str) -> None:
    """Write the status of a run that failed with a ValueError in its first epoch."""
    logdir.mkdir(parents=True, exist_ok=True)
    Status(
        state="failed", pid=1, host="here", started_at=now(), updated_at=now(), stage="train", loader="train", epoch=1,
        stage_epoch=1, num_epochs=3, step=1, optimizer_step=1, num_steps=None, metrics={},
        error={"type": "ValueError", "message": f"ValueError: {message}"},
    ).write(logdir)  # fmt: skip
