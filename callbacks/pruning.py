"""Weights set to zero, and kept there: once training is over, or some more after each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runnerkit.arguments import check_integers, check_names, check_numbers, check_strings
from runnerkit.callback import Callback, CallbackOrder
from runnerkit.pruning import PruningFn, new_mask, prunable, pruning_function, sparsity
from runnerkit.types import StateDict, as_dict
from runnerkit.unknown_key import UnknownKeyError

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class PruningCallback(Callback):
    """Prune a model by the methods of ``torch.nn.utils.prune``.

    By default once, of the weights that the stage ends with; no checkpoint has that. With ``prune_on_epoch_end=True``
    after each epoch's training, before its evaluation, `amount` of what is left: what is pruned stays zero while the
    rest trains on, and metrics and checkpoints are those of the pruned model.

    Nothing is wrapped: parameters keep their names, and any checkpoint loads into the model as it was. Gradients and
    weights are multiplied by masks, as torch's reparametrization does, and a checkpoint of the run holds the masks.
    Rank zero's masks are everybody's. The training loader has ``sparsity``, the share of zeros among what is pruned.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured", "random_structured", or one's own
            (module, name, amount).
        amount: a share in (0, 1) of each parameter, or an int: a number.
        keys_to_prune: names of parameters within their modules.
        prune_on_epoch_end: prune each epoch.
        layers_to_prune: names of modules; None is all whose parameter has two dimensions or more.
        dim, l_norm: of the structured methods: along which dimension, and by which norm (``n`` of torch).
        model_key: which model, if the runner has several.

    Attributes:
        masks: by parameter, True where a weight stays; empty before the first pruning.

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
        # When the best weights are back, which a checkpoint callback sees to, and before the model is exported.
        super().__init__(order=CallbackOrder.Checkpoint + 5)
        check_numbers(self, amount=amount)
        check_names(self, keys_to_prune=keys_to_prune)
        check_names(self, or_none=True, layers_to_prune=layers_to_prune)
        check_integers(self, least=None, or_none=True, dim=dim)
        if l_norm not in ("fro", "nuc"):  # torch's other norms
            check_numbers(self, or_none=True, l_norm=l_norm)
        check_strings(self, or_none=True, model_key=model_key)
        pruning_function(pruning_fn)  # refuse a name here, not after an epoch
        if amount <= 0 or (isinstance(amount, float) and amount >= 1):
            raise ValueError(f"PruningCallback: amount must be a share in (0, 1), or an int >= 1, got {amount}")
        is_structured = isinstance(pruning_fn, str) and pruning_fn.endswith("_structured")
        if is_structured and (dim is None or (pruning_fn == "ln_structured" and l_norm is None)):
            raise ValueError(
                f"PruningCallback: {pruning_fn} wants dim=, and ln_structured l_norm= too; got dim={dim}, "
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
        self._hooks: list[Any] = []

    def on_stage_start(self, runner: IRunner) -> None:
        models = as_dict(runner.model)
        if (self.model_key or "") not in models:
            raise UnknownKeyError(f"PruningCallback wants model {self.model_key!r}; the runner has {sorted(models)}")
        module = runner.engine.unwrap(models[self.model_key or ""])
        self._parameters = prunable(module, keys=self.keys_to_prune, layers=self.layers_to_prune)
        if any(hasattr(each, "full_tensor") for each in self._parameters.values()):
            raise ValueError("PruningCallback cannot rank weights that are in parts: use DistributedDataParallelEngine")
        self._check_sizes()
        self.masks = {}
        if not self.prune_on_epoch_end:
            return  # nothing is pruned while it trains
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                hook = parameter.register_hook(partial(self._masked, name))
                self._hooks.append(hook)
        for optimizer in as_dict(runner.optimizer).values():
            self._hooks.append(optimizer.register_step_post_hook(self._apply))

    def _check_sizes(self) -> None:
        """Refuse before training what torch would when that is over."""
        if callable(self.pruning_fn):
            return
        dim = self.arguments.get("dim") if self.pruning_fn.endswith("_structured") else None
        for name, parameter in self._parameters.items():
            if dim is not None and not -parameter.ndim <= dim < parameter.ndim:
                raise ValueError(f"dim={dim} is none of {name}, which has {parameter.ndim} dimensions")
            size = parameter.numel() if dim is None else parameter.shape[int(dim)]
            if isinstance(self.amount, int) and self.amount > size:
                raise ValueError(f"amount={self.amount} is more than {name} has to prune: {size}")

    def _masked(self, name: str, gradient: Tensor) -> Tensor:
        return gradient * self.masks[name] if self.masks else gradient

    @torch.no_grad()
    def _apply(self, *_: Any) -> None:
        if self.masks:
            torch._foreach_mul_(list(self._parameters.values()), [self.masks[name] for name in self._parameters])

    def on_loader_end(self, runner: IRunner) -> None:
        if not runner.is_train_loader:
            return
        is_last = runner.loader_key == [key for key in runner.loaders if key.startswith("train")][-1]
        if self.prune_on_epoch_end and is_last:
            self._prune(runner)
        runner.loader_metrics["sparsity"] = sparsity(self.masks) if self.masks else 0.0

    def on_stage_end(self, runner: IRunner) -> None:
        if not self.prune_on_epoch_end:
            self._prune(runner)
        self._remove_hooks()

    def on_exception(self, runner: IRunner) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._parameters = [], {}
        self.masks = {name: each.cpu() for name, each in self.masks.items()}  # where the caller reads them

    def _prune(self, runner: IRunner) -> None:
        masks = {
            name: new_mask(parameter, self.masks.get(name), self.pruning_fn, amount=self.amount, **self.arguments)
            for name, parameter in self._parameters.items()
        }
        # Every rank must enter: this broadcasts. A method may draw, and each rank draws other numbers.
        shared = runner.engine.broadcast_object({name: each.cpu() for name, each in masks.items()})
        self._take(shared)
        self._apply()

    def _take(self, masks: dict[str, Tensor]) -> None:
        self.masks = {name: masks[name].to(self._parameters[name].device) for name in self._parameters}

    def state_dict(self) -> StateDict:
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state: StateDict) -> None:
        if state["masks"] and state["masks"].keys() != self._parameters.keys():
            raise ValueError(
                f"the checkpoint has masks of {sorted(state['masks'])}, PruningCallback prunes "
                f"{sorted(self._parameters)}: pass the same keys_to_prune and layers_to_prune"
            )
        if state["masks"]:
            self._take(state["masks"])
