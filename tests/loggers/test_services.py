"""Laws of the loggers of services: what they refuse before training, and exact numbers."""

import os
import sys

import pytest

from runnerkit import dl
from runnerkit.loggers.services.service import ServiceLogger
from tests.interrupt import at
from tests.loggers.training import train


def noting(kind):
    return lambda self, name, value, *, step, scope: self.sent.append((kind, name, step.epoch))


class Service(ServiceLogger):
    """A service that lists what it is sent, by kind, name and epoch."""

    service = "mine"

    def __init__(self, logdir):
        super().__init__(logdir)
        self.sent = []

    def open_run(self, run_id):
        return run_id or "first"

    def send_scalars(self, scalars, *, step, scope):
        self.sent += [("scalar", name, step.epoch) for name in scalars]

    def send_artifact(self, name, path, *, kind):
        self.sent.append((kind, name, 0))

    send_text, send_image, send_histogram = noting("text"), noting("image"), noting("histogram")
    send_pr_curve, send_table = noting("pr_curve"), noting("table")


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


def test_a_table_and_its_picture_are_both_sent_once(tmp_path):
    """They have one name, and so may a text and a metric; a resumed run sends none of them again."""
    say = at("on_epoch_end", lambda runner: runner.log_text("loss", "low"))
    callbacks = [dl.ConfusionMatrixCallback("logits", "targets", num_classes=3), say]
    kinds = {("table", "valid/confusion_matrix"), ("image", "valid/confusion_matrix")}
    kinds |= {("text", "valid/loss"), ("scalar", "valid/loss")}

    sent = []
    for num_epochs in (1, 2):
        logger = Service(tmp_path)
        train(tmp_path, logger, callbacks=callbacks, num_epochs=num_epochs, resume="auto")
        sent += logger.sent

    for kind in kinds:
        assert [epoch for *each, epoch in sent if tuple(each) == kind] == [1, 2]
