"""The recipes of CONTRIBUTING.md, followed in a copy of the checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT, copy_of_checkout

RECIPE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
USE = """
import os
from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import SGD
from runnerkit import dl
from tests.tiny import loader, mlp, sgd

model, logger = mlp(), dl.InMemoryLogger()
runner = dl.SupervisedRunner(output_key="logits").train(
    model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), engine=dl.QuietEngine("cpu"),
    loaders={"train": loader(10, 4)}, loggers={"console": None, "memory": logger},
    callbacks=[
        dl.LargestBatchCallback(), dl.MeanAbsoluteErrorCallback("logits", "logits"),
        dl.MirroredCheckpointCallback("logs", content="runner", every_steps=1),
    ],
)
[(epoch, key, metrics)] = logger.rows
assert (epoch, key, metrics["largest_batch"], metrics["mae"]) == (1, "train", 4, 0), logger.rows
names = ["model.0001.00000001.pth", "model.0001.00000002.pth", "model.0001.00000003.pth", "model.0001.pth"]
assert sorted(path.name for path in Path("logs/mirror").iterdir()) == names

job = dl.BackgroundEngine(2, device="cpu")
assert job.launch(partial(os.nice, 0)) == os.nice(0) + 10
runner = dl.SupervisedRunner().train(
    model=mlp(), criterion=nn.CrossEntropyLoss(), loaders={"train": loader(10, 4), "valid": loader(10, 4)},
    optimizer=partial(SGD, lr=0.1), engine=job, loggers={"console": None}, callbacks=[dl.LargestBatchCallback()],
)
assert runner.epoch_metrics["valid"]["largest_batch"] == 4
"""


@pytest.mark.slow
@pytest.mark.cold
def test_the_recipes_add_callbacks_a_metric_an_engine_a_logger_and_a_storage(tmp_path):
    """Each takes its file and a line in the reference; the stubs are written, and the parts work."""
    copy = copy_of_checkout(tmp_path / "checkout")
    recipes = RECIPE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], cwd=copy, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(copy)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    folders = [Path(name).parts[0] for name, _ in recipes]
    assert folders == ["callbacks", "callbacks", "engines", "engines", "loggers", "callbacks"]
    for name, text in recipes:
        assert not (copy / name).exists()
        (copy / name).write_text(text, encoding="utf-8")
        with (copy / "docs" / "reference" / f"{Path(name).parts[0]}.md").open("a", encoding="utf-8") as page:
            [part] = re.findall(r'^__all__ = \["(\w+)"\]', text, flags=re.MULTILINE)
            page.write(f"\n::: runnerkit.dl.{part}\n")
    run("scripts/public_names.py")

    run("-W", "error:.*:FutureWarning", "-c", USE)
    run(
        "-m",
        "pytest",
        "-q",
        "--doctest-modules",
        *(f"runnerkit/{name}" for name, _ in recipes),
        "tests/engines/test_by_name.py",
    )
    run("-m", "ruff", "check", *(name for name, _ in recipes))
    run("-m", "ruff", "format", "--check", *(name for name, _ in recipes))
