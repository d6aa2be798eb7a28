"""Progress bars and the dashboard on a real terminal, in a notebook, and in a log file."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.callbacks.terminal import ROOT, run_in_terminal

SCRIPT = """
import json, sys
from torch import nn
from runnerkit import dl
from runnerkit.callbacks.monitor import progress
from tests.tiny import loader, mlp, sgd

class DrawAlways(dl.Callback):
    def on_stage_start(self, runner):  # runs in the process that draws
        progress.REFRESH_S = 0.0

SHOWN_BY = {"rich": dl.RichDashboardCallback, "bars": dl.TqdmCallback}

def train():
    model = mlp()
    return dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model, lr=0.125), num_epochs=3,
        loaders={"train": loader(32, 8, shuffle=True), "valid": loader(21, 8)},
        callbacks=[each() for name, each in SHOWN_BY.items() if name in sys.argv] + [DrawAlways()],
        verbose=True, cpu=True, ddp="ddp" in sys.argv,
    )

if __name__ == "__main__":
    print(json.dumps(train().epoch_metrics))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def tables(lines):
    """Return the header lines of the model's table and of the run's table."""
    return [line for line in lines if line.startswith(("layer  type", "loader  metric"))]


def test_terminal_has_one_bar_of_epochs_and_one_of_each_loader(script):
    """Two processes show one set of bars, and the epoch bar, lines and tables remain at the end."""
    shown = run_in_terminal(script, "ddp")

    for epoch in (1, 2, 3):
        for loader in ("train", "valid"):
            drawn = re.findall(rf"{epoch}/3 \* Epoch \({loader}\): +\d+%\S* (\d)/2 ([^\r\n\x1b]*)", shown.text)
            counts = [int(count) for count, _ in drawn]
            assert counts == sorted(counts) and counts[-1] == 2, "two bars alternate"
            assert "loss=" in drawn[-1][1] and ("lr=0.125" in drawn[-1][1]) == (loader == "train")
    assert [line for line in shown.screen if "Epoch (" in line] == []
    [epochs] = [line for line in shown.screen if line.startswith("Epochs:")]
    assert re.match(r"Epochs: 100%.* 3/3 \[", epochs)
    metrics = json.loads(shown.screen[-1])
    assert f"epoch  3  valid | loss {metrics['valid']['loss']:.4g}" in shown.screen
    assert len(tables(shown.screen)) == 2


def test_dashboard_shows_the_last_metrics_of_each_loader(script):
    """Three bars and a table remain, without tqdm's bars, and printed lines are above them."""
    shown = run_in_terminal(script, "rich")

    metrics = json.loads(shown.screen[-1])
    for name, num in (("epochs", 3), ("train", 4), ("valid", 3)):
        [line] = [line for line in shown.screen if line.startswith(f"{name} ") and "━" in line]
        assert "100%" in line and line.endswith(f"{num}/{num}")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.screen if line.startswith("│")]
    assert ["loss", f"{metrics['train']['loss']:.4g}", f"{metrics['valid']['loss']:.4g}"] in cells
    assert ["lr", "0.125", ""] in cells
    assert "Epoch (" not in shown.text
    above = shown.screen[: next(number for number, line in enumerate(shown.screen) if line.startswith("epochs"))]
    assert len([line for line in above if re.match(r"epoch  \d  (train|valid) \| loss", line)]) == 6


def test_log_file_has_lines_and_tables_only(script):
    """The file contains no bars, no dashboard, no colors and no cursor movements."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "check": True, "timeout": 280}
    done = subprocess.run([sys.executable, str(script), "rich", "bars"], **options)

    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "\r" not in done.stdout and "\x1b" not in done.stdout and "%" not in done.stdout
    assert len([line for line in lines if re.match(r"epoch  \d  (train|valid) \| loss", line)]) == 6
    assert len(tables(lines)) == 2


@pytest.mark.slow
@pytest.mark.cold  # a warm process may have imported tqdm.auto outside a notebook, for example with transformers
def test_notebook_has_widgets(script, monkeypatch):
    """The epochs and each pass have a widget, those of passes disappear at the end, and there are no text bars."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("IPYTHONDIR", str(script.parent))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(script.parent))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cell = nbformat.v4.new_code_cell("import train\ntrain.train();")
    notebook = nbformat.v4.new_notebook(cells=[cell])

    resources = {"metadata": {"path": str(script.parent)}}
    nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3", resources=resources).execute()

    widget = "application/vnd.jupyter.widget-view+json"
    shown = [output for output in cell.outputs if output.output_type == "display_data"]
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    values = [each["state"].get("value", "") for each in state.values() if each["model_name"] == "HTMLModel"]
    assert shown and all(widget in output.data for output in shown)
    assert [value for value in values if "3/3" in value and "it/s" in value], values
    text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    assert "%|" not in text and "epoch  3  valid | loss" in text
