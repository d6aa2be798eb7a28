"""The one reduction of a loader's metrics, on ranks simulated in one process."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerkit.fused_reduction import NUM_FUSED, reduce_totals
from tests.ranks import Ranks


def run(totals, num_samples):
    """Reduce on as many ranks as there are `totals`; return each rank's result and the number of collectives."""
    ranks = Ranks(len(totals))
    calls = [
        partial(reduce_totals, each, count, processes=engine, loader_key="valid")
        for engine, each, count in zip(ranks.engines, totals, num_samples, strict=True)
    ]
    return ranks.call(*calls), ranks.num_collectives


@settings(max_examples=25, deadline=None)
@given(
    num_ranks=st.integers(1, 4),
    num_metrics=st.integers(0, 2 * NUM_FUSED + 3),
    empty=st.sets(st.integers(0, 3)),
    data=st.data(),
)
def test_sums_and_counts_are_those_of_one_process(num_ranks, num_metrics, empty, data):
    """Any number of ranks, of metrics, and of ranks that saw no batch: plain sums over ranks, in one order."""
    names = [f"metric{index * 7919 % 1000:03d}" for index in range(num_metrics)]
    values = data.draw(st.lists(st.integers(-1000, 1000), min_size=num_ranks, max_size=num_ranks))
    filled = [rank for rank in range(num_ranks) if rank not in empty]
    totals = [
        {name: (values[rank] + index / 8, rank + 1) for index, name in enumerate(names)} if rank in filled else {}
        for rank in range(num_ranks)
    ]

    results, num_collectives = run(totals, [3] * num_ranks)

    expected = {
        name: (sum(values[rank] + index / 8 for rank in filled), sum(rank + 1 for rank in filled))
        for index, name in enumerate(names)
        if filled
    }
    for reduced, num_samples in results:
        assert reduced == expected and list(reduced) == list(expected)
        assert num_samples == 3 * num_ranks
    if num_ranks > 1 and len(filled) == num_ranks and num_metrics <= NUM_FUSED:
        assert num_collectives == 1


def test_different_metrics_are_an_error_on_every_rank():
    """Not a deadlock, not a wrong number: each rank names what each logged."""
    totals = [{"loss": (1.0, 1)}, {"loss": (1.0, 1), "extra": (2.0, 1)}, {}]

    with pytest.raises(
        ValueError, match=r"loader 'valid'.*rank 0: \['loss'\]; rank 1: \['extra', 'loss'\]; rank 2: \[\]"
    ):
        run(totals, [1, 1, 0])


def test_as_many_but_other_metrics_are_an_error_too():
    """The fingerprint is of the names, not of their number."""
    with pytest.raises(ValueError, match="different metrics"):
        run([{"loss": (1.0, 1)}, {"lass": (1.0, 1)}], [1, 1])


def test_large_counts_stay_exact():
    """An epoch of 2^40 samples on two ranks counts every one."""
    results, _ = run([{"loss": (0.5, 2**40 + 1)}, {"loss": (0.25, 2**40)}], [2**40 + 1, 2**40])

    assert results[0] == ({"loss": (0.75, 2**41 + 1)}, 2**41 + 1)
