"""Pictures, texts, distributions and curves in the form that TensorBoard reads.

Imported late: torch's part of it is slow to import, and few runs log such things.
"""

from __future__ import annotations

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # has no types
from tensorboard.plugins.histogram.metadata import create_summary_metadata  # type: ignore[import-untyped]  # likewise
from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]  # likewise
from torch.utils.tensorboard import summary

from runnerkit.logger import Histogram, PRCurve


def image_summary(tag: str, image: np.ndarray) -> Summary:
    """Encode an image, (H, W), (H, W, 3) or (H, W, 4) uint8, as PNG."""
    return summary.image(tag, image, dataformats="HW" if image.ndim == 2 else "HWC")


def text_summary(tag: str, text: str) -> Summary:
    """Hold a text, which TensorBoard shows as Markdown."""
    return summary.text(tag, text)


def histogram_summary(tag: str, histogram: Histogram) -> Summary:
    """Hold a row (left, right, count) for each bin."""
    rows = np.stack([histogram.edges[:-1], histogram.edges[1:], histogram.counts], axis=1)
    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(rows, dtype=np.float64))])


def pr_curve_summary(tag: str, curve: PRCurve) -> Summary:
    """Hold counts, precision and recall by threshold."""
    rows = (
        curve.true_positives, curve.false_positives, curve.true_negatives, curve.false_negatives, curve.precision,
        curve.recall,
    )  # fmt: skip
    return summary.pr_curve_raw(tag, *rows, num_thresholds=len(curve.thresholds))
