"""Conversion of images, texts, histograms and PR curves to TensorBoard summaries.

Import this module only where it is used: `torch.utils.tensorboard` is slow to import, and few runs need it.
"""

from __future__ import annotations

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # untyped
from tensorboard.plugins.histogram.metadata import create_summary_metadata  # type: ignore[import-untyped]  # likewise
from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]  # likewise
from torch.utils.tensorboard import summary

from runnerkit.logger import Histogram, PRCurve


def image_summary(tag: str, image: np.ndarray) -> Summary:
    """Encode an image, (H, W), (H, W, 3) or (H, W, 4) uint8, as PNG."""
    return summary.image(tag, image, dataformats="HW" if image.ndim == 2 else "HWC")


def text_summary(tag: str, text: str) -> Summary:
    """Encode a text, which TensorBoard shows as Markdown."""
    return summary.text(tag, text)


def histogram_summary(tag: str, histogram: Histogram) -> Summary:
    """Encode a histogram as a row (left, right, count) for each bin."""
    rows = np.stack([histogram.edges[:-1], histogram.edges[1:], histogram.counts], axis=1)
    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(rows, dtype=np.float64))])


def pr_curve_summary(tag: str, curve: PRCurve) -> Summary:
    """Encode the counts, precision and recall of each threshold."""
    rows = (
        curve.true_positives, curve.false_positives, curve.true_negatives, curve.false_negatives, curve.precision,
        curve.recall,
    )  # fmt: skip
    return summary.pr_curve_raw(tag, *rows, num_thresholds=len(curve.thresholds))
