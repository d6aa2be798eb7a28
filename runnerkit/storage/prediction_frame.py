"""Predictions as a pandas frame, with the columns of a .csv file of predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, Any

from runnerkit.storage.prediction_file import flat_columns
from runnerkit.storage.rows import to_cpu_rows

if TYPE_CHECKING:
    import pandas as pd


def check_index(index: Any) -> None:
    """Raise unless the index, if there is one, can label the rows of a frame.

    Raises:
        ImportError: pandas is not installed.
        TypeError: `index` is a frame, or is not a sequence.
    """
    try:
        import pandas  # noqa: F401  # before any process starts
    except ImportError as error:
        raise ImportError("predict_frame needs pandas: pip install 'runnerkit[metrics]'; or use predict_to") from error
    if hasattr(index, "columns"):
        raise TypeError("index= is a frame: pass its index, such as index=frame.index")
    if index is not None and not isinstance(index, Sized):
        raise TypeError(f"index= must be a sequence of labels, one per row, got {type(index).__name__}")


def prediction_frame(predictions: Iterable[Any], *, index: Any = None) -> pd.DataFrame:
    """Join the predictions of all batches; one row per sample.

    Args:
        index: labels of the rows; by default 0, 1, ...
    Raises:
        ValueError: there are no predictions; they differ in structure; `index` has another length.
        TypeError: a part does not consist of rows.

    >>> import torch
    >>> print(prediction_frame([{"p": torch.tensor([0.5, 1.0])}, {"p": torch.tensor([0.25])}], index=["a", "b", "c"]))
          p
    a  0.50
    b  1.00
    c  0.25
    """
    import pandas as pd

    batches: list[pd.DataFrame] = []
    for each in predictions:
        batch = pd.DataFrame(flat_columns(to_cpu_rows(each, None)))
        if batches and list(batch) != list(batches[0]):
            raise ValueError(
                f"columns {list(batch)} are not those of the first batch, {list(batches[0])}; return predictions of "
                "the same form from predict_batch"
            )
        batches.append(batch)
    if not batches:
        raise ValueError("no predictions for a frame: the loader gave no batch")
    frame = pd.concat(batches, ignore_index=True)
    if index is not None:
        if len(index) != len(frame):
            raise ValueError(
                f"index= has {len(index)} labels, but there are {len(frame)} predictions: pass the index of the rows "
                "that the loader reads, in their order"
            )
        frame.index = index if isinstance(index, pd.Index) else pd.Index(index)  # which makes tuples of several levels
    return frame
