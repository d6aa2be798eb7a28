"""Files are read once by the whole job, in one order for any number of processes and workers, and resume anywhere."""

import logging
import random
import tracemalloc
from itertools import accumulate, islice

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, share_of, start_epoch
from tests import tiny
from tests.data.places import flat, joined, share, shares
from tests.interrupt import Interrupt
from tests.shares import Rewinding
from tests.tiny import NUM_CLASSES, NUM_FEATURES


class Files:
    """Files of consecutive numbers that note in `log` what is read from them.

    Args:
        sizes: numbers in each file.
        log: path of a file to which worker processes append; None notes in this process.
    """

    def __init__(self, sizes, log=None):
        self.names = [f"file {index}" for index in range(len(sizes))]
        self.sizes = list(sizes)
        self.first = dict(zip(self.names, accumulate([0, *sizes]), strict=False))
        self.log = log
        self.noted = []

    def read(self, path, start=0):
        for number in range(self.first[path] + start, self.first[path] + self.sizes[self.names.index(path)]):
            if self.log is None:
                self.noted.append(number)
            else:
                with open(self.log, "a") as file:
                    file.write(f"{number}\n")
            yield number

    def read_from_the_start(self, path):
        return self.read(path)

    def dataset(self, **options):
        return dl.ShardedFiles(self.names, self.read, **{"sizes": self.sizes, **options})

    @property
    def num_read(self):
        return len(self.noted if self.log is None else self.log.read_text().split())


def in_order(ranks):
    return flat(joined(ranks))


def simulated(files, *, batch_size, world_size=1, num_workers=0, epoch=1, after=None, **options):
    """Return each rank's batches, with a copy of the data set for each worker, in this process."""
    loader = DataLoader(files.dataset(**options), batch_size=batch_size, collate_fn=list)
    ranks = []
    for shard in shares(loader, world_size, epoch=epoch):
        own, copies = share_of(shard), [files.dataset(**options) for _ in range(max(1, num_workers))]
        if after is not None:
            own.skip(after)
        batches = [(number, batch) for number, batch in enumerate(list(own)) if not is_idle(own, number)]
        ranks.append([[copies[number % len(copies)][spot] for spot in batch] for number, batch in batches])
    return ranks


def is_idle(own, number):
    """Return whether the samples of this step all belong to other processes."""
    sizes = own.sizes_of(number)
    return sizes is not None and sizes[own.rank] == 0


SHAPES = {
    "sizes": st.lists(st.integers(0, 40), min_size=1, max_size=12),
    "lanes": st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 3)]),
    "part": st.integers(1, 3),
    "shuffle": st.sampled_from([0, 1, 5, 100]),
}


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_any_job_that_divides_the_lanes_reads_each_sample_once_in_one_order(sizes, lanes, part, shuffle):
    """This holds for files of any sizes, empty ones too."""
    step = lanes[0] * part
    assume(sum(sizes) >= step)
    orders = set()
    for world_size in (each for each in (1, 2, 4, 8) if lanes[0] % each == 0):
        for num_workers in (each for each in (0, 1, 2, 3, 4) if lanes[1] % max(1, each) == 0):
            files, job = Files(sizes), {"world_size": world_size, "num_workers": num_workers}

            ranks = simulated(files, batch_size=step // world_size, lanes=lanes, shuffle=shuffle, **job)

            assert sorted(files.noted) == list(range(sum(sizes)))
            orders.add(tuple(in_order(ranks)))
    assert len(orders) == 1 and sorted(*orders) == list(range(sum(sizes)))


@settings(max_examples=40, deadline=None)
@given(**SHAPES, world_size=st.integers(1, 5), num_workers=st.integers(0, 5), taken=st.integers(0, 9))
def test_the_rest_of_an_epoch_is_the_same_for_any_job(sizes, lanes, part, shuffle, world_size, num_workers, taken):
    """This includes jobs that do not divide the lanes, and those with another step size."""
    step = lanes[0] * part
    assume(sum(sizes) >= (taken + 1) * step)
    options = {"lanes": lanes, "shuffle": shuffle}
    whole = in_order(simulated(Files(sizes), batch_size=step, **options))
    consumed = taken * step

    loader = DataLoader(Files(sizes).dataset(**options), batch_size=step)
    position = share_of(share(loader)).position_after(taken)
    job = {"world_size": world_size, "num_workers": num_workers, "batch_size": lanes[0]}  # lanes divide its step
    rest = in_order(simulated(Files(sizes), after=position, **job, **options))

    assert position == [consumed, step]
    assert rest == whole[consumed:]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_items_that_are_batches_are_read_once(tmp_path, world_size, num_workers):
    """With `batch_size=None`, processes take turns by items."""
    files = Files([6, 10, 3, 9], log=tmp_path / "log")
    options = {"lanes": (2, 2), "shuffle": 4}
    loader = DataLoader(files.dataset(**options), batch_size=None, num_workers=num_workers)
    one = list(batches_of(share(DataLoader(Files(files.sizes).dataset(**options), batch_size=None))))

    ranks = [list(batches_of(shard)) for shard in shares(loader, world_size)]

    assert [each for step in zip(*ranks, strict=True) for each in step] == one
    assert files.num_read == len(set(one)) == 28


def test_open_files_of_an_epoch_serve_the_next():
    """A block of the last epoch that begins where one of this epoch begins may have another end."""
    files = Files([7, 3, 5])
    loader = DataLoader(files.dataset(shuffle=4, lanes=(2, 1)), batch_size=2, collate_fn=list)
    shard = share(loader)

    for epoch in range(1, 60):
        start_epoch(shard, epoch)
        assert sorted(each for batch in batches_of(shard) for each in batch) == list(range(15))


def lines(path, start=0):
    with open(path) as file:
        yield from islice(map(int, file), start, None)


def test_workers_open_files_of_their_own(tmp_path):
    """A forked worker inherits the open files of its parent, and would move the parent's place in them."""
    (tmp_path / "numbers").write_text("\n".join(map(str, range(20_000))))
    dataset = dl.ShardedFiles([tmp_path / "numbers"], lines, sizes=[20_000])

    first = [dataset[index] for index in range(10)]
    loader = DataLoader(dataset, 1000, num_workers=1, collate_fn=list, sampler=range(10, 20_000))
    in_worker = [each for batch in loader for each in batch]
    rest = [dataset[index] for index in range(10, 20_000)]

    assert first == list(range(10))
    assert in_worker == rest == list(range(10, 20_000))


def test_each_epoch_has_another_order():
    """`shuffle=0` keeps the order of the files and of their samples in every lane."""
    sizes = [10] * 8
    shuffled = [in_order(simulated(Files(sizes), batch_size=8, shuffle=4, epoch=epoch)) for epoch in (1, 2, 1)]
    plain = [in_order(simulated(Files(sizes), batch_size=8, lanes=(1, 1), epoch=epoch)) for epoch in (1, 2)]

    assert shuffled[0] == shuffled[2] != shuffled[1] != sorted(shuffled[1])
    assert plain == [list(range(80))] * 2


class Features(dl.SupervisedRunner):
    def predict_batch(self, batch):
        return batch


@pytest.mark.parametrize(("options", "is_kept"), [({}, True), ({"lanes": (2, 2)}, False), ({"shuffle": 4}, False)])
def test_predictions_come_in_the_order_of_the_files_unless_they_are_shuffled_or_have_lanes(caplog, options, is_kept):
    """In that case a warning says so, as for a shuffled loader."""
    files = Files([5, 9, 2])
    loader = DataLoader(files.dataset(**options), batch_size=4)

    made = list(Features(model=nn.Identity()).predict_loader(loader=loader, cpu=True))

    assert (torch.cat(made).tolist() == list(range(16))) == is_kept
    assert ("shuffles: predictions come in its order" in caplog.text) != is_kept


@pytest.mark.parametrize(
    "sizes", [[256] * 16, [2560] * 4, [16 * 700]], ids=["a lane each", "four lanes each", "one file"]
)
def test_blocks_are_read_one_after_another(sizes):
    """Many lanes whose blocks began together would stop the training at once, and for long."""
    files = Files(sizes)
    loader = DataLoader(files.dataset(shuffle=64, lanes=(16, 1)), batch_size=16, collate_fn=list)
    batches, read = iter(batches_of(share(loader))), []

    for _ in range(len(loader)):
        before = files.num_read
        next(batches)
        read.append(files.num_read - before)

    assert sum(read) == sum(sizes)
    assert max(read[16:]) <= 2 * 64


def test_a_block_of_a_whole_file_is_shuffled_whole():
    """Every sample of a file may be its lane's first."""
    options = {"batch_size": 4, "shuffle": 8, "lanes": (4, 1)}

    firsts = [simulated(Files([8] * 4), epoch=epoch, **options)[0][0] for epoch in range(200)]

    assert {number for batch in firsts for number in batch} == set(range(32))


def test_numbers_of_any_integer_type_are_taken():
    """A block larger than any file is the file, and a checkpoint names NumPy's numbers as Python's."""
    files, of_numpy = Files([8, 8]), (np.int64(2), np.int64(1))

    order = simulated(files, batch_size=4, shuffle=2**80, lanes=of_numpy)

    assert order == simulated(files, batch_size=4, shuffle=8, lanes=(2, 1))
    assert repr(files.dataset(lanes=of_numpy).lanes) == "(2, 1)"


def test_a_block_is_shuffled_well():
    """Each sample of a block is as likely at each place; the file's samples stay within their block."""
    orders = [in_order(simulated(Files([8]), batch_size=8, shuffle=4, lanes=(1, 1), epoch=each)) for each in range(800)]

    counts = np.zeros((8, 8))
    for order in orders:
        counts[range(8), order] += 1
    assert counts[:4, 4:].sum() == counts[4:, :4].sum() == 0
    assert abs(counts[:4, :4] - 200).max() < 60  # five standard deviations


def test_a_reader_that_cannot_skip_reads_up_to_a_file_more_for_each_lane():
    """Samples before a lane's first one are read again; a reader with `start` skips them."""
    files = Files([31] * 8)
    options = {"sizes": files.sizes, "lanes": (4, 2)}
    loader = DataLoader(dl.ShardedFiles(files.names, files.read_from_the_start, **options), 8, collate_fn=list)

    shard = share(loader)

    assert sorted(number for batch in batches_of(shard) for number in batch) == list(range(248))
    num_lanes = 8 + 4  # the last step, which does not fill all lanes, has its own
    assert 248 < files.num_read < 248 + num_lanes * 31


def jittered(number):
    return number, random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_transform_draws_the_same_for_any_job():
    """Its generators are seeded for each sample by its place in the epoch."""
    found = []
    for world_size, num_workers in ((1, 0), (2, 0), (2, 2)):
        loader = DataLoader(
            Files([9, 14, 5, 12]).dataset(shuffle=3, lanes=(2, 2), transform=jittered),
            batch_size=4 // world_size, num_workers=num_workers, collate_fn=list,
        )  # fmt: skip
        found.append(in_order([list(batches_of(shard)) for shard in shares(loader, world_size)]))

    assert found[0] == found[1] == found[2]
    assert len({each[1] for each in found[0]}) == 40


def counters(path, start=0):
    return ([0] for _ in range(start, 8))


def counted_up(sample):
    sample[0] += 1
    random.random()
    return sample


def all_counted_up(samples):
    return [counted_up(sample)[0] for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "options", [{"transform": counted_up}, {"collate_fn": all_counted_up}], ids=["transform", "collate_fn"]
)
def test_samples_may_be_modified_in_place(options, num_workers):
    """Even if they are fetched again, as the transform has drawn, or are in a block that the next epoch begins with."""
    collate = options.get("collate_fn", lambda samples: [number for [number] in samples])
    dataset = dl.ShardedFiles(["a", "b"], counters, sizes=[8, 8], shuffle=8, transform=options.get("transform"))
    own = share(DataLoader(dataset, 4, num_workers=num_workers, collate_fn=collate, persistent_workers=num_workers > 0))

    for epoch in (1, 2, 3, 4):
        start_epoch(own, epoch)
        assert flat(batches_of(own)) == [1] * 16


@pytest.mark.parametrize("options", [{"batch_size": 4, "collate_fn": list}, {"batch_size": None}])
def test_a_batch_that_is_repeated_without_weight_may_have_been_modified(options):
    """The process without a sample in the last step takes part with its last batch as it was."""
    dataset = dl.ShardedFiles([0, 1], lambda path: [[0] for _ in range(9)], sizes=[9, 8], lanes=(2, 1))
    [_, second] = shares(DataLoader(dataset, **options), 2)
    found = []
    for batch in batches_of(second):
        found.append(str(batch))
        batch[0] = "modified"

    assert len(found) == (3 if options["batch_size"] else 9)
    assert len(set(found)) == 1


def test_the_sizes_are_counted_or_asked_for():
    """All three ways give the same data set; a pattern names files."""
    files = Files([3, 5])

    counted = dl.ShardedFiles(files.names, files.read)
    asked = dl.ShardedFiles(files.names, files.read, sizes=lambda path: files.sizes[files.names.index(path)])

    assert counted.sizes.tolist() == asked.sizes.tolist() == [3, 5]
    assert files.noted == list(range(8))
    assert [counted[index] for index in (0, 4, 7, -1)] == [0, 4, 7, 7]


def draws(path):
    yield random.random()


def numbers(path):
    yield from range(4)


def of_one(read=numbers, **options):
    return dl.ShardedFiles(["a"], read, **options)


BAD = {
    "no files": (lambda: dl.ShardedFiles("/nowhere/*", numbers), ValueError, r"'/nowhere/\*', which names none"),
    "a name": (lambda: dl.ShardedFiles("ab", numbers, shuffle=-1), ValueError, "names none"),
    "negative shuffle": (lambda: of_one(shuffle=-1), ValueError, "shuffle must be >= 0, got -1"),
    "shuffle=True": (lambda: of_one(sizes=[1], shuffle=True), TypeError, "shuffle must be an integer >= 0"),
    "shuffle=4.0": (lambda: of_one(sizes=[1], shuffle=4.0), TypeError, "shuffle must be an integer >= 0"),
    "lanes": (lambda: of_one(lanes=(2,)), ValueError, r"lanes must be \(processes, workers\)"),
    "too few sizes": (lambda: dl.ShardedFiles(["a", "b"], numbers, sizes=[4]), ValueError, "each of 2 files, got 1"),
    "no samples": (lambda: of_one(lambda path: []), ValueError, r"not all 0, got \[0\]"),
    "too short": (lambda: of_one(sizes=[5])[4], ValueError, "a ended after 4 samples, but sizes= says that it has 5"),
    "too long": (lambda: of_one(sizes=[3])[2], ValueError, "a has more than the 3 samples that sizes= says"),
    "draws when it is called": (
        lambda: of_one(lambda path: [random.random()], sizes=[1])[0], TypeError, r"draws random numbers \(python\)",
    ),
    "draws": (lambda: of_one(draws, sizes=[1])[0], TypeError, r"numbers \(python\), .* draw them in transform="),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_files_are_named(name):
    """Errors name the argument or the file, and say what was found."""
    make, kind, message = BAD[name]

    with pytest.raises(kind, match=message):
        make()


def test_a_reader_that_is_its_own_iterator_is_read_once():
    """As if it were a generator."""
    files = Files([5, 9, 3, 7])

    dataset = dl.ShardedFiles(
        files.names, lambda path, start=0: Rewinding(list(files.read(path, start))), shuffle=3, lanes=(2, 2)
    )

    assert sorted(flat(batches_of(share(DataLoader(dataset, 4, collate_fn=list))))) == list(range(24))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_reads_files(num_workers):
    """It has a batch sampler of its own class."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    dataset = Files([5, 9, 3, 7]).dataset(shuffle=3, lanes=(2, 2))
    loader, theirs = (each(dataset, 4, collate_fn=list, num_workers=num_workers) for each in (DataLoader, stateful))

    ranks = [list(batches_of(each)) for each in shares(theirs, 2)]

    assert type(share(theirs)) is stateful
    assert sorted(flat(flat(ranks))) == list(range(24))
    assert ranks == [list(batches_of(each)) for each in shares(loader, 2)]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "batch_size": 4},
        {"sampler": RandomSampler(range(8)), "batch_size": 4},
        {"batch_sampler": BatchSampler(RandomSampler(range(8)), 4, drop_last=False)},
        {"batch_sampler": type("Own", (BatchSampler,), {})(SequentialSampler(range(8)), 4, drop_last=False)},
    ],
    ids=["shuffle", "sampler", "batch sampler", "own class"],
)
def test_a_sampler_is_refused(options):
    """It would open a file for each sample."""
    loader = DataLoader(Files([4, 4]).dataset(), **options)

    with pytest.raises(TypeError, match=r"'train': ShardedFiles has its own order; a .* pass shuffle=1000 to the data"):
        shares(loader, 1)


def test_lanes_that_do_not_divide_a_step_are_refused():
    """The error says which numbers."""
    with pytest.raises(ValueError, match=r"lanes=\(4, 1\): 4 does not divide the 6 samples of a step"):
        simulated(Files([40]), batch_size=3, world_size=2, lanes=(4, 1))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("world_size", "num_workers", "factor"), [(4, 2, 1), (3, 2, 3), (4, 3, 3), (2, 8, 4)])
def test_a_job_that_does_not_divide_the_lanes_is_warned(caplog, world_size, num_workers, factor):
    """The warning says how often each file is read, which is counted here, and what to write instead."""
    files = Files([48] * 8)
    loader = DataLoader(files.dataset(lanes=(4, 2)), batch_size=24 // world_size, num_workers=num_workers)

    opened = set()
    with caplog.at_level(logging.WARNING):
        for rank, shard in enumerate(shares(loader, world_size)):
            for number, batch in enumerate(share_of(shard)):
                opened |= {(rank, number % num_workers, lane) for lane, _, _ in batch}

    assert caplog.text.count("loader 'train': its data set has 4 lanes x 2 turns") == (factor > 1)
    assert (f"so each file is read {factor} times; pass lanes=" in caplog.text) == (factor > 1)
    assert len(opened) == 8 * factor


@pytest.mark.parametrize("world_size", [1, 4096])
def test_a_rank_of_thousands_needs_no_more_memory(world_size):
    """A job with 100,000 files a rank: the order is computed when needed."""
    files, step = 100_000, 32 * 4096
    sizes = np.full(files, 1000)
    tracemalloc.start()
    dataset = dl.ShardedFiles(range(files), iter, sizes=sizes, shuffle=100, lanes=(4096, 4))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    loader = DataLoader(dataset, batch_size=step // world_size)
    own = share_of(share(loader, world_size - 1, world_size))

    batches = iter(own)
    first = [next(batches) for _ in range(3)]

    assert [len(batch) for batch in first] == [step // world_size] * 3
    assert len(own) == -(-files * 1000 // step)
    assert tracemalloc.get_traced_memory()[1] - before < 20e6 + 300 * step // world_size * 4
    tracemalloc.stop()


@pytest.mark.parametrize("kind", [list, tuple, iter, torch.tensor, np.array])
def test_without_a_runner_samples_have_numbers(kind):
    """Whatever a batch sampler yields them in."""
    loader = DataLoader(Files([3, 3]).dataset(), batch_sampler=[kind([1, 4])], collate_fn=list)

    assert list(loader) == [[1, 4]]


def labelled(number):
    features = torch.linspace(0, 1, NUM_FEATURES) * (number % 7) + torch.rand(NUM_FEATURES)
    return features, number % NUM_CLASSES


def train(logdir, *callbacks, num_workers, batch_size=8, **options):
    files = Files([13, 40, 7, 21, 30, 1, 16, 24])  # 19 steps: a tail has other steps in two processes
    dataset = files.dataset(shuffle=8, lanes=(4, 2), transform=labelled)
    loaders = {
        "train": DataLoader(dataset, batch_size, num_workers=num_workers),
        "valid": DataLoader(dataset, batch_size),
    }
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=1)
    runner = tiny.train(loaders=loaders, callbacks=[save, *callbacks], num_epochs=2, logdir=logdir, **options)
    return {**runner.model.state_dict(), **runner.epoch_metrics["valid"]}


@pytest.mark.parametrize(("step", "workers"), [(5, (0, 0)), (11, (2, 2)), (20, (2, 0)), (33, (0, 2))])
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, step, workers):
    """The run resumes within an epoch, with as many workers or others, and what they had prefetched is not lost."""
    expected = train(tmp_path / "whole", num_workers=0)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "log", Interrupt(step), num_workers=workers[0])
    resumed = train(tmp_path / "log", num_workers=workers[1], resume="auto")

    assert all(np.array_equal(np.asarray(resumed[name]), np.asarray(value)) for name, value in expected.items())


def test_two_processes_train_like_one(tmp_path):
    """Augmentation, evaluation and a data worker in each process are included."""
    one = train(tmp_path / "one", num_workers=0)

    two = train(tmp_path / "two", num_workers=1, batch_size=4, num_processes=2)

    assert all(np.allclose(np.asarray(two[name]), np.asarray(value), atol=1e-6) for name, value in one.items())


def test_a_pattern_may_be_a_url_or_a_path(tmp_path):
    """The files of any file system of fsspec, as URLs, sorted by name."""
    import fsspec

    for place in ("memory://shards", tmp_path):
        for name in ("b.txt", "a.txt", "c.csv"):
            with fsspec.open(f"{place}/{name}", "w") as file:
                file.write(name)

    def read(path):
        with fsspec.open(path, "r") as file:
            yield file.read()

    for pattern in ("memory://shards/*.txt", tmp_path / "*.txt", str(tmp_path / "*.txt")):
        files = dl.ShardedFiles(pattern, read)
        assert [files[number] for number in range(len(files))] == ["a.txt", "b.txt"]
