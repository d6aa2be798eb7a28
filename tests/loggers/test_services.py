"""Laws of the loggers of services: what they refuse before training, and exact numbers."""

import os
import sys

import pytest

from runnerkit import dl


@pytest.mark.parametrize(
    ("make", "module", "words"),
    [
        (dl.CometLogger, "comet_ml", r"CometLogger needs Comet: pip install runnerkit\[comet\]"),
        (dl.MLflowLogger, "mlflow", r"MLflowLogger needs MLflow: pip install runnerkit\[mlflow\]"),
        (dl.WandbLogger, "wandb", r"WandbLogger needs wandb: pip install runnerkit\[wandb\]"),
        (dl.TensorboardLogger, "tensorboard.compat.proto.event_pb2", r"pip install runnerkit\[tensorboard\]"),
    ],
)
def test_a_missing_package_names_the_install_command(tmp_path, monkeypatch, make, module, words):
    """All are optional: if one is missing, training does not start, and the environment does not change."""
    monkeypatch.delitem(sys.modules, "runnerkit.loggers.files.event_files", raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # import raises ImportError
    before = dict(os.environ)

    with pytest.raises(ImportError, match=words):
        make(tmp_path).setup()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (dl.CometLogger, {"mode": "get", "experiment_key": "mine"}, r"CometLogger sets experiment_key, mode itself"),
        (dl.WandbLogger, {"id": "mine", "dir": "elsewhere"}, r"sets dir, id of wandb\.init itself: pass logdir"),
        (dl.MLflowLogger, {"x_axis": "epochs"}, '"epoch" or "step", got \'epochs\''),
        (dl.TensorboardLogger, {"x_axis": "epochs"}, '"epoch" or "step", got \'epochs\''),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, make, options, words):
    """The loggers derive ids and folders from the logdir."""
    with pytest.raises(ValueError, match=words):
        make(tmp_path, **options)
