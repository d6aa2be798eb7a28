"""Import of NVIDIA Apex, with errors that explain what is wrong and what to use instead."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def require_apex(*, engine: str) -> None:
    """Raise unless ``apex.amp`` is installed; only files are inspected, as importing PyPI's unrelated `apex` may fail.

    Args:
        engine: name of the engine, for the message.
    Raises:
        ImportError: Apex is missing, is another project of that name, or is newer than 25.05.

    >>> require_apex(engine="APEXEngine")  # doctest: +SKIP
    Traceback (most recent call last):
    ImportError: APEXEngine needs NVIDIA Apex, and no package `apex` is installed...
    """
    build = "NVIDIA builds it from source, with CUDA; release 25.05 or earlier, as later ones lack apex.amp"
    folders = _folders()
    if not folders:
        raise ImportError(f"{engine} needs NVIDIA Apex, and no package `apex` is installed. {build}. {native(engine)}.")
    if any((folder / "amp").is_dir() for folder in folders):
        return
    if any((folder / part).is_dir() for folder in folders for part in ("optimizers", "normalization")):
        raise ImportError(
            f"{engine} needs apex.amp, which NVIDIA removed from Apex after release 25.05; the one in {folders[0]} is "
            f"newer. {native(engine)}. Apex's fused optimizers are plain optimizers and work with it."
        )
    raise ImportError(
        f"{engine} needs NVIDIA Apex, but the package `apex` in {folders[0]} is not it: the one on PyPI is an "
        f"unrelated web toolkit. Remove it with `pip uninstall apex`. {build}. {native(engine)}."
    )


def native(engine: str) -> str:
    """Recommend the engine of the same parallelism that does not need Apex.

    >>> native("DistributedDataParallelAPEXEngine")
    "DistributedDataParallelAMPEngine (amp=True), torch's own mixed precision, needs nothing installed"
    """
    return f"{engine.replace('APEX', 'AMP')} (amp=True), torch's own mixed precision, needs nothing installed"


def import_part(name: str) -> ModuleType:
    """Import ``apex.amp`` or ``apex.parallel``; call :func:`require_apex` first."""
    return import_module(f"apex.{name}")


def _folders() -> list[Path]:
    spec = find_spec("apex")
    return [Path(each) for each in spec.submodule_search_locations or ()] if spec is not None else []
