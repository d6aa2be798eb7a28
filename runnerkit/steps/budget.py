"""The length of a stage in epochs, optimizer steps or samples; the first limit that is reached ends it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runnerkit.callback import ICallback, last_training_loader, optimizer_callbacks
from runnerkit.sampling.sharding import count_batches, share_of
from runnerkit.support.arguments import check_integers

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


@dataclass(frozen=True)
class Budget:
    """Limits of a stage: it ends when the first of them is reached.

    A limit in steps or samples may end an epoch early; its evaluation loaders still run. A resumed run counts what was
    done before.

    Args:
        num_epochs: epochs.
        num_steps: optimizer steps: batches, or groups of accumulated batches.
        num_samples: training samples of all processes. The last step takes exactly the rest of a map-style data set;
            with a stream, or `epoch_steps`, the stage ends after the step that reaches the limit. With whole batches
            it does in one process, and several raise.

    >>> Budget(num_epochs=3, num_steps=1000).num_steps
    1000
    """

    num_epochs: int | None = None
    num_steps: int | None = None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        check_integers(self, or_none=True, **vars(self))
        if not self.limits:
            raise ValueError("a stage without num_epochs, num_steps or num_samples would never end: pass one of them")

    @property
    def limits(self) -> list[str]:
        """Names of the limits that are set."""
        return [name for name, limit in vars(self).items() if limit is not None]


class StageBudget:
    """The budget of a stage under way, and how much of it is left. The runner, whose counters say that, is passed in.

    Args:
        length: what ``get_stage_len`` returned; a number counts epochs.

    Attributes:
        given: the same as a budget.
        may_end_early: whether the stage may end within an epoch.
    """

    def __init__(self, length: int | Budget) -> None:
        self.given = length if isinstance(length, Budget) else Budget(num_epochs=length)
        self.may_end_early = self.given.limits != ["num_epochs"]
        self._max_epochs = math.inf if self.given.num_epochs is None else self.given.num_epochs
        self._max_steps = math.inf if self.given.num_steps is None else self.given.num_steps
        self._max_samples = math.inf if self.given.num_samples is None else self.given.num_samples

    def is_reached(self, *, epoch: int, num_steps: int, num_samples: int) -> bool:
        """Return whether `num_steps` or `num_samples` has reached its limit, or `epoch`, from 1, is after the last."""
        return num_steps >= self._max_steps or num_samples >= self._max_samples or epoch > self._max_epochs

    def is_over(self, runner: IRunner) -> bool:
        """Return whether the stage has reached a limit in steps or samples, or resumes in an epoch after its last."""
        return self.is_reached(
            epoch=runner.stage_epoch_step, num_steps=runner.stage_optimizer_step, num_samples=runner.stage_sample_step
        )

    def is_epoch_left(self, runner: IRunner) -> bool:
        """Return whether the stage may start another epoch."""
        num_epochs = math.inf if runner.stage_epoch_len is None else runner.stage_epoch_len
        return runner.stage_epoch_step < num_epochs and not self.is_over(runner)

    def ends_within_epoch(self, runner: IRunner) -> bool:
        """Return whether a limit in steps or samples is reached while the training loader has batches left."""
        if not self.may_end_early or not self.is_over(runner):
            return False
        is_last = runner.loader_key == last_training_loader(runner.loaders)
        is_at_end = runner.loader_batch_step == runner.loader_batch_len and is_last
        # A limit in samples shortens the loader, so that its end may be the limit's.
        return not is_at_end or self.given.num_samples is not None

    def is_evaluated_next(self, runner: IRunner) -> bool:
        """Return whether this training step is the last of its epoch, after which all evaluation loaders run anyway.

        Of a loader without a length this is not known. A limit within the epoch is not its end: a run with a higher
        limit continues after the evaluation.
        """
        keys = list(runner.loaders)
        later = keys[keys.index(runner.loader_key) + 1 :]
        if any(not key.startswith("train") for key in set(keys) - set(later)):
            return False  # some ran before
        if self.ends_within_epoch(runner):
            return False
        is_at_end = runner.need_early_stop or runner.loader_batch_step == runner.loader_batch_len
        return is_at_end and runner.loader_key == last_training_loader(runner.loaders)

    def describe_end(self, runner: IRunner) -> str:
        """Describe the progress towards each limit, and the argument to raise."""
        done = {
            "num_epochs": runner.stage_epoch_step,
            "num_steps": runner.stage_optimizer_step,
            "num_samples": runner.stage_sample_step,
        }
        limits, names = vars(self.given), self.given.limits
        parts = [f"{done[name]} of {limits[name]} {name.removeprefix('num_')}" for name in names]
        return f"{', '.join(parts)} are done; raise {' or '.join(names)} to continue"

    def limit_pass(self, runner: IRunner) -> None:
        """Let the pass over a training loader, which is about to start, end with the last sample of the stage, and let
        a sampler list no more than its last step needs.

        Raises:
            ValueError: processes may count differently, as no process knows the sizes of the others' batches.
        """
        num_steps, num_samples = self.given.num_steps, self.given.num_samples
        share = share_of(runner.loader)
        if num_steps is not None:
            fewest = min(accumulation_steps_of(runner.callbacks))
            share.need(max(0, num_steps - runner.stage_optimizer_step) * fewest)
        if num_samples is None:
            return
        share.end_after(max(0, num_samples - runner.stage_sample_step))
        if runner.engine.num_processes > 1 and share.batch_size is None:
            raise ValueError(
                f"num_samples: no process knows the sizes of the others' batches of loader "
                f"{runner.loader_key!r}; pass num_steps instead"
            )

    def count_steps(self, runner: IRunner, paces: Collection[int]) -> int | None:
        """Return how many optimizer steps the stage has; None unless every limit determines it.

        Called before the first epoch.

        Args:
            paces: batches that the optimizers accumulate.
        """
        given = self.given
        loaders = [] if runner.stage_key.startswith("infer") else _training_loaders(runner.loaders)
        lengths = [count_batches(loader) for loader in loaders]
        # A stage ends after the batch that reaches the limit.
        found = [] if given.num_steps is None else [math.ceil(given.num_steps / runner.steps_per_batch)]
        if given.num_epochs is not None:
            if None in lengths:
                return None
            found.append(given.num_epochs * sum(_steps_in(length or 0, paces) for length in lengths))
        if given.num_samples is not None:
            num_batches = share_of(loaders[0]).steps_for(given.num_samples, lengths[0]) if len(loaders) == 1 else None
            if num_batches is None or not lengths[0]:
                return None
            epochs, rest = divmod(num_batches, lengths[0])
            found.append(epochs * _steps_in(lengths[0], paces) + _steps_in(rest, paces))
        return min(found) * runner.steps_per_batch


def steps_per_epoch(
    loaders: Mapping[str, Any], callbacks: Mapping[str, ICallback], *, steps_per_batch: int
) -> int | None:
    """Return the optimizer steps of a whole epoch; None if a training loader does not have a length."""
    lengths = [count_batches(loader) for loader in _training_loaders(loaders)]
    if None in lengths:
        return None
    paces = accumulation_steps_of(callbacks)
    return sum(_steps_in(length or 0, paces) for length in lengths) * steps_per_batch


def _training_loaders(loaders: Mapping[str, Any]) -> list[Any]:
    return [loader for key, loader in loaders.items() if key.startswith("train")]


def _steps_in(num_batches: int, paces: Collection[int]) -> int:
    """Count the optimizer steps in `num_batches` batches; the last batch ends a step."""
    period = math.lcm(*paces)
    in_period = [number for number in range(1, period + 1) if any(number % pace == 0 for pace in paces)]
    periods, rest = divmod(num_batches, period)
    in_rest = sum(number <= rest for number in in_period)
    return periods * len(in_period) + in_rest + (rest > 0 and rest not in in_period)


def accumulation_steps_of(callbacks: Mapping[str, ICallback]) -> set[int]:
    """Return how many batches each of the optimizer callbacks accumulates."""
    return {each.accumulation_steps for each in optimizer_callbacks(callbacks)} or {1}
