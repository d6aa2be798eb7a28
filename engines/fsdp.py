"""Fully sharded data parallelism: weights, gradients and optimizer state split over processes (``fully_shard``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from runnerkit.engine import uncompiled
from runnerkit.engines.launch.process_group_engine import ProcessGroupEngine, ProcessGroupOptions
from runnerkit.engines.sharding.gather_precision import GatherPrecision
from runnerkit.engines.sharding.shard_policy import ShardPolicy, check_parameters, check_places, mesh_sizes
from runnerkit.metrics.reduction import Processes
from runnerkit.models.parameters import check_shapes, is_trained
from runnerkit.seeding.initialization import parameters_on_meta
from runnerkit.support.torch_internals import merge_dimensions
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from runnerkit.engines.sharding.optimizer_shards import KeptShards
    from runnerkit.engines.sharding.sharded_model import ShardedModel
    from runnerkit.engines.sharding.tensor_checks import FirstStep

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
    init: Literal["whole", "meta"]
    tensor_parallel: int
    plan: Mapping[str, Any] | None


class FullyShardedDataParallelEngine(ProcessGroupEngine):
    """Several processes that shard weights, gradients and the optimizer's state (FSDP2).

    Each process keeps one shard of every parameter and gathers the full parameters of one unit at a time. The loaders'
    batch_size is per process. In evaluation every process holds all weights, so that each runs at its own pace.

    Args:
        num_processes: None means one per GPU, or 2 without GPUs; (least, most) is explained in ProcessGroupEngine.
        shard_modules: module classes that form units, which are gathered, used and freed one after another.
        shard_min_parameters: form units by size: modules with at least this many parameters outside their inner units.
        reshard_after_forward: free a unit's weights after its forward pass; False keeps them for its backward pass.
        cpu_offload: keep shards and the optimizer's state in host memory.
        replicas: number of process groups that each hold the full model (HSDP), for example one per machine.
        compute_dtype: torch.bfloat16 computes and gathers in it; weights, summed gradients and steps stay float32.
        sharded_checkpoints: let each process save and load its own shards; see docs/fsdp.md.
        init: "meta" lets no process hold the whole model at any time: ``get_model`` makes parameters without values,
            and each process initialises, loads, evaluates and saves its own shards. The runner's model is left without
            values; they are in its checkpoints.
        tensor_parallel: number of processes, of neighboring ranks, that work on the same samples and divide the weights
            of the modules in `plan`.
        plan: maps patterns of module names to "colwise", "rowwise" or another style, see docs/fsdp.md; None takes the
            model's own, as those of Hugging Face have.
        options: address, port, backend, device, devices, timeout_s, launcher as in ProcessGroupEngine; else IEngine's.

    >>> FullyShardedDataParallelEngine(num_processes=4, replicas=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | tuple[int, int] | None = None,
        *,
        shard_modules: Sequence[type[nn.Module]] | None = None,
        shard_min_parameters: int | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        replicas: int = 1,
        compute_dtype: torch.dtype | None = None,
        sharded_checkpoints: bool = False,
        init: Literal["whole", "meta"] = "whole",
        tensor_parallel: int = 1,
        plan: Mapping[str, Any] | None = None,
        **options: Unpack[ProcessGroupOptions],
    ) -> None:
        super().__init__(num_processes, **options)
        self._exchange.compares = False  # each process has the gradients of its shards
        self.policy = ShardPolicy(shard_modules, shard_min_parameters)
        self._mesh_sizes = mesh_sizes(self.num_processes, replicas, tensor_parallel, bounds=self.bounds, plan=plan)
        self._gathers = GatherPrecision(compute_dtype, precision=self.precision, engine=type(self).__name__)
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.replicas = replicas
        self.compute_dtype = compute_dtype
        self.policy.check_init(init)
        self.tensor_parallel = tensor_parallel
        self.plan = plan
        self._data_ranks: Processes | None = None
        self.never_whole = init == "meta"
        self.sharded_checkpoints = sharded_checkpoints or self.never_whole
        self._seed = 0
        self._kept: KeptShards | None = None
        self._first_step: FirstStep | None = None  # of tensor parallelism
        self._unmatched: list[set[str]] = []  # patterns of the plan, for each model
        if cpu_offload and self.backend is None and self._uses_cuda():
            self.backend = "cpu:gloo,cuda:nccl"  # gradient norms in host memory are reduced by gloo
        self._mesh: DeviceMesh | None = None
        self._mesh_alone: DeviceMesh | None = None  # of the same processes, without communication
        self._saving_group: Any = None  # a ProcessGroup
        self._sharded: dict[int, ShardedModel] = {}  # by the id of the trained copy
        self._moved_optimizers: list[Optimizer] = []  # optimizers that step on shards

    def setup(self) -> None:
        super().setup()
        from runnerkit.engines.sharding.meshes import dims_of, group_of, mesh_of  # half a second, for this engine only

        self._mesh = mesh_of(self._mesh_sizes, self.device, timeout_s=self.timeout_s)
        if self.tensor_parallel > 1:
            from runnerkit.engines.sharding.tensor_plan import DataRanks

            # The norm of all gradients is a sum over the shards and over the parts of divided weights.
            merge_dimensions(self._mesh, dims_of(self._mesh)[-2:], timeout_s=self.timeout_s)
            rows = torch.arange(self.num_processes).view(-1, self.tensor_parallel).T
            group = group_of(rows, timeout_s=self.timeout_s)
            self._data_ranks = DataRanks(self, size=self.tensor_parallel, group=group)

    @property
    def data_parallel(self) -> Processes:
        return self._data_ranks or self

    def cleanup(self) -> None:
        self._restore_optimizers()
        self._mesh = self._mesh_alone = self._saving_group = self._data_ranks = self._first_step = None
        super().cleanup()

    def _restore_optimizers(self) -> None:
        """Restore the optimizers' original parameters without state or communication, also after a failure."""
        from runnerkit.engines.sharding.sharded_model import move_optimizer

        for optimizer in self._moved_optimizers:
            move_optimizer(optimizer, {shard: own for own, shard in self._pairs()}, convert=None)
        self._moved_optimizers.clear()
        self._sharded.clear()
        self._kept = None

    # Components.

    def making_model(self, *, seed: int) -> AbstractContextManager[Any]:
        self._seed = seed
        return parameters_on_meta() if self.never_whole else super().making_model(seed=seed)

    def prepare_loader(self, loader: Any, *, key: str, training: bool, seed: int) -> Any:
        return super().prepare_loader(loader, key=key, training=training or self.never_whole, seed=seed)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        if not is_trained(model):
            return super().prepare_model(model)
        check_shapes(model, type(self).__name__)
        return model  # it may be larger than the device: only its shards are moved there

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        from runnerkit.engines.sharding.optimizer_shards import check_known
        from runnerkit.engines.sharding.sharded_model import move_optimizer
        from runnerkit.models.shards import shard_like

        trained = {key: model for key, model in models.items() if is_trained(model)}
        self.policy.check(trained.values(), needs_units=self.never_whole)
        check_parameters(trained, {key: self.policy.units(model) for key, model in trained.items()})
        check_places(models, on_meta=trained if self.never_whole else {})
        self._unmatched.clear()
        models, optimizers = super().prepare(models, optimizers)
        if self._unmatched:
            from runnerkit.engines.sharding.tensor_checks import FirstStep
            from runnerkit.engines.sharding.tensor_plan import check_patterns

            check_patterns(self._unmatched, trained.values())
            self._first_step = FirstStep(self._tensor_mesh())
        shards = dict(self._pairs())
        for key, optimizer in optimizers.items():
            check_known(optimizer, shards, key=key)
            move_optimizer(optimizer, shards, shard_like)
            if self._kept is not None:
                self._kept.give_state(optimizer, {shard: own for own, shard in shards.items()})
            self._moved_optimizers.append(optimizer)
        modules = {key: self.trained_module(model) for key, model in models.items()}
        self._exchange.open(modules, optimizers.values(), exchanged=shards.values())
        return models, optimizers

    def release(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        from runnerkit.engines.sharding.optimizer_shards import KeptShards, on_device
        from runnerkit.engines.sharding.sharded_model import move_optimizer
        from runnerkit.models.shards import whole

        owners = {shard: own for own, shard in self._pairs()}
        if self.never_whole:
            self._kept = self._kept or KeptShards()
            self._kept.keep(self._sharded.values(), self._moved_optimizers, owners)
        else:
            for sharded in self._sharded.values():
                sharded.gather()
            for optimizer in self._moved_optimizers:
                move_optimizer(optimizer, owners, lambda value, own: on_device(whole(value), own.device))
        models, optimizers = super().release(models, optimizers)
        self._exchange.close()
        self._moved_optimizers.clear()
        self._sharded.clear()
        return models, optimizers

    def wrap(self, model: nn.Module) -> nn.Module:
        from runnerkit.engines.sharding.meta_model import MetaModel
        from runnerkit.engines.sharding.sharded_model import ShardedModel

        if not is_trained(model):
            return self.compiled(model)
        if self.never_whole:
            weights = None if self._kept is None else self._kept.take_weights(model)
            sharded: ShardedModel = MetaModel(model, seed=self._seed, weights=weights, **self._options())
        else:
            sharded = ShardedModel(model, **self._options())
        self._sharded[id(sharded.module)] = sharded
        return self.compiled(sharded.module)

    def _options(self) -> dict[str, Any]:
        """Return the arguments of a ShardedModel."""
        from runnerkit.engines.sharding.meshes import dims_of

        assert self._mesh is not None, "call setup() first"
        return {
            "mesh": self._mesh[dims_of(self._mesh)[:-1]] if self.tensor_parallel > 1 else self._mesh,
            "divide": self._divide if self.tensor_parallel > 1 else None,
            "policy": self.policy,
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
            "precision": self._gathers,
        }

    def _divide(self, module: nn.Module) -> None:
        from runnerkit.engines.sharding.tensor_plan import parallelize

        self._unmatched.append(parallelize(module, self._tensor_mesh(), self.plan))

    def _tensor_mesh(self) -> DeviceMesh:
        from runnerkit.engines.sharding.meshes import dims_of

        assert self._mesh is not None, "call setup() first"
        return self._mesh[dims_of(self._mesh)[-1]]

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module; its weights are those of the last :meth:`release` or full state dict."""
        sharded = self._of(model)
        return uncompiled(model) if sharded is None else sharded.own

    def trained_module(self, model: nn.Module) -> nn.Module:
        return uncompiled(model)

    def trained_parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        sharded = self._of(model)
        return super().trained_parameters(model) if sharded is None else sharded.shards.items()

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        # A forward pass that gathers would wait for ranks without a further batch.
        if (sharded := self._of(model)) is not None:
            sharded.unshard()
        return model

    def training_model(self, model: nn.Module) -> nn.Module:
        if (sharded := self._of(model)) is not None:
            sharded.reshard()
        return model

    def _of(self, model: nn.Module) -> ShardedModel | None:
        return self._sharded.get(id(uncompiled(model)))

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        for sharded in self._sharded.values():
            yield from sharded.pairs

    # A step.

    def synchronize(self, optimizer: Optimizer) -> None:
        if self._exchange.is_due(optimizer):
            self._exchange.check_unused(each.own for each in self._sharded.values())
        super().synchronize(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        for sharded in self._sharded.values():
            sharded.free_kept(optimizer, self._moved_optimizers)
        if self._first_step is not None:
            named = chain.from_iterable(each.module.named_parameters() for each in self._sharded.values())
            self._first_step.check_gradients(optimizer, named)
        has_stepped = super().step(optimizer)
        for sharded in self._sharded.values() if len(self._moved_optimizers) > 1 else ():
            sharded.note_changes()
        return has_stepped

    def backward(self, loss: torch.Tensor, optimizer: Optimizer | None = None) -> None:
        if self._first_step is not None:
            self._first_step.check_loss(loss)
        super().backward(loss, optimizer)

    def joint_gradients(self, parameters: list[torch.Tensor]) -> AbstractContextManager[Any]:
        if self.tensor_parallel == 1:
            return nullcontext()
        from runnerkit.engines.sharding.tensor_plan import gradients_on

        assert self._mesh is not None, "call setup() first"
        return gradients_on(self._mesh, parameters)

    @contextmanager
    def training_alone(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> Iterator[dict[str, nn.Module]]:
        from runnerkit.engines.sharding.meshes import mesh_without_communication
        from runnerkit.engines.sharding.trial_models import TrialModel, trial_models

        real, mesh, first_step = self._sharded, self._mesh, self._first_step
        self._first_step = None  # it communicates
        try:
            if self._mesh_alone is None:
                self._mesh_alone = mesh_without_communication(self._mesh_sizes, self.device, timeout_s=self.timeout_s)
            self._mesh = self._mesh_alone
            with (
                self._exchange.paused(),
                trial_models(real.values(), optimizers.values(), partial(TrialModel, **self._options())) as trials,
            ):
                others = {key: each.module for key, each in zip(real, trials, strict=True)}
                self._sharded = {id(each.module): each for each in trials}
                yield {key: others.get(id(uncompiled(model)), model) for key, model in models.items()}
        finally:
            self._sharded, self._mesh, self._first_step = real, mesh, first_step

    def zero_grad(self, optimizer: Optimizer) -> None:
        super().zero_grad(optimizer)
        for sharded in self._sharded.values():
            sharded.drop_held_gradients(optimizer)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext() if (sharded := self._of(model)) is None else sharded.holding_gradients()

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
        else:
            sharded.load(state)

    def optimizer_state_dict(self, optimizer: Optimizer, *, whole: bool = True) -> StateDict:
        from runnerkit.engines.sharding.optimizer_shards import whole_state_dict

        return whole_state_dict(optimizer) if whole else optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: StateDict) -> None:
        from runnerkit.engines.sharding.optimizer_shards import load_state_dict

        load_state_dict(optimizer, state)

    def whole_state(self, state: Any) -> Any:
        from runnerkit.models.shards import whole_state

        return whole_state(state)

    def save_shards(self, state: StateDict, folder: Path, *, asynchronous: bool) -> Callable[[], StateDict]:
        from runnerkit.checkpoints import sharded

        if asynchronous and self._saving_group is None:  # collectives in a thread need a separate group
            self._saving_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return sharded.save(state, folder, rank=self.rank, group=self._saving_group if asynchronous else None)

    def load_shards(self, state: StateDict | None, folder: Path, *, only_weights: bool = False) -> StateDict:
        from runnerkit.checkpoints import sharded

        if state is None:
            return sharded.load_foreign(folder, mesh=self._mesh)
        others = {"optimizer_state_dict", "trained_model_state_dict", "callbacks"} if only_weights else set[str]()
        return sharded.load(state, folder, mesh=self._mesh, but=others)
