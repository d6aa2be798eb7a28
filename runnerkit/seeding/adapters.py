"""Initial values of the adapters that the library peft adds to a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from runnerkit.support.component_members import ModuleMembers


def adapter_reset(module: nn.Module, around: Iterable[nn.Module]) -> Callable[[], None] | None:
    """Return a function that fills the LoRA adapters of a layer as ``get_peft_model`` does; None for other modules.

    The layers that adapters consist of would otherwise get their own initial values: LoRA's second matrix, which peft
    fills with zeros, would change what the model computes.

    Args:
        around: the modules that contain `module`, the nearest first; one of them has the configuration.
    Raises:
        ValueError: the adapters are of another kind, or their initial values depend on those of the base.
    """
    layer = ModuleMembers(module)
    if not {*layer.adapter_layer_names} - {"modules_to_save"}:  # whole copies of layers, which fill themselves
        return None
    reset = layer.reset_lora_parameters
    configs: Mapping[str, Any] = next(filter(None, (ModuleMembers(each).peft_config for each in around)), {})
    if reset is None or not configs:
        raise ValueError(
            f"{type(module).__module__}.{type(module).__name__} holds adapters, and of those only the initial values "
            "of LoRA from peft.get_peft_model are known: make the model without init='meta' and initialize_parameters"
        )

    for name, config in configs.items():
        if config.init_lora_weights not in (True, False, "gaussian"):
            raise ValueError(
                f"adapter {name!r} has init_lora_weights={config.init_lora_weights!r}; with init='meta' and "
                "initialize_parameters it must be True, False or 'gaussian'"
            )

    def fill() -> None:
        for name, config in configs.items():
            reset(name, config.init_lora_weights)

    return fill
