"""Everything in the logdir of a run that must be equal to that of another run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from runnerkit.checkpoints.file import load_checkpoint


def fingerprint(logdir: Path) -> dict[str, Any]:
    """Read what must be equal: the last checkpoint, bit for bit, CSV and JSONL files, and TensorBoard's series."""
    last = logdir / "checkpoints" / "last"  # a folder of shards, or a file
    state = load_checkpoint(last if last.is_dir() else last.with_suffix(".pth"))
    files = {f"csv {path.name}": path.read_text() for path in sorted((logdir / "csv").iterdir())}
    files["JSONL"] = (logdir / "metrics.jsonl").read_text()
    return {**dict(leaves(state)), **files, "TensorBoard": dict(series(logdir / "tensorboard"))}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the keys that only one fingerprint has, or whose values differ."""
    return sorted(key for key in one.keys() | other.keys() if (key in one) != (key in other) or one[key] != other[key])


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a checkpoint's leaves with their paths; two leaves are equal if all their bits are."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from leaves(value, f"{path}/{index}")
    elif isinstance(state, torch.Tensor):
        content = state.detach().contiguous().flatten().view(torch.uint8).tolist()
        yield path, (state.dtype, tuple(state.shape), bytes(content))
    else:
        yield path, repr(state)  # this way a NaN equals a NaN


def series(folder: Path) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run in sorted(folder.iterdir()):
        events = EventAccumulator(str(run), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            yield f"{run.name} {tag}", [(each.step, each.value) for each in events.Scalars(tag)]
