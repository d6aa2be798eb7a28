"""Progress bars in the terminal or notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackNode, CallbackOrder
from runnerkit.host_copy import read_metrics_at_once
from runnerkit.types import Scalar

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

# To show metrics costs a host sync and some 300 µs of formatting; to count a batch costs 3 µs.
REFRESH_S = 0.2


class TqdmCallback(Callback):
    """One bar for each pass over a loader, with the metrics of the latest batch; silent where there is no terminal.

    >>> TqdmCallback().node
    <CallbackNode.Master: 1>
    """

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)
        self._bars: dict[str, Any] = {}  # a validation within the training loader has a second one
        self._shown_at = 0.0

    def on_loader_start(self, runner: IRunner) -> None:
        if runner.epoch_step == 0:
            return  # the one batch that is evaluated before training, to see which metrics there are
        from tqdm.auto import tqdm  # its notebook half is worth loading only where bars are wanted

        self._bars[runner.loader_key] = tqdm(
            desc=f"{runner.stage_epoch_step}/{runner.stage_epoch_len} * Epoch ({runner.loader_key})",
            total=runner.loader_batch_len,
            initial=runner.loader_batch_step,
            leave=None,  # only the outermost bar stays on the screen; tqdm finds the line itself
            mininterval=REFRESH_S,
            disable=None,  # decided by isatty()
        )

    def on_batch_end(self, runner: IRunner) -> None:
        bar = self._bars.get(runner.loader_key)
        if bar is None or bar.disable:
            return
        now = time.monotonic()
        if now - self._shown_at >= REFRESH_S:
            self._shown_at = now
            bar.set_postfix_str(_format(runner.batch_metrics), refresh=False)
        bar.update()

    def on_loader_end(self, runner: IRunner) -> None:
        bar = self._bars.pop(runner.loader_key, None)
        if bar is None:
            return
        if not bar.disable:
            bar.set_postfix_str(_format(runner.loader_metrics), refresh=False)
        bar.close()

    def on_exception(self, runner: IRunner) -> None:
        for bar in reversed(self._bars.values()):  # the outermost last: it ends its line
            bar.close()
        self._bars.clear()


def _format(metrics: Mapping[str, Scalar]) -> str:
    shown = {name: value for name, value in sorted(metrics.items()) if not name.startswith("_")}
    [values] = read_metrics_at_once([shown])
    return ", ".join(f"{name}={value:.4g}" for name, value in values.items())
