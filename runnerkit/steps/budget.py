"""The length of a stage in epochs, optimizer steps or samples; the first limit that is reached ends it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runnerkit.callback import last_training_loader, optimizer_callbacks
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


def budget_of(length: int | Budget) -> Budget:
    """Return what ``get_stage_len`` returned as a budget; a number counts epochs."""
    return length if isinstance(length, Budget) else Budget(num_epochs=length)


def is_over(runner: IRunner) -> bool:
    """Return whether the stage has reached a limit in steps or samples."""
    budget = runner.current_run.stage.budget
    return is_reached(budget, num_steps=runner.stage_optimizer_step, num_samples=runner.stage_sample_step)


def is_reached(budget: Budget, *, num_steps: int, num_samples: int) -> bool:
    """Return whether `num_steps` or `num_samples` has reached its limit."""
    return num_steps >= _or_infinite(budget.num_steps) or num_samples >= _or_infinite(budget.num_samples)


def ends_within_epoch(runner: IRunner) -> bool:
    """Return whether the stage has reached a limit in steps or samples while its training loader has batches left."""
    if not runner.current_run.stage.may_end_early or not is_over(runner):
        return False
    is_last = runner.loader_key == last_training_loader(runner.loaders)
    is_at_end = runner.loader_batch_step == runner.loader_batch_len and is_last
    # A limit in samples shortens the loader, so that its end may be the limit's.
    return not is_at_end or runner.current_run.stage.budget.num_samples is not None


def is_evaluated_next(runner: IRunner) -> bool:
    """Return whether this training step is the last of its epoch, after which all evaluation loaders run anyway.

    Of a loader without a length this is not known. A limit within the epoch is not its end: a run with a higher limit
    continues after the evaluation.
    """
    keys = list(runner.loaders)
    later = keys[keys.index(runner.loader_key) + 1 :]
    if any(not key.startswith("train") for key in set(keys) - set(later)):
        return False  # some ran before
    if ends_within_epoch(runner):
        return False
    is_at_end = runner.need_early_stop or runner.loader_batch_step == runner.loader_batch_len
    return is_at_end and runner.loader_key == last_training_loader(runner.loaders)


def is_epoch_left(runner: IRunner) -> bool:
    """Return whether the stage may start another epoch."""
    return runner.stage_epoch_step < _or_infinite(runner.stage_epoch_len) and not is_over(runner)


def describe_end(runner: IRunner) -> str:
    """Describe the progress towards each limit, and the argument to raise."""
    done = {
        "num_epochs": runner.stage_epoch_step,
        "num_steps": runner.stage_optimizer_step,
        "num_samples": runner.stage_sample_step,
    }
    limits = vars(runner.current_run.stage.budget)
    names = runner.current_run.stage.budget.limits
    parts = [f"{done[name]} of {limits[name]} {name.removeprefix('num_')}" for name in names]
    return f"{', '.join(parts)} are done; raise {' or '.join(names)} to continue"


def limit_pass(runner: IRunner) -> None:
    """Let the pass over a training loader, which is about to start, end with the last sample of the stage, and let a
    sampler list no more than its last step needs.

    Raises:
        ValueError: processes may count differently, as no process knows the sizes of the others' batches.
    """
    num_steps, num_samples = runner.current_run.stage.budget.num_steps, runner.current_run.stage.budget.num_samples
    share = share_of(runner.loader)
    if num_steps is not None:
        share.need(max(0, num_steps - runner.stage_optimizer_step) * accumulation_of(runner))
    if num_samples is None:
        return
    share.end_after(max(0, num_samples - runner.stage_sample_step))
    if runner.engine.num_processes > 1 and share.batch_size is None:
        raise ValueError(
            f"num_samples: no process knows the sizes of the others' batches of loader "
            f"{runner.loader_key!r}; pass num_steps instead"
        )


def count_steps(runner: IRunner, paces: Collection[int]) -> int | None:
    """Return how many optimizer steps the stage has; None unless every limit determines it.

    Called before the first epoch.

    Args:
        paces: batches that the optimizers accumulate.
    """
    budget = runner.current_run.stage.budget
    loaders = (
        []
        if runner.stage_key.startswith("infer")
        else [loader for key, loader in runner.loaders.items() if key.startswith("train")]
    )
    lengths = [count_batches(loader) for loader in loaders]
    # A stage ends after the batch that reaches the limit.
    found = [] if budget.num_steps is None else [math.ceil(budget.num_steps / runner.steps_per_batch)]
    if budget.num_epochs is not None:
        if None in lengths:
            return None
        found.append(budget.num_epochs * sum(_steps_in(length or 0, paces) for length in lengths))
    if budget.num_samples is not None:
        num_batches = share_of(loaders[0]).steps_for(budget.num_samples, lengths[0]) if len(loaders) == 1 else None
        if num_batches is None or not lengths[0]:
            return None
        epochs, rest = divmod(num_batches, lengths[0])
        found.append(epochs * _steps_in(lengths[0], paces) + _steps_in(rest, paces))
    return min(found) * runner.steps_per_batch


def steps_per_epoch(runner: IRunner) -> int | None:
    """Return the optimizer steps of a whole epoch; None if a training loader does not have a length."""
    lengths = [count_batches(loader) for key, loader in runner.loaders.items() if key.startswith("train")]
    if None in lengths:
        return None
    return sum(_steps_in(length or 0, all_accumulation_steps(runner)) for length in lengths) * runner.steps_per_batch


def _steps_in(num_batches: int, paces: Collection[int]) -> int:
    """Count the optimizer steps in `num_batches` batches; the last batch ends a step."""
    period = math.lcm(*paces)
    in_period = [number for number in range(1, period + 1) if any(number % pace == 0 for pace in paces)]
    periods, rest = divmod(num_batches, period)
    in_rest = sum(number <= rest for number in in_period)
    return periods * len(in_period) + in_rest + (rest > 0 and rest not in in_period)


def accumulation_of(runner: IRunner) -> int:
    """Return how many batches the stage's optimizer callbacks accumulate, the fewest if they differ."""
    return min(all_accumulation_steps(runner))


def all_accumulation_steps(runner: IRunner) -> set[int]:
    """Return how many batches each of the stage's optimizer callbacks accumulates."""
    return {each.accumulation_steps for each in optimizer_callbacks(runner.callbacks)} or {1}


def _or_infinite(limit: int | None) -> float:
    return math.inf if limit is None else limit
