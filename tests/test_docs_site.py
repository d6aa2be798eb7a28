"""Tests of the hooks in scripts/docs_site, with which mkdocs builds the site; tests/test_docs.py builds it.

Those that need mkdocs, griffe or ruff are slow ones, which run in the environment of contributors.
"""

import ast
import inspect
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from runnerkit import dl
from tests.test_docs import PAGES, ROOT, blocks, public

HOOKS = ROOT / "scripts" / "docs_site"


def hook(name):
    """Return the names of a hook; those that import mkdocs need the extra docs."""
    return runpy.run_path(str(HOOKS / f"{name}.py"))


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@forge.example:owner/name.git", "https://forge.example/owner/name"),
        ("https://user:token@forge.example/owner/name.git", "https://forge.example/owner/name"),
        ("ssh://git@forge.example:2222/group/owner/name", "https://forge.example/group/owner/name"),
        ("https://forge.example/owner/name/", "https://forge.example/owner/name"),
        ("/srv/git/name.git", None),
        (None, None),
    ],
)
def test_the_header_links_the_repository_without_credentials(tmp_path, remote, address):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    if remote is not None:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)

    assert hook("header")["repository"](tmp_path) == address


def test_the_landing_page_makes_the_promises_of_the_readme():
    def promises(page):
        table = (ROOT / page).read_text(encoding="utf-8").partition("| promise |")[2].partition("\n\n")[0]
        return re.findall(r"^\| (\w[^|]*) \|", table, flags=re.MULTILINE)

    assert promises("docs/index.md") == promises("README.md") != []


@pytest.mark.slow
def test_long_lines_of_code_are_broken_and_comments_move_above():
    code = 'x = f("a", 1)\nif x:\n    y = g({}, {}, 3)  # the reason why\n'.format("a" * 24, "b" * 24)
    fits = 'x = f("a", 1)\nif x:\n    # the reason why\n    y = g({}, {}, 3)\n'.format("a" * 24, "b" * 24)
    narrow = hook("narrow_code")["narrow"]

    assert narrow(code) == fits == narrow(fits)
    assert max(map(len, narrow(f"value = function({', '.join(['argument'] * 20)})\n").splitlines())) <= 80
    assert narrow(broken := f"if {'x' * 90}\n") == broken


@pytest.mark.slow
def test_narrow_code_is_the_same_program():
    """Formatting and moving comments keep each program of the docs; what stays too long is a string or an address."""
    narrow, left = hook("narrow_code")["narrow"], []

    for page in PAGES:
        for block in blocks(page, "python"):
            result = narrow(block)
            assert ast.dump(ast.parse(result)) == ast.dump(ast.parse(block))
            left += [line for line in result.splitlines() if len(line) > 80]

    assert [line for line in left if '"' not in line] == []


@pytest.mark.slow
def test_each_class_has_a_page_and_is_listed():
    """The page that names a class lists it with its first line; functions stay on that page."""
    names = hook("reference_pages")
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "reference").glob("*.md"))

    found = {path: text for page in pages for _, path, text in names["classes_of"](ROOT / "docs", page)}

    classes = {name for name, value in public().items() if inspect.isclass(value)}
    assert {text.split()[1] for text in found.values()} == classes
    assert found["reference/callbacks/EMACallback.md"].startswith("::: runnerkit.dl.EMACallback\n")
    assert "inherited_members: true" in found["reference/engines/IEngine.md"]
    assert names["summary"]("runnerkit.dl", "EMACallback") == inspect.getdoc(dl.EMACallback).partition("\n")[0]


@pytest.mark.slow
def test_attributes_that_share_a_text_get_a_row_each():
    names = hook("docstrings_as_markdown")
    text = "Args:\n    left, right: both sides\n        of it.\n    depth: of both.\n"

    rows = names["SEVERAL"].sub(names["one_per_row"], text)

    both = "both sides\n        of it.\n"
    assert rows == f"Args:\n    left: {both}    right: {both}    depth: of both.\n"


@pytest.mark.slow
def test_roles_become_links_to_the_facade_that_has_the_class():
    with_links = hook("docstrings_as_markdown")["with_links"]

    text = with_links(
        ":class:`~runnerkit.metrics.AUCMetric`, :class:`~runnerkit.data.Wrapper`, :class:`X`", "runnerkit.dl"
    )

    own, other, sibling = text.split(", ")
    assert own == "[`AUCMetric`][runnerkit.metrics.AUCMetric]"
    assert other == "[`Wrapper`][runnerkit.dl.Wrapper]" and sibling == "[`X`][runnerkit.dl.X]"
    assert with_links(":func:`~a.b.reduce`, :meth:`Runner.train`", "runnerkit.dl") == "`reduce`, `Runner.train`"


@pytest.mark.slow
def test_type_aliases_are_written_out(tmp_path):
    import griffe

    aliases = (
        'T = TypeVar("T")\nMany = T | dict[str, Any]\nMode = Literal["min", "max"]\nModels: TypeAlias = Many[Module]\n'
    )
    (tmp_path / "page.py").write_text(f"{aliases}def f(x: Models, *, y: Mode | None = None) -> list[Many[Mode]]: ...\n")
    extensions = griffe.load_extensions(str(HOOKS / "type_aliases.py"))

    page = griffe.load("page", search_paths=[tmp_path], extensions=extensions)

    mode = "Literal['min', 'max']"
    expected = f"f(x: Module | dict[str, Any], *, y: {mode} | None = None) -> list[{mode} | dict[str, Any]]"
    assert page["f"].signature() == expected


def test_links_to_lists_of_examples_lead_to_the_gallery():
    page_of = hook("links_out_of_docs")["page_of"]

    assert page_of(Path("examples/first_hour/README.md")) == "examples/index.md"
    assert page_of(Path("examples/minimal/gan.py")) == "examples/minimal/gan.md"


def test_links_to_the_repository_keep_their_heading():
    """Without a repository the path is shown."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="data.md"))
    files = SimpleNamespace(get_file_from_path=lambda path: None)
    link = "[results](../benchmarks/RESULTS.md#import), [tests](../tests)"
    linked = hook("links_out_of_docs")["on_page_markdown"]
    where = [SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url=url) for url in ("https://forge.example/a", "")]

    assert [linked(link, page=page, config=each, files=files) for each in where] == [
        "[results](https://forge.example/a/blob/HEAD/benchmarks/RESULTS.md#import), "
        "[tests](https://forge.example/a/tree/HEAD/tests)",
        "results (`benchmarks/RESULTS.md`), `tests`",
    ]


@pytest.mark.slow
def test_each_program_of_the_examples_has_a_page():
    """Modules that programs import have none; a notebook's cells are the page."""
    names = hook("example_pages")
    folder = ROOT / "examples"

    found = {each.path.as_posix(): each for group in names["grouped"](folder).values() for each in group}

    programs = {
        path for path in folder.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    programs |= set(folder.glob("first_hour/*.py"))
    expected = {path.relative_to(folder).as_posix() for path in [*programs, *folder.rglob("*.ipynb")]}
    assert set(found) == expected
    gan = found["minimal/gan.py"]
    assert (gan.title, gan.page) == ("GAN", "examples/minimal/gan.md")
    assert gan.summary.startswith("GAN: two models") and "self.learn(loss" in gan.code and '"""GAN' not in gan.code
    assert "```python\nimport torch" in found["notebooks/quick_start.ipynb"].code
    results = names["results_of"](folder / "minimal" / "README.md")
    assert set(results) == {path.name for path in (folder / "minimal").glob("*.py")}
    assert results["gan.py"].startswith("63.3% of the points")


def test_small_examples_have_figures():
    figures = {path.stem for path in (ROOT / "docs" / "images" / "examples").glob("*.png")}
    without = runpy.run_path(str(ROOT / "scripts" / "example_figures.py"))["WITHOUT"]

    assert figures == {path.stem for path in (ROOT / "examples" / "minimal").glob("*.py")} - without
