"""Tests of a wheel built from the sdist and of an editable install, both used from another folder."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from runnerkit.commands.docs_pages import llms_txt
from runnerkit.version import __version__
from tests.layers import modules

ROOT = Path(__file__).parents[1]
USE = (
    "import runnerkit, runnerkit.engines, runnerkit.callbacks.checkpoint, runnerkit.loggers;"
    "import runnerkit.contrib, runnerkit.data;"
    "print(runnerkit.engines.__file__)"
)
DOCS = "from runnerkit.commands.cli import main; main(['docs', 'cli'])"


def run(*command, cwd):
    done = subprocess.run([str(each) for each in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def committed():
    """Return the files that git would commit; links among them are left out."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    return {name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}


def test_links_of_the_repository_stay_within_it():
    """A link to the environment of one checkout replaces that of another one, with its packages, when it is merged."""
    listed = run("git", "ls-files", "--stage", cwd=ROOT).splitlines()
    links = [ROOT / line.split("\t")[1] for line in listed if line.startswith("120000")]

    assert links
    assert [each for each in links if not each.resolve().is_relative_to(ROOT.resolve())] == []


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    """The wheel holds the package with the root folders as sub-packages, no tests or examples, and can be imported.

    `build` makes the wheel from the sdist, which holds all files of the package once, without links.
    """
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    wheel = tmp_path / "dist" / f"runnerkit-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(tmp_path / "dist" / f"runnerkit-{__version__}.tar.gz") as sdist:
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
    assert committed() - {".gitignore"} - sources.keys() == set()
    assert (tmp_path / "site" / "runnerkit" / "llms.txt").read_text(encoding="utf-8") == llms_txt()
    assert run(sys.executable, "-P", "-c", site + DOCS, cwd=tmp_path) == (ROOT / "docs" / "cli.md").read_text().strip()
    assert Path(where).is_relative_to(tmp_path / "site")


@pytest.mark.slow
def test_an_editable_install_works_from_elsewhere(tmp_path):
    """An editable install in a new virtual environment imports the folders of the checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    # use torch, setuptools and the other packages of this environment, so that nothing is downloaded
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    [site_packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed))
    pip = (sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--ignore-installed", "--editable", ROOT, cwd=tmp_path)

    where = run(python, "-P", "-c", USE, cwd=tmp_path)
    version = run(tmp_path / "venv" / "bin" / "runnerkit", "--version", cwd=tmp_path)

    assert Path(where).resolve() == ROOT / "engines" / "__init__.py"
    assert version.startswith("runnerkit 0.")
