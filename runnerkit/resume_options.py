"""Optimizer options and schedules of a resumed run that come from its arguments instead of its checkpoint."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runnerkit.types import StateDict
from runnerkit.warmup import WarmupLR

Source: TypeAlias = Literal["checkpoint", "arguments"]


def check_source(resume_options: str) -> None:
    """Refuse any other word.

    Raises:
        ValueError: with both words and what they mean.
    """
    if resume_options not in ("checkpoint", "arguments"):
        raise ValueError(
            "resume_options must be 'checkpoint' (the saved learning rate and schedule) or 'arguments' (the ones that "
            f"are passed), got {resume_options!r}"
        )


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Copy the options of each parameter group, such as its learning rate, and what a scheduler added to them."""
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def put_options(optimizer: Any, options: list[dict[str, Any]]) -> None:
    """Put back what :func:`options_of` copied; the optimizer's state, such as its momentum, stays."""
    for group, own in zip(getattr(optimizer, "param_groups", []), options, strict=False):
        group.update(own)


def advance(scheduler: Any, saved: StateDict) -> None:
    """Step a scheduler as it was passed to where the `saved` one was.

    One that cannot be stepped alone (it follows a metric, or does not count its steps) takes its saved state.
    """
    if isinstance(scheduler, WarmupLR) and "num_done" in saved:
        is_over = saved["num_done"] >= saved["length"]
        wanted = scheduler.length if is_over else min(saved["num_done"], scheduler.length)
        _step(scheduler, wanted - scheduler.num_done)
        if scheduler.after is not None and saved["after"] is not None:
            advance(scheduler.after, saved["after"])
        return
    done, count = _num_steps(scheduler.state_dict()), _num_steps(saved)
    if done is None or count is None or isinstance(scheduler, ReduceLROnPlateau):
        scheduler.load_state_dict(saved)
    else:
        _step(scheduler, count - done)


def _step(scheduler: Any, num_steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses the optimizer's steps
        for _ in range(num_steps):
            scheduler.step()


def _num_steps(state: StateDict) -> int | None:
    """Count the steps of a scheduler by its state; None if that does not tell."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    inner = state.get("_schedulers")  # torch's ChainedScheduler
    return _num_steps(inner[0]) if inner else None
