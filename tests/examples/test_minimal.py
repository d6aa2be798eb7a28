"""Each minimal example learns what it claims, compared with a baseline that learned nothing."""

import ast
import importlib
import re
import runpy
from pathlib import Path
from statistics import median

import pytest

from runnerkit import dl

FOLDER = Path(__file__).parents[2] / "examples" / "minimal"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def run_script(name, capsys):
    """Run an example as a script that prints one line; return its results."""
    learned = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")["learned"]
    assert len(capsys.readouterr().out.splitlines()) == 1
    return learned


def run_in_two_processes(name, _):
    """Make half the steps, each with twice the samples; return the results."""
    main = importlib.import_module(f"examples.minimal.{name}").main
    if name == "stages":
        return main(dl.DistributedDataParallelEngine(2, device="cpu"))
    return main(ddp=True, cpu=True)


@pytest.fixture(params=[run_script, pytest.param(run_in_two_processes, marks=pytest.mark.slow)])
def learn(request, capsys):
    """Return either way to run an example; both must learn the same."""
    return lambda name: request.param(name, capsys)


def test_linear_regression_finds_the_weights_of_least_squares(learn):
    """The remaining error is the noise's, 0.1 squared, known from 200 samples to within a third."""
    learned = learn("linear_regression")

    assert learned["mse"] == pytest.approx(0.01, rel=1 / 3)
    assert learned["mse"] < learned["mse_of_mean"] / 100
    assert learned["distance"] < 0.01


def test_multiclass_reads_digits(learn):
    """With ten classes, chance is 0.1, and 0.3 among the top three."""
    learned = learn("multiclass")

    assert learned["accuracy03"] >= learned["accuracy01"] > 0.9


def test_multilabel_answers_better_than_the_commonest_answers(learn):
    """The AUC without skill is 0.5."""
    learned = learn("multilabel")

    assert learned["accuracy"] > 0.9 > learned["accuracy_of_commonest"]
    assert learned["auc"] > 0.95


def test_multi_head_teaches_both_heads(learn):
    """Chance is 0.1 for a digit and 0.5 for its parity."""
    learned = learn("multi_head")

    assert learned["digit_accuracy"] > 0.9
    assert learned["parity_accuracy"] > 0.9


def test_multi_criterion_finds_both_quantiles(learn):
    """About 10 % of samples are on either side, within three standard errors of 1,000, and the width grows with the
    noise.

    For x uniform in [0, 0.2] and [0.8, 1], the noise is 0.1 and 0.9 on average; an interval that ignores x has the same
    width in both.
    """
    learned = learn("multi_criterion")

    assert learned["below"] == pytest.approx(0.1, abs=0.03)
    assert learned["above"] == pytest.approx(0.1, abs=0.03)
    assert learned["wide"] > 4 * learned["narrow"]


def test_multi_optimizer_steps_both(learn):
    """Both kinds of weights change; chance is 0.1."""
    learned = learn("multi_optimizer")

    assert learned["accuracy"] > 0.85
    assert min(learned["matrices_moved"], learned["vectors_moved"]) > 0.01


def test_multi_model_reads_digits(learn):
    """Chance is 0.1."""
    assert learn("multi_model")["accuracy"] > 0.9


def test_stages_finetuning_goes_beyond_the_frozen_body(learn):
    """With five digits, chance is 0.2. The head alone has converged: 30 more epochs would not improve it."""
    learned = learn("stages")

    assert learned["pretrain"] > 0.95
    assert learned["finetune"] > learned["freeze"] + 0.03
    assert learned["freeze"] > 0.6


def test_autoencoder_restores_better_than_as_many_principal_components(learn):
    """Principal components are the best linear method."""
    learned = learn("autoencoder")

    assert learned["mse"] < 0.85 * learned["mse_of_pca"] < learned["mse_of_mean"]


def test_vae_says_more_than_the_mean_image(learn):
    """The loss includes the cost of the code, which is used: a collapsed code costs nothing."""
    learned = learn("vae")

    assert learned["loss"] == pytest.approx(learned["reconstruction"] + learned["divergence"], rel=1e-6)
    assert learned["loss"] < learned["loss_of_mean_image"] - 1
    assert learned["divergence"] > 1


def test_gan_reaches_the_ring(learn):
    """Uniform points in the square from -1 to 1 are near a mode in 8 * pi * 0.15**2 / 4 = 14 % of cases."""
    learned = learn("gan")

    assert learned["near"] > 2 * 0.14 > learned["near_before"]
    assert learned["modes"] >= 6


def test_metric_learning_finds_kinds_it_was_never_shown(learn):
    """Chance is 1 in 50, and the untrained model is hardly better."""
    learned = learn("metric_learning")

    assert learned["recall05"] >= learned["recall01"] > 0.8
    assert learned["recall01_before"] < 0.1


def test_contrastive_finds_the_other_half(learn):
    """The other half is found among 360; with ten guesses, chance is ten times as large."""
    learned = learn("contrastive")

    assert learned["chance"] == 1 / 360
    assert learned["recall01"] > 30 * learned["chance"]
    assert learned["recall10"] > 0.5


def test_self_supervision_helps_where_labels_are_few(learn):
    """Chance is 0.1; for 360 images, 0.1 is more than three standard errors of a fraction near one half."""
    learned = learn("self_supervised")

    assert learned["accuracy"] > max(learned["pixels"], learned["untrained"]) + 0.1
    assert learned["pixels"] > 0.1


def test_knowledge_distillation_teaches_without_labels(learn):
    """Chance is 0.1; the student equals the teacher except for a few images."""
    learned = learn("knowledge_distillation")

    assert learned["student"] > learned["teacher"] - 0.05
    assert learned["teacher"] > 0.9
    assert learned["agreement"] > 0.9


def test_reinforcement_keeps_the_pole_up(learn):
    """500 steps are the maximum; an untrained policy falls after about 20."""
    learned = learn("reinforcement")

    assert 10 < learned["return_at_random"] < 40
    assert 300 < learned["return"] <= 500


def test_gpt_sees_more_than_the_byte_before(learn):
    """No model of byte pairs can go below their entropy, not even one fitted to these pages."""
    learned = learn("gpt")

    assert learned["bits"] < learned["bigram"] - 0.1 < learned["unigram"] - 1
    assert len(learned["sample"]) > 20


def test_segmentation_tells_a_disc_from_a_square(learn):
    """Brightness separates shapes from the background, but not from each other."""
    learned = learn("segmentation")

    assert learned["iou"] > learned["iou_of_brightness"] + 0.1
    assert learned["dice"] > learned["iou"]


def test_recommender_ranks_better_than_popularity(learn):
    """Each metric is better by half."""
    learned = learn("recommender")

    assert learned.keys() == {"hitrate10", "mrr10", "ndcg10"}
    assert all(ours > 1.5 * popularity > 0 for ours, popularity in learned.values())


def test_kfold_learns_in_each_fold(capsys):
    """Chance is 0.1."""
    learned = run_script("kfold", capsys)

    assert len(learned["accuracies"]) == 5
    assert min(learned["accuracies"]) > 0.85


def test_mixup_bears_wrong_labels_better(learn):
    """The accuracy improves by at least 2 of 100 images."""
    learned = learn("mixup")

    assert learned["accuracy"] > learned["without"] + 0.02
    assert learned["without"] > 0.7


def test_averages_of_weights_are_nearer_than_the_last(learn):
    """The distance to the optimum, which the steps circle, is at most half."""
    learned = learn("ema_swa")

    assert max(learned["ema"], learned["swa"]) < learned["last"] / 2


def test_lr_finder_suggests_a_rate_that_learns(learn):
    """The first rate of the sweep learns nothing (chance is 0.1), and the suggestion is far from the diverging rate."""
    learned = learn("lr_finder")

    assert learned["accuracy"] > 0.8 > learned["accuracy_of_first"] + 0.5
    assert learned["suggestion"] < learned["diverged"] / 10


def test_optuna_search_gives_up_bad_trials(capsys):
    """Pruned trials were worse than the best, and the median trial by 2 of 100 images."""
    learned = run_script("optuna_search", capsys)

    assert len(learned["pruned"] + learned["complete"]) == 15 and len(learned["pruned"]) >= 3
    assert max(learned["pruned"]) <= learned["best"] == max(learned["complete"])
    assert learned["best"] > max(0.9, median(learned["pruned"] + learned["complete"]) + 0.02)


def test_export_keeps_the_answers(learn):
    """For logits around 10, torch.export is exact, ONNX differs by float32 rounding, and 8 bits by a few percent."""
    learned = learn("export")
    (_, of_program, _), (size, of_onnx, accuracy), (size_of_int8, of_int8, accuracy_of_int8) = learned.values()

    assert of_program == 0 and of_onnx < 1e-4 and 0 < of_int8 < 0.5
    assert accuracy > 0.9 and abs(accuracy_of_int8 - accuracy) < 0.02
    assert size_of_int8 < size / 3


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
