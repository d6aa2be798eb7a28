"""Training from a notebook: a cell starts the processes, which receive classes defined in cells."""

import nbformat
import pytest
import torch

from tests.launchers.docs import commands
from tests.tiny import mlp, weights

DEFINITIONS = """
import torch
from torch import nn
from runnerkit import dl
from tests.tiny import loader, mlp, train

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, features):
        return self.layers(features)

class Counter(dl.Callback):
    def on_batch_end(self, runner):
        runner.num_seen = getattr(runner, "num_seen", 0) + runner.batch_size
"""
TRAINING = """
model = Net()
loaders = {"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}
runner = train(model, num_epochs=2, callbacks=[Counter()], loaders=loaders, ddp=True, cpu=True)
torch.save(model.layers.state_dict(), "weights.pth")
runner.engine.num_processes, runner.num_seen
"""
SHOWN = "runner"
FAILURE = """
class Refuses(dl.Callback):
    def on_loader_start(self, runner):
        raise ArithmeticError(f"rank {runner.engine.rank} refuses")

try:
    train(model, callbacks=[Refuses()], ddp=True, cpu=True)
except ArithmeticError as error:
    print(type(error.__cause__).__name__)
"""


@pytest.mark.slow
def test_a_notebook_trains_in_several_processes(jobs, expected):
    """Model and callback classes are defined in a cell; weights, attributes, metrics and exceptions are sent back."""
    path = jobs.folder / "train.ipynb"
    cells = [nbformat.v4.new_code_cell(text) for text in (DEFINITIONS, TRAINING, SHOWN, FAILURE)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    [command] = commands("A notebook")

    job = jobs.start(command, variables={"IPYTHONDIR": str(jobs.folder), "JUPYTER_RUNTIME_DIR": str(jobs.folder)})

    assert job.wait(120) == 0, job.output
    executed = nbformat.read(path, as_version=4)
    [result], [shown], [printed] = (cell.outputs for cell in executed.cells[1:])
    assert result["data"]["text/plain"] == "(2, 86)"  # 2 epochs of 32 samples here (of 64) and 11 (of 21)
    assert "finished in epoch 2" in shown["data"]["text/html"] and "2 processes" in shown["data"]["text/html"]
    assert printed["text"] == "RankTraceback\n"
    model = mlp()
    model.load_state_dict(torch.load(jobs.folder / "weights.pth", weights_only=True))
    torch.testing.assert_close(weights(model), expected(2), rtol=0, atol=1e-6)
