"""Data parallelism with Horovod: one process per GPU, or several on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.engine import EngineOptions, uncompiled
from runnerkit.engines.adapters.horovod_batch_norm import SynchronizedBatchNorms
from runnerkit.engines.adapters.horovod_launch import is_launched, rendezvous
from runnerkit.engines.adapters.horovod_optimizer import DistributedStep, Operation
from runnerkit.engines.communicators.horovod import Horovod, import_horovod
from runnerkit.engines.launch.launchers import ExternalLauncher, SpawnLauncher
from runnerkit.engines.launch.several_processes import SeveralProcessesEngine
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.job_process import Launcher
from runnerkit.types import parameters_of, shared_parameters

__all__ = ["HorovodEngine"]

logger = logging.getLogger(__name__)


class HorovodOptions(EngineOptions, total=False):
    """Arguments of :class:`HorovodEngine`, for engines that pass them on."""

    device: Literal["cuda", "cpu"] | None
    compression: Literal["fp16"] | None
    op: Operation
    gradient_predivide_factor: float
    sync_bn: bool


class HorovodEngine(SeveralProcessesEngine):
    """Several processes whose gradients Horovod averages.

    Under horovodrun, ``horovod.run`` or mpirun the engine joins the launched processes; under plain python or in a
    notebook it starts them itself, on this machine, over Gloo. The loaders' batch_size is per process.

    Args:
        num_processes: None means one per GPU, or 2 without GPUs; a launcher's number overrides it.
        device: "cuda" or "cpu"; None means GPUs if there are any. Each process uses the GPU of its local rank.
        compression: "fp16" sends gradients in half precision.
        op: reduction of gradients over processes: "average", "sum", or "adasum" (needs MPI), which adds their
            orthogonal components and averages the parallel ones (Maleki et al. 2020, Adasum).
        gradient_predivide_factor: with op="average", divide gradients by this factor before the sum, and by
            num_processes / factor afterwards: the average is the same, and large gradients do not overflow in half
            precision.
        sync_bn: share batch statistics between GPUs; on the CPU it is ignored, with a warning.
        options: as in IEngine.

    >>> HorovodEngine(4, compression="fp16").num_processes
    4
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        device: Literal["cuda", "cpu"] | None = None,
        compression: Literal["fp16"] | None = None,
        op: Operation = "average",
        gradient_predivide_factor: float = 1.0,
        sync_bn: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(**options)
        self._exchange.compares = False  # every backward pass sends what optimizers hold
        if num_processes is not None and num_processes < 1:
            raise ValueError(f"num_processes must be >= 1, got {num_processes}; pass None for one per GPU")
        if device not in (None, "cuda", "cpu"):
            raise ValueError(f"device must be 'cuda', 'cpu' or None, got {device!r}")
        if compression not in (None, "fp16"):
            raise ValueError(f"compression must be 'fp16' or None, got {compression!r}")
        if op not in ("average", "sum", "adasum"):
            raise ValueError(f"op must be 'average', 'sum' or 'adasum', got {op!r}")
        if not 0 < gradient_predivide_factor < float("inf"):
            raise ValueError(f"gradient_predivide_factor must be > 0 and finite, got {gradient_predivide_factor}")
        if gradient_predivide_factor != 1 and op != "average":
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op='average', got op={op!r}")
        self.communicator = Horovod()
        self._uses_cuda = device == "cuda" or (device is None and torch.cuda.is_available())
        self.compression: Literal["fp16"] | None = compression
        self.op: Operation = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sync_bn = sync_bn
        environment = ProcessEnvironment.read()
        self.num_processes = (
            environment.world_size
            if environment is not None
            else num_processes or (max(1, torch.cuda.device_count()) if self._uses_cuda else 2)
        )
        self._steps: dict[int, DistributedStep] = {}  # by id of Horovod's optimizer: those of prepare(), and of shares
        self._waiting: dict[int, list[DistributedStep]] = {}  # by id of a model: the steps on its parameters
        self._batch_norms = SynchronizedBatchNorms()

    def check(self) -> None:
        super().check()
        import_horovod()

    def launcher(self) -> Launcher:
        if is_launched():
            environment = ProcessEnvironment.read()
            assert environment is not None, "a launcher must have started this process"
            return ExternalLauncher(self, environment)
        if self.op == "adasum":
            raise ValueError(
                "op='adasum' needs MPI, but plain python starts processes over Gloo: start the script with "
                f"mpirun -np {self.num_processes} python, or horovodrun --mpi -np {self.num_processes} python"
            )
        return SpawnLauncher(self.num_processes, server=partial(rendezvous, self.num_processes))

    def setup(self) -> None:
        assert is_launched(), "call launch() first"
        hvd = import_horovod()
        if not hvd.is_initialized():
            hvd.init()
        self.process_index, self.local_process_index = hvd.rank(), hvd.local_rank()
        self.num_processes = hvd.size()
        self.open_device(self._choose_device())
        if self.op == "adasum":
            self._check_adasum(hvd)

    def _choose_device(self) -> torch.device:
        if not self._uses_cuda:
            return torch.device("cpu")
        index, count = self.local_process_index, torch.cuda.device_count()
        if index >= count:
            raise RuntimeError(
                f"process {index} of this machine lacks a GPU, as there are only {count}: start at most that many "
                "processes per machine, or pass device='cpu'"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def _check_adasum(self, hvd: Any) -> None:
        if not hvd.mpi_enabled():
            raise ValueError(
                "op='adasum' needs MPI, but these processes communicate over Gloo: start the script with mpirun or "
                "horovodrun --mpi, and use a Horovod built with MPI (check with horovodrun --check-build)"
            )
        if self.precision.skips_steps:
            raise ValueError("op='adasum' steps during backward and cannot skip a step as float16 requires: use bf16")

    def cleanup(self) -> None:
        # Horovod keeps running until the process ends: built with MPI, it cannot start twice in one process.
        super().cleanup()
        for step in self._steps.values():
            step.remove_hooks()
        self._steps, self._waiting = {}, {}
        self._batch_norms.put_back()

    def what_may_differ(self) -> list[str]:
        several = self.num_processes > 1
        return ["Horovod fuses gradients as they arrive: set HOROVOD_FUSION_THRESHOLD=0"] if several else []

    # Components.

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.sync_bn and self.device.type == "cuda":
            model = self._batch_norms.put_in(model)
        elif self.sync_bn:
            logger.warning("sync_bn=True is ignored: Horovod's SyncBatchNorm runs on GPUs only, but this is the CPU")
        self.communicator.broadcast_tensors([*model.parameters(), *model.buffers()])
        return self.compiled(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return uncompiled(model)

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        # Batch statistics differ between ranks; evaluate rank zero's, which checkpoints hold.
        self.communicator.broadcast_tensors(list(model.buffers()))
        return model

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        # Wrap optimizers first: Horovod creates new ones, and a precision may modify the ones that step.
        names: dict[Tensor, str] = {
            parameter: f"{key}.{name}" if key else name
            for key, model in models.items()
            for name, parameter in model.named_parameters()
        }
        groups = shared_parameters(optimizers.values())
        if groups and self.op == "adasum":
            raise ValueError("op='adasum' steps during backward, so a parameter may belong to one optimizer only")
        shared = {
            positions: self._step_of(torch.optim.SGD(parameters, lr=0.0), key=f"shared by {positions}", names=names)
            for positions, parameters in groups.items()
        }  # these send gradients, and never step
        steps = {
            key: self._step_of(
                optimizer, key=key, names=names, shared=[each for held, each in shared.items() if position in held]
            )
            for position, (key, optimizer) in enumerate(optimizers.items())
        }
        models, optimizers = super().prepare(models, {key: step.optimizer for key, step in steps.items()})
        self._steps = {id(step.optimizer): step for step in (*shared.values(), *steps.values())}
        self._waiting = {
            id(model): [step for step in self._steps.values() if step.holds_any_of(model)] for model in models.values()
        }
        modules = {key: self.unwrap(model) for key, model in models.items()}
        sent = [each for each in parameters_of(*optimizers.values()) if each.requires_grad]
        self._exchange.open(modules, optimizers.values(), exchanged=sent)
        return models, optimizers

    def _step_of(
        self, optimizer: Optimizer, *, key: str, names: dict[Tensor, str], shared: Sequence[DistributedStep] = ()
    ) -> DistributedStep:
        return DistributedStep(
            optimizer,
            names={parameter: f"{key}/{name}" for parameter, name in names.items()},
            state=self.broadcast_object(optimizer.state_dict()),
            compression=self.compression,
            op=self.op,
            gradient_predivide_factor=self.gradient_predivide_factor,
            shared=shared,
        )

    def release(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        self._exchange.close()
        models, optimizers = super().release(models, optimizers)
        released = {key: self._steps[id(optimizer)].release() for key, optimizer in optimizers.items()}
        for step in self._steps.values():
            step.remove_hooks()
        self._steps, self._waiting = {}, {}
        models = {key: self._batch_norms.own(model) for key, model in models.items()}
        self._batch_norms.put_back()
        return models, released

    # A step.

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        for step in self._steps.values():
            step.before_backward()
        super().backward(loss, optimizer)

    def synchronize(self, optimizer: Optimizer) -> None:
        self._steps[id(optimizer)].synchronize()

    def clip_gradients(self, optimizer: Optimizer, clip: Callable[[list[Tensor]], Any]) -> None:
        if self.op == "adasum":
            raise ValueError("op='adasum' steps during backward, before gradients can be clipped: remove the clipping")
        super().clip_gradients(optimizer, clip)

    def step(self, optimizer: Optimizer) -> bool:
        self.synchronize(optimizer)  # before a scaler checks for non-finite gradients
        return super().step(optimizer)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        if self.op == "adasum":
            raise ValueError("op='adasum' steps in each backward: accumulation_steps must be 1")
        with ExitStack() as stack:
            for step in self._waiting.get(id(model), ()):
                stack.enter_context(step.without_communication())
            yield
