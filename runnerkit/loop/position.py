"""The position of a run: the only code that restores its counters, and that advances all but those of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runnerkit.loop.attributes import Attributes, ProcessState
from runnerkit.metrics.renamed import NamedMetrics
from runnerkit.types import Metrics, StateDict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


@dataclass
class _Values(Attributes):
    """The part of a checkpoint that tells how far the run got; plain attributes of the runner, as steps read them."""

    epoch_step: int
    batch_step: int
    optimizer_step: int
    sample_step: int
    stage_epoch_step: int
    stage_batch_step: int
    stage_optimizer_step: int
    stage_sample_step: int
    epoch_metrics: dict[str, Metrics]
    experiment_metrics: dict[int, dict[str, Metrics]]


class Position(ProcessState):
    """Counters and metrics of a run, which are public attributes of its runner.

    Who makes an optimizer step counts it in ``optimizer_step`` and ``stage_optimizer_step``; a pass counts its own
    batches and samples, in ``loader_*``. All others are written here only. The runner is passed in: an object that
    referred to it would keep its loaders' workers.
    """

    def __init__(self) -> None:
        self._validated_at = -1  # `batch_step` of the last evaluation within a training loader of this epoch

    def start_stage(self, runner: IRunner) -> None:
        runner.stage_epoch_step = runner.stage_batch_step = runner.stage_optimizer_step = runner.stage_sample_step = 0

    def start_epoch(self, runner: IRunner) -> None:
        runner.epoch_step += 1
        runner.stage_epoch_step += 1
        runner.epoch_metrics = {}
        self._validated_at = -1

    def count_batch(self, runner: IRunner, num_samples: int) -> None:
        """Count a training batch, and its samples in all processes."""
        runner.batch_step += 1
        runner.sample_step += num_samples
        runner.stage_batch_step += 1
        runner.stage_sample_step += num_samples

    def correct_samples(self, runner: IRunner, surplus: int) -> None:
        """Take back training samples that were counted, but that other processes did not have."""
        runner.sample_step -= surplus
        runner.stage_sample_step -= surplus

    def note_validation(self, runner: IRunner) -> None:
        self._validated_at = runner.batch_step

    def is_validated(self, runner: IRunner) -> bool:
        """Return whether the evaluation loaders have run since the last training step."""
        return self._validated_at == runner.batch_step

    def end_loader(self, runner: IRunner, key: str) -> None:
        runner.epoch_metrics[key] = NamedMetrics(runner.loader_metrics)

    def end_epoch(self, runner: IRunner) -> None:
        runner.experiment_metrics[runner.epoch_step] = runner.epoch_metrics

    def metrics_of_epochs(self, runner: IRunner) -> dict[int, dict[str, Metrics]]:
        """Return a copy of the metrics so far, by epoch, with those of the epoch under way."""
        under_way = {runner.epoch_step: {**runner.epoch_metrics}} if runner.epoch_metrics else {}
        return {**runner.experiment_metrics, **under_way}

    @contextmanager
    def trial(self, runner: IRunner) -> Iterator[None]:
        """Keep the metrics of passes in the body out of the epoch's."""
        kept, runner.epoch_metrics = runner.epoch_metrics, {}
        yield
        runner.epoch_metrics = kept

    def state_dict(self, runner: IRunner) -> StateDict:
        return dict(vars(_Values.of(runner)))

    def load_state_dict(self, runner: IRunner, state: StateDict) -> None:
        # Absent before 0.2, where each batch was a step.
        was = {"optimizer_step": state["batch_step"], "stage_optimizer_step": state["stage_batch_step"]}
        values = {name: {**was, **state}[name] for name in _Values.names()}
        values["epoch_metrics"] = _named(state["epoch_metrics"])
        values["experiment_metrics"] = {epoch: _named(each) for epoch, each in state["experiment_metrics"].items()}
        _Values(**values).restore(runner)


def _named(metrics: dict[str, Metrics]) -> dict[str, Metrics]:
    return {loader: NamedMetrics(each) for loader, each in metrics.items()}
