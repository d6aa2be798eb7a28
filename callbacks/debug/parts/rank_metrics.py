"""Comparison of metrics between ranks, and between several processes and one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runnerkit.engine import IEngine
from runnerkit.precision import FP32
from runnerkit.types import Metrics

_CANCELLED = 1e-12  # residue of a float64 sum that cancels to zero, when summed in another order


def tolerance_of(engine: IEngine) -> float:
    """Return the relative tolerance between two computations of one metric.

    The same batches go through the same operations, so only the order of floating-point sums differs. In half precision
    and on a GPU, another process may choose another algorithm for a layer: a few outputs then round to the adjacent
    number, by 2^-8 in bfloat16, and a mean over samples changes by far less. Repeating one of 1,000 samples changes it
    by more.
    """
    return 1e-6 if engine.device.type == "cpu" and isinstance(engine.precision, FP32) else 1e-4


def differing(metrics: Mapping[str, float], others: Metrics, *, tolerance: float) -> set[str]:
    """Return the common metrics that differ by more than `tolerance`; two NaNs are equal."""
    return {name for name in metrics.keys() & others.keys() if not _is_close(metrics[name], others[name], tolerance)}


def _is_close(value: float, other: float, tolerance: float) -> bool:
    if math.isnan(value) and math.isnan(other):
        return True
    return math.isclose(value, other, rel_tol=tolerance, abs_tol=_CANCELLED if tolerance else 0.0)


def check_alike(of_ranks: Sequence[Mapping[str, Metrics]]) -> None:
    """Raise unless metrics are the same on all ranks.

    Args:
        of_ranks: {loader: {metric: value}} by rank.
    Raises:
        ValueError: a metric differs; gives the values and a remedy.
    """
    for key, metrics in of_ranks[0].items():
        for name in metrics:
            values = [float(each.get(key, {}).get(name, math.nan)) for each in of_ranks]
            if not all(_is_close(value, values[0], 0.0) for value in values):
                listing = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"metric {name!r} of loader {key!r} differs between ranks: {listing}. Reduce what you "
                    "write to loader_metrics, for example by self.engine.reduce(tensor, 'sum'), or put the mean of "
                    "each batch into batch_metrics, which the runner reduces"
                )
