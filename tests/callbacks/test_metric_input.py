"""Input that metric callbacks refuse, and their error messages."""

import pytest
import torch

from runnerkit import dl
from tests.callbacks.stand_ins import end_loader, make_runner, run_loader


def run_batch(callback, **batch):
    run_loader(callback, make_runner(), [{key: torch.as_tensor(value) for key, value in batch.items()}])


LOGITS = torch.eye(3)


@pytest.mark.parametrize(
    ("callback", "batch", "message"),
    [
        (
            dl.PrecisionRecallF1SupportCallback("x", "y"),
            {"x": LOGITS, "y": [0, 1]},
            r"expected logits \(N, C, ...\) and targets \(N, ...\), got \(3,\) and \(2,\)",
        ),
        (
            dl.PrecisionRecallF1SupportCallback("x", "y", num_classes=4),
            {"x": LOGITS, "y": [0, 1, 2]},
            "num_classes is 4",
        ),
        (dl.PrecisionRecallF1SupportCallback("x", "y"), {"x": [0, 1], "y": [0, 1]}, "pass num_classes="),
        (
            dl.PrecisionRecallF1SupportCallback("x", "y"),
            {"x": LOGITS, "y": [0, -100, 2]},
            r"targets must be class indices in \[0, 3\), got -100 to 2",
        ),
        (
            dl.ConfusionMatrixCallback("x", "y", num_classes=3),
            {"x": [0, 1, 3], "y": [0, 1, 2]},
            r"outputs must be class indices in \[0, 3\), got 0 to 3",
        ),
        (
            dl.MultilabelAccuracyCallback("x", "y"),
            {"x": LOGITS, "y": [0, 1, 2]},
            r"expected scores \(N, C\) and 0/1 targets \(N, C\), got \(3, 3\) and \(3,\)",
        ),
        (
            dl.MultilabelPrecisionRecallF1SupportCallback("x", "y", num_classes=2),
            {"x": LOGITS, "y": LOGITS},
            "scores have 3 classes, num_classes is 2",
        ),
        (dl.AUCCallback("x", "y"), {"x": LOGITS, "y": [0, 1]}, r"expected scores \(N, C\) and targets.*got \(3, 3\)"),
        (dl.R2SquaredCallback("x", "y"), {"x": LOGITS, "y": [0.0, 1.0, 2.0]}, r"expected outputs and targets \(N, D\)"),
        (dl.MRRCallback("x", "y"), {"x": LOGITS, "y": [0, 1, 2]}, r"expected scores \(N, M\) and relevances"),
        (
            dl.IOUCallback("x", "y"),
            {"x": LOGITS, "y": LOGITS[:2]},
            r"the same shape with classes in dimension 1, got \(3, 3\) and \(2, 3\)",
        ),
        (dl.DiceCallback("x", "y", weights=[1, 1]), {"x": LOGITS, "y": LOGITS}, "weights has 2 entries for 3 classes"),
        (
            dl.CMCScoreCallback("x", "y", "q"),
            {"x": LOGITS, "y": [0, 1, 2], "q": [True]},
            r"expected embeddings \(N, D\), labels \(N,\) and is_query \(N,\)",
        ),
    ],
)
def test_a_batch_of_another_shape_is_refused(callback, batch, message):
    """The error gives the expected and the actual shapes."""
    with pytest.raises(ValueError, match=message):
        run_batch(callback, **batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dl.NDCGCallback("x", "y", topk=(0, 1)), r"topk must be integers >= 1.*got \(0, 1\)"),
        (lambda: dl.CMCScoreCallback("x", "y", "q", topk=[]), r"topk must be integers >= 1"),
        (lambda: dl.ConfusionMatrixCallback("x", "y"), "pass class_names= or num_classes="),
        (
            lambda: dl.ConfusionMatrixCallback("x", "y", class_names=["a"], num_classes=2),
            "class_names has 1 entries for num_classes=2",
        ),
        (lambda: dl.TrevskyCallback("x", "y", alpha=2), r"alpha must be in \(0, 1\) for beta to be 1 - alpha, got 2"),
    ],
)
def test_arguments_are_refused_before_training(make, message):
    """The constructor raises the error."""
    with pytest.raises(ValueError, match=message):
        make()


def test_a_loader_without_a_gallery_is_refused():
    """Without a gallery, the score is undefined."""
    callback, runner = dl.CMCScoreCallback("x", "y", "q"), make_runner()
    run_batch(callback, x=LOGITS, y=[0, 1, 2], q=[True, True, True])

    with pytest.raises(ValueError, match="3 of 3 samples are queries: the loader needs queries and a gallery"):
        end_loader(callback, runner)


@pytest.mark.parametrize(
    ("callback", "batch", "expected"),
    [
        (dl.R2SquaredCallback("x", "y"), {"x": [[0.1]] * 5, "y": [0.1] * 5}, {"r2squared": 1.0}),
        (dl.R2SquaredCallback("x", "y"), {"x": [0.1, 0.1, 0.3], "y": [0.1] * 3}, {"r2squared": 0.0}),
        (
            dl.DiceCallback("x", "y", weights=[0.25, 0.75]),
            {"x": [[1.0, 0.0]], "y": [[0.0, 0.0]]},
            {"dice": 0.5, "dice/_macro": 0.5, "dice/_micro": 0.0, "dice/_weighted": 0.75},
        ),
        (
            dl.NDCGCallback("x", "y", topk=9),
            {"x": [[3.0, 2.0, 1.0]], "y": [[0, 3, 1]]},
            # gains 7 and 1 are at ranks 2 and 3, ideally at 1 and 2
            {"ndcg09": (7 / 1.584962500721156 + 1 / 2) / (7 + 1 / 1.584962500721156)},
        ),
        (dl.MRRCallback("x", "y", suffix="_a"), {"x": [[1.0, 2.0]], "y": [[0, 0]]}, {"mrr01_a": 0.0}),
        (
            dl.CMCScoreCallback("x", "y", "q"),
            {"x": [[0.0], [1.0], [1.0]], "y": [0, 0, 1], "q": [1, 0, 0]},
            {"cmc01": 1.0},  # another embedding at the same distance does not come before the match
        ),
    ],
)
def test_corner_cases(callback, batch, expected):
    """Constant targets, empty masks, no relevant items and tied distances have defined values."""
    runner = make_runner(loggers={})
    run_loader(callback, runner, [{key: torch.as_tensor(value) for key, value in batch.items()}])

    end_loader(callback, runner)

    assert runner.loader_metrics == pytest.approx(expected, rel=1e-12)
