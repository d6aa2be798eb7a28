"""A terminal dashboard of progress and the latest metrics of each loader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackNode, CallbackOrder
from runnerkit.callbacks.monitor.live_metrics import LiveMetrics, shown
from runnerkit.support.host_copy import read_metrics_at_once
from runnerkit.types import Metrics

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["RichDashboardCallback"]

# Drawing takes about 4 ms and synchronizes with the device.
REFRESH_S = 0.5


class RichDashboardCallback(Callback):
    """Progress bars of epochs and loaders, with a table of metrics below that has a column per loader, drawn by rich.

    For a running loader, the table shows the learning rate and exponential means of metrics over about fifty batches;
    for a finished one, the loader's values. It runs on rank zero and shows nothing without a terminal. With it,
    `train(verbose=True)` does not add bars. Printed output appears above the dashboard.

    Raises:
        ImportError: rich is not installed.
    """

    shapes_training = True  # evaluate_loader(verbose=True) shows its own bar

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)
        try:
            import rich  # noqa: F401  # raise here, not in another process
        except ImportError as error:
            raise ImportError("RichDashboardCallback needs rich: pip install runnerkit[rich]") from error
        self._live: Any = None  # None without a terminal
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._under_way: dict[str, LiveMetrics] = {}
        self._metrics: dict[str, Metrics] = {}
        self._shown_at = 0.0

    def on_stage_start(self, runner: IRunner) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import MofNCompleteColumn, Progress, TextColumn

        console = Console()
        if not console.is_terminal and not console.is_jupyter:
            return
        self._tasks, self._under_way, self._metrics = {}, {}, {}
        names = TextColumn("{task.description}", style="progress.description", markup=False)
        self._progress = Progress(names, *Progress.get_default_columns()[1:], MofNCompleteColumn(), console=console)
        self._live = Live(console=console, auto_refresh=False)  # no thread: steps draw when due
        self._live.start()

    def on_epoch_start(self, runner: IRunner) -> None:
        self._count("epochs", runner.stage_epoch_step - 1, total=runner.stage_epoch_len)

    def on_loader_start(self, runner: IRunner) -> None:
        if runner.epoch_step == 0:
            return  # the batch evaluated before training, to find the metrics
        self._under_way[runner.loader_key] = LiveMetrics()
        self._count(runner.loader_key, runner.loader_batch_step, total=runner.loader_batch_len)

    def on_batch_end(self, runner: IRunner) -> None:
        if self._live is None or runner.epoch_step == 0:
            return
        now = time.monotonic()
        if now - self._shown_at >= REFRESH_S:
            self._shown_at = now
            self._progress.update(self._tasks[runner.loader_key], completed=runner.loader_batch_step)
            self._metrics[runner.loader_key] = self._under_way[runner.loader_key].read(runner)
            self._draw()

    def on_loader_end(self, runner: IRunner) -> None:
        if self._live is None or runner.epoch_step == 0:
            return
        self._progress.update(self._tasks[runner.loader_key], completed=runner.loader_batch_step)
        [self._metrics[runner.loader_key]] = read_metrics_at_once([shown(runner.loader_metrics)])

    def on_epoch_end(self, runner: IRunner) -> None:
        if self._live is not None:
            self._progress.update(self._tasks["epochs"], completed=runner.stage_epoch_step)

    def on_stage_end(self, runner: IRunner) -> None:
        if self._live is not None:
            try:
                self._draw()
            finally:
                self._live.stop()
                self._live = self._progress = None

    on_exception = on_stage_end

    def _count(self, name: str, completed: int, *, total: int | None) -> None:
        """Start or restart a bar."""
        if self._live is None:
            return
        if name in self._tasks:
            self._progress.reset(self._tasks[name], total=total, completed=completed)
        else:
            self._tasks[name] = self._progress.add_task(name, total=total, completed=completed)

    def _draw(self) -> None:
        from rich.console import Group
        from rich.table import Column, Table
        from rich.text import Text

        table = Table("metric", *(Column(Text(key)) for key in self._metrics))
        for name in dict.fromkeys(name for metrics in self._metrics.values() for name in metrics):
            values = (metrics.get(name) for metrics in self._metrics.values())
            table.add_row(Text(name), *("" if value is None else f"{value:.4g}" for value in values))
        self._live.update(Group(self._progress, table), refresh=True)
