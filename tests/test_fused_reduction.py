"""Tests of the fused reduction of a loader's metrics, on ranks simulated in one process."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerkit.metrics.reduction import NUM_FUSED, PartialSums, reduce_sums
from tests.ranks import Ranks


def run(shares):
    """Reduce `shares`, one per rank; return each rank's result and the number of collectives."""
    ranks = Ranks(len(shares))
    of_rank = partial(reduce_sums, loader_key="valid")
    calls = [partial(of_rank, each, processes=engine) for engine, each in zip(ranks.engines, shares, strict=True)]
    return ranks.call(*calls), ranks.num_collectives


DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8]


@settings(max_examples=25, deadline=None)
@given(
    num_ranks=st.integers(1, 4),
    shapes=st.lists(st.sampled_from([(), (3,), (2, 3), (0,), (NUM_FUSED,)]), max_size=5),
    empty=st.sets(st.integers(0, 3)),
    data=st.data(),
)
def test_sums_are_those_of_one_process(num_ranks, shapes, empty, data):
    """Reduced sums equal plain sums, in the same order, for any ranks, owners, shapes, dtypes and empty ranks."""
    values = data.draw(st.lists(st.integers(0, 60), min_size=num_ranks, max_size=num_ranks))
    filled = [rank for rank in range(num_ranks) if rank not in empty]
    names = [f"sum{index * 7 % 5}" for index in range(len(shapes))]
    dtypes = [DTYPES[index % len(DTYPES)] for index in range(len(shapes))]

    def share(number):
        return PartialSums(
            {name: torch.full(s, number, dtype=d) for name, s, d in zip(names, shapes, dtypes, strict=True)}
        )

    shares = [
        {"all": PartialSums({"n": torch.tensor(3)}), "b": share(values[rank]) if rank in filled else None}
        for rank in range(num_ranks)
    ]

    results, num_collectives = run(shares)

    for totals in results:
        assert totals["all"].sums["n"] == 3 * num_ranks
        if not filled:
            assert totals["b"] is None
            continue
        expected = share(sum(values[rank] for rank in filled)).sums
        assert list(totals["b"].sums) == names
        torch.testing.assert_close(totals["b"].sums, expected, rtol=0, atol=0)
    if num_ranks > 1 and len(filled) in (0, num_ranks) and NUM_FUSED not in [s[0] for s in shapes if s]:
        assert num_collectives == 1


@pytest.mark.parametrize("num_owners", [1, 20])
def test_one_collective_however_many_metrics(num_owners):
    """Any number of metrics needs one collective, and one more gathers all values that cannot be summed."""
    sums = {f"metric {index}": PartialSums({"tp": torch.ones(10)}) for index in range(num_owners)}
    lists = {f"list {index}": PartialSums({}, [[index]]) for index in range(num_owners)}

    assert run([sums, sums])[1] == 1
    results, num_collectives = run([sums | lists, sums | lists])

    assert num_collectives == 2
    assert results[0][f"list {num_owners - 1}"].others == [[num_owners - 1], [num_owners - 1]]


def test_a_rank_without_a_batch_gets_everything():
    """A rank without a batch, which knows neither names nor shapes, gets the results of all ranks."""
    full = {"auc": PartialSums({"n": torch.ones(2, 3)}, [{"scores": [torch.ones(4)]}])}

    results, _ = run([full, {"auc": None}, full])

    for totals in results:
        assert torch.equal(totals["auc"].sums["n"], 2 * torch.ones(2, 3))
        assert len(totals["auc"].others) == 2 and torch.equal(totals["auc"].others[1]["scores"][0], torch.ones(4))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"loss": torch.ones(3), "extra": torch.ones(())}, r"rank 0: \['loss'\]; rank 1: \['extra', 'loss'\]"),
        ({"lass": torch.ones(3)}, r"rank 0: \['loss'\]; rank 1: \['lass'\]"),
        ({"loss": torch.ones(4)}, r"rank 0: loss float32\[3\]; rank 1: loss float32\[4\]"),
        ({"loss": torch.ones(1, 3)}, r"rank 0: loss float32\[3\]; rank 1: loss float32\[1, 3\]"),
        ({"loss": torch.ones(3, dtype=torch.int64)}, r"rank 0: loss float32\[3\]; rank 1: loss int64\[3\]"),
    ],
)
def test_the_fingerprint_is_of_names_shapes_and_dtypes(other, message):
    """Ranks whose metrics differ in a name, shape or dtype raise an error, even if the number of values is the same."""
    with pytest.raises(ValueError, match=f"loader 'valid': ranks differ in callback 'f1'.*{message}; rank 2: no batch"):
        run([{"callback 'f1'": each} for each in (PartialSums({"loss": torch.ones(3)}), PartialSums(other), None)])


def test_sums_are_exact():
    """Those of integers beyond 2^53, the limit of float64, too; that of three float32 values is rounded once."""
    values = torch.tensor([2**60 + 1, -(2**60) - 1, -1, 2**53 + 1])

    results, _ = run(
        [{"n": PartialSums({"n": values})}, {"n": PartialSums({"n": torch.tensor([2, 2, 2, 0])})}, {"n": None}]
    )

    for totals in results:
        assert totals["n"].sums["n"].tolist() == [2**60 + 3, -(2**60) + 1, 1, 2**53 + 1]
    parts = [torch.tensor(value) for value in (1e8, 3.0, 3.0)]

    results, _ = run([{"s": PartialSums({"s": part})} for part in parts])

    assert results[0]["s"].sums["s"] == torch.tensor(1e8 + 6, dtype=torch.float64).float()
