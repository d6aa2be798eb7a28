"""Progress bars in the terminal or notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackNode, CallbackOrder
from runnerkit.callbacks.monitor.live_metrics import LiveMetrics, shown
from runnerkit.support.host_copy import read_metrics_at_once
from runnerkit.types import Scalar

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["TqdmCallback"]

# Showing metrics costs a host sync and about 300 µs of formatting; counting a batch costs 3 µs.
REFRESH_S = 0.2


class TqdmCallback(Callback):
    """A progress bar for epochs, if there are several, and one for each pass over a loader, on rank zero.

    Bars of loaders show the learning rate and exponential means of metrics over about fifty batches, and finally the
    loader's values. Nothing is shown without a terminal; in a notebook, bars are widgets if ipywidgets is installed.

    >>> TqdmCallback().node
    <CallbackNode.Master: 1>
    """

    shapes_training = True  # evaluate_loader(verbose=True) shows its own bar

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)
        self._epochs: Any = None
        self._bars: dict[str, Any] = {}  # several during a validation within the training loader
        self._metrics: dict[str, LiveMetrics] = {}
        self._shown_at = 0.0

    def on_epoch_start(self, runner: IRunner) -> None:
        if self._epochs is None and runner.stage_epoch_len != 1:
            self._epochs = _bar("Epochs", total=runner.stage_epoch_len, initial=runner.stage_epoch_step - 1)

    def on_loader_start(self, runner: IRunner) -> None:
        if runner.epoch_step == 0:
            return  # the batch evaluated before training, to find the metrics
        self._metrics[runner.loader_key] = LiveMetrics()
        self._bars[runner.loader_key] = _bar(
            f"{runner.stage_epoch_step}/{runner.stage_epoch_len or '?'} * Epoch ({runner.loader_key})",
            total=runner.loader_batch_len,
            initial=runner.loader_batch_step,
        )

    def on_batch_end(self, runner: IRunner) -> None:
        bar = self._bars.get(runner.loader_key)
        if bar is None or bar.disable:
            return
        now = time.monotonic()
        if now - self._shown_at >= REFRESH_S:
            self._shown_at = now
            bar.set_postfix_str(_format(self._metrics[runner.loader_key].read(runner)), refresh=False)
        bar.update()

    def on_loader_end(self, runner: IRunner) -> None:
        self._metrics.pop(runner.loader_key, None)
        bar = self._bars.pop(runner.loader_key, None)
        if bar is None:
            return
        if not bar.disable:
            bar.set_postfix_str(_format(runner.loader_metrics), refresh=False)
        bar.close()

    def on_epoch_end(self, runner: IRunner) -> None:
        if self._epochs is not None:
            self._epochs.update()

    def on_stage_end(self, runner: IRunner) -> None:
        bars = [self._epochs] if self._epochs is not None else []
        for bar in reversed([*bars, *self._bars.values()]):  # the outermost last: it ends the line
            bar.close()
        self._bars.clear()
        self._epochs = None

    on_exception = on_stage_end


def _bar(description: str, *, total: int | None, initial: int) -> Any:
    from tqdm.auto import tqdm  # import lazily: the notebook support is slow to load

    return tqdm(
        desc=description,
        total=total,
        initial=initial,
        leave=None,  # only the outermost bar stays on the screen; tqdm finds the line itself
        mininterval=REFRESH_S,
        disable=None,  # disabled unless isatty()
    )


def _format(metrics: Mapping[str, Scalar]) -> str:
    [values] = read_metrics_at_once([shown(metrics)])
    names = sorted(values, key=lambda name: (name != "loss", name))  # the loss first: a narrow terminal cuts the end
    return ", ".join(f"{name}={values[name]:.4g}" for name in names)
