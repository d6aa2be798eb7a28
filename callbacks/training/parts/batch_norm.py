"""Recomputation of batch norm statistics for averaged weights, by ``torch.optim.swa_utils.update_bn``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from runnerkit.callback import innermost
from runnerkit.callbacks.training.batch_transform import BatchTransformCallback
from runnerkit.loop.loader_pass import Pass
from runnerkit.models.modes import Modes
from runnerkit.sampling.sharding import start_epoch
from runnerkit.seeding.generators import keep_rng
from runnerkit.support.torch_internals import BatchNorm
from runnerkit.types import as_dict, like

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module has batch norm with running statistics.

    >>> has_statistics(nn.Sequential(nn.BatchNorm1d(2))), has_statistics(nn.LayerNorm(2))
    (True, False)
    """
    return any(map(_has_own, module.modules()))


def _has_own(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and module.running_mean is not None


def renew_statistics(runner: IRunner, modules: Iterable[nn.Module], *, loader_key: str) -> None:
    """Run the runner's ``handle_batch`` over a loader, without gradients, and set the statistics of `modules` to the
    means over all batches of all processes; every rank must call this.

    Batches pass through BatchTransformCallbacks first, as in evaluation; no other callbacks are called.
    """
    forward = _Forward(runner, modules)
    with runner.loader_pass.suspended(runner):
        Pass.enter(runner, loader_key)
        runner.is_train_loader = runner.is_valid_loader = runner.is_infer_loader = False
        runner.is_within_loader = True
        start_epoch(runner.loader, runner.epoch_step)
        _renew(runner, forward)
    runner.current_run.stage.use_model(runner)


def _renew(runner: IRunner, forward: _Forward) -> None:
    trained = runner.current_run.stage.training_model
    models = as_dict(trained)
    modes = Modes(models.values())
    # The evaluation model keeps each rank's own statistics, while DDP's forward pass would broadcast rank zero's.
    used = {key: runner.engine.evaluation_model(model).eval() for key, model in models.items()}
    runner.model = like(trained, used)
    with keep_rng():
        update_bn(((batch,) for batch in runner.loader_pass.batches(runner)), forward)
    modes.restore()
    for each in filter(_has_own, forward.modules()):
        for name in ("running_mean", "running_var"):
            _put(each, name, runner.engine.reduce(each.get_buffer(name), "mean"))
        # Processes of tensor parallelism count the same batches.
        _put(each, "num_batches_tracked", runner.engine.data_parallel.reduce(each.get_buffer("num_batches_tracked")))


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    module.get_buffer(name).copy_(value)


class _Forward(nn.Module):
    """A module for update_bn that holds the batch norms and handles batches as the runner does."""

    def __init__(self, runner: IRunner, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.eval()
        self._runner = runner
        self._transforms = [
            each for each in runner.callbacks.values() if isinstance(innermost(each), BatchTransformCallback)
        ]

    def forward(self, batch: Any) -> None:
        self._runner.loader_pass.start_batch(self._runner, batch)
        for each in self._transforms:
            each.on_batch_start(self._runner)
        with self._runner.engine.autocast():
            self._runner.handle_batch(self._runner.batch)
