"""Ranks that do not train on equally many batches are told so, instead of waiting for each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from runnerkit.engines.failure import FAILED, PeerLostError
from runnerkit.engines.lockstep import Lockstep


@pytest.fixture
def ranks():
    """Three of them over one store, which wait 0.3 s for each other."""
    store = HashStore()
    several = [Lockstep(store, rank=rank, world_size=3, timeout_s=0.3) for rank in range(3)]
    yield several
    for each in several:
        each.close()


def end(ranks, counts):
    """End a loader on each rank at the same time; return what each raised."""

    def leave(rank, count):
        rank.enter(lambda: count)
        try:
            rank.leave(count, key="train")
        except (ValueError, TimeoutError, PeerLostError) as error:
            return error

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(leave, ranks, counts))


def test_equal_numbers_pass_time_after_time(ranks):
    """No batch at all is a number too; and what was told of earlier loaders is forgotten."""
    for num_batches in (4, 7, 0, 7):
        assert end(ranks, [num_batches] * 3) == [None] * 3

    assert ranks[0]._store.num_keys() < 25


def test_each_rank_is_told_the_numbers_of_all(ranks):
    """Where none of them was stuck, since no collective was under way."""
    assert [str(each).partition("none: ")[2] for each in end(ranks, [4, 5, 4])] == ["the ranks had [4, 5, 4]"] * 3


def test_a_rank_that_goes_on_is_told_of(ranks):
    """It is stuck where the others have nothing any more, and only a thread of it can say so."""
    ranks[2].enter(lambda: 5)
    ranks[0]._timeout_s = 30

    [error] = end(ranks[:1], [4])

    assert isinstance(error, ValueError)
    assert str(error).endswith("rank 0 had 4, and rank 2 is in its batch 5")


def test_a_rank_that_is_not_there_yet_is_waited_for(ranks):
    """Slow is not wrong: the loader of the others' last batch may be the one under way."""
    ranks[2].enter(lambda: 4)

    errors = end(ranks[:2], [4, 4])

    assert [type(each) for each in errors] == [TimeoutError] * 2
    assert "rank 0 had 4 batches of loader 'train' and waited 0.3 s for others to end it" in str(errors[0])


def test_nobody_waits_for_a_rank_that_has_failed(ranks):
    """There may be no collective that would say so."""
    ranks[0]._store.set(FAILED, "")

    assert [type(each) for each in end(ranks[:1], [4])] == [PeerLostError]
