"""DDP communication hooks by name: compress gradients on their way between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch.nn.parallel import DistributedDataParallel

Hook: TypeAlias = tuple[Any, Callable[..., Any]]
CommHook: TypeAlias = Literal["fp16", "bf16", "powersgd"] | Hook | Callable[[], Hook]


def checked(hook: CommHook | None) -> CommHook | None:
    """Return `hook` if it is None, a known name, a pair ``(state, hook)`` or a function that returns one.

    Raises:
        ValueError: it is anything else.
    """
    is_pair = isinstance(hook, tuple) and len(hook) == 2
    if hook is None or is_pair or callable(hook) or hook in ("fp16", "bf16", "powersgd"):
        return hook
    raise ValueError(
        f"comm_hook must be 'fp16', 'bf16', 'powersgd', a (state, hook) pair or a function returning one, got {hook!r}"
    )


def register(hook: CommHook, model: DistributedDataParallel) -> None:
    """Register `hook` with a wrapped model.

    "fp16" and "bf16" halve the bytes sent. "powersgd" sends a rank-1 approximation of each matrix, after 1,000 exact
    steps, and feeds the error back (Vogels et al. 2019, PowerSGD). A state that belongs to a process group, such as
    PowerSGD's, must be created in the process that uses it; pass a function:
    ``comm_hook=lambda: (PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)``. Checkpoints do not
    contain the state: a resumed run repeats the exact steps.
    """
    # imported only when needed: it takes a tenth of the import time of runnerkit
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if callable(hook):
        hook = hook()
    if isinstance(hook, tuple):
        model.register_comm_hook(*hook)
    elif hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "bf16":
        # DDP rejects torch's own hook, by its name, unless the backend is NCCL; gloo can add bf16 as well.
        model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    else:
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1), powerSGD_hook.powerSGD_hook
        )
