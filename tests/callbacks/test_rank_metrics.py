"""How near a metric of several processes must be to that of one."""

from types import SimpleNamespace

import pytest

from runnerkit.callbacks.rank_metrics import tolerance_of, unlike
from runnerkit.engines import AMPEngine, CPUEngine


class OnGPU(CPUEngine):
    """Says that it computes on a GPU; nothing is computed."""

    def __init__(self):
        super().__init__()
        self.device = SimpleNamespace(type="cuda")


@pytest.mark.parametrize("engine", [CPUEngine(), AMPEngine(device="cpu"), OnGPU()], ids=["CPU", "bf16", "GPU"])
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e5])
def test_one_sample_of_a_thousand_counted_twice_is_noticed_on_any_device(engine, scale):
    """Whatever the size of the metric: a loss of 1e-5 is no zero."""
    right, padded = sum(range(1000)) / 1000, sum([*range(1000), 999]) / 1001

    assert unlike({"loss": scale * padded}, {"loss": scale * right}, tolerance=tolerance_of(engine)) == {"loss"}


def test_rounding_and_nan_are_alike():
    """A mean of values of both signs may be zero but for what float64 rounds; two that are not there are the same."""
    nan = float("nan")

    assert unlike({"a": 1e-15, "b": nan, "c": 1.0}, {"a": 0.0, "b": nan, "c": 1 + 1e-7}, tolerance=1e-6) == set()
    assert unlike({"a": 1e-15}, {"a": 0.0}, tolerance=0.0) == {"a"}
