"""examples/fsdp_gpt.py trains on a mesh, resumes on another one, and leaves weights that plain torch loads."""

import re

import pytest
import torch
from torch.nn.functional import cross_entropy

from examples import fsdp_gpt
from runnerkit import read_metrics
from tests.examples.start import start

COMMANDS = [line for line in fsdp_gpt.__doc__.splitlines() if "examples/fsdp_gpt.py" in line]
SMALL = ("--depth", 1)


@pytest.mark.slow
def test_the_documented_commands_run(tmp_path):
    """The second resumes the run of the first, in other processes; the merged weights give the logged loss."""
    first, second = COMMANDS
    start(first, tmp_path, *SMALL, "--steps", 20, OMP_NUM_THREADS="1")
    output = start(second, tmp_path, *SMALL, "--steps", 40, "--tensor-parallel", 4, OMP_NUM_THREADS="1")

    logdir = tmp_path / "logs" / "fsdp_gpt"
    metrics = read_metrics(logdir)
    losses = metrics[(metrics.loader == "valid") & (metrics.metric == "loss")].value
    model = fsdp_gpt.GPT(64, 1)
    model.load_state_dict(torch.load(logdir / "whole.pth", weights_only=True)["model_state_dict"])
    unseen = fsdp_gpt.texts(train=False)
    with torch.no_grad():
        found = float(cross_entropy(model(unseen[:, :-1]).flatten(0, 1), unseen[:, 1:].flatten()))
    assert losses.iloc[-1] == pytest.approx(found, rel=1e-4) and losses.iloc[-1] < losses.iloc[0]
    assert float(re.search(r"([\d.]+) nats", output)[1]) == pytest.approx(found, abs=0.01)
