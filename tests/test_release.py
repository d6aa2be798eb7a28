"""Tests of the release metadata: version, changelog, requirements, extras, CI workflow and project files."""

import configparser
import functools
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from runnerkit.version import __version__
from tests.layers import LATE, imports, modules

ROOT = Path(__file__).parents[1]
# Built from source, see docs/horovod.md and docs/apex.md; PyPI's "apex" is an unrelated package.
FROM_SOURCE = {"horovod", "apex"}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read_string(read("setup.cfg"))
    return parser


def distributions(requirements):
    """Return normalized distribution names: lower case, "-" for "_"."""
    names = (re.match(r"[\w.-]+", line) for line in requirements.splitlines() if line)
    return {name[0].lower().replace("_", "-") for name in names if name}


def test_the_version_stands_in_one_place():
    """The semantic version is defined in runnerkit.version; the metadata read it, and the README repeats it."""
    assert re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", __version__)
    assert setup_cfg()["metadata"]["version"] == "attr: runnerkit.version.__version__"
    assert set(re.findall(r"(?:version|Engines in)\s(\d+\.\d+\.\d+)", read("README.md"))) == {__version__}
    assert "version:" not in read("CITATION.cff").replace("cff-version:", "")


def test_the_changelog_keeps_its_form():
    """The changelog has "Unreleased", then dated versions, newest first, with the sections of keepachangelog.com."""
    headings = re.findall(r"^## (.*)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    kinds = re.findall(r"^### (.*)$", read("CHANGELOG.md"), flags=re.MULTILINE)

    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d{2}-\d{2}", each) for each in headings[1:]]
    versions = [tuple(int(number) for number in each.groups()) for each in released]
    assert headings[0] == "[Unreleased]"
    assert versions == sorted(set(versions), reverse=True)
    assert all(version <= tuple(int(number) for number in __version__.split(".")) for version in versions)
    assert kinds and set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@functools.cache
def imports_of(path):
    return list(imports(path))


def imported(*, only_top_level):
    """Return the third-party packages that runnerkit imports, including by importlib.import_module("...")."""
    names = set()
    for module, path in modules(ROOT):
        found = imports_of(path)
        if only_top_level:
            names |= {name for name, _, is_top_level in found if is_top_level and module not in LATE}
        else:
            names |= {name for name, _, _ in found}
            names |= set(re.findall(r'import_module\("([\w.]+)"\)', path.read_text(encoding="utf-8")))
    roots = {name.split(".")[0] for name in names}
    return roots - sys.stdlib_module_names - {"runnerkit", "__future__"} - FROM_SOURCE


def needed(names):
    of_package = importlib.metadata.packages_distributions()  # Ray, which few need, is not installed
    return {name: {each.lower().replace("_", "-") for each in of_package.get(name, [name])} for name in sorted(names)}


def test_what_is_imported_is_required_or_in_an_extra():
    """Top-level imports are in install_requires, unless the module is imported late; others are in an extra."""
    required = distributions(setup_cfg()["options"]["install_requires"])
    extras = setup_cfg()["options.extras_require"]
    optional = distributions(extras["all"]) | distributions(extras["vision"]) | distributions(extras["ray"])

    for only_top_level, given in ((True, required), (False, required | optional)):
        wanted = needed(imported(only_top_level=only_top_level))
        assert [name for name, any_of in wanted.items() if not any_of & given] == []


def test_extras_that_messages_name_exist():
    """Extras in error messages and on pages, such as runnerkit[metrics], exist."""
    extras = set(setup_cfg()["options.extras_require"])
    files = [path for _, path in modules(ROOT)] + [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    named = {
        name
        for path in files
        for group in re.findall(r"(?:runnerkit|'\.)\[([a-z,]+)\]", path.read_text(encoding="utf-8"))
        for name in group.split(",")
    }
    assert {"metrics", "tensorboard"} <= named <= extras


def test_type_checkers_read_every_example():
    """mypy, from pyproject.toml or `make check`, and basedpyright check every example."""
    tools = tomllib.loads(read("pyproject.toml"))["tool"]
    patterns = [*tools["mypy"]["files"], *re.findall(r"/mypy (examples/\S+)", read("Makefile"))]
    named = [path for pattern in patterns for path in ROOT.glob(pattern)]

    checked = {path for each in named for path in (each.rglob("*.py") if each.is_dir() else [each])}
    assert set((ROOT / "examples").rglob("*.py")) <= checked
    links = {f"runnerkit/{each.name}" for each in (ROOT / "runnerkit").iterdir() if each.is_symlink()}
    assert {"runnerkit", "examples", *links} <= set(tools["basedpyright"]["include"])
