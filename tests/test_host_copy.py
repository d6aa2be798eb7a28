"""Tests that loggers receive exact values from tensors on any device."""

from dataclasses import replace

import pytest
import torch

from runnerkit.logger import Step, StepQueue
from runnerkit.support.host_copy import read_metrics_at_once

STEP = Step(stage="train", loader="train", epoch=1, batch=4)


@pytest.mark.parametrize(
    "value",
    [
        *map(torch.tensor, (2**24 + 1, 2**53 - 1, 1 / 3, True, [[7.5]])),
        *(torch.tensor(-(2**31), dtype=torch.int32), torch.tensor(1 / 3, dtype=torch.float64), 2**53 - 1),
    ],
    ids=str,
)
def test_no_number_is_rounded_in_the_step_log(value):
    """Logged integers and float64 values keep all digits."""
    queue = StepQueue()
    queue.put(STEP, {"loss": torch.tensor(0.5), "it": value})

    assert [*queue.take(), *queue.take()] == [(STEP, {"loss": 0.5, "it": float(value)})]


def test_a_tensor_that_changes_in_place_is_logged_as_it_was():
    """A tensor that is later modified in place, such as a parameter, is logged with its value at the time."""
    queue, scale = StepQueue(), torch.nn.Parameter(torch.tensor(1.0))
    for batch in (1, 2):
        queue.put(replace(STEP, batch=batch), {"scale": scale})
        with torch.no_grad():
            scale += 1

    assert [metrics for _, metrics in queue.take()] == [{"scale": 1.0}, {"scale": 2.0}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_several_devices_are_read_together():
    """Tensors on the CPU and on a GPU are read in one call."""
    metrics = {"loss": torch.tensor(0.5, device="cuda"), "lr": torch.tensor(0.1, dtype=torch.float64), "count": 3}

    assert read_metrics_at_once([metrics]) == [{"loss": 0.5, "lr": 0.1, "count": 3.0}]


def test_tensors_are_stacked_with_those_of_their_device_only(monkeypatch):
    """Only tensors of one device are stacked, as torch requires; the meta device stands in for a second device."""
    stack, devices = torch.stack, []

    def note(tensors):
        devices.append({str(each.device) for each in tensors})
        return stack([torch.zeros_like(each, device="cpu") for each in tensors])

    monkeypatch.setattr(torch, "stack", note)

    read_metrics_at_once([{"loss": torch.empty((), device="meta"), "lr": torch.tensor(0.1)}])

    assert devices == [{"meta"}, {"cpu"}]
