"""Tables and figures that metric callbacks log: matrices, curves, values of each class."""

import logging
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.metrics import roc_curve
from tests.callbacks.recording import Kept
from tests.tiny import train

NUM_CLASSES = 10


def evaluate(logdir, callbacks, *, loggers=None, num_classes=NUM_CLASSES, **options):
    """Train for an epoch; return scores and targets of the validation loader."""
    draw = torch.Generator().manual_seed(1)
    targets = torch.randint(num_classes, (95,), generator=draw)
    features = torch.randn(95, num_classes, generator=draw) + 2 * nn.functional.one_hot(targets, num_classes)
    loader = DataLoader(TensorDataset(features, targets), batch_size=20)
    loggers = {"console": dl.ConsoleLogger(), "tensorboard": None, **(loggers or {})}
    options = {"loaders": {"valid": loader}, "callbacks": callbacks, "logdir": logdir, "loggers": loggers, **options}
    train(nn.Identity(), optimizer=None, criterion=None, **options)
    return features.numpy(), targets.numpy()


CALLBACKS = {
    "confusion_matrix": lambda **options: dl.ConfusionMatrixCallback("logits", "targets", num_classes=10, **options),
    "auc/curves": lambda **options: dl.AUCCallback("logits", "targets", **options),
    "f1/by_class": lambda **options: dl.PrecisionRecallF1SupportCallback("logits", "targets", **options),
}


def test_tables_are_those_of_scikit_learn(tmp_path, capsys):
    """Of the whole loader; the console's line has neither counts nor values of classes."""
    scores, targets = evaluate(tmp_path, [make() for make in CALLBACKS.values()])

    tables = {name: pd.read_csv(tmp_path / "tables" / f"{name}.csv") for name in CALLBACKS}
    for table in tables.values():
        assert (table["loader"] == "valid").all() and (table["epoch"] == 1).all()
    names = [f"class_{each:02d}" for each in range(NUM_CLASSES)]
    matrix = tables["confusion_matrix"].pivot(index="true", columns="predicted", values="count")
    matrix = matrix.reindex(index=names, columns=names).fillna(0)
    np.testing.assert_array_equal(matrix, sk.confusion_matrix(targets, scores.argmax(1)))

    by_class = tables["f1/by_class"]
    expected = sk.precision_recall_fscore_support(targets, scores.argmax(1), zero_division=0)
    np.testing.assert_allclose(by_class[["precision", "recall", "f1", "support"]].T, expected, rtol=1e-12)
    assert list(by_class["class"]) == names

    curves = tables["auc/curves"]
    for number, name in enumerate(names):
        curve = curves[curves["class"] == name]
        false, true, _ = sk.roc_curve(targets == number, scores[:, number], drop_intermediate=False)
        points = zip(curve["false_positive_rate"], curve["true_positive_rate"], strict=True)
        assert set(points) <= set(zip(false, true, strict=True))
        area = np.trapezoid([0, *curve["true_positive_rate"]], [0, *curve["false_positive_rate"]])
        assert area == pytest.approx(sk.roc_auc_score(targets == number, scores[:, number]), abs=0.01)

    [line] = [each for each in capsys.readouterr().out.splitlines() if "valid |" in each]
    assert "f1/_macro" in line and "class_" not in line


def test_two_processes_log_one_table_of_all_samples(tmp_path):
    for num_processes, name in enumerate(["one", "two"], start=1):
        evaluate(tmp_path / name, [make() for make in CALLBACKS.values()], num_processes=num_processes)

    for name in CALLBACKS:
        one, two = (pd.read_csv(tmp_path / each / "tables" / f"{name}.csv") for each in ("one", "two"))
        pd.testing.assert_frame_equal(one, two)


def test_figures_go_to_loggers_that_accept_images(tmp_path):
    album = Kept()

    evaluate(tmp_path, [make() for make in CALLBACKS.values()], loggers={"album": album})

    assert list(album.images) == [("valid", name) for name in CALLBACKS]
    for [image] in album.images.values():
        assert image.dtype == np.uint8 and image.shape[2] == 3 and len(np.unique(image.reshape(-1, 3), axis=0)) > 20


def test_tables_and_figures_can_be_left_out(tmp_path):
    album = Kept()
    callbacks = [CALLBACKS["auc/curves"](log_curves=False), CALLBACKS["f1/by_class"](log_table=False)]

    evaluate(tmp_path, callbacks, loggers={"album": album})

    assert not album.images and not (tmp_path / "tables").exists()


@pytest.mark.parametrize("normalize", [True, False])
def test_a_confusion_matrix_has_its_counts_or_fractions_in_its_cells(normalize):
    """The largest cell is dark; the figure takes Matplotlib's arguments."""
    callback = dl.ConfusionMatrixCallback(
        "x", "y", "errors", ["cat", "dog"], normalize=normalize, plot_params={"figsize": (3, 3), "dpi": 100}
    )

    figure = callback.draw(torch.tensor([[2, 0], [1, 1]]))

    [axes] = figure.axes
    texts = [each.get_text() for each in axes.texts]
    assert texts == (["1.00", "0.00", "0.50", "0.50"] if normalize else ["2", "0", "1", "1"])
    assert [each.get_text() for each in axes.get_xticklabels()] == ["cat", "dog"]
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())
    assert pixels.shape == (300, 300, 4) and pixels[..., 0].min() < 60


def test_many_classes_keep_figures_small(tmp_path):
    """A matrix of 300 classes is drawn without names, curves and rows are not drawn; the tables are complete."""
    album = Kept()
    callbacks = [
        dl.ConfusionMatrixCallback("logits", "targets", num_classes=300),
        dl.AUCCallback("logits", "targets"),
        dl.PrecisionRecallF1SupportCallback("logits", "targets"),
    ]

    evaluate(tmp_path, callbacks, loggers={"album": album}, num_classes=300)

    [(image,)] = album.images.values()
    assert max(image.shape) <= 1400
    assert len(pd.read_csv(tmp_path / "tables" / "f1" / "by_class.csv")) == 300


def test_without_matplotlib_there_is_a_table_and_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # import raises ImportError
    album = Kept()

    with caplog.at_level(logging.WARNING):
        evaluate(tmp_path, [CALLBACKS["confusion_matrix"]()], loggers={"album": album})

    assert "no image of 'confusion_matrix' without Matplotlib: pip install runnerkit[metrics]" in caplog.text
    assert not album.images and (tmp_path / "tables" / "confusion_matrix.csv").exists()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=60))
def test_a_curve_has_the_points_of_scikit_learns(samples):
    """Also with ties, and without curves where one class is missing; fewer points are some of them with both ends."""
    scores, targets = (np.array(each) for each in zip(*samples, strict=True))
    given_scores, given_targets = torch.from_numpy(scores / 10), torch.from_numpy(targets)

    curve = {name: each.numpy() for name, each in roc_curve(given_scores, given_targets).items()}

    if targets.all() or not targets.any():
        assert all(len(each) == 0 for each in curve.values())
        return
    false, true, thresholds = sk.roc_curve(targets, scores / 10, drop_intermediate=False)
    precision, recall, _ = sk.precision_recall_curve(targets, scores / 10)
    np.testing.assert_allclose(curve["false_positive_rate"], false[1:], rtol=1e-12)
    np.testing.assert_allclose(curve["true_positive_rate"], true[1:], rtol=1e-12)
    np.testing.assert_array_equal(curve["threshold"], thresholds[1:])
    np.testing.assert_allclose(curve["precision"], precision[:-1][::-1], rtol=1e-12)
    np.testing.assert_allclose(curve["true_positive_rate"], recall[:-1][::-1], rtol=1e-12)
    few = roc_curve(given_scores, given_targets, max_points=4)["threshold"].tolist()
    assert len(few) <= 4 and set(few) <= set(curve["threshold"])
    assert (few[0], few[-1]) == (curve["threshold"][0], curve["threshold"][-1])


def test_a_nan_score_has_no_curve():
    assert roc_curve(torch.tensor([0.1, torch.nan]), torch.tensor([0, 1]))["threshold"].numel() == 0


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ({}, TypeError, "a table is a mapping from names of columns to their cells, got {}"),
        ([1], TypeError, "a table is a mapping"),
        ({"a": [1], "b": [1, 2]}, ValueError, "the same length, got {'a': 1, 'b': 2}"),
        ({"a": "abc"}, TypeError, "a sequence of cells, got 'abc' for 'a'"),
        ({"a": torch.tensor(1)}, TypeError, "a sequence of cells, got 1 for 'a'"),
        ({"a": [None]}, TypeError, "cells of a table are strings or numbers, got None in column 'a'"),
        ({"a": torch.zeros(2, 2)}, TypeError, r"got \[0.0, 0.0\] in column 'a'"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, table, error, message):
    class Wrong(dl.Callback):
        def on_loader_end(self, runner):
            runner.log_table("wrong", table)

    with pytest.raises(error, match=message):
        evaluate(tmp_path, [Wrong()])
