"""The five operations of communicators, and their state, without an engine."""

import pickle

import pytest
import torch
import torch.distributed as dist

from runnerkit import dl
from runnerkit.communicator import OneProcess
from runnerkit.engines.communicators.horovod import Horovod, import_horovod
from runnerkit.engines.communicators.process_group import ProcessGroup
from runnerkit.engines.process_environment import ProcessEnvironment
from tests.engines.together import together
from tests.tiny import mlp, train


def operations(communicator, rank):
    """Call every operation; the results are closed forms of rank and number of processes."""
    own = torch.tensor([1.0, 3.0], dtype=torch.float64) * (rank + 1)
    results = {op: communicator.reduce(own, op).tolist() for op in ("sum", "mean", "min", "max")}
    sums = [communicator.start_sum(own + number) for number in range(3)]  # under way at a time
    results["sums"] = [wait().tolist() for wait in sums]
    results["gathered"] = communicator.gather("zero" if rank == 0 else {"rank": rank})
    results["received"] = communicator.broadcast({"from": rank})
    tensors = [torch.full((2, 2), float(rank)), torch.tensor(rank), torch.full((3,), 7.0 + rank)]
    communicator.broadcast_tensors(tensors)
    results["tensors"] = [each.tolist() for each in tensors]
    communicator.barrier()
    communicator.settle()
    return results, own.tolist()


def in_a_process_group():
    environment, communicator = ProcessEnvironment.read(), ProcessGroup()
    options = {"device": torch.device("cpu"), "backend": None, "timeout_s": 60}
    opened = [communicator.open(environment, **options) is not None for _ in range(2)]
    results = operations(communicator, environment.rank)
    was_open = dist.is_initialized()
    communicator.close()
    communicator.close()
    return results, opened, [was_open, dist.is_initialized()]


def over_horovod():
    import_horovod().init()
    return operations(Horovod(), import_horovod().rank())


def expected(num_processes):
    own = torch.tensor([1.0, 3.0], dtype=torch.float64)
    total = own * (1 if num_processes == 1 else 3)
    return {
        "sum": total.tolist(), "mean": (total / num_processes).tolist(), "min": own.tolist(),
        "max": (own * num_processes).tolist(),
        "sums": [(total + num_processes * number).tolist() for number in range(3)],
        "gathered": ["zero", {"rank": 1}][:num_processes], "received": {"from": 0},
        "tensors": [[[0.0, 0.0], [0.0, 0.0]], 0, [7.0, 7.0, 7.0]],
    }  # fmt: skip


def test_one_process_gets_its_own_values():
    """The result of a reduction is a new tensor, as with several processes."""
    results, own = operations(OneProcess(), 0)
    value = torch.ones(2)

    assert results == expected(1)
    assert own == [1.0, 3.0]
    assert OneProcess().reduce(value).data_ptr() != value.data_ptr()


def test_a_process_group_sums_gathers_and_broadcasts():
    """Opening it again changes nothing, and closing it ends the group that it made."""
    (results, own), opened, states = together(in_a_process_group)

    assert results == expected(2)
    assert own == [1.0, 3.0]
    assert opened == [True, False]
    assert states == [True, False]


@pytest.mark.horovod
@pytest.mark.slow
def test_horovod_sums_gathers_and_broadcasts():
    """The results are those of a process group."""
    results, own = dl.HorovodEngine(2, device="cpu").launch(over_horovod)

    assert results == expected(2)
    assert own == [1.0, 3.0]


@pytest.mark.parametrize("engine", [dl.CPUEngine(), dl.DistributedDataParallelEngine(2), dl.HorovodEngine(2)])
def test_a_closed_communicator_travels_with_its_engine(engine):
    """An engine is pickled for the processes that it starts."""
    assert type(pickle.loads(pickle.dumps(engine.communicator))) is type(engine.communicator)


def test_processes_without_a_communicator_are_refused():
    """They would train each for itself, and log the metrics of one."""

    class Lonely(dl.CPUEngine):
        num_processes = 2

    with pytest.raises(TypeError, match="Lonely has 2 processes and no communicator"):
        train(mlp(), engine=Lonely())


def test_sums_of_a_group_of_nccl_that_the_user_made_are_on_its_device(monkeypatch):
    """Nccl sends tensors of a GPU only; the group is stood in for, and meta tensors are those of the GPU."""
    devices = []

    class Group:
        def wait(self):
            pass

    def all_reduce(tensor, async_op):
        devices.append(tensor.device.type)
        return Group()

    stand_ins = {"is_initialized": True, "get_backend": "nccl", "get_rank": 0, "get_world_size": 1}
    for name, value in stand_ins.items():
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group = ProcessGroup()

    group.open(ProcessEnvironment.read(), device=torch.device("meta"), backend=None, timeout_s=60)
    group.start_sum(torch.ones(1))()

    assert devices == ["meta"]
