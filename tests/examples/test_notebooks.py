"""The notebooks run from top to bottom, show what their text promises, and are stored without outputs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def outputs(path, folder):
    """Execute a copy in `folder`; return the outputs of its code cells in order."""
    shutil.copy(path, folder)
    own = {
        "IPYTHONDIR": str(folder),
        "JUPYTER_RUNTIME_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    # With this variable set, the kernel leaves its processes' output to pytest.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [Path(sys.executable).parent / "jupyter", "execute", "--inplace", path.name], cwd=folder, text=True,
        env={**inherited, **own}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(folder / path.name, as_version=4)
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def printed(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.parent.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    """Outputs would depend on the machine and change in every run; running the notebook takes half a minute."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]

    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_the_quick_start_trains_and_shows(tmp_path):
    """It shows five epochs, the run, a table and a plot; most digits are right, and both counts agree."""
    _, training, [run], [table], [picture], reading, [accuracy] = outputs(NOTEBOOKS / "quick_start.ipynb", tmp_path)

    start, *lines, notice = printed(training).splitlines()
    assert start.startswith("started:") and notice.startswith("loaded the best weights")
    assert [line[:15] for line in lines] == [
        f"epoch  {epoch}  {key}" for epoch in range(1, 6) for key in ("train", "valid")
    ]
    assert "finished in epoch 5" in run.data["text/html"] and "<polyline" in run.data["text/html"]
    assert "accuracy03" in table.data["text/html"] and "image/png" in picture.data
    num_wrong, num_all = map(int, re.match(r"(\d+) of (\d+) are wrong", printed(reading)).groups())
    assert num_all == 360
    assert float(accuracy.data["text/plain"]) == 1 - num_wrong / 360 > 0.9


@pytest.mark.slow
def test_two_processes_train_in_a_notebook(tmp_path):
    """Both learn from their shards; the notebook receives model, metrics and callback, and one process's exception."""
    _, training, result, failure = outputs(NOTEBOOKS / "ddp_in_a_notebook.ipynb", tmp_path)

    assert printed(training).count("epoch  3") == 2, "only rank zero prints"
    first, second = printed(result).splitlines()
    assert float(re.fullmatch(r"2 processes, accuracy (0\.\d+)", first)[1]) > 0.9
    assert second == "rank 0 trained on 2157 samples of 4311"  # 3 epochs of 22 x 32 + 15
    assert printed(failure).splitlines()[-1] == "rank 1 of 2 raised: rank one has had enough"
