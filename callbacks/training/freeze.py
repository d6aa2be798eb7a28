"""Freezing of parameters for some epochs, such as a pretrained encoder's while a new head is trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runnerkit.callback import Callback, CallbackOrder, innermost, outermost
from runnerkit.callbacks.checkpoint import CheckpointCallback
from runnerkit.errors import check_component
from runnerkit.support.arguments import check_integers, check_names, check_strings
from runnerkit.support.torch_internals import BatchOrInstanceNorm
from runnerkit.types import StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["FreezeCallback"]


class FreezeCallback(Callback):
    """Freeze parameters by name in some epochs of each stage; in the other epochs they are trained.

    They stay in the optimizer: a frozen parameter's gradient is None, so neither momentum nor weight decay changes it.
    A batch norm whose parameters are all frozen uses its running statistics and does not update them. Afterwards all
    parameters require gradients again, and these batch norms are in training mode. DistributedDataParallelEngine needs
    ``find_unused_parameters=True`` for this.

    Args:
        patterns: names as in ``model.named_parameters()``, with wildcards: "encoder.*", "*.bias"; "encoder" matches
            everything below it.
        from_epoch, until_epoch: first and last epoch in which they are frozen, counted from 1 in each stage; None is
            the stage's last.
        model_key: which model, if the runner has several.

    >>> FreezeCallback("encoder", until_epoch=2).patterns
    ('encoder',)
    """

    shapes_training = True

    def __init__(
        self,
        patterns: str | Sequence[str],
        *,
        from_epoch: int = 1,
        until_epoch: int | None = None,
        model_key: str | None = None,
    ) -> None:
        super().__init__(order=CallbackOrder.Internal)
        patterns = (patterns,) if isinstance(patterns, str) else patterns
        check_names(self, patterns=patterns)
        check_integers(self, from_epoch=from_epoch)
        check_integers(self, or_none=True, until_epoch=until_epoch)
        check_strings(self, or_none=True, model_key=model_key)
        if until_epoch is not None and until_epoch < from_epoch:
            raise ValueError(
                f"FreezeCallback: epochs are counted from 1, and until_epoch must be >= from_epoch; got "
                f"from_epoch={from_epoch}, until_epoch={until_epoch}"
            )
        self.patterns = tuple(patterns)
        self.from_epoch, self.until_epoch = from_epoch, until_epoch
        self.model_key = model_key
        self._parameters: list[nn.Parameter] = []
        self._batch_norms: list[nn.Module] = []
        self._is_frozen = False

    def on_stage_start(self, runner: IRunner) -> None:
        models = as_dict(runner.current_run.stage.training_model)  # under FSDP2 a sharded copy trains
        check_component(self, "model", self.model_key, models)
        module = runner.engine.trained_module(models[self.model_key or ""])
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        for pattern in self.patterns:
            if not any(_matches(name, pattern) for name in trained):
                raise ValueError(
                    f"FreezeCallback: no trainable parameter matches {pattern!r}; the names are "
                    f"{', '.join(list(trained)[:12])}"
                )
        names = {name for name in trained if any(_matches(name, pattern) for pattern in self.patterns)}
        if len(names) == len(trained):
            raise ValueError(f"FreezeCallback would freeze all parameters of the model, by {list(self.patterns)}")
        self._check_unused(runner)
        savers = [each for each in map(innermost, runner.callbacks.values()) if isinstance(each, CheckpointCallback)]
        left_out = [each for each in savers if each.trainable_only]
        is_alone = outermost(self, runner.callbacks.values()) is self and runner.stage_key == next(iter(runner.stages))
        is_for_good = is_alone and self.from_epoch == 1 and self.until_epoch is None
        is_loaded = any(each.content == "runner" or each.load_best_on_end or each.load_best_of_run for each in left_out)
        if left_out and (is_loaded or not is_for_good):
            raise ValueError(
                "CheckpointCallback(trainable_only=True) leaves out what is frozen when it saves, and FreezeCallback "
                "gives weights back: leave out trainable_only, or call utils.set_requires_grad before the run instead"
            )
        self._parameters = [trained[name] for name in names]
        frozen = {id(each) for each in self._parameters}
        self._batch_norms = [
            each
            for each in module.modules()
            if isinstance(each, BatchOrInstanceNorm) and {id(own) for own in each.parameters()} & frozen
            and all(id(own) in frozen or not own.requires_grad for own in each.parameters())
        ]  # fmt: skip

    def _check_unused(self, runner: IRunner) -> None:
        wrapped = as_dict(runner.current_run.stage.training_model).get(self.model_key or "")
        if isinstance(wrapped, DistributedDataParallel) and not wrapped.find_unused_parameters:
            raise ValueError(
                "DDP waits for gradients that frozen parameters never get: FreezeCallback needs "
                f"{type(runner.engine).__name__}(find_unused_parameters=True)"
            )

    def on_epoch_start(self, runner: IRunner) -> None:
        last = self.until_epoch or runner.stage_epoch_step
        self._freeze(self.from_epoch <= runner.stage_epoch_step <= last)

    def _freeze(self, is_frozen: bool) -> None:
        if is_frozen == self._is_frozen:
            return
        self._is_frozen = is_frozen
        for each in self._parameters:
            each.requires_grad_(not is_frozen)
            each.grad = None
        for module in self._batch_norms:
            module.train(not is_frozen)

    def on_stage_end(self, runner: IRunner) -> None:
        self._freeze(False)
        self._parameters, self._batch_norms = [], []

    on_exception = on_stage_end

    def state_dict(self) -> StateDict:
        return {"is_frozen": True} if self._is_frozen else {}

    def load_state_dict(self, state: StateDict) -> None:
        # A checkpoint holds the modes of frozen batch norms, which are in training mode again afterwards.
        self._freeze(state.get("is_frozen", False))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
