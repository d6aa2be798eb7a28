"""Print the exact versions of all packages that the extra `dev` needs, as installed beside this Python.

    make lock    writes them to constraints-dev.txt

The versions are those that the tests have passed with; `pip install` reads the file as constraints.
"""

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# Written by `make lock`: what the tests have passed with, for pip install -c constraints-dev.txt -e '.[dev]'
# Python {python}, {system}. On other systems it pins the same versions of the packages that are needed there too.
"""


def needed(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the requirements of an installed package with some of its extras, as (name, extras)."""
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": each}) for each in {"", *extras}):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def closure(name: str, extras: frozenset[str]) -> set[str]:
    """Return the names of all packages that a package needs with these extras, at any depth."""
    left, seen = [(name, extras)], set()
    while left:
        if (each := left.pop()) not in seen:
            seen.add(each)
            left += needed(*each)
    return {each for each, _ in seen} - {name}


def lock(name: str = "runnerkit", extra: str = "dev") -> str:
    """Return the text of the file; raise PackageNotFoundError, with the name, if the extra is not installed."""
    pins = []
    for each in sorted(closure(name, frozenset({extra}))):
        version = Version(importlib.metadata.version(each))
        pins.append(f"{each}=={version.public}\n")  # without "+cpu", which other systems lack
    system = f"{platform.system()} {platform.machine()}"
    return HEADER.format(python=f"{sys.version_info.major}.{sys.version_info.minor}", system=system) + "".join(pins)


if __name__ == "__main__":
    print(lock(), end="")
