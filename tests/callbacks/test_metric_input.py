"""Input that metric callbacks refuse, and their error messages."""

import pytest
import torch

from runnerkit import dl
from tests.callbacks.stand_ins import evaluate

LOGITS = torch.eye(3)


F1, ROWS = dl.PrecisionRecallF1SupportCallback, [0, 1, 2]


@pytest.mark.parametrize(
    ("callback", "batch", "message"),
    [
        (F1("x", "y"), {"x": LOGITS, "y": [0, 1]}, r"expected logits \(N, C, ...\) .* got \(3,\) and \(2,\)"),
        (F1("x", "y", num_classes=4), {"x": LOGITS, "y": ROWS}, "num_classes is 4"),
        (F1("x", "y"), {"x": [0, 1], "y": [0, 1]}, "pass num_classes="),
        (F1("x", "y"), {"x": LOGITS, "y": [0, -100, 2]}, r"targets must be .* in \[0, 3\), got -100 to 2"),
        (dl.ConfusionMatrixCallback("x", "y", num_classes=3), {"x": [0, 1, 3], "y": ROWS}, r"outputs .* got 0 to 3"),
        (dl.MultilabelAccuracyCallback("x", "y"), {"x": LOGITS, "y": ROWS}, r"scores \(N, C\) and 0/1 targets"),
        (
            dl.MultilabelPrecisionRecallF1SupportCallback("x", "y", num_classes=2),
            {"x": LOGITS, "y": LOGITS},
            "scores have 3 classes, num_classes is 2",
        ),
        (dl.AUCCallback("x", "y"), {"x": LOGITS, "y": [0, 1]}, r"expected scores \(N, C\) and targets.*got \(3, 3\)"),
        (dl.R2SquaredCallback("x", "y"), {"x": LOGITS, "y": [0.0, 1.0, 2.0]}, r"expected outputs and targets \(N, D\)"),
        (dl.MRRCallback("x", "y"), {"x": LOGITS, "y": ROWS}, r"expected scores \(N, M\) and relevances"),
        (dl.IOUCallback("x", "y"), {"x": LOGITS, "y": LOGITS[:2]}, r"same shape .* got \(3, 3\) and \(2, 3\)"),
        (dl.DiceCallback("x", "y", weights=[1, 1]), {"x": LOGITS, "y": LOGITS}, "weights has 2 entries for 3 classes"),
        (dl.CMCScoreCallback("x", "y", "q"), {"x": LOGITS, "y": ROWS, "q": [True]}, r"labels \(N,\) and is_query"),
        (dl.CMCScoreCallback("x", "y", "q"), {"x": LOGITS, "y": ROWS, "q": [True] * 3}, "3 of 3 samples are queries"),
    ],
)
def test_a_batch_that_has_no_value_is_refused(callback, batch, message):
    """The error gives the expected and the actual shapes; the last one is raised at the loader's end."""
    with pytest.raises(ValueError, match=message):
        evaluate(callback, [{key: torch.as_tensor(value) for key, value in batch.items()}])


LOG2_OF_3 = 1.584962500721156


@pytest.mark.parametrize(
    ("callback", "batch", "expected"),
    [
        (
            dl.DiceCallback("x", "y", weights=[0.25, 0.75]),
            {"x": [[1.0, 0.0]], "y": [[0.0, 0.0]]},
            {"dice": 0.5, "dice/_macro": 0.5, "dice/_micro": 0.0, "dice/_weighted": 0.75},
        ),
        # gains 7 and 1 are at ranks 2 and 3, ideally at 1 and 2
        (
            dl.NDCGCallback("x", "y", topk=9),
            {"x": [[3.0, 2.0, 1.0]], "y": [[0, 3, 1]]},
            {"ndcg09": (7 / LOG2_OF_3 + 1 / 2) / (7 + 1 / LOG2_OF_3)},
        ),
        (dl.MRRCallback("x", "y", suffix="_a"), {"x": [[1.0, 2.0]], "y": [[0, 0]]}, {"mrr01_a": 0.0}),
        # another embedding at the same distance does not come before the match
        (dl.CMCScoreCallback("x", "y", "q"), {"x": [[0.0], [1], [1]], "y": [0, 0, 1], "q": [1, 0, 0]}, {"cmc01": 1.0}),
    ],
)
def test_corner_cases(callback, batch, expected):
    """Constant targets, empty masks, no relevant items and tied distances have defined values."""
    runner = evaluate(callback, [{key: torch.as_tensor(value) for key, value in batch.items()}])

    assert runner.loader_metrics == pytest.approx(expected, rel=1e-12)
