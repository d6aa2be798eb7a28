"""Tests of the docs: code blocks run, links are valid, the reference is complete, and the site builds."""

import ast
import enum
import functools
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import runnerkit
from runnerkit import contrib, dl, metrics, utils
from runnerkit.callback import EVENTS
from runnerkit.support.stub_names import imports_of_stub
from runnerkit.torchvision_cpu import import_torchvision
from tests.fashion_mnist_layout import write_fashion_mnist
from tests.layers import modules
from tests.only_these import hide

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def name_of(page):
    return str(page.relative_to(ROOT))


def needs(page, package):
    """Return whether the page's code imports the package."""
    return any(re.search(rf"^(import|from) {package}\b", block, flags=re.MULTILINE) for block in blocks(page, "python"))


def names_extra_vision(page):
    return re.search(r"runnerkit\[[\w,]*\bvision\b", page.read_text(encoding="utf-8")) is not None


def marks_of(page):
    """Return the mark of a page that needs transformers, which only the extra dev installs."""
    return [pytest.mark.slow] if needs(page, "transformers") else []


RUNNABLE = [pytest.param(page, marks=marks_of(page), id=name_of(page)) for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", RUNNABLE)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """The Python blocks of each page run in order, in one namespace and an empty folder, with Fashion-MNIST in data.

    They need what `runnerkit[all]` installs: a page that needs torchvision names the extra `vision`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNERKIT_STAGING", str(tmp_path / "staging"))  # the usual one is that of all runs of the user
    namespace = {"__name__": "__main__"}
    if any(needs(page, package) for package in ("torchvision", "transformers")):
        import_torchvision()  # transformers imports it where it is installed
    elif not names_extra_vision(page):
        hide(monkeypatch, "torchvision")
    if needs(page, "torchvision"):
        assert names_extra_vision(page)
        write_fashion_mnist("data", num_train=96, num_test=48)

    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def without_blocks(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Return heading anchors that are equal on the site and GitHub; they differ if punctuation leaves two spaces."""
    headings = [heading.lower() for heading in re.findall(r"^#+ (.+)$", without_blocks(page), flags=re.MULTILINE)]
    words = [re.sub(r"[^\w\s-]", "", heading).strip() for heading in headings]
    return {re.sub(r"[\s-]+", "-", each) for each in words} & {each.replace(" ", "-") for each in words}


def leads_nowhere(page, path, anchor):
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_links_and_commands_exist(page):
    """Linked files and headings, `make` targets and example scripts exist."""
    text = page.read_text(encoding="utf-8")
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    # ../../actions of the README is a page of the repository, not a file
    links = re.findall(r"\]\((?!https?:|\.\./\.\./actions/)([^)#\s]*)#?([^)\s]*)\)", without_blocks(page))
    assert [link for link in links if leads_nowhere(page, *link)] == []
    commands = "\n".join(blocks(page, "bash") + blocks(page, "sh") + re.findall(r"`(make [a-z-]+)`", text))
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= rules
    assert [path for path in re.findall(r"(?<!tests/)\bexamples/[\w/]+\.py", text) if not (ROOT / path).exists()] == []


def test_the_tests_of_each_failure_exist():
    """The last column of the tables of reliability.md has parts of names of tests."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(
        r"`([a-z]+(?:_[a-z]+){2,})`", "\n".join(re.findall(r"^\|.*\| ([^|]*`[^|]*) \|$", page, re.MULTILINE))
    )
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests = re.findall(r"^def (test_\w+)", "\n".join(sources), flags=re.MULTILINE)

    assert len(named) > 30
    assert [name for name in named if not any(name in test for test in tests)] == []


@functools.cache
def defined_in(path):
    """Return the names of functions, classes, variables and attributes that a file defines or sets."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    stored = [each for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)]
    return names | {each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in stored}


def unknown_names(page):
    """Yield what the items, table rows and paragraphs of a page put in backquotes, but none of their files defines."""
    anywhere = set.union(*(defined_in(path) for _, path in modules(ROOT)), set(EVENTS))
    for item in re.split(r"\n\n|\n(?=\d+\. |\| )", page.read_text(encoding="utf-8")):
        files = [ROOT / name for name in re.findall(r"`(\w+/[\w/]+\.py)`", item)]
        yield from (name_of(path) for path in files if not path.exists())
        known = set(EVENTS).union(*(defined_in(path) for path in files if path.exists())) if files else anywhere
        for names in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", item):
            yield from (f"{names} in {item[:60]!r}" for name in names.split(".") if name not in known)


def test_files_and_names_of_the_architecture_exist():
    """Each file exists, and each name is defined in a file of the same row, step or paragraph; in the picture too."""
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    drawn = set(re.findall(r'<text class="code"[^>]*>(\w+)</text>', picture))

    assert list(unknown_names(ROOT / "docs" / "architecture.md")) == []
    assert drawn and drawn <= set.union(*(defined_in(path) for _, path in modules(ROOT)))


def names_in(module):
    """Return the names of a facade, also those that `dl` does not list."""
    return dict(imports_of_stub("runnerkit.dl")) if module is dl else module.__all__


@functools.cache
def public():
    """Return the public objects by their names in the reference."""
    facades = {"runnerkit": runnerkit, "runnerkit.dl": dl, "runnerkit.utils": utils, "runnerkit.contrib": contrib}
    facades["runnerkit.metrics"] = metrics
    names = {
        f"{facade}.{name}": getattr(module, name) for facade, module in facades.items() for name in names_in(module)
    }
    twice = {f"runnerkit.{name}" for name in names_in(dl)} | {"runnerkit.utils.get_available_engine"}
    aliases = {name for name, value in names.items() if not name.endswith(getattr(value, "__name__", name))}
    return {name: value for name, value in names.items() if name not in {*twice, *aliases, "runnerkit.__version__"}}


def test_every_public_name_is_in_the_reference_once():
    """Every public name appears exactly once in docs/reference."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))

    assert Counter(re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)) == Counter(list(public()))


def described(value):
    """Join the docstrings of a class or function, its bases and the classes they refer to by :class:`X` or "X's"."""
    seen, text, left = set(), "", [value]
    while left:
        seen.add(each := left.pop())
        owners = [base for base in getattr(each, "__mro__", [each]) if base.__module__.startswith("runnerkit.")]
        doc = "\n".join(inspect.getdoc(owner) or "" for owner in owners)
        names = re.findall(r"(\w+)(?:`|'s\b)", doc)
        others = {getattr(facade, name) for facade in (dl, metrics) for name in names if name in names_in(facade)}
        text, left = text + doc, [*left, *(others - seen)]
    return text


@pytest.mark.parametrize("name", sorted(public()))
def test_every_parameter_of_a_public_name_is_described(name):
    """Every parameter of a public name occurs in a docstring."""
    value = public()[name]
    if inspect.isclass(value) and issubclass(value, (enum.Enum, Exception)):
        return  # users do not call these

    parameters = inspect.signature(value).parameters.values()
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]

    text = described(value)
    assert [each for each in names if not re.search(rf"\b{each}\b", text)] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, where a warning is an error, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_name_and_needs_no_network(site):
    """The site loads no external resources, has an anchor for each public name and contains loop.svg."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    everything = "\n".join(pages.values())

    elsewhere = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]+>", everything)
    styles = "\n".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert elsewhere == re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)", styles) == []
    assert {name for name in public() if f'id="{name}"' not in everything} == set()
    assert 'src="loop.svg"' in pages[site / "loop.html"] and (site / "loop.svg").is_file()
    reference = "\n".join(text for path, text in pages.items() if "reference" in path.relative_to(site).parts)
    assert "&gt;&gt;&gt;" in reference and "<blockquote>" not in reference and ":class:" not in reference
    assert re.findall(r"<code>~[^<]*", reference) == []


def parameters_of(html):
    """Return the names in the lists of a page of the reference, one for each row."""
    return re.findall(r"<li class=\"doc-section-item[^>]*>\s*<b>\s*<code>(?:<[^>]+>)*(\w+)", html)


@pytest.mark.slow
def test_each_class_is_a_page_with_a_row_for_each_attribute(site):
    """Pages stay small; types of runnerkit and torch are links."""
    pages = {path.relative_to(site / "reference"): path for path in (site / "reference").rglob("*.html")}
    large = {name: path.stat().st_size for name, path in pages.items() if path.stat().st_size > 200_000}
    of_classes = {path.stem for path in pages if path.parent != Path()}

    assert large == {}
    assert of_classes == {name.rpartition(".")[2] for name, value in public().items() if inspect.isclass(value)}
    runner = (site / "reference" / "runner" / "IRunner.html").read_text(encoding="utf-8")
    assert {"model", "criterion", "optimizer", "scheduler", "sample_step"} <= set(parameters_of(runner))
    assert 'href="../engines/IEngine.html#' in runner and "Interval" not in runner
    assert "generated/torch.nn.Module.html" in (site / "reference" / "engines" / "IEngine.html").read_text("utf-8")
    saver = (site / "reference" / "callbacks" / "CheckpointCallback.html").read_text(encoding="utf-8")
    assert "runnerkit.dl.<wbr>CheckpointCallback" in saver and "exceptions.html#ValueError" in saver
    assert "runnerkit.monitor.Mode" not in saver


@pytest.mark.slow
def test_pages_have_version_themes_permalinks_and_neighbors(site):
    page = (site / "exactness.html").read_text(encoding="utf-8")

    assert f"runnerkit {runnerkit.__version__}" in page
    assert page.count("data-md-color-scheme=") >= 3 and 'class="headerlink"' in page and "content.code.copy" in page
    assert 'class="md-footer__link md-footer__link--prev"' in page
    assert 'class="md-footer__link md-footer__link--next"' in page
    example = (site / "examples" / "minimal" / "gan.html").read_text(encoding="utf-8")
    assert 'src="../../images/examples/gan.png"' in example and "63.3% of the points" in example
    assert 'href="minimal/gan.html"' in (site / "examples" / "index.html").read_text(encoding="utf-8")
