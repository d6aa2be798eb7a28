"""A training without epoch_steps ends with its stream: all processes take a step if one of them has samples for it."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, share_of, start_epoch
from tests import tiny
from tests.data.places import flat, share, shares
from tests.data.test_lane_stream import SHAPES, Numbers, has_empty_lane
from tests.engines.together import together
from tests.interrupt import Interrupt


class Sums:
    """Sums of ranks that are threads: the n-th of each rank belong together."""

    def __init__(self, world_size):
        self.world_size, self.values, self.changed = world_size, {}, threading.Condition()
        self.has_failed = False

    def fail(self):
        with self.changed:
            self.has_failed = True
            self.changed.notify_all()

    def _is_whole(self, number):
        return self.has_failed or len(self.values[number]) == self.world_size

    def of_rank(self):
        numbers = iter(range(10**9))

        def start_sum(value):
            number = next(numbers)
            with self.changed:
                self.values.setdefault(number, []).append(value.clone())
                self.changed.notify_all()

            def wait():
                with self.changed:
                    assert self.changed.wait_for(lambda: self._is_whole(number), timeout=30)
                    if self.has_failed:
                        raise RuntimeError("another process has failed")
                return sum(self.values[number])

            return wait

        return start_sum


def steps_of(loaders, *, epoch=1):
    """Return the steps of each rank as (batch, sizes of all ranks), and the positions after each of them.

    Args:
        epoch: None to continue where the shares are.
    """
    sums = Sums(len(loaders))

    def run(loader):
        own, found, positions = share_of(loader), [], []
        own.start_sum = sums.of_rank()
        if epoch is not None:
            start_epoch(loader, epoch)
        try:
            for number, batch in enumerate(batches_of(loader)):
                found.append((batch, own.sizes_of(number) or [own.batch_size] * len(loaders)))
                positions.append(own.position_after(number + 1))
        except ValueError:
            sums.fail()
            raise
        return found, positions

    with ThreadPoolExecutor(len(loaders)) as pool:
        return list(pool.map(run, loaders))


def loaders_of(dataset, world_size=1, *, batch_size, num_workers=0):
    collate = list if batch_size else lambda item: item
    loader = DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=collate)
    return shares(loader, world_size, epoch=None)


def global_batches(loaders):
    """Return the samples of each step, and check that all ranks took it and knew its sizes."""
    ranks = [found for found, _ in steps_of(loaders)]
    assert len({len(found) for found in ranks}) == 1
    steps = []
    for parts in zip(*ranks, strict=True):
        sizes = parts[0][1]
        assert all(each == sizes for _, each in parts)
        own = [batch if sizes[rank] else [] for rank, (batch, _) in enumerate(parts)]
        assert [len(each) for each in own] == sizes
        steps.append(sorted(flat(own)))
    return steps


@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_any_job_takes_the_steps_of_one_process(sizes, lanes):
    """Shards of any length, empty ones too: each sample once, in the same global batches."""
    [alone] = loaders_of(Numbers(sizes, lanes), 1, batch_size=8)
    start_epoch(alone, 1)
    one = [sorted(batch) for batch in batches_of(alone)]
    assert sorted(flat(one)) == list(range(sum(sizes)))
    for world_size in (each for each in (2, 4) if lanes[0] % each == 0):
        if has_empty_lane(sizes, lanes):  # a process may be without a sample in its first step
            continue
        assert global_batches(loaders_of(Numbers(sizes, lanes), world_size, batch_size=8 // world_size)) == one


@pytest.mark.parametrize("world_size", [1, 2])
def test_workers_that_end_early_change_nothing(world_size):
    """The lanes of one worker end long before those of the other."""
    sizes, lanes = [3, 40, 5, 40, 2, 40, 3, 40], (2, 2)
    dataset = Numbers([sizes[index // 2 % 2 + 2 * (index % 2)] for index in range(8)], lanes)
    alone = global_batches(loaders_of(dataset, 1, batch_size=8))

    assert global_batches(loaders_of(dataset, world_size, batch_size=8 // world_size, num_workers=2)) == alone


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=8, max_size=16), part=st.floats(0, 1))
def test_a_job_of_another_size_continues_with_the_batches_that_are_left(sizes, part):
    """Positions count the steps without any sample, and the ranks that took part without one."""
    lanes = (2, 4)
    one = global_batches(loaders_of(Numbers(sizes, lanes), 1, batch_size=4))
    saved = loaders_of(Numbers(sizes, lanes), 2, batch_size=2)
    ranks = steps_of(saved)
    number = int(part * (len(one) - 1))
    loaders = loaders_of(Numbers(sizes, lanes), 1, batch_size=4)
    position = share_of(saved[0]).joined(None, lambda _: [positions[number] for _, positions in ranks])
    start_epoch(loaders[0], 1)
    share_of(loaders[0]).skip(position)

    assert [sorted(batch) for batch in batches_of(loaders[0])] == one[number + 1 :]


def drawn(samples):
    return random.random()


def test_each_batch_draws_in_its_collate_fn():
    """Also after its first lane has ended; a resumed run draws the same."""
    own = [share(DataLoader(Numbers([2, 20, 17], (3, 1)), 3, num_workers=1, collate_fn=drawn)) for _ in range(2)]
    whole = list(batches_of(own[0]))
    share_of(own[1]).skip(share_of(own[0]).position_after(9))

    assert len(set(whole)) == len(whole) == 20
    assert list(batches_of(own[1])) == whole[9:]


def test_whole_batches_are_taken_in_turns():
    """With batch_size=None each item is a batch; a rank without one takes part with none."""
    ranks = [found for found, _ in steps_of(loaders_of(Numbers([5, 1, 1, 1], (2, 2)), 2, batch_size=None))]

    assert [sizes for _, sizes in ranks[0]] == [sizes for _, sizes in ranks[1]]
    taken = [batch for rank, found in enumerate(ranks) for batch, sizes in found if sizes[rank] is None]
    assert sorted(taken) == list(range(8))


def test_a_process_without_any_sample_takes_part_with_those_of_others():
    """All its shards may be empty."""
    [_, (second, _)] = steps_of(loaders_of(Numbers([5, 0, 5, 0], (2, 1)), 2, batch_size=2))

    assert all((batch, sizes[1]) == ([0, 1], 0) or (batch, sizes[1]) == ([5, 6], 0) for batch, sizes in second)
    assert len(second) == 5


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_process_whose_lanes_have_ended_gets_its_first_samples_again(batch_size):
    """A new object each time, as it may be modified; also in a resumed run, which lacks a batch before."""
    [_, (second, _)] = steps_of(loaders_of(Numbers([20, 3], (2, 1)), 2, batch_size=batch_size))
    idle = [batch for batch, sizes in second if sizes[1] == 0]

    assert len(idle) > 6 and all(batch == (20 if batch_size is None else [20, 21]) for batch in idle)
    assert batch_size is None or len(set(map(id, idle))) == len(idle)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("at", [2, 10, 20, 25])
def test_a_resume_after_a_worker_has_ended_repeats_nothing(num_workers, at):
    """The steps of a worker that has ended are empty; a limit in batches does not count them."""

    def limited():
        loader = DataLoader(Numbers([3, 3, 40, 40, 3, 3, 40, 40], (2, 2)), 4, num_workers=num_workers, collate_fn=list)
        return share(dl.BatchLimitLoaderWrapper(loader, 30))

    whole = list(batches_of(limited()))
    first = limited()
    batches = batches_of(first)
    assert [next(batches) for _ in range(at)] == whole[:at]
    second = limited()
    share_of(second).skip(share_of(first).position_after(at))

    assert len(whole) == 30
    assert list(batches_of(second)) == whole[at:]


def test_a_loader_that_is_a_batch_ahead_has_the_same_positions():
    """Accumulation without a length fetches one ahead, past steps that are empty as their lanes have ended."""
    found = []
    for num_ahead in (0, 1):
        [loader] = loaders_of(Numbers([3, 40, 3, 40], (1, 4)), 1, batch_size=2)
        start_epoch(loader, 1)
        batches, positions = batches_of(loader), []
        for number, _ in enumerate(batches):
            if number >= num_ahead:
                positions.append(share_of(loader).position_after(number + 1 - num_ahead))
        found.append(positions)

    assert found[1] == found[0][:-1] and len(found[1]) > 40


class Epochs:
    """A collate_fn that returns the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __call__(self, samples):
        return self.epoch


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_learn_the_epoch(is_persistent):
    options = {"num_workers": 1, "collate_fn": Epochs(), "persistent_workers": is_persistent}
    own, found = share(DataLoader(Numbers([4] * 4, (2, 1)), 4, **options)), []
    for epoch in (1, 2, 3):
        start_epoch(own, epoch)
        found.append(set(batches_of(own)))

    assert found == [{1}, {2}, {3}]


class Rows(Numbers):
    """Shards of rows of features and targets, as functions of their numbers."""

    def shard(self, num_shards, index):
        for number in super().shard(num_shards, index):
            x = torch.sin(torch.arange(4, dtype=torch.float64) + number)
            yield x, x.sum()


def error(out, y):
    return (out[:, 0] - y).square().mean()


def train(logdir, num_processes, *, accumulation_steps=1, num_workers=0, interrupt_at=None, **options):
    """Return the weights after two epochs, the counters and the mean loss; nothing after an interruption."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    loader = DataLoader(Rows([7, 31, 12, 3, 9, 22, 1, 5], (2, 2)), 8 // num_processes, num_workers=num_workers)
    callbacks = [dl.OptimizerCallback(metric_key="loss", accumulation_steps=accumulation_steps)]
    callbacks += [Interrupt(interrupt_at)] if interrupt_at else []
    options |= {"criterion": error, "num_processes": num_processes, "loaders": {"train": loader}, "num_epochs": 2}
    try:
        runner = tiny.train(model, logdir=logdir, callbacks=callbacks, **options)
    except KeyboardInterrupt:
        return None
    counters = runner.sample_step, runner.batch_step, runner.optimizer_step
    return model.weight.detach(), counters, runner.epoch_metrics["train"]["loss"]


class InPlace(dl.SupervisedRunner):
    def handle_batch(self, batch):
        self.batch = {**batch, "features": batch["features"].sub_(0.1).div_(0.2)}
        super().handle_batch(self.batch)


def statistics_of(num_processes):
    """Train with lanes of 16 and of 400 samples; return the model, whose first rank is not idle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)).double()
    loader = DataLoader(Rows([40, 4, 40, 4], (2, 1)), 4 // num_processes)
    options = {
        "criterion": error,
        "optimizer": torch.optim.SGD(model.parameters(), 0.001),
        "loaders": {"train": loader},
    }
    tiny.train(model, runner=InPlace(), num_processes=num_processes, **options)
    return model[0].running_var, model[1].weight.detach()


def of_two_processes(folder):
    found = [
        train(folder / "plain", 2),
        train(folder / "workers", 2, num_workers=2),
        train(folder / "accumulated", 2, accumulation_steps=3),
    ]
    train(folder / "again", 2, interrupt_at=21)
    train(folder / "alone", 2, interrupt_at=9)
    return [*found, train(folder / "again", 2, resume="auto")], statistics_of(2)


def test_two_processes_train_the_weights_of_one(tmp_path):
    """The gradient of each step is that of all its samples, also after a resume."""
    (plain, workers, accumulated, again), (variances, weight) = together(lambda: of_two_processes(tmp_path))
    alone = train(tmp_path / "alone", 1, resume="auto")
    expected = train(tmp_path / "one", 1)

    assert expected[1][0] == 2 * 90
    for found, wanted in [
        (plain, expected), (workers, expected), (again, expected), (alone, expected),
        (accumulated, train(tmp_path / "accumulated alone", 1, accumulation_steps=3)),
    ]:  # fmt: skip
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-13)
        assert found[1] == wanted[1]
        assert found[2] == pytest.approx(wanted[2], abs=1e-12)
    assert torch.isfinite(weight).all() and torch.isfinite(variances).all()


def test_a_stream_of_one_shard_has_one_lane():
    batches = list(batches_of(share(DataLoader(Numbers([9], None), batch_size=4))))

    assert torch.cat(batches).tolist() == list(range(9))
