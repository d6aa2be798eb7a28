"""Whether metrics are the same for several processes and for one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runnerkit.engine import IEngine
from runnerkit.precision import FP32
from runnerkit.types import Metrics

_CANCELLED = 1e-12  # what a float64 sum of values of both signs, in another order, leaves of a zero


def tolerance_of(engine: IEngine) -> float:
    """Say how far, relatively, two computations of one metric may be apart.

    The same batches go through the same operations, so that the order of float sums alone differs. In half precision
    and on a GPU another process may have chosen another algorithm for a layer: a few of its outputs are then rounded to
    the neighbouring number, by 2^-8 in bfloat16, and a mean over samples moves by far less. To repeat one of 1,000
    samples moves it by more.
    """
    return 1e-6 if engine.device.type == "cpu" and isinstance(engine.precision, FP32) else 1e-4


def unlike(metrics: Mapping[str, float], others: Metrics, *, tolerance: float) -> set[str]:
    """Name the metrics that both have and that are further apart than `tolerance`; two NaN are alike."""
    return {name for name in metrics.keys() & others.keys() if not _is_close(metrics[name], others[name], tolerance)}


def _is_close(value: float, other: float, tolerance: float) -> bool:
    if math.isnan(value) and math.isnan(other):
        return True
    return math.isclose(value, other, rel_tol=tolerance, abs_tol=_CANCELLED if tolerance else 0.0)


def check_alike(of_ranks: Sequence[Mapping[str, Metrics]]) -> None:
    """Refuse metrics that are not the same on all ranks.

    Args:
        of_ranks: {loader: {metric: value}} by rank.
    Raises:
        ValueError: with the values, and what to do.
    """
    for key, metrics in of_ranks[0].items():
        for name in metrics:
            values = [float(each.get(key, {}).get(name, math.nan)) for each in of_ranks]
            if not all(_is_close(value, values[0], 0.0) for value in values):
                listing = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"metric {name!r} of loader {key!r} differs between ranks: {listing}. What is written to "
                    "loader_metrics must be reduced, as by self.engine.reduce(tensor, 'sum'); or put the mean of each "
                    "batch into batch_metrics, where that is done"
                )
