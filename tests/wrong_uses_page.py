"""Rows of docs/wrong_uses.md: what tests/test_wrong_uses.py does wrong, as a user would write it, and the message."""

import ast
import os
import re
import shlex
from functools import cache
from pathlib import Path

from benchmarks.results import read_section, write_section

ROOT = Path(__file__).parents[1]
PAGE, TABLES = ROOT / "docs" / "wrong_uses.md", ROOT / "tests" / "test_wrong_uses.py"
COMMAND = "RUNNERKIT_WRITE_WRONG_USES=1 pytest tests/test_wrong_uses.py"
HEADS = {
    "TRAIN": "| in the call of `train` | error | message |\n|---|---|---|",
    "OTHERS": "| call | error | message |\n|---|---|---|",
    "COMMANDS": "| command | message |\n|---|---|",
}
LONG_LIST = re.compile(r"((?:\w+, ){4})(?:\w+, ){3,}(\w+)")
# Hydra, torch or typer chose some of their words, which differ between versions.
WORDED_BY_OTHERS = {"argument almost right", "class almost right", "option instead of a key", "command almost right"}
CALLS = {"loader": "loader", "mlp": "model", "classification": "dataset"}
METHODS = {"predicted": "predict_loader", "evaluated": "evaluate_loader", "of": "dl.SupervisedRunner"}
NAMES = {"FRAME": "frame", "ROWS": "rows", "LOADERS": "loaders", "VALID": "loader", "mlp": "make_model"}
SETUP = (("optimizer", None), ("cpu", False), ("cpu", True))  # arguments that only the tests need


class _AsUsersWrite(ast.NodeTransformer):
    """Names of tests are replaced by those of a script."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        if name in CALLS:
            return ast.Name(CALLS[name])
        if name == "Made" and isinstance(node.args[0], ast.Lambda):
            return self.visit(node.args[0].body)
        node.func = ast.Name(METHODS[name]) if name in METHODS else self.visit(node.func)
        node.args = [self.visit(each) for each in node.args]
        node.keywords = [each for each in map(self.visit, node.keywords) if not _is_setup(each)]
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(NAMES.get(node.id, node.id))


def _is_setup(argument: ast.keyword) -> bool:
    value = argument.value
    return isinstance(value, ast.Constant) and (argument.arg, value.value) in SETUP


def _in_python(node: ast.AST) -> str:
    text = ast.unparse(_AsUsersWrite().visit(node))
    return text if '"' in text else text.replace("'", '"')


def _as_written(table: str, entry: ast.expr) -> str:
    if table == "COMMANDS":
        assert isinstance(entry, ast.Tuple)
        return f"runnerkit {shlex.join(ast.literal_eval(entry.elts[0]))}"
    if table == "OTHERS":
        assert isinstance(entry, ast.Tuple)
        call = entry.elts[0]
        return _in_python(call.body if isinstance(call, ast.Lambda) else call)
    assert isinstance(entry, ast.Call)
    given = {str(each.arg): _in_python(each.value) for each in entry.keywords if not _is_setup(each)}
    return given.get("runner") or ", ".join(f"{name}={value}" for name, value in given.items())


@cache
def uses() -> dict[str, dict[str, str]]:
    """Return what is written in each use, by its name, for each of the tables."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(TABLES.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and (table := ast.unparse(node.targets[0])) in HEADS:
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            entries = {str(ast.literal_eval(key)): entry for key, entry in pairs if key is not None}
            found[table] = {
                name: _as_written(table, entry) for name, entry in entries.items() if name not in WORDED_BY_OTHERS
            }
    return found


def rows(table: str) -> list[str]:
    """Return the rows of the page, without the header."""
    return read_section(table.lower(), PAGE, command=COMMAND).splitlines()[2:]


def code(text: str) -> str:
    """Return text as code of a cell."""
    mark = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{mark}{space}{' '.join(text.split())}{space}{mark}".replace("|", r"\|")


def shortened(message: str) -> str:
    """Return a message without what differs between machines, and without the middle of long lists of names.

    >>> shortened("one of a, b, c, d, e, f, g, h, i; got <A object at 0x7f31>")
    'one of a, b, c, d, ..., i; got <A object at 0x...>'
    """
    message = re.sub(r"at 0x[0-9a-f]+", "at 0x...", message.replace(str(Path.cwd()), "/home/me/project"))
    return LONG_LIST.sub(r"\1..., \2", message)


def check_row(table: str, name: str, *, message: str, error: type[Exception] | None = None) -> None:
    """Assert that the page has the message of a use; write it there if RUNNERKIT_WRITE_WRONG_USES is set."""
    if name in WORDED_BY_OTHERS:
        return
    begin, end = f"| {code(uses()[table][name])} |", f"{code(shortened(message))} |"
    row = f"{begin} {error.__name__} | {end}" if error is not None else f"{begin} {end}"
    if os.environ.get("RUNNERKIT_WRITE_WRONG_USES"):
        begins = [f"| {code(each)} |" for each in uses()[table].values()]
        others = [each for each in rows(table) if not each.startswith(begin) and each.startswith(tuple(begins))]
        ordered = sorted([*others, row], key=lambda each: next(i for i, b in enumerate(begins) if each.startswith(b)))
        write_section(table.lower(), "\n".join([HEADS[table], *ordered]), PAGE, command=COMMAND)
    assert row in rows(table), f"the page is out of date: {COMMAND}"
