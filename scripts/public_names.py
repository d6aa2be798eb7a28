"""Write the stubs that declare the public names of callbacks, engines, loggers, data and contrib, and the list of `dl`.

A name is public if the ``__all__`` of the file that defines it lists it. ``make format`` calls this script.
"""

import ast
import re
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
DL = Path("runnerkit", "dl.pyi")
# Names that `dl` finds but does not list: interfaces, wrappers, engines that fix a precision, names of other libraries
# and former ones. `IRunner` is what scripts subclass.
UNLISTED = re.compile(
    r"I(?!Runner)[A-Z][a-z]\w*|\w+Wrapper|\w*(AMP|APEX)Engine|Precision|RankTraceback|choose_engine"
    r"|FunctionalMetricCallback|SoftUpdateCallaback|TrevskyCallback"
)


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
    return "\n".join(lines) + "\n"


def dl_stub(root: Path = ROOT) -> str:
    """Return the stub of `dl`: its imports as they are, and the list of the names that users type."""
    imports = (root / DL).read_text(encoding="utf-8").partition("\n__all__")[0].rstrip()
    names: set[str] = set()
    for node in ast.parse(imports).body:
        assert isinstance(node, ast.ImportFrom) and node.module is not None
        is_package = node.names[0].name == "*"
        names |= _imported(stub_of(node.module, root)) if is_package else {alias.name for alias in node.names}
    listed = sorted(name for name in names if not UNLISTED.fullmatch(name))
    return imports + "\n\n__all__ = [\n" + "".join(f'    "{name}",\n' for name in listed) + "]\n"


def path_of(package: str, root: Path = ROOT) -> Path:
    """Return the path of a package's stub."""
    return root / PACKAGES[package][0] / "__init__.pyi"


def _linter_order(name: str) -> tuple[bool, bool, str]:
    """Sort constants before classes, and these before functions, as ruff does."""
    return not name.isupper(), name.islower(), name


def _imported(stub: str) -> set[str]:
    return {alias.name for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom) for alias in node.names}


def _public(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


if __name__ == "__main__":
    for each in PACKAGES:
        path_of(each).write_text(stub_of(each), encoding="utf-8")
    (ROOT / DL).write_text(dl_stub(), encoding="utf-8")
