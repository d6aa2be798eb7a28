"""The structure of the package: no import cycles, and one owner for each state."""

import ast
import functools
import re
from pathlib import Path

from runnerkit import dl
from runnerkit.loop import position
from runnerkit.sampling import loader_members
from runnerkit.support import component_members, function_members
from runnerkit.support.members import Member, Members
from tests.layers import modules

ROOT = Path(__file__).parents[1]
# The interface of callbacks imports the runner's type, and modules of the loop import the type from there.
ALLOWED_EDGE = ("runnerkit.callback", "runnerkit.runner")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the parsed modules of the package by their names."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules(ROOT)}


def imports_by_module() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, those under TYPE_CHECKING included."""
    graph: dict[str, set[str]] = {}
    for name, tree in trees().items():
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & trees().keys() or {node.module}
        graph[name] = (found & trees().keys()) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module."""
    reach = {name: set(after) for name, after in graph.items()}
    for middle in reach:
        for name, after in reach.items():
            if middle in after:
                reach[name] = after | reach[middle]
    parts = {frozenset(other for other in reach[name] if name in reach[other]) for name in reach if name in reach[name]}
    return sorted(sorted(part) for part in parts)


def test_imports_have_no_circle_but_the_one_of_the_callback_contract():
    """Modules of the loop import only from modules that do not import them."""
    graph = imports_by_module()
    assert ALLOWED_EDGE[1] in graph[ALLOWED_EDGE[0]]
    graph[ALLOWED_EDGE[0]].discard(ALLOWED_EDGE[1])

    assert circles(graph) == []


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


OWN_MODULES = {"runnerkit.runner", "runnerkit.loop.run"}
RUNNERS = {"IRunner", "Runner", "SupervisedRunner", "Predictor"}
USUAL_NAMES = {"runner", "_runner", "alone", "scratch", "worker"}


def private_members_of_runners(tree: ast.AST) -> list[str]:
    """Return what a module reads or assigns of a runner, as "runner._name"; a class of runners may use its own."""
    names = set(USUAL_NAMES)
    own: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and RUNNERS & names_in(node.annotation):
            names.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target).split(".")[-1])
        if isinstance(node, ast.ClassDef) and any(RUNNERS & names_in(base) for base in node.bases):
            own.update(ast.walk(node))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in own)
    return [ast.unparse(each) for each in found if re.match("_[^_]", each.attr) and last_name(each.value) in names]


def names_in(node: ast.AST | None) -> set[str]:
    return set(re.findall(r"\w+", ast.unparse(node))) if node is not None else set()


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_no_module_uses_a_private_member_of_a_runner():
    """They use `runner.current_run`, and neither read nor assign anything that begins with an underscore."""
    found = {
        name: used
        for name, tree in trees().items()
        if name not in OWN_MODULES and (used := private_members_of_runners(tree))
    }

    assert found == {}


def test_a_private_member_of_a_runner_is_found_under_any_name():
    text = """
def show(hero: IRunner, other: int):
    hero._a, other._b, runner._c, self.runner._d = 1, 2, 3, hero.public
class Own(Runner):
    def show(self, worker):
        worker._e = self._f
"""
    assert private_members_of_runners(ast.parse(text)) == ["hero._a", "runner._c", "self.runner._d"]


def test_counters_and_the_metrics_of_epochs_are_written_by_their_owner():
    """`Position` writes them; optimizer steps are counted where they are made."""
    names = position._Values.names() - {"optimizer_step", "stage_optimizer_step"}
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            written = {each.attr for target in targets if target for each in ast.walk(target) if is_of_runner(each)}
            if isinstance(node, ast.Assign | ast.AugAssign) and written & names:
                found.append(name)

    assert {*found} == {"runnerkit.loop.position"}


def is_of_runner(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "runner"


def test_no_module_lists_attribute_names_in_a_tuple_of_strings():
    """Groups of attributes are dataclasses, which a type checker and a reader can follow."""
    of_runner = {name for name in vars(dl.SupervisedRunner()) if not name.startswith("_")}
    lists = []
    for name, tree in trees().items():
        nodes = [*ast.walk(tree)]
        of_arguments = {each.value for each in nodes if isinstance(each, ast.keyword) and each.arg == "by_position"}
        for node in nodes:
            if isinstance(node, ast.Tuple | ast.Set | ast.List) and node not in of_arguments:
                words = {each.value for each in node.elts if isinstance(each, ast.Constant)}
                if len(words & of_runner) >= 3:
                    lists.append((name, node.lineno))

    assert lists == []


def listed_members():
    """Return the names of members in the lists of what is asked of loaders, samplers, data sets and components."""
    kinds = [each for module in (loader_members, component_members, function_members) for each in vars(module).values()]
    kinds = [each for each in kinds if isinstance(each, type) and issubclass(each, Members)]
    return {member.name for kind in kinds for member in vars(kind).values() if isinstance(member, Member)}


def test_a_member_that_a_list_has_is_asked_through_the_list():
    """So its type and its default are in one place. `set_epoch` is called on parts of every kind."""
    names, found = listed_members() - {"set_epoch"}, []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            is_probe = isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "hasattr")
            if is_probe and isinstance(node.args[1], ast.Constant) and node.args[1].value in names:
                found.append((name, node.lineno))

    assert {"num_workers", "_init_weights"} < names
    assert found == []
