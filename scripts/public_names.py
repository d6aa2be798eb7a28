"""Write the stubs that declare the public names of callbacks, engines, loggers, data and contrib.

A name is public if the ``__all__`` of the file that defines it lists it. ``make format`` calls this script.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Maps a package to its folder and to the contract module whose names it also exports.
PACKAGES = {
    "runnerkit.callbacks": ("callbacks", "runnerkit.callback"),
    "runnerkit.contrib": ("runnerkit/contrib", None),
    "runnerkit.data": ("runnerkit/data", None),
    "runnerkit.engines": ("engines", "runnerkit.engine"),
    "runnerkit.loggers": ("loggers", "runnerkit.logger"),
    "runnerkit.metrics": ("runnerkit/metrics", None),
}


def stub_of(package: str, root: Path = ROOT) -> str:
    """Return the text of a package's stub, sorted by module."""
    folder, contract = PACKAGES[package]
    names = {} if contract is None else {contract: _public(root / (contract.replace(".", "/") + ".py"))}
    for path in (root / folder).rglob("*.py"):
        if path.name != "__init__.py":
            module = ".".join([package, *path.relative_to(root / folder).with_suffix("").parts])
            names[module] = _public(path)
    lines = ["# Written by scripts/public_names.py from the __all__ of each file: run `make format`."]
    for module in sorted(names):
        lines += [f"from {module} import {name} as {name}" for name in sorted(names[module], key=_linter_order)]
    listed = "".join(f'    "{name}",\n' for name in sorted({name for each in names.values() for name in each}))
    return "\n".join(lines) + f"\n\n__all__ = [\n{listed}]\n"


def path_of(package: str, root: Path = ROOT) -> Path:
    """Return the path of a package's stub."""
    return root / PACKAGES[package][0] / "__init__.pyi"


def _linter_order(name: str) -> tuple[bool, bool, str]:
    """Sort constants before classes, and these before functions, as ruff does."""
    return not name.isupper(), name.islower(), name


def _public(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


if __name__ == "__main__":
    for each in PACKAGES:
        path_of(each).write_text(stub_of(each), encoding="utf-8")
