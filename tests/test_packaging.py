"""Tests of the sdist, of the wheel built from it, and of an editable install, all used from another folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from runnerkit.commands.docs_pages import llms_txt
from runnerkit.version import __version__
from tests.checkout import ROOT, committed, copy_of_checkout
from tests.layers import modules

USE = (
    "import runnerkit, runnerkit.engines, runnerkit.callbacks.checkpoint, runnerkit.loggers;"
    "import runnerkit.contrib, runnerkit.data;"
    "print(runnerkit.engines.__file__)"
)
DOCS = "from runnerkit.commands.cli import main; main(['docs', 'cli'])"


NOT_IN_SDIST = {".gitignore"}


def run(*command, cwd, **variables):
    command, environment = [str(each) for each in command], {**os.environ, **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build the sdist, and the wheel from it; return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    checkout = copy_of_checkout(tmp_path_factory.mktemp("checkout"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, checkout, cwd=folder)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(dist, tmp_path):
    """The wheel holds the package with the root folders as sub-packages, no tests or examples, and can be imported.

    `build` makes the wheel from the sdist, which holds all files of the package once, without links.
    """
    wheel = dist / f"runnerkit-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(dist / f"runnerkit-{__version__}.tar.gz") as sdist:
        sources = {each.name.split("/", 1)[-1]: each for each in sdist}
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    site = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r});"

    where = run(sys.executable, "-P", "-c", site + USE, cwd=tmp_path)

    sources_of_modules = [path for _, path in modules(ROOT)]
    stubs = [path.with_suffix(".pyi") for path in sources_of_modules if path.with_suffix(".pyi").exists()]
    checkout = [path.relative_to(ROOT) for path in (*sources_of_modules, *stubs)]
    expected = {path if path.parts[0] == "runnerkit" else "runnerkit" / path for path in checkout}
    data = {"runnerkit/py.typed", "runnerkit/commands/output.schema.json", "runnerkit/llms.txt"}
    data |= {f"runnerkit/history/{name}.html" for name in ("comparison", "page", "parts", "report")}
    data |= {f"runnerkit/{page.relative_to(ROOT).as_posix()}" for page in (ROOT / "docs").rglob("*.md")}
    assert {path.as_posix() for path in expected} | data == {name for name in names if ".dist-info" not in name}
    assert {"engines/ddp.py", "LICENSE", "CHANGELOG.md", "constraints.txt"} <= sources.keys()
    assert not any(each.issym() or each.islnk() for each in sources.values())
    copies = "runnerkit/engines", "runnerkit/callbacks", "runnerkit/docs"
    assert [name for name in sources if name.startswith(copies)] == []
    files = {name for name in committed() if not (ROOT / name).is_symlink()}
    assert files - NOT_IN_SDIST - sources.keys() == set()
    assert (tmp_path / "site" / "runnerkit" / "llms.txt").read_text(encoding="utf-8") == llms_txt()
    assert run(sys.executable, "-P", "-c", site + DOCS, cwd=tmp_path) == (ROOT / "docs" / "cli.md").read_text().strip()
    assert Path(where).is_relative_to(tmp_path / "site")


def editable_install(source, folder):
    """Install `source` into a new virtual environment in `folder`; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    # use torch, setuptools and the other packages of this environment, so that nothing is downloaded
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    [site_packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed))
    pip = (sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--ignore-installed", "--editable", source, cwd=folder)
    return python


@pytest.mark.slow
def test_an_editable_install_works_from_elsewhere(tmp_path):
    """An editable install in a new virtual environment imports the folders of the checkout."""
    checkout = copy_of_checkout(tmp_path / "checkout")
    python = editable_install(checkout, tmp_path)

    where = run(python, "-P", "-c", USE, cwd=tmp_path, PYTHONPATH="")
    version = run(tmp_path / "venv" / "bin" / "runnerkit", "--version", cwd=tmp_path, PYTHONPATH="")

    assert Path(where).resolve() == checkout / "engines" / "__init__.py"
    assert version.startswith("runnerkit 0.")


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Return a repository of this checkout, whose changelog has a section of its version, and where it was built."""
    folder = copy_of_checkout(tmp_path_factory.mktemp("release") / "checkout")
    changelog = folder / "CHANGELOG.md"
    heads = f"## [Unreleased]\n\n## [{__version__}] - 2026-12-31\n"
    changelog.write_text(changelog.read_text(encoding="utf-8").replace("## [Unreleased]\n", heads), encoding="utf-8")
    git = ("git", "-c", "user.name=nobody", "-c", "user.email=nobody@example.com", "-c", "commit.gpgsign=false")
    for arguments in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "all")):
        run(*git, *arguments, cwd=folder)
    return folder


def build_release(release, tag):
    command = [str(release / "scripts" / "build_release.sh"), sys.executable, "https://forge.example/owner/name", tag]
    return subprocess.run(command, cwd=release, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_release_is_built_as_pypi_accepts_it(release):
    """Both files pass PyPI's checks, name the repository, and leave the checkout unchanged."""
    pytest.importorskip("twine")

    done = build_release(release, f"v{__version__}")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    assert run("git", "status", "--short", cwd=release) == ""
    [wheel], [sdist] = (release / "dist").glob("*.whl"), (release / "dist").glob("*.tar.gz")
    [info] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    metadata = zipfile.ZipFile(wheel).read(info).decode()
    with tarfile.open(sdist) as archive:
        [info] = [each for each in archive if each.name.count("/") == 1 and each.name.endswith("/PKG-INFO")]
        assert archive.extractfile(info).read().decode() == metadata
    assert "Project-URL: Homepage, https://forge.example/owner/name\n" in metadata
    assert "\nAuthor: The runnerkit authors\n" in metadata
    assert f"(https://forge.example/owner/name/blob/v{__version__}/docs/index.md)" in metadata


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["v9.9.9", "0.1.0"])
def test_a_tag_of_another_version_is_not_built(release, tag):
    done = build_release(release, tag)

    assert done.returncode == 1 and f"the tag is {tag}, but runnerkit/version.py has {__version__}" in done.stderr


@pytest.mark.slow
def test_a_version_without_a_section_of_the_changelog_is_not_built(release, tmp_path):
    copy = shutil.copytree(release, tmp_path / "copy", symlinks=True)
    (copy / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")

    done = build_release(copy, f"v{__version__}")

    assert done.returncode == 1 and f"CHANGELOG.md lacks a section [{__version__}]" in done.stderr


@pytest.mark.slow
def test_the_tests_run_in_an_unpacked_sdist(dist, tmp_path):
    """It lacks the repository and the links; the editable install, as of `make`, finds the folders at its root."""
    shutil.unpack_archive(dist / f"runnerkit-{__version__}.tar.gz", tmp_path, filter="data")
    source = tmp_path / f"runnerkit-{__version__}"
    python = editable_install(source, tmp_path)

    tests = ("tests/test_publishing.py", "tests/test_layers.py", "tests/test_rows.py", "tests/callbacks/test_timer.py")
    printed = run(python, "-m", "pytest", "-q", "-m", "not slow", *tests, cwd=source, PYTHONPATH="")
    where = run(python, "-P", "-c", USE, cwd=tmp_path, PYTHONPATH="")

    assert " passed" in printed
    assert Path(where).resolve() == source / "engines" / "__init__.py"
