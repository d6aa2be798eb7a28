"""One process on one device."""

from torch import nn

from runnerkit.engines.single_process import SingleProcessEngine
from runnerkit.precision import Precision


class DeviceEngine(SingleProcessEngine):
    """Train on a device by name.

    >>> engine = DeviceEngine("cpu")
    >>> engine.setup()
    >>> engine
    DeviceEngine(device='cpu', rank=0, world_size=1)
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


class CPUEngine(DeviceEngine):
    """Train on the CPU.

    >>> CPUEngine().is_ddp
    False
    """

    def __init__(self, *, precision: Precision | None = None) -> None:
        super().__init__("cpu", precision=precision)


class GPUEngine(DeviceEngine):
    """Train on one GPU.

    Args:
        index: which; by default torch's current one.

    >>> GPUEngine(index=1)._wanted_device
    'cuda:1'
    """

    def __init__(self, index: int | None = None, *, precision: Precision | None = None) -> None:
        super().__init__("cuda" if index is None else f"cuda:{index}", precision=precision)
