"""What TensorBoard's HPARAMS tab shows of a run: its hyperparameters, and how it ended.

They lie in the folder above those of the loaders. The tab takes it for a session and the folders below for its parts:
its columns are the hyperparameters, and the last value of each loader's metrics, as ``loss`` of ``valid``. (What all
sessions have in common, an "experiment", is left out: TensorBoard reads one only, and with it the columns of one run.)

Imported late: TensorBoard is optional.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]  # has no types
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # likewise
from tensorboard.plugins.hparams import metadata  # type: ignore[import-untyped]  # likewise
from tensorboard.plugins.hparams.api_pb2 import Status  # type: ignore[import-untyped]  # likewise
from tensorboard.plugins.hparams.plugin_data_pb2 import (  # type: ignore[import-untyped]  # likewise
    HParamsPluginData,  # pyright: ignore[reportAttributeAccessIssue]
    SessionEndInfo,  # pyright: ignore[reportAttributeAccessIssue]
    SessionStartInfo,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]  # likewise

from runnerkit.plain_values import flat, plain

_SUFFIX = ".hparams"  # of the file's name


def write(folder: Path, hparams: Mapping[str, Any], *, start_s: float, failed: bool | None = None) -> None:
    """Write the file, in the place of the one before; a tag that is there twice keeps what it had first.

    Args:
        folder: that above the loaders'.
        hparams: nested ones get names such as ``optimizer/lr``; what is no finite number or bool becomes its string.
        start_s: when the run started, in seconds since 1970.
        failed: how it ended; None while it runs.
    """
    older = list(folder.glob(f"*tfevents*{_SUFFIX}"))
    writer = EventFileWriter(str(folder), filename_suffix=_SUFFIX)
    start = SessionStartInfo(start_time_secs=start_s)
    for name, value in flat(plain(hparams), separator="/"):
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float) and math.isfinite(value):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = str(value)
    writer.add_event(_event(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)))
    if failed is not None:
        status = Status.Value("STATUS_FAILURE" if failed else "STATUS_SUCCESS")
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        writer.add_event(_event(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)))
    writer.close()
    for path in older:
        path.unlink()


def _event(tag: str, content: HParamsPluginData) -> Event:
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
    return Event(wall_time=time.time(), step=0, summary=Summary(value=[value]))
