"""Tests that docs/exactness.md has the numbers that its benchmark computes."""

import pytest

from benchmarks import exactness


def numbers(row):
    """Return the numeric cells."""
    return [float(cell.replace(",", "")) for cell in row if cell.strip("+-0123456789.,e") == ""]


@pytest.fixture(scope="module")
def of_one_process():
    return exactness.error_of_ours((1,))


def test_the_recipes_are_as_wrong_as_the_page_says(of_one_process):
    """The table of recipes is reproduced to the last digit, except for the column of multi-process runs."""
    written, computed = exactness.read(exactness.RECIPES_BEGIN), exactness.recipe_rows(of_one_process)

    assert [row[:2] for row in written] == [row[:2] for row in computed]
    for old, new in zip(written, computed, strict=True):
        assert numbers(old[2:-1]) == pytest.approx(numbers(new[2:-1]), abs=1.1e-4)


def test_every_recipe_is_wrong_and_ours_is_not(of_one_process):
    """Every listed recipe has an error above 5e-4, and ours is below 1e-12."""
    for row in exactness.read(exactness.RECIPES_BEGIN):
        assert abs(float(row[-2])) > 5e-4
        assert row[-1] == "under 1e-10"

    assert max(of_one_process.values()) < 1e-12


def test_the_sums_are_as_wrong_as_the_page_says():
    """The shortest row of the table is reproduced, and its float64 mean equals that of LoaderMeans."""
    length = 100_000

    [computed] = exactness.sum_rows((length,))
    written = exactness.read(exactness.SUMS_BEGIN)[0]
    assert numbers(written)[:2] == pytest.approx(numbers(computed)[:2], abs=1e-6)
    assert numbers(written)[2] == pytest.approx(numbers(computed)[2], rel=0.5), (
        "a single loss that rounds differently changes it"
    )
    assert written[-1] == computed[-1]
    assert exactness.mean_of_loader_means(10_000) == exactness.our_mean(10_000)
