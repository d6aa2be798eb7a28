"""Install the core, the extra `demo` and the extra `all` into empty environments, and print what comes with them.

    python scripts/installs.py [EXTRA ...]    with a Python that has the extra `dev`, "core" for none

The wheel is built, checked by twine as PyPI does, and installed with constraints.txt into environments of a temporary
folder. Each row of the table has the number of packages, their size, the verdict of `pip check`, and the modules that
were imported together, those of the extra's requirements. pip resolves before it downloads: if it chooses a torch for
CUDA, which needs gigabytes of libraries, the script ends with an error.
"""

import json
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
HEAD = "| installed | packages | MB | of them torch | `pip check` | imported together |\n|---|---:|---:|---:|---|---|"
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


def row(wheel: Path, extra: str, folder: Path) -> str:
    """Install into a new environment in `folder`; return the row of the table."""
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
    tried = json.loads(run(python, "-P", "-c", TRY, json.dumps(requirements_of(wheel, extra))).splitlines()[-1])
    failed = [f"{module} failed: {error}" for module, error in tried.items() if error]
    num_packages, torch = len(list(site.glob("*.dist-info"))), megabytes(site / "torch")
    imported = f"{len(tried) - len(failed)} of {len(tried)} modules" + "".join(f"; {each}" for each in failed)
    name = f"`runnerkit[{extra}]`" if extra else "`runnerkit`"
    return f"| {name} | {num_packages} | {megabytes(site):,} | {torch:,} | {check.rstrip('.').lower()} | {imported} |"


def main(extras: list[str]) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT)
        [wheel] = (folder / "dist").glob("*.whl")
        print(run(sys.executable, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir()), file=sys.stderr)
        print(HEAD)
        for extra in extras:
            print(row(wheel, "" if extra == "core" else extra, folder / extra), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["core", "demo", "all"])
