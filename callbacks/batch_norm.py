"""Batch norm's statistics, renewed for weights that no training ended with: ``torch.optim.swa_utils.update_bn``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from runnerkit import components
from runnerkit.callback import innermost
from runnerkit.callbacks.batch_transform import BatchTransformCallback
from runnerkit.sampling.sharding import start_epoch
from runnerkit.seeding import keep_rng
from runnerkit.types import as_dict, like

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


def has_statistics(module: nn.Module) -> bool:
    """Whether a module has batch norm with running statistics.

    >>> has_statistics(nn.Sequential(nn.BatchNorm1d(2))), has_statistics(nn.LayerNorm(2))
    (True, False)
    """
    return any(map(_has_own, module.modules()))


def _has_own(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def renew_statistics(runner: IRunner, modules: Iterable[nn.Module], *, loader_key: str) -> None:
    """Run the runner's ``handle_batch`` over a loader, without gradients, and give `modules` the mean of their batch
    statistics over all batches of all processes; every rank must call.

    Batches pass through BatchTransformCallbacks first, as those of evaluation do; other callbacks do not act.
    """
    forward = _Forward(runner, modules)
    paused = components.pause_loader(runner)
    runner.loader_key, runner.loader = loader_key, runner.loaders[loader_key]
    runner.is_train_loader = runner.is_valid_loader = runner.is_infer_loader = False
    runner.is_within_loader, runner.loader_batch_step = True, 0
    start_epoch(runner.loader, runner.epoch_step)
    models = as_dict(runner._training_model)
    # The evaluation model: statistics are each rank's own until the end, where DDP's forward would share rank zero's.
    used = {key: runner.engine.evaluation_model(model).eval() for key, model in models.items()}
    runner.model = like(runner._training_model, used)
    with keep_rng():
        update_bn(((batch,) for batch in runner._batches()), forward)
    for each in filter(_has_own, forward.modules()):
        _reduce(runner, each.running_mean, "mean")
        _reduce(runner, each.running_var, "mean")
        _reduce(runner, each.num_batches_tracked, "sum")
    components.continue_loader(runner, paused)


def _reduce(runner: IRunner, statistic: Any, op: Any) -> None:
    assert isinstance(statistic, Tensor)
    statistic.copy_(runner.engine.reduce(statistic, op))


class _Forward(nn.Module):
    """Takes batches as the runner does; in it update_bn finds the batch norms."""

    def __init__(self, runner: IRunner, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.eval()
        self._runner = runner
        self._transforms = [
            each for each in runner.callbacks.values() if isinstance(innermost(each), BatchTransformCallback)
        ]

    def forward(self, batch: Any) -> None:
        components.start_batch(self._runner, batch)
        for each in self._transforms:
            each.on_batch_start(self._runner)
        with self._runner.engine.autocast():
            self._runner.handle_batch(self._runner.batch)
