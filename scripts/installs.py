"""Install the core and the extras `demo` and `all` into empty environments, and write what comes with them to a page.

    python scripts/installs.py                with a Python that has the extra `dev`; writes a table to docs/versions.md
    python scripts/installs.py EXTRA ...      prints the rows of these extras only, "core" for none

The wheel is built, checked by twine as PyPI does, and installed with constraints.txt into environments of a temporary
folder. Each row of the table has the requirements, the number of packages, their size, the verdict of `pip check`, and
the modules that were imported together, those of the requirements. pip resolves before it downloads: if it chooses a
torch for CUDA, which needs gigabytes of libraries, the script ends with an error.
"""

import datetime
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OF_CUDA = re.compile(r"(cuda-|nvidia-(?!ml-py$)|triton$)")
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- installs: written by python scripts/installs.py -->\n", "<!-- end of installs -->\n"
HEAD = """\
| installed | requires | packages | MB | of them torch | `pip check` | imported together |
|---|---|---:|---:|---:|---|---|"""
TRY = """
import importlib, json, re, sys
from importlib.metadata import packages_distributions

wanted, result = set(json.loads(sys.argv[1])), {}
for module, owners in packages_distributions().items():
    if module.isidentifier() and module[0] != "_" and wanted & {re.sub("[-_.]+", "-", each).lower() for each in owners}:
        try:
            importlib.import_module(module)
            result[module] = ""
        except Exception as error:
            result[module] = f"{type(error).__name__}: {error}"
from runnerkit import contrib, dl, metrics, utils
for facade in (contrib, dl, metrics, utils):
    for name in facade.__all__:
        getattr(facade, name)
print(json.dumps(result))
"""


def run(*command: object) -> str:
    """Run a command and return its standard output; end the script with what it printed if it fails."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def requirements_of(wheel: Path, extra: str) -> list[str]:
    """Return the names of the packages that a wheel with an extra requires itself, "" for none."""
    with ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    requirements = [Requirement(line) for line in lines]
    return [
        canonicalize_name(each.name)
        for each in requirements
        if each.marker is None or each.marker.evaluate({"extra": extra})
    ]


def packages_of_cuda(names: Iterable[str]) -> list[str]:
    """Return the packages that belong to a torch for CUDA; nvidia-ml-py only reads the state of GPUs.

    >>> packages_of_cuda(["torch", "nvidia-ml-py", "nvidia-cublas", "cuda-toolkit", "triton"])
    ['nvidia-cublas', 'cuda-toolkit', 'triton']
    """
    return [name for name in names if OF_CUDA.match(canonicalize_name(name))]


def megabytes(folder: Path) -> int:
    """Return the size of the files in a folder, without byte code."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return round(sum(path.stat().st_size for path in files) / 1e6)


def version_of_torch(site: Path) -> str:
    """Return the version of the torch in a folder of packages."""
    [info] = site.glob("torch-*.dist-info")
    return info.name.removeprefix("torch-").removesuffix(".dist-info")


def row(wheel: Path, extra: str, folder: Path) -> tuple[str, str]:
    """Install into a new environment in `folder`; return the row of the table and the version of torch."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    target = [*PIP, "--python", python]
    what = ["--constraint", ROOT / "constraints.txt", f"{wheel}[{extra}]" if extra else wheel]
    plan = json.loads(run(*target, "install", "--quiet", "--dry-run", "--report", "-", *what))
    if found := packages_of_cuda(each["metadata"]["name"] for each in plan["install"]):
        sys.exit(f"pip would install {', '.join(found)}: name an index with builds of torch for the CPU")
    run(*target, "install", "--quiet", *what)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    check = subprocess.run([*target, "check"], capture_output=True, text=True, check=False).stdout.strip()
    required, core = requirements_of(wheel, extra), requirements_of(wheel, "")
    tried = json.loads(run(python, "-P", "-c", TRY, json.dumps(required)).splitlines()[-1])
    failed = [f"{module} failed: {error}" for module, error in tried.items() if error]
    num_packages, torch = len(list(site.glob("*.dist-info"))), megabytes(site / "torch")
    imported = f"{len(tried) - len(failed)} of {len(tried)} modules" + "".join(f"; {each}" for each in failed)
    name = f"`runnerkit[{extra}]`" if extra else "`runnerkit`"
    added = ", ".join(sorted({*required} - {*core})) if extra else ", ".join(core)
    requires = f"the core, {added}" if extra else added
    cells = [name, requires, num_packages, f"{megabytes(site):,}", f"{torch:,}", check.rstrip(".").lower(), imported]
    return f"| {' | '.join(map(str, cells))} |", version_of_torch(site)


def with_table(page: str, table: str) -> str:
    """Return the text of a page with another table of installs.

    >>> with_table(f"# Versions\\n{BEGIN}old\\n{END}more", "new") == f"# Versions\\n{BEGIN}new\\n{END}more"
    True
    """
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table}\n{END}{rest.split(END)[1]}"


def main(extras: list[str]) -> None:
    """Print the table; write it to the page if no extras are named."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT)
        [wheel] = (folder / "dist").glob("*.whl")
        print(run(sys.executable, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir()), file=sys.stderr)
        lines, torches = [HEAD], set[str]()
        print(HEAD)
        for extra in extras or ("core", "demo", "all"):
            line, torch = row(wheel, "" if extra == "core" else extra, folder / extra)
            print(line, flush=True)
            lines.append(line)
            torches.add(torch)
    where = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines += ["", f"{datetime.date.today()}, torch {', '.join(torches)}, {where}."]
    print("\n".join(lines[-2:]))
    if not extras:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
