"""Metrics of scikit-learn over a loader equal those of scikit-learn over all of its samples."""

import pytest
import torch
from sklearn import metrics

from runnerkit import dl
from tests.tiny import loader, mlp, train

LABELS = {"y_pred": "labels", "y_true": "targets"}


class Labels(dl.SupervisedRunner):
    """A runner whose batches have labels and the score of the first class, too."""

    def handle_batch(self, batch):
        super().handle_batch(batch)
        probabilities = self.batch["logits"].softmax(dim=1)
        self.batch |= {"labels": probabilities.argmax(dim=1), "scores": probabilities[:, 1]}
        self.batch["is_second"] = (self.batch["targets"] == 1).long()


def run(*callbacks):
    """Train; return the metrics of the evaluation loader, its outputs and its targets."""
    valid, outputs = loader(30, 4, seed=1), []
    runner = train(mlp(), runner=Labels(), loaders={"train": loader(8, 4), "valid": valid}, callbacks=callbacks)
    for batch in runner.predict_loader(valid):
        outputs.append(batch["logits"] if isinstance(batch, dict) else batch)
    return runner.epoch_metrics["valid"], torch.cat(outputs), torch.cat([batch[1] for batch in valid])


def test_over_a_loader_they_are_those_of_all_samples():
    """By name, with options, and of a function; the last batch is short."""
    found, logits, targets = run(
        dl.SklearnLoaderCallback(LABELS, "f1_score", "f1", average="macro", zero_division=0.0),
        dl.SklearnLoaderCallback({"y_score": "scores", "y_true": "is_second"}, "roc_auc_score", "auc"),
        dl.SklearnLoaderCallback({"y1": "labels", "y2": "targets"}, metrics.cohen_kappa_score, "kappa"),
    )

    labels, scores = logits.argmax(dim=1), logits.softmax(dim=1)[:, 1]
    assert found["f1"] == pytest.approx(metrics.f1_score(targets, labels, average="macro", zero_division=0.0), abs=1e-9)
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(targets == 1, scores), abs=1e-9)
    assert found["kappa"] == pytest.approx(metrics.cohen_kappa_score(targets, labels), abs=1e-9)


def test_of_batches_they_are_a_mean_weighted_by_their_sizes():
    found, logits, targets = run(dl.SklearnBatchCallback(LABELS, "f1_score", "f1", average="micro", zero_division=0))

    assert found["f1"] == pytest.approx(metrics.accuracy_score(targets, logits.argmax(dim=1)), abs=1e-7)


@pytest.mark.parametrize("kind", [dl.SklearnBatchCallback, dl.SklearnLoaderCallback])
def test_several_arguments_may_take_the_same_values(kind):
    """The targets are the weights of the samples, too."""
    named = {"sample_weight": "targets", **LABELS}

    found, logits, targets = run(kind(named, "zero_one_loss", "errors", normalize=False))

    wrong = (targets * (logits.argmax(dim=1) != targets)).double()
    sizes = torch.tensor([4.0] * 7 + [2.0], dtype=torch.float64)
    of_batches = torch.stack([each.sum() for each in wrong.split(4)])
    wanted = wrong.sum() if kind is dl.SklearnLoaderCallback else (sizes * of_batches).sum() / 30
    assert wrong.sum() > 0 and found["errors"] == pytest.approx(wanted.item(), abs=1e-6)


@pytest.mark.parametrize("kind", [dl.SklearnBatchCallback, dl.SklearnLoaderCallback])
def test_what_they_cannot_use_is_named(kind):
    with pytest.raises(ValueError, match=r"lacks 'f1_scor'.*f1_score"):
        kind(LABELS, "f1_scor", "f1")
    with pytest.raises(TypeError, match="metric_fn must be a function"):
        kind(LABELS, 3, "f1")
    with pytest.raises(TypeError, match="keys must be a dict"):
        kind("labels", "f1_score", "f1")
    with pytest.raises(ValueError, match=r"f1_score returned \d numbers.*average="):
        run(kind(LABELS, "f1_score", "f1", average=None))
    with pytest.raises(KeyError, match="'label' of a batch"):
        run(kind({"y_pred": "label", "y_true": "targets"}, "f1_score", "f1"))
