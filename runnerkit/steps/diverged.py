"""Advice for a loss that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runnerkit.callback import ICallback, ICheckpointCallback, innermost


def advice(callbacks: Mapping[str, ICallback], *, gradient_clip: float | None) -> str:
    """Return the end of a message about a loss that is not finite; it mentions only checkpoints that exist."""
    folders = [each.logdir for each in map(innermost, callbacks.values()) if isinstance(each, ICheckpointCallback)]
    is_saved = any(folder is not None and (Path(folder) / "checkpoints" / "index.json").is_file() for folder in folders)
    clip = "" if gradient_clip is not None else " or gradient_clip=1.0"
    return (
        f'; try a smaller learning rate{clip}, and train with non_finite="locate" to see where it begins'
        + "; the last checkpoint predates it" * is_saved
    )
