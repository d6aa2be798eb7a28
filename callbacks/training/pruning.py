"""Pruning of weights: once after training, or gradually after each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from runnerkit.callback import Callback, CallbackOrder, innermost, last_training_loader
from runnerkit.callbacks.training.parts.weight_average import WeightAverageCallback
from runnerkit.errors import check_component
from runnerkit.models.magnitude_pruning import PruningFn, new_mask, prunable, pruning_function, sparsity
from runnerkit.models.parameters import check_shapes
from runnerkit.support.arguments import check_integers, check_names, check_numbers, check_strings
from runnerkit.support.torch_internals import is_dtensor, multiply_each_
from runnerkit.types import StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["PruningCallback"]


class PruningCallback(Callback):
    """Prune a model with the methods of ``torch.nn.utils.prune``.

    By default, prune once at the end of the stage; no checkpoint contains the result. With ``prune_on_epoch_end=True``,
    prune `amount` of the remaining weights after each epoch's training, before its evaluation: pruned weights stay zero
    while the others are trained, and metrics and checkpoints are those of the pruned model.

    Parameters keep their names, and any checkpoint loads into the original model. Gradients and weights are multiplied
    by masks, as in torch's reparametrization, and checkpoints of the run hold the masks. All ranks use rank zero's
    masks. The training loader logs ``sparsity``, the fraction of zeros among the pruned parameters.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured", "random_structured", or a function
            of (module, name, amount).
        amount: a fraction in (0, 1) of each parameter, or an int: a number.
        keys_to_prune: names of parameters within their modules.
        prune_on_epoch_end: prune after each epoch.
        layers_to_prune: names of modules; None is all modules whose parameter has two or more dimensions.
        dim, l_norm: for the structured methods, the dimension and the norm (torch's ``n``).
        model_key: which model, if the runner has several.

    Attributes:
        masks: by parameter, True where a weight is kept; empty before the first pruning.

    >>> PruningCallback("ln_structured", amount=0.25, dim=0, l_norm=2).arguments
    {'dim': 0, 'n': 2}
    """

    shapes_training = True

    def __init__(
        self,
        pruning_fn: PruningFn = "l1_unstructured",
        amount: float = 0.5,
        *,
        keys_to_prune: Sequence[str] = ("weight",),
        prune_on_epoch_end: bool = False,
        layers_to_prune: Sequence[str] | None = None,
        dim: int | None = None,
        l_norm: float | str | None = None,
        model_key: str | None = None,
    ) -> None:
        # After CheckpointCallback restores the best weights, and before the model is exported.
        super().__init__(order=CallbackOrder.Checkpoint + 5)
        check_numbers(self, amount=amount)
        check_names(self, keys_to_prune=keys_to_prune)
        check_names(self, or_none=True, layers_to_prune=layers_to_prune)
        check_integers(self, least=None, or_none=True, dim=dim)
        if l_norm not in ("fro", "nuc"):  # torch's other norms
            check_numbers(self, or_none=True, l_norm=l_norm)
        check_strings(self, or_none=True, model_key=model_key)
        pruning_function(pruning_fn)  # raise here, not after an epoch
        if amount <= 0 or (isinstance(amount, float) and amount >= 1):
            raise ValueError(f"PruningCallback: amount must be a fraction in (0, 1) or an int >= 1, got {amount}")
        is_structured = isinstance(pruning_fn, str) and pruning_fn.endswith("_structured")
        if is_structured and (dim is None or (pruning_fn == "ln_structured" and l_norm is None)):
            raise ValueError(
                f"PruningCallback: {pruning_fn} needs dim=, and ln_structured also l_norm=; got dim={dim}, "
                f"l_norm={l_norm}"
            )
        self.pruning_fn = pruning_fn
        self.amount = amount
        self.keys_to_prune = tuple(keys_to_prune)
        self.prune_on_epoch_end = prune_on_epoch_end
        self.layers_to_prune = layers_to_prune
        self.arguments: dict[str, Any] = {
            key: each for key, each in {"dim": dim, "n": l_norm}.items() if each is not None
        }
        self.model_key = model_key
        self.masks: dict[str, Tensor] = {}
        self.provides = ("sparsity",)
        self._parameters: dict[str, nn.Parameter] = {}
        self._earlier: dict[str, ReferenceType[nn.Parameter]] = {}  # those of the stage before
        self._hooks: list[Any] = []

    def on_experiment_start(self, runner: IRunner) -> None:
        self.masks = {}

    def on_stage_start(self, runner: IRunner) -> None:
        models = as_dict(runner.model)
        check_component(self, "model", self.model_key, models)
        module = runner.engine.unwrap(models[self.model_key or ""])
        check_shapes(module, "PruningCallback")
        self._parameters = prunable(module, keys=self.keys_to_prune, layers=self.layers_to_prune)
        if any(map(is_dtensor, self._parameters.values())):
            raise ValueError("PruningCallback cannot prune a sharded model: use DistributedDataParallelEngine")
        self._check_sizes()
        if not self.prune_on_epoch_end:
            self.masks = {}
            return  # prunes after training only
        self._take(self._earlier_masks())
        for each in map(innermost, runner.callbacks.values()):
            if isinstance(each, WeightAverageCallback) and (self.model_key or "") in each.averages:
                raise ValueError(
                    "PruningCallback(prune_on_epoch_end=True) prunes the trained weights, and the run ends with the "
                    f"averages of {type(each).__name__}, which are not pruned: leave out prune_on_epoch_end"
                )
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                hook = parameter.register_hook(partial(self._masked, name))
                self._hooks.append(hook)
        for optimizer in as_dict(runner.optimizer).values():
            self._hooks.append(optimizer.register_step_post_hook(self._apply))

    def _earlier_masks(self) -> dict[str, Tensor]:
        """Return what an earlier stage pruned of these parameters and is still zero; its best weights may have less."""
        masks = {}
        for name, parameter in self._parameters.items():
            is_kept = parameter.detach().cpu() != 0
            is_same = name in self.masks and name in self._earlier and self._earlier[name]() is parameter
            masks[name] = self.masks[name].cpu() | is_kept if is_same else torch.ones_like(is_kept)
        return {} if all(each.all() for each in masks.values()) else masks

    def _check_sizes(self) -> None:
        """Raise before training for sizes that torch would refuse after it."""
        if callable(self.pruning_fn):
            return
        dim = self.arguments.get("dim") if self.pruning_fn.endswith("_structured") else None
        for name, parameter in self._parameters.items():
            if dim is not None and not -parameter.ndim <= dim < parameter.ndim:
                raise ValueError(f"dim={dim} is out of range for {name}, which has {parameter.ndim} dimensions")
            size = parameter.numel() if dim is None else parameter.shape[int(dim)]
            if isinstance(self.amount, int) and self.amount > size:
                raise ValueError(f"amount={self.amount} exceeds the size of {name}: {size}")

    def _masked(self, name: str, gradient: Tensor) -> Tensor:
        return gradient * self.masks[name] if self.masks else gradient

    @torch.no_grad()
    def _apply(self, *_: Any) -> None:
        if self.masks:
            multiply_each_(list(self._parameters.values()), [self.masks[name] for name in self._parameters])

    def on_loader_end(self, runner: IRunner) -> None:
        if not runner.is_train_loader:
            return
        is_last = runner.loader_key == last_training_loader(runner.loaders)
        if self.prune_on_epoch_end and is_last:
            self._prune(runner)
        runner.loader_metrics["sparsity"] = sparsity(self.masks) if self.masks else 0.0

    def on_stage_end(self, runner: IRunner) -> None:
        if not self.prune_on_epoch_end:
            self._prune(runner)
        self._release()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._earlier = {name: ref(each) for name, each in self._parameters.items()}
        self._hooks, self._parameters = [], {}
        self.masks = {name: each.cpu() for name, each in self.masks.items()}  # for the calling process

    def on_experiment_end(self, runner: IRunner) -> None:
        self._release()
        self._earlier = {}  # cannot be pickled

    on_exception = on_experiment_end

    def _prune(self, runner: IRunner) -> None:
        masks = {
            name: new_mask(parameter, self.masks.get(name), self.pruning_fn, amount=self.amount, **self.arguments)
            for name, parameter in self._parameters.items()
        }
        # Every rank must enter: this broadcasts, because random methods draw different numbers on each rank.
        shared = runner.engine.broadcast_object({name: each.cpu() for name, each in masks.items()})
        self._take(shared)
        self._apply()

    def _take(self, masks: dict[str, Tensor]) -> None:
        self.masks = {name: each.to(self._parameters[name].device) for name, each in masks.items()}

    def state_dict(self) -> StateDict:
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state: StateDict) -> None:
        if state["masks"] and state["masks"].keys() != self._parameters.keys():
            raise ValueError(
                f"the checkpoint has masks of {sorted(state['masks'])}, but PruningCallback prunes "
                f"{sorted(self._parameters)}: pass the same keys_to_prune and layers_to_prune"
            )
        self._take(state["masks"])
