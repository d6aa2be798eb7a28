"""Events for TensorBoard's HPARAMS tab: the hyperparameters and the final status of a run.

The file is in the parent of the loaders' folders. The tab shows the parent as a session, with the hyperparameters and
the last value of each loader's metrics as columns, such as ``loss`` of ``valid``. No "experiment" is written, which
would describe all sessions: TensorBoard reads only one, so the tab would show the columns of one run.

Import this module only where it is used: TensorBoard is optional.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]  # untyped
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # likewise
from tensorboard.plugins.hparams import metadata  # type: ignore[import-untyped]  # likewise
from tensorboard.plugins.hparams.api_pb2 import Status  # type: ignore[import-untyped]  # likewise
from tensorboard.plugins.hparams.plugin_data_pb2 import (  # type: ignore[import-untyped]  # likewise
    HParamsPluginData,  # pyright: ignore[reportAttributeAccessIssue]
    SessionEndInfo,  # pyright: ignore[reportAttributeAccessIssue]
    SessionStartInfo,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]  # likewise

from runnerkit.support.plain_values import flat, plain

_SUFFIX = ".hparams"  # of the file's name


def write_hparams(folder: Path, hparams: Mapping[str, Any], *, start_s: float, failed: bool | None = None) -> None:
    """Write the file and delete the earlier ones: TensorBoard keeps the first value of a tag that occurs twice.

    Args:
        folder: parent of the loaders' folders.
        hparams: nested ones get names such as ``optimizer/lr``; values other than finite numbers and bools become
            strings.
        start_s: start of the run, in seconds since 1970.
        failed: True if the run failed, False if it succeeded, None while it runs.
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
