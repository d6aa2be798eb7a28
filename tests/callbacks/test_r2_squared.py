"""R2 is exact for any mean of the targets, on any number of processes."""

from fractions import Fraction

import pytest
import torch
from sklearn.metrics import r2_score

from runnerkit import dl
from tests.callbacks.stand_ins import evaluate_on_ranks


def exact(outputs, targets):
    """Compute R2 with rational numbers, rounded once at the end."""
    outputs, targets = ([Fraction(each) for each in column.tolist()] for column in (outputs, targets))
    mean = sum(targets) / len(targets)
    errors = sum((target - output) ** 2 for target, output in zip(targets, outputs, strict=True))
    return float(1 - errors / sum((target - mean) ** 2 for target in targets))


def on_ranks(shares):
    """Return the value on each rank for its batches of (outputs, targets)."""
    batches = [[{"x": outputs, "y": targets} for outputs, targets in share] for share in shares]
    runners, num_collectives = evaluate_on_ranks(dl.R2SquaredCallback("x", "y"), batches)
    assert num_collectives == (1 if all(shares) and len(shares) > 1 else 0 if len(shares) == 1 else 3)
    return [runner.loader_metrics["r2squared"] for runner in runners]


@pytest.mark.parametrize("ratio", [1, 1e4, 1e6, 1e8, 1e9, -1e9], ids="{:.0e}".format)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_large_mean_costs_no_digits(ratio, num_ranks, is_sorted):
    """Nine digits are exact for means up to those of times in seconds, 1.7e9, in any order, with unequal rank means."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(97, generator=generator, dtype=torch.float64) + ratio
    targets = targets.sort().values if is_sorted else targets
    outputs = targets + 0.3 * torch.randn(97, generator=generator, dtype=torch.float64)
    batches = list(zip(outputs.split(7), targets.split(7), strict=True))
    size = -(-len(batches) // num_ranks)

    values = on_ranks([batches[start : start + size] for start in range(0, len(batches), size)])

    assert values == pytest.approx([exact(outputs, targets)] * num_ranks, rel=1e-9)


def test_several_outputs_and_ranks_without_a_batch():
    """The value is the mean over outputs with different means; empty batches do not count."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randn(20, 3, generator=generator) + torch.tensor([0.0, 1e3, -5.0])
    outputs = targets + torch.randn(20, 3, generator=generator)
    whole, empty = (outputs, targets), (outputs[:0], targets[:0])
    first, second = ((outputs[rows], targets[rows]) for rows in (slice(0, 4), slice(4, 20)))

    values = on_ranks([[empty], [first, empty], [], [second]])

    expected = r2_score(whole[1].double(), whole[0].double())
    assert values == pytest.approx([expected] * 4, rel=1e-9)


def test_an_outlier_that_comes_first_costs_few_digits():
    """In the worst case, the shift is 1e8 deviations away from all other targets, and the variance depends on it."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.cat([torch.tensor([1e8], dtype=torch.float64), torch.randn(999, generator=generator).double()])
    outputs = targets + 1e6 * torch.randn(1000, generator=generator, dtype=torch.float64)

    assert on_ranks([[(outputs, targets)]]) == pytest.approx([exact(outputs, targets)], rel=1e-9)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_targets_that_do_not_vary_are_seen_to(num_ranks):
    """Constant targets are detected without a tolerance: sums of 0.1 are rounded, and 1e9 + 1e-6 differs from 1e9."""
    constant = torch.full((10,), 0.1, dtype=torch.float64)
    close = torch.tensor([1e9, 1e9 + 1e-6] * 5, dtype=torch.float64)

    assert on_ranks([[(constant, constant)]] * num_ranks) == [1.0] * num_ranks
    assert on_ranks([[(constant + 1, constant)]] * num_ranks) == [0.0] * num_ranks
    expected = exact(torch.full((10,), 1e9, dtype=torch.float64), close)
    assert expected == pytest.approx(-1.0)
    assert on_ranks([[(torch.full_like(close, 1e9), close)]] * num_ranks) == pytest.approx([expected] * num_ranks)
