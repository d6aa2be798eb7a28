"""Tests of draw_curves: every dot is at the right place."""

import numpy as np
import pytest

from runnerkit.commands.braille import draw_curves, limits

# Positions of the dots of U+2800 + n in the Unicode table: bit, row, column within the character.
BITS = [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 0, 1), (4, 1, 1), (5, 2, 1), (6, 3, 0), (7, 3, 1)]


def dots(characters):
    """Convert (height, width) characters to the (4 * height, 2 * width) dots that they show, top row first."""
    height, width = characters.shape
    found = np.zeros((4 * height, 2 * width), dtype=bool)
    for (row, column), character in np.ndenumerate(characters):
        for bit, down, right in BITS:
            found[4 * row + down, 2 * column + right] = (ord(character) - 0x2800) >> bit & 1
    return found


def test_a_point_for_each_dot_comes_back():
    """With x to the right and y upwards, the picture equals the matrix that the points were taken from."""
    picture = np.random.default_rng(0).random((12, 10)) < 0.3
    picture[0, 0] = picture[-1, -1] = True  # the corners determine the scale
    rows, columns = np.nonzero(picture)
    points = [np.array([[column, -row]], dtype=float) for row, column in zip(rows, columns, strict=True)]

    characters, owners = draw_curves(points, width=5, height=3)

    np.testing.assert_array_equal(dots(characters), picture)
    np.testing.assert_array_equal(owners >= 0, characters != "\u2800")


def test_points_are_joined_by_lines():
    """Joined points on a diagonal give one dot per column and row."""
    characters, _ = draw_curves([np.array([[0.0, 0.0], [3.0, 3.0], [7.0, 7.0]])], width=4, height=2)

    np.testing.assert_array_equal(dots(characters), np.eye(8, dtype=bool)[::-1])


@pytest.mark.parametrize("hole", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leaves_a_gap(hole):
    """A non-finite point is not joined to its neighbors and does not affect the scale."""
    characters, _ = draw_curves([np.array([[0, 0], [1, 0], [3, hole], [6, 1], [7, 1]])], width=4, height=1)

    found = dots(characters)
    assert np.nonzero(found[3])[0].tolist() == [0, 1]
    assert np.nonzero(found[0])[0].tolist() == [6, 7]
    assert found.sum() == 4


def test_the_later_curve_owns_what_both_touch():
    """A character has one color, so it belongs to the later of two curves that share it."""
    flat, high = np.array([[0.0, 0.0], [7.0, 0.0]]), np.array([[6.0, 0.0], [7.0, 4.0]])

    _, owners = draw_curves([flat, high], width=4, height=2)

    assert owners.tolist() == [[-1, -1, -1, 1], [0, 0, 0, 1]]


def test_one_epoch_and_a_constant_are_drawn_and_nothing_finite_is_empty():
    """A curve without extent in x or y is drawn; curves without finite points give an empty picture, NaN limits."""
    for curve in (np.array([[1.0, 0.5]]), np.array([[1.0, 0.5], [2.0, 0.5]])):
        assert dots(draw_curves([curve], width=3, height=2)[0]).any()
    curves = [np.array([[1.0, np.nan]]), np.empty((0, 2))]

    characters, owners = draw_curves(curves, width=3, height=2)

    assert not dots(characters).any() and (owners == -1).all()
    assert np.isnan(limits(curves)).all()
