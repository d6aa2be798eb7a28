"""Metrics that need all samples at once, such as areas under curves and nearest neighbors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.batch_keys import pick
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.callbacks.metrics.parts.loader_sums import Sums, as_floats, named
from runnerkit.metrics.reduction import Share, on_cpu
from runnerkit.support.arguments import check_keys, check_strings
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class LoaderSamples:
    """The batches of one loader on the device; each has several tensors with one row per sample."""

    def __init__(self) -> None:
        self._batches: list[list[Tensor]] = []

    def add(self, columns: list[Tensor]) -> None:
        """Keep a copy of a batch.

        A view would keep its base in memory, for example hidden[:, 0] the hidden states of the whole loader; and the
        next step overwrites the outputs of a CUDA graph.
        """
        self._batches.append([each.detach().clone(memory_format=torch.contiguous_format) for each in columns])

    def share(self) -> Share | None:
        return Share({}, [self._columns()]) if self._batches else None

    def state_dict(self) -> StateDict:
        return {"columns": on_cpu(self._columns())}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        self._batches = [[each.to(device) for each in state["columns"]] for state in states if state["columns"]]

    def _columns(self) -> list[Tensor]:
        return [torch.cat(column) for column in zip(*self._batches, strict=True)]


class LoaderSamplesCallback(LoaderStateCallback[LoaderSamples]):
    """Base class of callbacks that keep their inputs of every batch, at the cost of memory and one gather per loader.

    Args:
        keys: keys of ``runner.batch`` to keep, with as many rows each.
        prefix, suffix: added to the names, before a slash.
    """

    def __init__(self, *, prefix: str | None, suffix: str | None, **keys: Any) -> None:
        super().__init__()
        check_keys(self, **keys)
        check_strings(self, or_none=True, prefix=prefix, suffix=suffix)
        self.keys = tuple(keys.values())
        self.prefix, self.suffix = prefix or "", suffix or ""

    @abstractmethod
    def values(self, *columns: Tensor) -> Sums:
        """Compute the metrics, () tensors by name, from all samples of all processes, in any order."""

    def check(self, *inputs: Tensor) -> None:
        """Raise if a batch has the wrong shape."""

    def new_state(self, runner: IRunner) -> LoaderSamples:
        return LoaderSamples()

    def on_batch_end(self, runner: IRunner) -> None:
        inputs, _ = pick(runner, *self.keys, reader=type(self).__name__)
        self.check(*inputs)
        self.state(runner).add(inputs)

    def finish(self, runner: IRunner, state: LoaderSamples, total: Share) -> None:
        columns = [torch.cat(column) for column in zip(*total.others, strict=True)]
        runner.loader_metrics.update(as_floats(named(self.values(*columns), prefix=self.prefix, suffix=self.suffix)))
