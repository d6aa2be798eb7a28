"""Public names and signatures as text, and those of runnerkit 0.1.0 in ``public_names_0_1_0.txt``."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

RECORD = Path(__file__).with_suffix(".txt")
PACKAGES = ("callbacks", "contrib", "data", "dl", "engines", "loggers", "utils")


def names() -> Iterator[str]:
    """Yield ``package.name`` of all public names."""
    for package in ("runnerkit", *(f"runnerkit.{each}" for each in PACKAGES)):
        yield from (f"{package}.{name}" for name in importlib.import_module(package).__all__)


def signatures() -> Iterator[str]:
    """Yield ``name(parameters)`` of all public functions, constructors and methods, once each."""
    facades = [importlib.import_module(f"runnerkit.{each}") for each in ("dl", "contrib", "utils")]
    public = {name: getattr(facade, name) for facade in facades for name in facade.__all__}
    for name, value in sorted(public.items()):
        yield f"{name}{_parameters(value)}"
        for method, function in sorted(vars(value).items()) if inspect.isclass(value) else []:
            if not method.startswith("_") and isinstance(function, FunctionType | staticmethod):
                yield f"{name}.{method}{_parameters(function)}"


def _parameters(value: Any) -> str:
    try:
        given = inspect.signature(value).parameters.values()
    except ValueError:  # an enumeration, on some versions of Python
        return ""
    shown = []
    for each in given:
        if each.name == "self":
            continue
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**", each.KEYWORD_ONLY: "kw "}.get(each.kind, "")
        default = "" if each.default is each.empty else "=" + re.sub(r" at 0x\w+", "", repr(each.default))
        shown.append(f"{star}{each.name}{default}")
    return f"({'; '.join(shown)})"


if __name__ == "__main__":
    print(*sorted(names()), *signatures(), sep="\n")
