"""How DDP's gradients are compressed on their way between processes, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch.nn.parallel import DistributedDataParallel

Hook: TypeAlias = tuple[Any, Callable[..., Any]]
CommHook: TypeAlias = Literal["fp16", "bf16", "powersgd"] | Hook | Callable[[], Hook]


def checked(hook: CommHook | None) -> CommHook | None:
    """Refuse what is neither a name, nor a pair, nor a function that makes one.

    Raises:
        ValueError: with the names.
    """
    is_pair = isinstance(hook, tuple) and len(hook) == 2
    if hook is None or is_pair or callable(hook) or hook in ("fp16", "bf16", "powersgd"):
        return hook
    raise ValueError(
        f"comm_hook must be 'fp16', 'bf16', 'powersgd', a pair (state, hook) or a function that makes one, got {hook!r}"
    )


def register(hook: CommHook, model: DistributedDataParallel) -> None:
    """Register `hook` with a wrapped model.

    "fp16" and "bf16" halve what is sent. "powersgd" sends a rank-1 approximation of each matrix, after 1,000 exact
    steps, and feeds the error back (Vogels et al. 2019, PowerSGD). A state that belongs to a process group,
    as PowerSGD's does, is made in the process that uses it, by a function:
    ``comm_hook=lambda: (PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)``. Its state is
    not in checkpoints: a resumed run makes its exact steps anew.
    """
    # imported by those who compress: a tenth of the time that the import of runnerkit takes
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if callable(hook):
        hook = hook()
    if isinstance(hook, tuple):
        model.register_comm_hook(*hook)
    elif hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "bf16":
        # Torch's hook DDP lets pass with NCCL only, by its name; gloo adds bf16 as well.
        model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    else:
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1), powerSGD_hook.powerSGD_hook
        )
