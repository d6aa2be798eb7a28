"""Each minimal example learns what it claims, compared with a baseline that learned nothing."""

import ast
import importlib
import re
import runpy
import traceback
from pathlib import Path
from statistics import median

import pytest

from runnerkit import dl
from runnerkit.seeding.generators import set_global_seed
from tests.engines.together import together

FOLDER = Path(__file__).parents[2] / "examples" / "minimal"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
approx = pytest.approx
# Many short runs, for which no more processes are needed, and the slowest: test_language_model.py trains a GPT in two
# processes, and callbacks/test_exact_metrics.py has the metrics of segmentation there.
ALONE = {"kfold", "optuna_search", "gpt", "segmentation"}

# What the results of each example must fulfill.
CLAIMS = {
    # The remaining error is the noise's, 0.1 squared, known from 200 samples to within a third.
    "linear_regression": lambda it: (
        it["mse"] == approx(0.01, rel=1 / 3) and it["mse"] < it["mse_of_mean"] / 100 and it["distance"] < 0.01
    ),
    # With ten classes, chance is 0.1, and 0.3 among the top three.
    "multiclass": lambda it: it["accuracy03"] >= it["accuracy"] > 0.9,
    # The AUC without skill is 0.5.
    "multilabel": lambda it: it["accuracy"] > 0.9 > it["accuracy_of_commonest"] and it["auc"] > 0.95,
    # Chance is 0.1 for a digit and 0.5 for its parity.
    "multi_head": lambda it: it["digit_accuracy"] > 0.9 and it["parity_accuracy"] > 0.9,
    # About 10 % of samples are on either side, within three standard errors of 1,000, and the width grows with the
    # noise: for x uniform in [0, 0.2] and [0.8, 1], it is 0.1 and 0.9 on average.
    "multi_criterion": lambda it: it["below"] == approx(0.1, abs=0.03) == it["above"] and it["wide"] > 4 * it["narrow"],
    # Both kinds of weights change; chance is 0.1.
    "multi_optimizer": lambda it: it["accuracy"] > 0.85 and min(it["matrices_moved"], it["vectors_moved"]) > 0.01,
    "multi_model": lambda it: it["accuracy"] > 0.9,
    # With five digits, chance is 0.2. The head alone has converged: 30 more epochs would not improve it.
    "stages": lambda it: it["pretrain"] > 0.95 and it["finetune"] > it["freeze"] + 0.03 > 0.63,
    # Principal components are the best linear method.
    "autoencoder": lambda it: it["mse"] < 0.85 * it["mse_of_pca"] < it["mse_of_mean"],
    # The loss includes the cost of the code, which is used: a collapsed code costs nothing.
    "vae": lambda it: (
        it["loss"] == approx(it["reconstruction"] + it["divergence"], rel=1e-6)
        and it["loss"] < it["loss_of_mean_image"] - 1
        and it["divergence"] > 1
    ),
    # Uniform points in the square from -1 to 1 are near a mode in 8 * pi * 0.15**2 / 4 = 14 % of cases.
    "gan": lambda it: it["near"] > 2 * 0.14 > it["near_before"] and it["modes"] >= 6,
    # Chance is 1 in 50, and the untrained model is hardly better.
    "metric_learning": lambda it: it["recall05"] >= it["recall01"] > 0.8 and it["recall01_before"] < 0.1,
    # The other half is found among 360; with ten guesses, chance is ten times as large.
    "contrastive": lambda it: it["chance"] == 1 / 360 and it["recall01"] > 30 * it["chance"] and it["recall10"] > 0.5,
    # Chance is 0.1; for 360 images, 0.1 is more than three standard errors of a fraction near one half.
    "self_supervised": lambda it: it["accuracy"] > max(it["pixels"], it["untrained"]) + 0.1 and it["pixels"] > 0.1,
    # The student, taught without labels, equals the teacher except for a few images.
    "knowledge_distillation": lambda it: (
        it["student"] > it["teacher"] - 0.05 and it["teacher"] > 0.9 and it["agreement"] > 0.9
    ),
    # 500 steps are the maximum; an untrained policy falls after about 20.
    "reinforcement": lambda it: 10 < it["return_at_random"] < 40 and 300 < it["return"] <= 500,
    # No model of byte pairs can go below their entropy, not even one fitted to these pages.
    "gpt": lambda it: it["bits"] < it["bigram"] - 0.1 < it["unigram"] - 1 and len(it["sample"]) > 20,
    # Brightness separates shapes from the background, but not a disc from a square.
    "segmentation": lambda it: it["dice"] > it["iou"] > it["iou_of_brightness"] + 0.1,
    # Each metric is better than that of popularity by half.
    "recommender": lambda it: (
        it.keys() == {"hitrate10", "mrr10", "ndcg10"} and all(ours > 1.5 * theirs > 0 for ours, theirs in it.values())
    ),
    "kfold": lambda it: len(it["accuracies"]) == 5 and min(it["accuracies"]) > 0.85,
    # The accuracy on noisy labels improves by at least 2 of 100 images.
    "mixup": lambda it: it["accuracy"] > it["without"] + 0.02 and it["without"] > 0.7,
    # The distance to the optimum, which the steps circle, is at most half.
    "ema_swa": lambda it: max(it["ema"], it["swa"]) < it["last"] / 2,
    # The first rate of the sweep learns nothing, and the suggestion is far from the diverging rate.
    "lr_finder": lambda it: (
        it["accuracy"] > 0.8 > it["accuracy_of_first"] + 0.5 and it["suggestion"] < it["diverged"] / 10
    ),
    # Pruned trials were worse than the best, and the median trial by 2 of 100 images.
    "optuna_search": lambda it: (
        len(it["pruned"] + it["complete"]) == 15
        and len(it["pruned"]) >= 3
        and max(it["pruned"]) <= it["best"] == max(it["complete"])
        and it["best"] > max(0.9, median(it["pruned"] + it["complete"]) + 0.02)
    ),
    # (size, error, accuracy): torch.export is exact, ONNX differs by float32 rounding, 8 bits by a few percent.
    "export": lambda it: _is_exported(*it.values()),
}


def _is_exported(program, onnx, int8):
    is_near = program[1] == 0 and onnx[1] < 1e-4 and 0 < int8[1] < 0.5
    return is_near and onnx[2] > 0.9 and abs(int8[2] - onnx[2]) < 0.02 and int8[0] < onnx[0] / 3


@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(name, capsys):
    """As a script, which prints one line."""
    learned = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")["learned"]

    assert CLAIMS[name](learned), learned
    assert len(capsys.readouterr().out.splitlines()) == 1


def _all_in_this_process():
    """Run the examples in one of two processes; return their results, or the traceback of one that failed."""
    learned = {}
    for name in sorted(set(NAMES) - ALONE):
        set_global_seed(0)  # the processes make the same data
        main = importlib.import_module(f"examples.minimal.{name}").main
        options = {"engine": dl.DistributedDataParallelEngine(2, device="cpu")} if name == "stages" else {}
        try:
            learned[name] = main(**options or {"ddp": True, "cpu": True})
        except Exception:
            learned[name] = traceback.format_exc()
    return learned


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_the_same():
    """All examples in one launch, with half the steps of twice the samples."""
    learned = together(_all_in_this_process)

    assert learned.keys() == set(NAMES) - ALONE
    wrong = {name: it for name, it in learned.items() if isinstance(it, str) or not CLAIMS[name](it)}
    assert not wrong, "\n".join(f"{name}: {it}" for name, it in wrong.items())


def test_the_table_names_each_example():
    """Rows and files correspond one to one."""
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.py\) \|", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)

    assert rows == [(name, file) for name, file in rows if name == file]
    assert sorted(name for name, _ in rows) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_forty_lines_at_most(name):
    """Examples have ten to forty lines, without blank lines, imports and docstrings."""
    source = (FOLDER / f"{name}.py").read_text()
    lines = {number for number, line in enumerate(source.splitlines(), start=1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        says = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if says or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, node.end_lineno + 1))

    assert 10 <= len(lines) <= 40
