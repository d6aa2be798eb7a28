"""`python -m torch.distributed.launch` passes an option to scripts; each example that parses options accepts it."""

import argparse
import importlib
import json
import re

import pytest

from runnerkit import read_metrics
from runnerkit.torchvision_cpu import import_torchvision
from tests.cifar10_layout import write_cifar10
from tests.examples.start import ROOT, start
from tests.free_port import free_port

# As printed in guides, up to the script.
LAUNCH = "python -m torch.distributed.launch --nproc_per_node=2 --master_port={port}"
PARSING = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py") if "ArgumentParser(" in path.read_text()
)
OF_DEV = "examples/finetune_hf.py"  # needs packages of the extra dev


class Parsed(Exception):
    """Raised when the example has parsed its command line."""


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=pytest.mark.slow) if each == OF_DEV else each for each in PARSING]
)
def test_each_example_takes_the_option_in_both_spellings(script, monkeypatch):
    """torch 1 used --local_rank."""
    if script == OF_DEV:
        import_torchvision()  # transformers imports torchvision, which may need the workaround
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_leave(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_leave)

    for option in ("--local-rank=1", "--local_rank=1"):
        with pytest.raises(Parsed):
            module.main([option])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_guides_command_trains_an_example(tmp_path):
    """Two processes train together, and the option is not logged as a hyperparameter."""
    write_cifar10(tmp_path / "data", num_train=81, num_test=41)
    options = ["--width", "0.125", "--batch-size", "20", "--epochs", "1", "--logdir", "logdir"]

    output = start(
        f"{LAUNCH.format(port=free_port())} examples/cifar10/main.py", tmp_path, *options, CUDA_VISIBLE_DEVICES=""
    )

    logdir = tmp_path / "logdir"
    assert output.count("valid accuracy") == 1
    assert json.loads((logdir / "environment.json").read_text())["engine"]["num_processes"] == 2
    assert not re.search("local.rank", (logdir / "hparams.yml").read_text())
    assert not read_metrics(logdir).duplicated(["loader", "epoch", "metric"]).any()
