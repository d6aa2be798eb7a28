"""Tests that the ten tasks of examples/first_hour run as their users start them, and compute what they print."""

import ast
import json
import re
import runpy
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch.nn.functional import cross_entropy

from runnerkit import read_metrics
from runnerkit.contrib import Digits
from tests.examples.start import start
from tests.examples.test_notebooks import outputs, printed

FOLDER = Path(__file__).parents[1] / "examples" / "first_hour"
FILES = {path.name: path for path in sorted(FOLDER.iterdir()) if path.suffix in {".py", ".yaml", ".ipynb"}}
ROWS = re.findall(r"^\| [^|]+ \| \[(.+)\]\((.+)\) \| (\d+) \| `(.+)` \|$", (FOLDER / "README.md").read_text(), re.M)
LOGS = Path("logs/first_hour")


def lines_of(path):
    """Count the lines that a user writes, without blank lines, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    lines = {number: line for number, line in enumerate(text.splitlines(), start=1) if line.strip()}
    if path.suffix != ".yaml":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                lines = {number: line for number, line in lines.items() if not node.lineno <= number <= node.end_lineno}
    return len([line for line in lines.values() if not line.lstrip().startswith("#")])


def without_numbers(text):
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "#", text)


def test_the_table_has_each_task_and_counts_its_lines():
    """Ten rows, in the order of the tasks; each file has at most 40 lines."""
    assert sorted(name for name, _, _, _ in ROWS) == sorted(FILES) and len(ROWS) == 10
    assert all(name == target for name, target, _, _ in ROWS)
    counts = {name: lines_of(path) for name, path in FILES.items()}
    assert {name: int(count) for name, _, count, _ in ROWS} == counts
    assert max(counts.values()) <= 40


@pytest.mark.parametrize("path", [path for path in FILES.values() if path.suffix == ".py"], ids=lambda path: path.stem)
def test_the_docstring_says_how_to_run_the_script(path):
    what, command = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n\n")

    assert "\n" not in what and command == f"python examples/first_hour/{path.name}"


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Return a function that runs a script in an empty folder; it returns the script's names and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name):
        names = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        out = capsys.readouterr().out
        assert_promised(f"{name}.py", out)
        return names, out

    return run


def assert_promised(name, out):
    """Check that the last line is that of the README, apart from the numbers, which depend on the machine."""
    [promised] = [shown for file, _, _, shown in ROWS if file == name]
    assert without_numbers(out.splitlines()[-1]) == without_numbers(promised)


def valid(logdir, metric):
    table = read_metrics(logdir)
    return table[(table["loader"] == "valid") & (table["metric"] == metric)].set_index("epoch")["value"]


def test_own_project_stops_early_with_the_best_weights(example):
    """The loss has not improved for five epochs, and the model's is the smallest one, as plain PyTorch computes it."""
    names, out = example("own_project")

    losses = valid(LOGS / "own_project", "loss")
    data, model = names["Spirals"](600, seed=1), names["model"].cpu().eval()
    logits = model(data.points)
    assert len(losses) == losses.idxmin() + 5 < 100
    assert cross_entropy(logits, data.targets).item() == pytest.approx(losses.min(), rel=1e-5)
    accuracy = (logits.argmax(dim=1) == data.targets).double().mean().item()
    assert accuracy > 0.9 and f"the best: accuracy {accuracy:.1%}" in out
    assert "stopped early" in out and "loaded the best weights" in out


def test_own_project_may_be_started_again(example):
    """The second start trains nothing, and keeps the best weights."""
    _, first = example("own_project")
    _, again = example("own_project")

    assert first.splitlines()[-1] == again.splitlines()[-1] and "epoch  1" not in again


def test_each_token_has_the_same_weight(example):
    """The logged loss is that of all tokens at once; the mean over batches is another number."""
    names, out = example("token_weights")

    model, pad = names["runner"].model.cpu().eval(), names["PAD"]
    text, targets = names["valid"][:, :-1], names["valid"][:, 1:]
    with torch.no_grad():
        losses = cross_entropy(model(text), targets, ignore_index=pad, reduction="none")
    kept = targets != pad
    by_batch = [part[mask].mean() for part, mask in zip(losses.split(16), kept.split(16), strict=True)]
    loss = names["runner"].epoch_metrics["valid"]["loss"]
    assert loss == pytest.approx(losses[kept].mean().item(), rel=1e-5)
    assert abs(loss - torch.stack(by_batch).mean().item()) > 1e-4 * loss
    assert loss < 3.5 and f"{loss:.2f} nats" in out
    assert names["runner"].optimizer_step == 2 * 63  # 125 batches of 16, two in a step


def test_the_own_metric_is_exact_and_the_own_callback_stops(example):
    """The root of the mean over all rows, as plain PyTorch computes it; the epochs before were not good enough."""
    names, out = example("own_callback")

    runner = names["runner"]
    rows, progress = (torch.tensor(each) for each in load_diabetes(return_X_y=True))
    progress = (progress - progress.mean()) / progress.std()
    guesses = runner.model.cpu()((rows / rows.std(dim=0)).float())[300:, 0]
    rmse = (guesses - progress[300:]).square().mean().sqrt().item()
    history = [each["valid"]["rmse"] for each in runner.experiment_metrics.values()]
    assert history[-1] == pytest.approx(rmse, rel=1e-5) and rmse < 0.75 <= min(history[:-1])
    assert 1 < len(history) < 50 and f"{rmse:.3f} standard deviations after {len(history)} of 50 epochs" in out


def test_the_sweep_finds_the_best_learning_rate(example):
    """The table, its first row and the page are those of the three runs."""
    _, out = example("sweep")

    best = {lr: valid(LOGS / "sweep" / f"lr={lr}", "accuracy").max() for lr in (0.1, 0.01, 0.001)}
    winner, accuracy = re.search(r"best learning rate ([\d.]+), accuracy ([\d.]+%)", out).groups()
    assert accuracy == f"{best[float(winner)]:.1%}" and best[float(winner)] == max(best.values()) > 0.9
    assert all(f"{value:.3f}".rstrip("0") in out for value in best.values())
    page = (LOGS / "sweep" / "report.html").read_text(encoding="utf-8")
    assert all(f"lr={lr}" in page for lr in best)


def test_a_resumed_run_ends_with_the_same_bits(example):
    """It continued at the end of the second epoch, and does not differ from a run without an interruption."""
    names, out = example("resume")

    resumed, whole = (names[name].model.state_dict() for name in ("resumed", "whole"))
    rows = [read_metrics(names["folder"] / name).drop(columns="run") for name in ("interrupted", "whole")]
    shutil.rmtree(names["folder"])
    assert "the power is gone; the same call again" in out and "are equal, bit for bit" in out
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    pd.testing.assert_frame_equal(*rows)
    assert out.count("epoch  3  train") == 2  # once more, and in the other run


def test_predictions_are_those_of_the_best_weights(example):
    """The file has a row per image, in order, equal to what plain PyTorch computes from best.pth."""
    names, out = example("predict")

    digits, model = Digits(train=False), names["make_model"]()
    weights = torch.load(LOGS / "predict" / "checkpoints" / "best.pth", weights_only=True)["model_state_dict"]
    model.load_state_dict(weights)
    confidence, digit = model(digits.images.flatten(1) / 255).softmax(dim=1).max(dim=1)
    table = pd.read_csv(LOGS / "predict" / "predictions.csv")
    assert table["digit"].tolist() == digit.tolist() and table["target"].tolist() == digits.targets.tolist()
    assert table["confidence"].to_numpy() == pytest.approx(confidence.detach().numpy(), rel=1e-4)
    right = int((digit == digits.targets).sum())
    assert right > 300 and f"{right} of 360 digits are right" in out


def test_two_processes_have_the_weights_of_one(tmp_path):
    """Up to rounding, after five epochs."""
    out = start("python examples/first_hour/two_processes.py", tmp_path)

    assert_promised("two_processes.py", out)
    one, num_processes, two, difference = re.search(
        r"in 1 process (\S+), in (\d) processes (\S+); the weights differ by (\S+) at most", out
    ).groups()
    assert num_processes == "2" and float(one) > 0.9 and float(one) == pytest.approx(float(two), abs=2 / 360)
    assert float(difference) < 1e-3 and out.count("epoch  5  valid") == 2


def test_the_config_trains_and_takes_other_values(tmp_path):
    """Both commands of its comment work; the second run has its own folder and the other values."""
    first, second = re.findall(r"^# runnerkit (run .+)$", FILES["digits.yaml"].read_text(), flags=re.M)

    out = start(f"python -m runnerkit {first}", tmp_path)
    start(f"python -m runnerkit {second}", tmp_path)

    assert_promised("digits.yaml", out)
    runs = [tmp_path / "logs" / name for name in ("digits", "digits-2")]
    accuracies = [valid(run, "accuracy") for run in runs]
    assert [len(each) for each in accuracies] == [3, 5] and min(each.max() for each in accuracies) > 0.8
    assert f"accuracy {accuracies[0].iloc[-1]:.4g}" in out
    assert (runs[0] / "checkpoints" / "best.pth").exists() and "lr: 0.003" in (runs[1] / "hparams.yml").read_text()


@pytest.mark.slow
def test_the_notebook_shows_a_table_a_run_and_a_picture(tmp_path):
    """Most wines are right, and the table agrees with the printed number."""
    [head], training, [picture], predictions = outputs(FILES["table.ipynb"], tmp_path)

    assert "malic_acid" in head.data["text/html"] and "image/png" in picture.data
    [shown] = [each for each in training if each.output_type == "execute_result"]
    assert "<polyline" in shown.data["text/html"]
    assert_promised("table.ipynb", printed(predictions))
    right = int(re.match(r"(\d+) of 45 wines are right", printed(predictions))[1])
    assert right > 40 and "color_intensity" in predictions[-1].data["text/html"]


def test_the_three_mistakes_are_explained(example):
    """Each error says where it is and what to write; without them the same program trains."""
    names, out = example("three_bugs")

    headings = r"^the loss is NaN:|^a metric is misspelt:|^a layer .*:|^without"
    _, nan, misspelt, shape, _ = re.split(headings, out, flags=re.MULTILINE)
    assert "FloatingPointError" in nan and "'1' (Linear), after an infinity in that of '0' (Log)" in nan
    assert "'acuracy'" in misspelt and "did you mean 'accuracy'" in misspelt
    assert "RuntimeError" in shape and "batch 1 of loader 'train'" in shape and "float32[64, 64]" in shape
    accuracy = names["runner"].epoch_metrics["valid"]["accuracy"]
    assert accuracy > 0.8 and out.endswith(f"accuracy {accuracy:.1%} after 3 epochs\n")
