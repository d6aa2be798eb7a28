"""Learning-rate warm-up, optionally followed by another scheduler."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from runnerkit.support.component_members import SchedulerMembers
from runnerkit.types import StateDict, groups_of


class WarmupLR:
    """A scheduler that increases the learning rate linearly from `start_lr`, then hands over to `after`.

    Step (or epoch) i of n, counted from 0, uses ``start_lr + (lr - start_lr) * i / n``, like torch's LinearLR and Goyal
    et al. 2017 (arXiv:1706.02677, 2.2). With start_lr=0 the first step does not change the weights; with `num_epochs`
    that holds for the whole first epoch. The full learning rates are those of the groups at construction.

    Torch's ``SequentialLR([LinearLR(...), after])`` is similar, but it cannot start at 0, be followed by
    ReduceLROnPlateau, or count the warm-up in steps and the rest in epochs. SchedulerCallback handles both units: it
    does not step `after` until the warm-up is over; epochs that end later count for it. In a hand-written loop, call
    :meth:`step` after each step until `is_over`, then as often as `after` requires.

    Args:
        optimizer: optimizer to schedule; groups that are added later have their full rate immediately.
        num_steps, num_epochs: length of the warm-up, >= 1; pass one of the two.
        start_lr: >= 0, and at most the full rate of any group.
        after: a scheduler of the same optimizer; None keeps the full rate.
    Raises:
        ValueError: not exactly one length; a `start_lr` above a full rate; an `after` of another optimizer.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    >>> plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    >>> scheduler = WarmupLR(optimizer, num_steps=2, after=plateau)
    >>> rates = scheduler.get_last_lr()
    >>> for metric in (None, None, 1.0, 2.0):
    ...     optimizer.step()
    ...     scheduler.step(metric)
    ...     rates += scheduler.get_last_lr()
    >>> [round(rate, 3) for rate in rates]
    [0.0, 0.2, 0.4, 0.4, 0.04]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        start_lr: float = 0.0,
        after: Any = None,
    ) -> None:
        lengths: list[Any] = [each for each in (num_steps, num_epochs) if each is not None]
        if len(lengths) != 1 or not isinstance(lengths[0], Integral) or lengths[0] < 1:
            raise ValueError(
                "a warm-up needs either num_steps or num_epochs, an int >= 1, "
                f"got num_steps={num_steps}, num_epochs={num_epochs}"
            )
        full = [float(group["lr"]) for group in optimizer.param_groups]
        if not 0 <= start_lr <= min(full):
            raise ValueError(f"start_lr must be between 0 and the learning rates, {full}; got {start_lr}")
        if isinstance(after, WarmupLR):
            raise TypeError("after=WarmupLR(...) would warm up twice; pass the scheduler that follows")
        own = SchedulerMembers(after).optimizer  # user-defined schedulers may lack it
        if own is not None and groups_of(own) is not optimizer.param_groups:
            raise ValueError(f"after={type(after).__name__}(...) has another optimizer; create it with the same one")
        self.optimizer = optimizer
        self.after = after
        self.num_steps, self.num_epochs = num_steps, num_epochs
        self.start_lr = start_lr
        self.full_lrs = full
        self.num_done = 0
        self._set_rates()

    @property
    def _schedulers(self) -> tuple[Any, ...]:
        return () if self.after is None else (self.after,)  # the name in torch's schedulers, which engines read

    @property
    def is_per_step(self) -> bool:
        """True if the warm-up is counted in optimizer steps, False for epochs."""
        return self.num_steps is not None

    @property
    def length(self) -> int:
        """Length of the warm-up in steps or epochs."""
        length = self.num_steps or self.num_epochs
        assert length is not None
        return length

    @property
    def is_over(self) -> bool:
        """True after the warm-up, when the rates are the full ones or set by `after`."""
        return self.num_done >= self.length

    def step(self, metrics: Any = None) -> None:
        """Advance by one step or epoch; after the warm-up, step `after`.

        Args:
            metrics: passed to an `after` such as ReduceLROnPlateau.
        """
        if not self.is_over:
            self.num_done += 1
            self._set_rates()
        elif self.after is not None:
            self.after.step(*(() if metrics is None else (metrics,)))

    def _set_rates(self) -> None:
        part = self.num_done / self.length
        for group, full in zip(self.optimizer.param_groups, self.full_lrs, strict=False):
            rate = full if self.is_over else self.start_lr + (full - self.start_lr) * part
            set_lr(group, rate)

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> StateDict:
        """Return the progress and length of the warm-up, the full rates, and the state of `after`."""
        state = SchedulerMembers(self.after).state_dict
        after = state() if state is not None else None
        return {"num_done": self.num_done, "length": self.length, "full_lrs": list(self.full_lrs), "after": after}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a :meth:`state_dict`; the optimizer's state has the current rates.

        A warm-up of another length, for example because the number of processes changes the steps per epoch, continues
        from the same fraction.

        Raises:
            ValueError: the state is from another scheduler.
        """
        if "num_done" not in state:
            raise ValueError(
                f"WarmupLR got the state of another scheduler, with {sorted(state)}: resume with the scheduler that "
                "was saved, or start a new schedule with the weights: runner.load(...), then train without resume"
            )
        self.num_done = round(state["num_done"] * self.length / state.get("length", self.length))
        self.full_lrs = list(state["full_lrs"])
        load = SchedulerMembers(self.after).load_state_dict
        if state["after"] is not None and load is not None:
            load(state["after"])


def cosine_with_warmup(
    optimizer: Optimizer, num_steps: int | None, *, warmup_steps: int = 0, final_lr: float = 0.0
) -> Any:
    """Return a scheduler per optimizer step: a linear warm-up from 0, then half a cosine down to `final_lr`.

    Pass it to ``train(scheduler=...)`` as it is, or as ``functools.partial(cosine_with_warmup, warmup_steps=100)``.

    Args:
        optimizer: optimizer to schedule.
        num_steps: all steps, those of the warm-up included.
        warmup_steps: < `num_steps`.
        final_lr: learning rate of the last step, of every group.
    Raises:
        ValueError: `num_steps` is None, as a limit of the training does not tell, or not above `warmup_steps`.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    >>> scheduler = cosine_with_warmup(optimizer, num_steps=6, warmup_steps=2)
    >>> rates = scheduler.get_last_lr()
    >>> for _ in range(6):
    ...     optimizer.step()
    ...     scheduler.step()
    ...     rates += scheduler.get_last_lr()
    >>> [round(rate, 3) for rate in rates]
    [0.0, 0.2, 0.4, 0.341, 0.2, 0.059, 0.0]
    """
    if num_steps is None:
        raise ValueError(
            "the number of steps is not known, because a training loader lacks a length or does not tell the sizes of "
            "its batches: pass num_steps= to train(), without num_epochs and num_samples"
        )
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(f"warmup_steps must be >= 0 and < num_steps={num_steps}, got {warmup_steps}")
    after = CosineAnnealingLR(optimizer, num_steps - warmup_steps, eta_min=final_lr)
    return WarmupLR(optimizer, num_steps=warmup_steps, after=after) if warmup_steps else after


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the learning rate of an optimizer's group; a tensor is changed in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
