"""Ranks that train on unequal numbers of batches get an error instead of waiting for each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from runnerkit.engines.failures.failure import FAILED, PeerLostError
from runnerkit.engines.failures.lockstep import Lockstep


@pytest.fixture
def ranks():
    """Three ranks with one store, which wait half a minute for each other."""
    store = HashStore()
    several = [Lockstep(store, rank=rank, world_size=3, timeout_s=30) for rank in range(3)]
    yield several
    for each in several:
        each.close()


def end(ranks, counts):
    """End a loader on each rank at the same time; return what each rank raised."""

    def leave(rank, count):
        rank.enter(lambda: count)
        try:
            rank.leave(count, key="train")
        except (ValueError, TimeoutError, PeerLostError) as error:
            return error

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(leave, ranks, counts))


def test_equal_numbers_pass_time_after_time(ranks):
    """Zero batches are a valid number, and keys of earlier loaders are deleted."""
    for num_batches in (4, 7, 0, 7):
        assert end(ranks, [num_batches] * 3) == [None] * 3

    assert ranks[0]._store.num_keys() < 25


def test_each_rank_is_told_the_numbers_of_all(ranks):
    """With no collective pending, no rank is stuck, and each error lists all numbers."""
    assert [str(each).partition("none: ")[2] for each in end(ranks, [4, 5, 4])] == ["the ranks had [4, 5, 4]"] * 3


def test_a_rank_that_goes_on_is_told_of(ranks):
    """The rank hangs in a collective that the others never enter, so only its thread can report its position."""
    ranks[2].enter(lambda: 5)

    [error] = end(ranks[:1], [4])

    assert isinstance(error, ValueError)
    assert str(error).endswith("rank 0 had 4, but rank 2 is at batch 5")


def test_a_rank_that_is_not_there_yet_is_waited_for(ranks):
    """A slow rank is not an error, as it may still finish the same loader."""
    ranks[2].enter(lambda: 4)
    for each in ranks:
        each._timeout_s = 0.3

    errors = end(ranks[:2], [4, 4])

    assert [type(each) for each in errors] == [TimeoutError] * 2
    assert "rank 0 had 4 batches of loader 'train' and waited 0.3 s for the others to end it" in str(errors[0])


def test_nobody_waits_for_a_rank_that_has_failed(ranks):
    """A failure is noticed even without a pending collective that would report it."""
    ranks[0]._store.set(FAILED, "")

    assert [type(each) for each in end(ranks[:1], [4])] == [PeerLostError]
