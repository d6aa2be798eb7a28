"""Tests of predictions as rows: moved off the device and interleaved over ranks."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerkit.storage.rows import interleave, to_cpu_rows, walk

Pair = namedtuple("Pair", ["left", "right"])


@settings(deadline=None)
@given(total=st.integers(1, 50), num_ranks=st.integers(1, 6))
def test_rows_that_were_dealt_out_come_back_in_order(total, num_ranks):
    """Rows that are distributed in turn are restored in order, for all types and structures."""
    rows = torch.arange(total)

    def share(rank):
        mine = rows[rank::num_ranks]
        return {
            "pair": Pair(mine, [torch.stack([mine, -mine], 1)]),
            "array": mine.numpy(),
            "name": list(map(str, mine)),
        }

    whole = interleave([share(rank) for rank in range(min(total, num_ranks))])

    assert torch.equal(whole["pair"].left, rows)
    assert torch.equal(whole["pair"].right[0], torch.stack([rows, -rows], 1))
    assert whole["array"].tolist() == rows.tolist()
    assert whole["name"] == list(map(str, rows))


def test_what_is_taken_off_is_the_rows_and_no_more():
    """to_cpu_rows copies only a view's own elements, detaches tensors and keeps the structure."""
    large = torch.randn(4, 1000, requires_grad=True)
    prediction = {"view": large[:, :2], "lists": [large[:, 0], (None, ("a", "b", "c", "d"))]}

    taken = to_cpu_rows(prediction, (torch.zeros(4, 3), torch.zeros(4)))

    assert torch.equal(taken["view"], large[:, :2]) and not taken["view"].requires_grad
    assert taken["view"].untyped_storage().nbytes() == 4 * 2 * 4
    assert [path for path, _ in walk(taken)] == [("view",), ("lists", 0), ("lists", 1, 0), ("lists", 1, 1)]
    assert taken["lists"][1] == (None, ["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("prediction", "error", "words"),
    [
        ({"loss": torch.tensor(1.0)}, ValueError, r"prediction\['loss'\] must have a row .*expand\(batch_size\).*\(\)"),
        ([torch.zeros(4), torch.zeros(1, 3)], ValueError, r"prediction\[1\] must have a row .* \(1, 3\)"),
        (torch.zeros(5), ValueError, r"prediction must have a row .* \(5,\)"),
        ({"a": torch.zeros(4), "b": torch.zeros(3)}, ValueError, r"prediction\['b'\] must have a row"),
        ({}, ValueError, "prediction must have a row for each sample"),
        (None, ValueError, "prediction must have a row for each sample"),
        ({"x": {1, 2}}, TypeError, r"prediction\['x'\] is a builtins.set; return tensors from predict_batch"),
        (torch.eye(4).to_sparse(), TypeError, "is a torch.sparse_coo tensor; make it dense"),
    ],
)
def test_what_is_no_rows_is_named(prediction, error, words):
    """A prediction that does not have one row per sample raises an error with its path and shape."""
    with pytest.raises(error, match=words):
        to_cpu_rows(prediction, {"features": torch.zeros(4, 3), "names": ["a", "b", "c", "d"]})


ARRAYS = [np.zeros((4, 3)), np.zeros(4)]
PICTURES = [{"picture": torch.zeros(3, size, 5), "boxes": torch.zeros(size, 4)} for size in (6, 7)]


@pytest.mark.parametrize(
    ("batch", "num_rows", "known"),
    [
        ((torch.zeros(4, 3), torch.zeros(4)), 4, None),  # not 2, as a pair
        (ARRAYS, 4, None),
        ({"both": [torch.zeros(4), ["a"] * 4]}, 4, None),
        (PICTURES, 2, None),  # a list of samples of different shapes
        ({"features": torch.zeros(4, 3), "names_of_classes": ["a", "b"]}, 4, 4),
    ],
    ids=["tuple", "arrays", "nested", "samples in a list", "known number"],
)
def test_a_batch_has_as_many_rows_as_samples(batch, num_rows, known):
    """The length of a container, such as the pair (features, targets), is not the number of samples."""
    assert len(to_cpu_rows(torch.zeros(num_rows), batch, num_samples=known)) == num_rows
    wrong = 2 if num_rows == 4 else 9
    with pytest.raises(ValueError, match=rf"its shape is \({wrong},\)"):
        to_cpu_rows(torch.zeros(wrong), batch, num_samples=known)


def test_a_batch_whose_length_cannot_be_seen_has_any():
    """For a batch of unknown length, for example of a graph library, the parts need only have equal lengths."""
    assert len(to_cpu_rows({"a": torch.zeros(5), "b": np.zeros((5, 2))}, object())["a"]) == 5
    with pytest.raises(ValueError, match=r"prediction must have a row .*'a'\].: 5, .prediction\['b'\].: 6"):
        to_cpu_rows({"a": torch.zeros(5), "b": torch.zeros(6)}, object())


@pytest.mark.parametrize(
    ("predictions", "words"),
    [
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], "prediction has different forms"),
        ([[torch.zeros(1)], torch.zeros(1)], "prediction has different forms"),
        ([{"a": torch.zeros(1)}, {"a": None}], r"prediction\['a'\] has different forms"),
        ([torch.zeros(2, 5), torch.zeros(2, 4)], r"differs in shape.*\(2, 5\), \(2, 4\).*pad rows"),
        ([torch.zeros(2), torch.zeros(2).half()], "differs in shape or type.*float16"),
        ([torch.zeros(1), torch.zeros(2)], "the processes had .1, 2. rows"),
    ],
)
def test_predictions_that_do_not_fit_together_are_named(predictions, words):
    """Predictions of different structure, shape or dtype raise an error with the path of the part."""
    with pytest.raises(ValueError, match=words):
        interleave(predictions)
