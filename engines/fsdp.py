"""Fully sharded data parallelism: weights, gradients and optimizer state split over processes (``fully_shard``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from runnerkit.engine import uncompiled
from runnerkit.engines.launch.process_group import ProcessGroupEngine, ProcessGroupOptions
from runnerkit.engines.sharding.shard_policy import ShardPolicy, check_parameters
from runnerkit.precision import AMP, FP32
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from runnerkit.engines.sharding.sharded_model import ShardedModel

__all__ = ["FullyShardedDataParallelEngine"]


class FullyShardedDataParallelOptions(ProcessGroupOptions, total=False):
    """Arguments of :class:`FullyShardedDataParallelEngine`, for engines that pass them on."""

    shard_modules: Sequence[type[nn.Module]] | None
    shard_min_parameters: int | None
    reshard_after_forward: bool
    cpu_offload: bool
    replicas: int
    compute_dtype: torch.dtype | None
    sharded_checkpoints: bool


class FullyShardedDataParallelEngine(ProcessGroupEngine):
    """Several processes that shard weights, gradients and the optimizer's state (FSDP2).

    Each process keeps one shard of every parameter and gathers the full parameters of one unit at a time. The loaders'
    batch_size is per process. In evaluation every process holds all weights, so that each runs at its own pace.

    Args:
        num_processes: None means one per GPU, or 2 without GPUs; a launcher's number overrides it.
        shard_modules: module classes that form units, which are gathered, used and freed one after another.
        shard_min_parameters: form units by size: modules with at least this many parameters outside their inner units.
        reshard_after_forward: free a unit's weights after its forward pass; False keeps them for its backward pass.
        cpu_offload: keep shards and the optimizer's state in host memory.
        replicas: number of process groups that each hold the full model (HSDP), for example one per machine.
        compute_dtype: torch.bfloat16 computes and gathers in it; weights, summed gradients and steps stay float32.
        sharded_checkpoints: let each process save and load its own shards; see docs/fsdp.md.
        options: address, port, backend, device, devices, timeout_s as in ProcessGroupEngine; the rest as in IEngine.

    >>> FullyShardedDataParallelEngine(num_processes=4, replicas=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        shard_modules: Sequence[type[nn.Module]] | None = None,
        shard_min_parameters: int | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        replicas: int = 1,
        compute_dtype: torch.dtype | None = None,
        sharded_checkpoints: bool = False,
        **options: Unpack[ProcessGroupOptions],
    ) -> None:
        super().__init__(num_processes, **options)
        self.policy = ShardPolicy(shard_modules, shard_min_parameters)
        if replicas < 1 or self.num_processes % replicas:
            raise ValueError(
                f"replicas must divide the number of processes, got {replicas} for {self.num_processes}; "
                "pass 1 to shard over all of them"
            )
        if compute_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"compute_dtype must be torch.bfloat16 or None, got {compute_dtype}; "
                "float16 needs a scaler: precision=AMP(torch.float16)"
            )
        if not isinstance(self.precision, FP32 | AMP) or (compute_dtype and not isinstance(self.precision, FP32)):
            raise ValueError(
                f"{type(self).__name__} accepts either precision=AMP(...) or compute_dtype=torch.bfloat16; "
                f"got {type(self.precision).__name__} and {compute_dtype}"
            )
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.replicas = replicas
        self.compute_dtype = compute_dtype
        self.sharded_checkpoints = sharded_checkpoints
        if cpu_offload and self.backend is None and self._uses_cuda():
            self.backend = "cpu:gloo,cuda:nccl"  # gradient norms in host memory are reduced by gloo
        self._mesh: DeviceMesh | None = None
        self._saving_group: Any = None  # a ProcessGroup
        self._sharded: dict[int, ShardedModel] = {}  # by the id of the trained copy
        self._followers: list[Optimizer] = []  # optimizers that step on shards

    def setup(self) -> None:
        super().setup()
        from torch.distributed.device_mesh import init_device_mesh  # half a second, for this engine only

        if self.replicas == 1:
            self._mesh = init_device_mesh(self.device.type, (self.num_processes,), mesh_dim_names=("shards",))
        else:
            self._mesh = self._mesh_of_replicas()

    def _mesh_of_replicas(self) -> DeviceMesh:
        """Create a mesh whose groups use timeout_s; those of ``init_device_mesh`` use torch's default, half an hour."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(self.num_processes).view(self.replicas, -1)
        timeout = timedelta(seconds=self.timeout_s)
        make_groups: Callable[..., tuple[Any, Any]] = dist.new_subgroups_by_enumeration  # untyped in torch
        groups = [make_groups(each.tolist(), timeout=timeout)[0] for each in (ranks.T, ranks)]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=("replicas", "shards"))

    def cleanup(self) -> None:
        self._let_go()
        self._mesh = self._saving_group = None
        super().cleanup()

    def _let_go(self) -> None:
        """Restore the optimizers' original parameters without state or communication, also after a failure."""
        from runnerkit.engines.sharding.sharded_model import follow

        for optimizer in self._followers:
            follow(optimizer, {shard: own for own, shard in self._pairs()}, convert=None)
        self._followers.clear()
        self._sharded.clear()

    # Components.

    def prepare_model(self, model: nn.Module) -> nn.Module:
        # A trained model may be larger than the device: only its shards are moved there.
        return model if _is_trained(model) else super().prepare_model(model)

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        from runnerkit.engines.sharding.sharded_model import follow, shard_like

        trained = {key: model for key, model in models.items() if _is_trained(model)}
        self.policy.check(trained.values())
        check_parameters(trained, {key: self.policy.units(model) for key, model in trained.items()})
        models, optimizers = super().prepare(models, optimizers)
        shards = dict(self._pairs())
        for key, optimizer in optimizers.items():
            _check_known(optimizer, shards, key=key)
            follow(optimizer, shards, shard_like)
            self._followers.append(optimizer)
        return models, optimizers

    def release(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        from runnerkit.engines.sharding.sharded_model import follow, whole

        for sharded in self._sharded.values():
            sharded.gather()
        owners = {shard: own for own, shard in self._pairs()}
        for optimizer in self._followers:
            follow(optimizer, owners, lambda value, own: _to(whole(value), own.device))
        models, optimizers = super().release(models, optimizers)
        self._followers.clear()
        self._sharded.clear()
        return models, optimizers

    def wrap(self, model: nn.Module) -> nn.Module:
        from runnerkit.engines.sharding.sharded_model import ShardedModel

        if not _is_trained(model):
            return self.compiled(model)
        assert self._mesh is not None, "call setup() first"
        sharded = ShardedModel(
            model,
            mesh=self._mesh,
            policy=self.policy,
            reshard_after_forward=self.reshard_after_forward,
            cpu_offload=self.cpu_offload,
            compute_dtype=self.compute_dtype,
        )
        self._sharded[id(sharded.module)] = sharded
        return self.compiled(sharded.module)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module; its weights are those of the last :meth:`release` or full state dict."""
        sharded = self._of(model)
        return uncompiled(model) if sharded is None else sharded.own

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        # A forward pass that gathers would wait for ranks without a further batch.
        sharded = self._of(model)
        if sharded is not None:
            sharded.unshard()
        return model

    def training_model(self, model: nn.Module) -> nn.Module:
        sharded = self._of(model)
        if sharded is not None:
            sharded.reshard()
        return model

    def _of(self, model: nn.Module) -> ShardedModel | None:
        return self._sharded.get(id(uncompiled(model)))

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        for sharded in self._sharded.values():
            yield from sharded.pairs

    # A step.

    def zero_grad(self, optimizer: Optimizer) -> None:
        super().zero_grad(optimizer)
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for sharded in self._sharded.values():
            if sharded.has_held_gradients and any(id(shard) in mine for _, shard in sharded.pairs):
                sharded.drop_held_gradients()

    @contextmanager
    def _holding(self, sharded: ShardedModel) -> Iterator[None]:
        sharded.hold_gradients(True)
        try:
            yield
        finally:
            sharded.hold_gradients(False)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        sharded = self._of(model)
        return nullcontext() if sharded is None else self._holding(sharded)

    # State.

    def model_state_dict(self, model: nn.Module, *, whole: bool = True) -> StateDict:
        sharded = self._of(model)
        if sharded is None:
            return super().model_state_dict(model)
        return sharded.gather().state_dict() if whole else sharded.module.state_dict()

    def load_model_state_dict(self, model: nn.Module, state: StateDict) -> None:
        sharded = self._of(model)
        if sharded is None:
            super().load_model_state_dict(model, state)
        elif _has_shards(state):
            sharded.module.load_state_dict(state)
        else:
            sharded.own.load_state_dict(state)
            sharded.scatter()

    def optimizer_state_dict(self, optimizer: Optimizer, *, whole: bool = True) -> StateDict:
        from runnerkit.engines.sharding.sharded_model import whole as gathered

        state = optimizer.state_dict()
        if not whole:
            return state
        cpu = torch.device("cpu")  # moved one by one: together they may be larger than the device
        by_parameter = {
            index: {name: _to(gathered(value), cpu) for name, value in each.items()}
            for index, each in state["state"].items()
        }
        return {**state, "state": by_parameter}

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: StateDict) -> None:
        from runnerkit.engines.sharding.sharded_model import shard_like

        shards = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        saved = [index for group in state["param_groups"] for index in group["params"]]
        like = dict(zip(saved, shards, strict=False))  # if they do not match, the optimizer raises
        by_parameter = {
            index: {name: shard_like(value, like[index]) for name, value in each.items()} if index in like else each
            for index, each in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": by_parameter})

    def save_shards(self, state: StateDict, folder: Path, *, asynchronous: bool) -> Callable[[], StateDict]:
        from runnerkit.checkpoints import sharded

        if asynchronous and self._saving_group is None:  # collectives in a thread need a separate group
            self._saving_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return sharded.save(state, folder, rank=self.rank, group=self._saving_group if asynchronous else None)

    def load_shards(self, state: StateDict, folder: Path) -> StateDict:
        from runnerkit.checkpoints import sharded

        return sharded.load(state, folder, mesh=self._mesh)


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _has_shards(state: StateDict) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in state.values())


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _check_known(optimizer: Optimizer, shards: dict[nn.Parameter, nn.Parameter], *, key: str) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in shards:
                raise ValueError(
                    f"optimizer {key!r} holds a parameter of shape {tuple(parameter.shape)} that is not part of any "
                    "trained model; create it from model.parameters()"
                )
