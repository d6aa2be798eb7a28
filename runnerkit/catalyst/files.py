"""The files of Catalyst 21.12, written beside those of runnerkit for programs that read them after the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runnerkit.callback import Callback, CallbackNode, CallbackOrder, ICallback
from runnerkit.callbacks import AccuracyCallback, ControlFlowCallback
from runnerkit.loggers import CSVLogger
from runnerkit.loggers.files.table import format_rows, read_rows
from runnerkit.runner import IRunner
from runnerkit.storage.atomic_file import write_text

__all__ = ["CatalystFilesCallback"]


class CatalystFilesCallback(Callback):
    """After each epoch, rewrite the tables of each CSV logger as those of Catalyst 21.12, on rank zero.

    ``csv/<loader>.csv`` becomes ``logs/<loader>.csv`` with the columns step, which is the epoch of the stage, and
    metrics, sorted, where the top-1 accuracy of an AccuracyCallback is "accuracy01". When the run ends, its
    ``trace.json`` is in ``tb_profile`` too.

    >>> CatalystFilesCallback().node.name
    'Master'
    """

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)

    def on_epoch_end(self, runner: IRunner) -> None:
        names = dict(_names_of_accuracy(runner.callbacks))
        for logdir in _logdirs(runner):
            write_tables(logdir, names)

    def on_experiment_end(self, runner: IRunner) -> None:
        for logdir in _logdirs(runner):
            if (logdir / "trace.json").exists():
                (logdir / "tb_profile").mkdir(exist_ok=True)
                text = (logdir / "trace.json").read_text(encoding="utf-8")
                write_text(logdir / "tb_profile" / "trace.pt.trace.json", text)


def write_tables(logdir: Path, names: Mapping[str, str]) -> None:
    """Write ``logs/<loader>.csv`` from each ``csv/<loader>.csv``.

    Args:
        names: of metrics that have another name in Catalyst.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "csv").mkdir()
    >>> _ = (folder / "csv" / "valid.csv").write_text("stage,epoch,step,loss,accuracy\\ntune,3,100,0.5,0.75\\n")
    >>> write_tables(folder, {"accuracy": "accuracy01"})
    >>> print((folder / "logs" / "valid.csv").read_text())
    step,accuracy01,loss
    1,0.75,0.5
    <BLANKLINE>
    """
    tables = {path: read_rows(path) for path in (logdir / "csv").rglob("*.csv") if ".batch." not in path.name}
    first: dict[str, int] = {}  # epoch of each stage
    for _, *rows in filter(None, tables.values()):
        for stage, epoch, *_ in rows:
            first[stage] = min(int(epoch), first.get(stage, int(epoch)))
    for path, lines in tables.items():
        if not lines:
            continue
        (_, _, _, *metrics), *rows = lines
        columns = sorted((names.get(name, name), place) for place, name in enumerate(metrics, start=3))
        table = [["step", *(name for name, _ in columns)]]
        table += [[str(int(row[1]) - first[row[0]] + 1), *(row[place] for _, place in columns)] for row in rows]
        target = logdir / "logs" / path.relative_to(logdir / "csv")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, format_rows(table).decode())


def _logdirs(runner: IRunner) -> list[Path]:
    return [each.logdir for each in runner.loggers.values() if isinstance(each, CSVLogger)]


def _names_of_accuracy(callbacks: Mapping[str, ICallback]) -> Iterator[tuple[str, str]]:
    """Yield (name, Catalyst's name) of each AccuracyCallback's top-1 accuracy."""
    for each in callbacks.values():
        inner = each.callback if isinstance(each, ControlFlowCallback) else each
        if isinstance(inner, AccuracyCallback):
            metric: Any = inner.metric
            for k, name in zip(metric.topk, inner.provides, strict=True):
                if k == 1:
                    start, _, end = name.rpartition("accuracy")
                    yield name, f"{start}accuracy01{end}"
