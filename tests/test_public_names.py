"""The public names: complete, sorted, and cheap to import."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runnerkit import dl

ROOT = Path(__file__).parents[1]
PARTS = ("callbacks", "contrib", "data", "metrics", "dl", "engines", "loggers", "utils")
PACKAGES = ["runnerkit", *(f"runnerkit.{part}" for part in PARTS)]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_exist_once_and_in_order(package):
    """__all__ is sorted, and each of its names is unique and exists."""
    module = importlib.import_module(package)

    assert module.__all__ == sorted(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_facades_define_nothing(package):
    """Facades only collect names."""
    module = importlib.import_module(package)

    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == package]
    assert own == []


@pytest.mark.parametrize("package", ["runnerkit.callbacks", "runnerkit.data", "runnerkit.engines", "runnerkit.loggers"])
def test_dl_has_every_public_name_of_the_side_packages(package):
    """One import line is enough for a script, also for names that `dl` does not list."""
    module = importlib.import_module(package)

    assert [name for name in module.__all__ if getattr(dl, name, None) is not getattr(module, name)] == []


@pytest.mark.parametrize("package", ["runnerkit.callbacks", "runnerkit.engines", "runnerkit.loggers"])
def test_every_public_class_is_exported(package):
    """A class of a side package without a leading underscore is exported or an abstract base."""
    module = importlib.import_module(package)
    defined = set()
    for path in Path(module.__file__).parent.glob("*.py"):
        if path.stem != "__init__":
            each = importlib.import_module(f"{package}.{path.stem}")
            defined |= {
                name
                for name, value in vars(each).items()
                if inspect.isclass(value) and value.__module__ == each.__name__ and _is_final_part(value)
            }

    assert {name for name in defined if not name.startswith("_")} - set(module.__all__) == set()


def _is_final_part(value):
    contracts = (dl.ICallback, dl.IEngine, dl.ILogger)
    return issubclass(value, contracts) and not inspect.isabstract(value)


@pytest.mark.parametrize("folder", ["engines", "callbacks", "loggers"])
def test_a_folder_imported_by_its_own_name_says_so(folder):
    """`import engines` raises, because it would create a second copy of the package."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert f"runnerkit.{folder}" in done.stderr.splitlines()[-1]


STATEMENTS = {
    "package": "import runnerkit",
    "torch": "import torch",
    "part": "runnerkit.engines.CPUEngine",
    "side packages": "import runnerkit.callbacks, runnerkit.loggers",
    "dl": "from runnerkit import dl; dir(dl)",
    "late names": "from runnerkit.dl import ConfusionMatrixCallback, MLflowLogger",
    "everything": "from runnerkit import *; from runnerkit.dl import *; import runnerkit.utils, runnerkit.contrib",
}


@pytest.fixture(scope="module")
def loaded():
    """Return the modules loaded after each statement, run in turn in a new interpreter: {name: set of modules}."""
    lines = [f"{line}; loaded[{name!r}] = sorted(sys.modules)" for name, line in STATEMENTS.items()]
    code = "\n".join(["import json, sys", "loaded = {}", *lines, "print(json.dumps(loaded))"])
    return {name: set(modules) for name, modules in json.loads(printed_by(code)).items()}


def printed_by(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users' installs are compiled
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout


@pytest.mark.cold
def test_the_package_imports_what_it_is_asked_for(loaded):
    """`import runnerkit` does not load torch; sub-packages are loaded on first access."""
    assert "torch" not in loaded["package"]
    assert "runnerkit.engines" in loaded["part"] - loaded["torch"]


@pytest.mark.cold
def test_dl_brings_what_few_ask_for_when_they_do(loaded):
    """Rarely used modules are loaded on first access, yet all names are available."""
    late = {"runnerkit.callbacks.metrics.confusion_matrix", "runnerkit.loggers.services.mlflow"}

    assert parts(loaded["dl"]) == parts(loaded["side packages"])
    assert late <= loaded["late names"] - loaded["dl"]
    assert dl.ConfusionMatrixCallback is vars(dl)["ConfusionMatrixCallback"]
    with pytest.raises(AttributeError, match=r"module .runnerkit\.dl. does not have the attribute .ConfusionMatrix.$"):
        dl.ConfusionMatrix  # noqa: B018


def parts(modules):
    return {name for name in modules if name.startswith(("runnerkit.callbacks.", "runnerkit.loggers."))}


@pytest.mark.cold
def test_importing_the_package_loads_no_optional_package(loaded):
    """`import runnerkit` does not load an optional package, unless torch itself does."""
    costly = ("torchmetrics", "pandas", "matplotlib", "tensorboard", "torchvision", "sklearn", "PIL", "rich")
    costly += ("typer", "hydra", "omegaconf", "pydantic", "optuna", "mlflow", "wandb", "comet_ml")

    extra = loaded["everything"] - loaded["torch"]

    assert [name for name in extra if name.split(".")[0] in costly] == []
    assert not extra & {"torch._dynamo", "torch.distributed.optim", "torch.utils.tensorboard"}


@pytest.mark.slow
@pytest.mark.cold
def test_the_cost_of_the_import_is_printed(capsys):
    """The cost is a ratio of CPU times in one process."""
    code = (
        "import time; begin = time.process_time(); import torch; torch_s = time.process_time() - begin;"
        "begin = time.process_time(); from runnerkit import *; print(torch_s, time.process_time() - begin)"
    )

    printed_by(code)  # compiles and reads the files
    torch_s, added_s = map(float, printed_by(code).split())

    with capsys.disabled():
        print(
            f"\nimport runnerkit adds {added_s / torch_s:.1%} of the CPU time of import torch ({added_s * 1000:.0f} ms)"
        )
    assert added_s < torch_s, "it must be a small part; a limit in ms would judge the machine"
