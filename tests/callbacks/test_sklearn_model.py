"""A scikit-learn model fitted within a run equals one fitted manually on the same features."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier

from runnerkit import dl
from tests.tiny import classification, loader, train


class Features(dl.Runner):
    """A runner that passes on the data set's features, as a frozen encoder would."""

    def handle_batch(self, batch):
        features, targets = batch
        self.batch = {"features": features, "targets": targets}


def run(*callbacks, batch_size=4, shuffle=True, **options):
    loaders = {
        "train_features": loader(30, batch_size, shuffle=shuffle),
        "valid": loader(22, batch_size, seed=1),
        "test": loader(9, batch_size, seed=2),
    }
    return train(runner=Features(), optimizer=None, loaders=loaders, callbacks=list(callbacks), **options)


def data(num_samples, seed):
    features, targets = classification(num_samples, seed=seed).tensors
    return features.numpy(), targets.numpy()


def probe(model_fn=LogisticRegression, **arguments):
    loaders = {"train_loader": "train_features", "valid_loaders": ["valid", "test"]}
    return dl.SklearnModelCallback("features", "targets", **loaders, model_fn=model_fn, **arguments)


def test_scores_and_predictions_are_those_by_hand():
    """The model is fitted on one loader and scored on two, and a metric callback reads its probabilities."""
    callback = probe(predict_method="predict_proba", C=0.5)
    expected = LogisticRegression(C=0.5).fit(*data(30, 0))

    accuracy = dl.AccuracyCallback("sklearn_predict", "targets")
    runner = run(callback, dl.ControlFlowCallback(accuracy, loaders=["valid", "test"]), num_epochs=2)

    for key, (num_samples, seed) in {"valid": (22, 1), "test": (9, 2)}.items():
        score = expected.score(*data(num_samples, seed))
        assert runner.epoch_metrics[key]["sklearn_score"] == pytest.approx(score, abs=1e-12)
        assert runner.epoch_metrics[key]["accuracy"] == pytest.approx(score, abs=1e-12)
    assert 0.5 < runner.epoch_metrics["valid"]["sklearn_score"] < 1
    assert "sklearn_score" not in runner.epoch_metrics["train_features"]
    np.testing.assert_allclose(callback.model.coef_, expected.coef_, rtol=1e-4)


@pytest.mark.parametrize("model_fn", [LogisticRegression, Ridge])
def test_two_processes_and_a_shuffle_change_nothing(model_fn):
    """Samples are gathered, sorted and fitted once, so the coefficients are equal bit for bit."""
    one, two = probe(model_fn), probe(model_fn)

    alone = run(one, shuffle=False)
    together = run(two, batch_size=3, num_processes=2)

    assert np.array_equal(one.model.coef_, two.model.coef_)
    scores = [each.epoch_metrics["valid"]["sklearn_score"] for each in (alone, together)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)


def test_each_epoch_is_fitted_anew():
    """Each epoch fits the model again, on that epoch's features."""
    sizes = []

    class Counting(KNeighborsClassifier):
        def fit(self, features, targets):
            sizes.append(len(features))
            return super().fit(features, targets)

    run(probe(Counting, n_neighbors=3), num_epochs=2)

    assert sizes == [30, 30]


@pytest.mark.parametrize(
    ("keys", "options", "error", "words"),
    [
        (("features", "targets", "train", "valid"), {}, ValueError, r"'train'; .* \['train_features', 'valid', 'test'"),
        (("features", "targets", "test", ["valid"]), {}, ValueError, "cannot predict loader 'valid' before 'test'"),
        (("features", "targets", "valid", "test"), {"predict_method": "guess"}, ValueError, "predict_method='guess'"),
        (("pixels", "targets", "valid", "test"), {}, KeyError, "reads 'pixels' of a"),
    ],
)
def test_bad_input_is_refused(keys, options, error, words):
    """The error names the loader, method or batch key."""
    with pytest.raises(error, match=words):
        run(dl.SklearnModelCallback(*keys, Ridge, **options))


def test_a_prediction_before_the_fit_is_refused():
    """An evaluation within the first epoch comes before the first fit."""
    callback = dl.SklearnModelCallback("features", "targets", "train", "valid", Ridge)
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}

    with pytest.raises(RuntimeError, match="cannot predict loader 'valid' before it is fitted on 'train'"):
        train(loaders=loaders, valid_every_steps=2, callbacks=[callback])
