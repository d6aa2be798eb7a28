"""Linear layers in float8, by torchao; the rest of the model in bf16."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runnerkit.precision import AMP

__all__ = ["Float8"]

logger = logging.getLogger(__name__)

_MULTIPLE = 16  # of a linear layer's sizes, which the hardware needs
_OLDEST = (8, 9)  # compute capability: Ada, Hopper


class Float8(AMP):
    """Matrix products of linear layers in float8 (torchao), everything else in bf16; weights stay in float32.

    For the duration of a stage, each ``nn.Linear`` whose sizes are multiples of 16 is replaced by torchao's
    ``Float8Linear``, which has the same parameters; `compile=True` of the engine is what makes it fast.

    Args:
        recipe: of the scales, as in torchao: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        filter_fn: a function of a module and its name within the model that returns whether to replace it.
        emulate: compute in float32 what the hardware would return; slow, for devices without float8.

    >>> Float8(emulate=True).skips_steps
    False
    """

    def __init__(
        self,
        recipe: str = "tensorwise",
        *,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        emulate: bool = False,
    ) -> None:
        super().__init__(torch.bfloat16)
        self.recipe, self.filter_fn, self.emulate = recipe, filter_fn, emulate
        self._replaced: list[tuple[nn.Module, str, nn.Linear]] = []  # model, name in it, the user's module

    def check(self) -> None:
        """Raise if torchao is not installed, or does not know the recipe.

        Raises:
            ImportError, ValueError: with what to install, or the recipes.
        """
        self._config()

    def setup(self, device: torch.device) -> None:
        has_float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OLDEST
        if not self.emulate and not has_float8:
            raise RuntimeError(
                f"precision='fp8' needs a GPU with float8 (compute capability 8.9 or newer), and this is {device}: use "
                "'bf16', or Float8(emulate=True), which is slow, to try its numbers"
            )
        super().setup(device)

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-untyped]  # untyped

        for model in models.values():
            given = dict(model.named_modules())
            convert_to_float8_training(model, module_filter_fn=self._is_replaced, config=self._config())
            for name, module in given.items():
                if isinstance(module, nn.Linear) and model.get_submodule(name) is not module:
                    self._replaced.append((model, name, module))
        if models and not self._replaced:
            logger.warning(
                "precision='fp8': no nn.Linear within the model has sizes that are multiples of %d", _MULTIPLE
            )
        return super().prepare(models, optimizers)

    def cleanup(self) -> None:
        for model, name, given in self._replaced:
            current = model.get_submodule(name)
            given.weight, given.bias = current.weight, current.bias  # type: ignore[assignment]  # a Float8Linear's
            model.set_submodule(name, given)
        self._replaced = []
        super().cleanup()

    def _is_replaced(self, module: nn.Module, name: str) -> bool:
        if not name or not isinstance(module, nn.Linear):  # the caller holds the model itself
            return False
        is_fit = module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
        return is_fit and (self.filter_fn is None or self.filter_fn(module, name))

    def _config(self) -> Any:
        try:
            from torchao.float8 import Float8LinearConfig
        except ImportError as error:
            raise ImportError("precision='fp8' needs torchao: pip install runnerkit[float8]") from error
        try:
            config = Float8LinearConfig.from_recipe_name(self.recipe)
        except AssertionError as error:
            raise ValueError(str(error)) from None
        return replace(config, emulate=self.emulate)
