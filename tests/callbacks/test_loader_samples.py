"""Samples kept until a loader's end own their memory."""

import pytest
import torch

from runnerkit import dl
from tests.callbacks.stand_ins import end_loader, make_runner, run_loader


def kept_bytes(callback):
    columns = [each for batch in callback._under_way["train"]._batches for each in batch]
    return sum(each.untyped_storage().nbytes() for each in columns)


@pytest.mark.parametrize(
    "make_view", [lambda x: x[:, 0], lambda x: x[:1].expand(4, 100, 8)[:, 0]], ids=["row", "expanded"]
)
def test_a_view_does_not_keep_what_it_is_a_view_of(make_view):
    """Of 100 hidden states, only the first is kept: per batch 4 x 8 float32 values and 4 targets of 8 bytes."""
    callback = dl.AUCCallback("x", "y")

    batches = [{"x": make_view(torch.rand(4, 100, 8)), "y": torch.arange(4)} for _ in range(3)]
    run_loader(callback, make_runner(), batches)

    assert kept_bytes(callback) == 3 * (4 * 8 * 4 + 4 * 8)


def test_what_the_next_step_writes_over_was_copied():
    """A CUDA graph writes its output to the same memory in every step."""
    callback, runner = dl.AUCCallback("x", "y"), make_runner()
    output = torch.empty(2, requires_grad=True)

    callback.on_loader_start(runner)
    for scores, targets in ([0.1, 0.2], [0, 1]), ([0.4, 0.3], [1, 1]), ([0.5, 0.0], [1, 0]):
        with torch.no_grad():
            output.copy_(torch.tensor(scores))
        runner.batch = {"x": output, "y": torch.tensor(targets)}
        callback.on_batch_end(runner)
    end_loader(callback, runner)

    assert runner.loader_metrics["auc"] == 1.0
