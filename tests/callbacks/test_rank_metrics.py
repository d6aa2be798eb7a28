"""Tolerance between a metric of several processes and that of one."""

from types import SimpleNamespace

import pytest

from runnerkit.callbacks.debug.parts.rank_metrics import differing, tolerance_of
from runnerkit.engines import AMPEngine, CPUEngine


class OnGPU(CPUEngine):
    """An engine that claims to compute on a GPU and computes nothing."""

    def __init__(self):
        super().__init__()
        self.device = SimpleNamespace(type="cuda")


@pytest.mark.parametrize("engine", [CPUEngine(), AMPEngine(device="cpu"), OnGPU()], ids=["CPU", "bf16", "GPU"])
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e5])
def test_one_sample_of_a_thousand_counted_twice_is_noticed_on_any_device(engine, scale):
    """The tolerance is relative, so a loss of 1e-5 is not treated as zero."""
    right, padded = sum(range(1000)) / 1000, sum([*range(1000), 999]) / 1001

    assert differing({"loss": scale * padded}, {"loss": scale * right}, tolerance=tolerance_of(engine)) == {"loss"}


def test_rounding_and_nan_are_alike():
    """A mean of both signs may be zero up to float64 rounding, and two NaNs are equal."""
    nan = float("nan")

    assert differing({"a": 1e-15, "b": nan, "c": 1.0}, {"a": 0.0, "b": nan, "c": 1 + 1e-7}, tolerance=1e-6) == set()
    assert differing({"a": 1e-15}, {"a": 0.0}, tolerance=0.0) == {"a"}
