"""Loaders around loaders: their batches, attributes, sharding and resumption."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from runnerkit import dl
from runnerkit.data import BatchLimitLoaderWrapper, BatchPrefetchLoaderWrapper, TensorLoader
from runnerkit.sampling.feed import for_device
from runnerkit.sampling.sharding import batches_of, share_of
from runnerkit.sampling.streams.shards import can_seek, shards_of
from tests import tiny
from tests.data.places import flat, share, shares
from tests.interrupt import Interrupt
from tests.shares import Rewinding
from tests.test_resume import Augmented
from tests.tiny import classification, loader, mlp, weights


def numbers(num_samples, batch_size=4, **kwargs):
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, **kwargs)


def batches(each):
    return [batch[0].tolist() for batch in each]


LIMITED = {
    "limit": lambda inner: BatchLimitLoaderWrapper(inner, num_batches=3),
    "limit of prefetch": lambda inner: BatchLimitLoaderWrapper(BatchPrefetchLoaderWrapper(inner), 3),
    "prefetch of limit": lambda inner: BatchPrefetchLoaderWrapper(BatchLimitLoaderWrapper(inner, 3), num_prefetches=2),
}
WRAPPERS = {"prefetch": BatchPrefetchLoaderWrapper, **LIMITED}


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_the_held_loader_has_is_shown(name):
    """Data set, batch size, samplers and workers are those of the inner loader; attributes it lacks are missing."""
    inner = numbers(40, num_workers=0)
    wrapper = WRAPPERS[name](inner)

    for attribute in ("dataset", "batch_size", "sampler", "batch_sampler", "num_workers"):
        assert getattr(wrapper, attribute) is getattr(inner, attribute)
    assert wrapper.origin is inner or wrapper.origin.origin is inner
    assert not hasattr(WRAPPERS[name]([1, 2, 3, 4]), "dataset")


@pytest.mark.parametrize(("num_batches", "expected"), [(1, 1), (3, 3), (99, 10), (0.3, 3), (0.01, 1), (1.0, 10)])
def test_a_limit_is_a_number_of_batches_or_a_part(num_batches, expected):
    """The first batches are served, at least one, and the same ones in each pass."""
    limited = BatchLimitLoaderWrapper(numbers(40), num_batches)

    assert len(limited) == expected
    assert batches(limited) == batches(limited) == batches(numbers(40))[:expected]


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_wrapper_shares_what_it_holds(name, world_size):
    """Each process gets the first batches of the shard it would get without the wrapper."""
    inner = numbers(70, shuffle=True)

    for rank in range(world_size):
        shard = share(WRAPPERS[name](inner), rank, world_size)
        expected = batches(share(inner, rank, world_size))[: 3 if name in LIMITED else None]
        assert len(shard) == len(expected)
        assert batches(shard) == expected


def test_a_part_is_the_same_number_on_all_ranks():
    """A fraction takes the same number of global batches even if one rank has one more batch."""
    whole = [[index] for index in range(7)]  # ranks 0 and 1 have 4 and 3 batches
    limited = BatchLimitLoaderWrapper(DataLoader(TensorDataset(torch.arange(7)), batch_sampler=whole), 0.5)

    assert [batches(shard) for shard in shares(limited, 2, training=False)] == [[[0], [2]], [[1], [3]]]
    assert len(share(limited)) == 3


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("num_done", [1, 2, 3])
def test_an_interrupted_pass_goes_on_where_it_was(name, num_done):
    """Batches before and after the interruption make up the whole pass; a limit counts those already served."""
    wrap = WRAPPERS[name]
    whole = batches(share(wrap(numbers(22, shuffle=True))))
    first = share(wrap(numbers(22, shuffle=True)))
    position = first.batch_sampler.position_after(num_done)

    rest = share(wrap(numbers(22, shuffle=True)))
    rest.batch_sampler.skip(position)

    assert len(rest) == len(whole) - num_done
    assert batches(rest) == whole[num_done:]
    rest.batch_sampler.set_epoch(1)
    assert batches(rest) == whole


def train(logdir, train_loader, *callbacks, **options):
    model = mlp(dropout=0.3)
    loaders = {"train": train_loader, "valid": BatchLimitLoaderWrapper(loader(21, 4), 2)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options |= {"callbacks": [dl.CheckpointCallback(logdir, content="runner", every_steps=2), *callbacks]}
    return tiny.train(model, optimizer=optimizer, loaders=loaders, num_epochs=3, logdir=logdir, **options)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_run_resumed_within_an_epoch_equals_the_uninterrupted_one(tmp_path, name):
    """Weights and metrics match, with dropout and augmentation: the inner iterator is made before generators are
    restored."""

    def make():
        return WRAPPERS[name](DataLoader(Augmented(24), batch_size=4, shuffle=True))

    expected = train(tmp_path / "whole", make())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", make(), Interrupt(9))

    resumed = train(tmp_path / "broken", make(), resume="auto")

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics
    assert resumed.batch_step == (9 if name in LIMITED else 18)


def test_workers_that_persist_serve_one_limited_pass_after_another():
    """Batches that workers prefetched beyond the limit are not served in the next pass."""
    limited = BatchLimitLoaderWrapper(numbers(40, num_workers=1, persistent_workers=True), 2)

    assert batches(limited) == batches(limited) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_prefetcher_on_the_cpu_is_not_there():
    """On the CPU, no batch is fetched early or copied."""
    asked = []

    def stream():
        for number in range(3):
            asked.append(number)
            yield torch.tensor([number])

    class Stream:
        def __iter__(self):
            return stream()

    iterator = iter(BatchPrefetchLoaderWrapper(Stream(), num_prefetches=2).for_device(torch.device("cpu")))

    assert next(iterator).tolist() == [0]
    assert asked == [0]


@pytest.fixture
def events(monkeypatch):
    """Replace CUDA streams with stand-ins, so that batches can be prefetched to the CPU, and record their calls."""
    events = []

    class Stream:
        def __init__(self, device):
            self.name = "copies"

        def wait_stream(self, other):
            events.append(f"copies wait for {other}")

        def record_event(self):
            events.append("sent")
            return len(events)

    class Steps:
        def wait_event(self, event):
            events.append("step waits")

        def __str__(self):
            return "steps"

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Steps())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return events


class PrefetchAnywhere(BatchPrefetchLoaderWrapper):
    """A loader that prefetches to the CPU as it would to a GPU."""

    def __iter__(self):
        return self._copied(batches_of(self.origin), torch.device("cpu"))


def test_a_batch_is_sent_before_the_one_before_it_is_used(events):
    """A copy waits for the queued steps, and the step waits for its copy."""
    used = []
    for batch in PrefetchAnywhere([torch.tensor(0), torch.tensor(1)]):
        used.append(batch.item())
        events.append("step")

    sending = ["copies wait for steps", "sent"]
    assert events == [*sending, *sending, "step waits", "step", "step waits", "step"]
    assert used == [0, 1]


class BadSample(Dataset):
    """A data set whose fifth batch of two cannot be fetched."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 8:
            raise RuntimeError("sample 8 is broken")
        return torch.tensor(float(index))


class Counting(dl.Runner):
    def __init__(self):
        super().__init__()
        self.seen = []

    def handle_batch(self, batch):
        self.seen.append(batch.tolist())


@pytest.mark.parametrize("num_prefetches", [1, 3, 9])
def test_a_batch_that_cannot_be_fetched_raises_when_it_is_due(num_prefetches, events):
    """Batches before it are trained on, and the error names the batch and keeps its traceback, as without
    prefetching."""
    runner, plain = Counting(), DataLoader(BadSample(), batch_size=2)

    with pytest.raises(RuntimeError, match="sample 8 is broken") as caught:
        tiny.train(runner=runner, loaders={"train": PrefetchAnywhere(plain, num_prefetches)})

    assert runner.seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert "while batch 5 of loader 'train', epoch 1, rank 0 was fetched" in caught.value.__notes__
    assert caught.traceback[-1].name == "__getitem__"
    assert caught.value.__context__ is None


def test_a_batch_that_is_never_due_does_not_raise(events):
    """A batch that was prefetched beyond the limit does not raise."""
    limited = BatchLimitLoaderWrapper(PrefetchAnywhere(DataLoader(BadSample(), batch_size=2), 3), 4)

    assert [batch.tolist() for batch in limited] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("num_prefetches", [1, 2])
def test_so_many_batches_are_on_the_device_beside_the_present_one(num_prefetches, events):
    """The previous batch is released before the next one is made."""
    alive = weakref.WeakSet()

    def stream():
        for number in range(6):
            seen.append(len(alive))
            batch = torch.tensor([number])
            alive.add(batch)
            yield batch
            del batch

    seen = []
    for batch in BatchPrefetchLoaderWrapper([], num_prefetches)._copied(stream(), torch.device("cpu")):
        del batch

    assert max(seen) == num_prefetches


class Placed:
    """A loader that makes its batches for a device."""

    device = None

    def __iter__(self):
        return iter([torch.zeros(1)])

    def for_device(self, device):
        placed = Placed()
        placed.device = device
        return placed


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_engine_tells_the_device_to_what_is_inside(name):
    """The innermost loader gets the device, and the user's own object is unchanged."""
    inner, engine = Placed(), dl.CPUEngine()
    engine.setup()

    held = engine.prepare_loader(WRAPPERS[name](inner), key="train", training=True, seed=1)
    while hasattr(held, "origin"):
        held = held.origin

    assert held.device == torch.device("cpu") and inner.device is None


@pytest.mark.parametrize("name", ["prefetch", "limit of prefetch", "prefetch of limit"])
def test_memory_is_pinned_for_a_gpu_however_deep_the_data_loader_is(name):
    """Both the shard and the loader that feeds it pin memory; the user's own loader is unchanged."""
    plain = numbers(8)

    held = share(WRAPPERS[name](plain)).for_device(torch.device("cuda"))
    while hasattr(held, "origin"):
        held = held.origin

    assert held.pin_memory and held._feed.pin_memory and not plain.pin_memory


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_rank_without_a_last_batch_repeats_its_own(name):
    """As without the wrapper, three batches on two ranks become two each; the second rank's last counts nothing."""
    whole = DataLoader(TensorDataset(torch.arange(6)), batch_sampler=[[0, 1], [2, 3], [4, 5]])

    ranks = shares(WRAPPERS[name](whole), 2, epoch=None)

    assert [batches(rank) for rank in ranks] == [[[0, 1], [4, 5]], [[2, 3], [2, 3]]]
    assert [share_of(rank).sizes_of(1) for rank in ranks] == [[2, 0]] * 2


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_loader_that_is_its_own_iterator_is_started_once(name):
    """Its __iter__, which starts it again, is called once a pass."""
    loader = Rewinding([torch.zeros(1), torch.ones(1)])

    found = batches_of(WRAPPERS[name](loader))

    assert [next(found), *found] == [torch.zeros(1), torch.ones(1)]
    assert loader.num_starts == 1


def test_a_distributed_sampler_inside_gets_its_epoch():
    """The runner finds the sampler through the wrapper."""
    sampler = DistributedSampler(classification(16), num_replicas=1, rank=0)
    inner = DataLoader(classification(16), batch_size=4, sampler=sampler)

    tiny.train(loaders={"train": BatchPrefetchLoaderWrapper(BatchLimitLoaderWrapper(inner, 2))}, num_epochs=3)

    assert sampler.epoch == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BatchLimitLoaderWrapper([1], 0), ValueError, "num_batches must be >= 1, got 0"),
        (lambda: BatchLimitLoaderWrapper([1], 1.5), ValueError, r"0 < num_batches <= 1; got 1.5"),
        (lambda: BatchLimitLoaderWrapper([1], True), TypeError, "num_batches must be an integer >= 1, got True"),
        (lambda: BatchLimitLoaderWrapper([1], "3"), TypeError, "num_batches must be an integer >= 1, got '3'"),
        (lambda: BatchLimitLoaderWrapper(iter([1]), 0.5), TypeError, "0.5, needs a loader with a length, got"),
        (lambda: BatchPrefetchLoaderWrapper([1], 0), ValueError, "num_prefetches must be >= 1 or None, got 0"),
        (lambda: BatchPrefetchLoaderWrapper([1], 1.5), TypeError, "num_prefetches must be an integer >= 1"),
        (lambda: share(BatchPrefetchLoaderWrapper([1]), 0, 2), TypeError, "loader 'train' is a list and cannot be sh"),
    ],
)
def test_bad_input_is_refused(make, error, message):
    """The error states the allowed values, or names the inner loader that cannot be sharded."""
    with pytest.raises(error, match=message):
        make()


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("num_prefetches", [None, 3])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_prefetched_batches_are_whole_when_the_gpu_computes_on_them(num_prefetches, pin_memory):
    """With large batches, slow kernels queued on them and reused memory, each sum equals the CPU's."""
    features = torch.randn(64, 1_000_000)
    plain = DataLoader(TensorDataset(features), batch_size=2, pin_memory=pin_memory)
    ahead = BatchPrefetchLoaderWrapper(plain, num_prefetches).for_device(torch.device("cuda"))
    weight = torch.randn(1000, 1000, device="cuda")

    sums = []
    for (batch,) in ahead:
        assert batch.is_cuda
        busy = weight
        for _ in range(20):
            busy = torch.tanh(busy @ weight)  # the sum below is queued behind these
        sums.append((batch + 0 * busy.sum()).double().sum())
        del batch

    expected = [batch.double().sum() for batch in features.split(2)]
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@cuda
def test_on_a_gpu_no_step_waits_for_the_device():
    """Batches prefetched from pinned memory or made on the GPU need no synchronization after the first one."""
    ahead = BatchPrefetchLoaderWrapper(numbers(64)).for_device(torch.device("cuda"))
    there = TensorLoader(torch.arange(64), batch_size=4, shuffle=True, device="cuda")

    for each in (ahead, there):
        iterator = iter(each)
        seen = [next(iterator)[0]]
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen += [batch[0] for batch in iterator]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sorted(torch.cat(seen).tolist()) == list(range(64))


@pytest.mark.gpu
@cuda
def test_the_engine_turns_pinned_memory_on():
    """Memory is pinned in a copy, and the user's loader is unchanged."""
    plain = numbers(8)
    engine = dl.GPUEngine()
    engine.setup()

    prepared = engine.prepare_loader(BatchPrefetchLoaderWrapper(plain), key="train", training=True, seed=1)

    assert prepared.origin.pin_memory and not plain.pin_memory
    assert prepared.device == engine.device
    assert sorted(flat(batches(prepared))) == list(range(8))


class Forwards(IterableDataset):
    """A user's wrapper, which forwards the attributes that it lacks."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def __iter__(self):
        return iter(self.inner)


def test_members_that_a_wrapper_forwards_count():
    """A runtime-checkable Protocol would not see them: from Python 3.12 on, it asks no `__getattr__`."""
    stream = SimpleNamespace(num_shards=4, shard=lambda num_shards, index: range(index))
    stateful = SimpleNamespace(state_dict=dict, load_state_dict=print)
    placed = SimpleNamespace(for_device=lambda device: device)

    assert shards_of(Forwards(stream)).num_shards == 4
    assert can_seek(Forwards(stateful)) and not can_seek(Forwards(placed))
    assert for_device(Forwards(placed), torch.device("cpu")) == torch.device("cpu")
