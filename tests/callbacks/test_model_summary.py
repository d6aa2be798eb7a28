"""The model's table is logged once and does not affect the run."""

import torch
from torch import nn

from benchmarks.calls import calls_per_step
from runnerkit import dl
from tests.callbacks.recording import Kept
from tests.tiny import loader, mlp, sgd, train, weights

TABLE = [
    "layer  type         output shape  parameters  FLOPs",
    "0      Linear       (8, 16)              112  1.54k",
    "1      BatchNorm1d  (8, 16)               32   0.00",
    "2      ReLU         (8, 16)                0   0.00",
    "3      Dropout      (8, 16)                0   0.00",
    "4      Linear       (8, 3)                51    768",
    "195 parameters, 195 of them trainable",
    "2.30k FLOPs in the forward pass of one batch",
]


def told(*callbacks, runner=None, model=None, **options):
    """Train for two epochs; return the texts, the weights and the runner."""
    logger, model = Kept(), model or mlp(dropout=0.5, batch_norm=True)
    loaders = {"train": loader(32, 8, shuffle=True), "valid": loader(21, 8)}
    options = {"loaders": loaders, "loggers": {"texts": logger}, "num_epochs": 2, **options}
    runner = train(model, runner=runner, callbacks=list(callbacks), **options)
    return logger.texts, weights(runner.model), runner


class ByHand(dl.Runner):
    """A runner without `predict_batch`."""

    def handle_batch(self, batch):
        features, targets = batch
        loss = self.criterion(self.model(features), targets)
        self.batch_metrics["loss"] = loss
        if self.is_train_loader:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def test_table_is_told_once_and_the_run_is_the_same():
    """Shapes are those of the first batch; weights are equal bit for bit, with dropout, batch norm and shuffling."""
    texts, trained, _ = told(dl.ModelSummaryCallback())
    none, without, _ = told()

    assert [each.splitlines() for each in texts] == [TABLE]
    assert none == []
    assert torch.equal(trained, without)


def test_a_resumed_run_tells_it_only_in_another_logdir(tmp_path):
    """The logs of the interrupted run have the table."""

    def run(name, num_epochs, **options):
        logdir = tmp_path / name
        return told(dl.ModelSummaryCallback(), model=mlp(), logdir=logdir, num_epochs=num_epochs, **options)[0]

    counts = [len(run("a", 1, resume="auto")), len(run("a", 2, resume="auto"))]

    assert counts == [1, 0]
    assert len(run("b", 3, resume=tmp_path / "a")) == 1


def test_a_resumed_run_that_is_the_first_to_ask_for_the_table_tells_it(tmp_path):
    told(model=mlp(), logdir=tmp_path, num_epochs=1, resume="auto")

    assert len(told(dl.ModelSummaryCallback(), model=mlp(), logdir=tmp_path, resume="auto")[0]) == 1


def test_what_the_engine_wrapped_is_unwrapped():
    """The table lists the user's layers by their own names."""
    texts, _, _ = told(dl.ModelSummaryCallback(), engine=dl.DataParallelEngine())

    assert [each.splitlines() for each in texts] == [TABLE]


def test_batch_is_what_other_callbacks_made_of_it():
    """Shapes are those of the batch that the model gets."""

    class Half(dl.Callback):
        def on_batch_start(self, runner):
            runner.batch = {key: each[:4] for key, each in runner.batch.items()}

    texts, _, _ = told(dl.ModelSummaryCallback(), Half(dl.CallbackOrder.Internal))

    assert "0      Linear       (4, 16)" in texts[0]


def test_runner_without_predict_batch_gets_parameters():
    """The table then says how to get shapes."""
    [text], _, _ = told(dl.ModelSummaryCallback(), runner=ByHand())

    assert text.splitlines()[1].split() == ["0", "Linear", "-", "112", "-"]
    assert "195 parameters" in text
    assert "ByHand.predict_batch(batch, **kwargs): implement it" in text.splitlines()[-1]


def test_several_models_are_told_by_key():
    """Names are those in ``runner.model``."""

    class Pair(dl.SupervisedRunner):
        def predict_batch(self, batch, **kwargs):
            return self.model["head"](self.model["body"](batch["features"]))

        def handle_batch(self, batch):
            self.batch = {"logits": self.predict_batch(batch), "targets": batch["targets"]}

    logger, models = Kept(), {"body": nn.Linear(6, 4), "head": nn.Linear(4, 3)}
    optimizer = sgd(nn.ModuleDict(models))

    train(models, runner=Pair(), optimizer=optimizer, callbacks=[dl.ModelSummaryCallback()], loggers={"texts": logger})

    assert [line.split()[:4] for line in logger.texts[0].splitlines()[1:3]] == [
        ["body", "Linear", "(4,", "4)"],
        ["head", "Linear", "(4,", "3)"],
    ]


def test_what_predict_batch_keeps_stays_as_it_was():
    """`predict_batch` runs on a copy of the runner, so tensors without values do not reach the user's list."""

    class Keeps(dl.SupervisedRunner):
        def __init__(self):
            super().__init__()
            self.kept = []

        def predict_batch(self, batch, **kwargs):
            self.kept.append(super().predict_batch(batch, **kwargs))

    texts, _, runner = told(dl.ModelSummaryCallback(), runner=Keeps())

    assert runner.kept == [] and "2.30k FLOPs" in texts[0]


def test_steps_after_the_first_pay_nothing():
    """Later steps make no additional function calls."""

    def run(num_steps, *callbacks):
        train(loaders={"train": loader(num_steps, 1)}, callbacks=list(callbacks))

    def run_with_summaries(num_steps):
        run(num_steps, dl.ModelSummaryCallback(), dl.RunSummaryCallback())

    assert calls_per_step(run_with_summaries) == calls_per_step(run)


def test_evaluation_and_the_look_at_the_metrics_before_training_tell_nothing():
    """The table is written once, when the loggers are open."""
    texts, _, runner = told(dl.ModelSummaryCallback(), dl.EarlyStoppingCallback(9, monitor="valid/loss", mode="min"))
    runner.evaluate_loader(loader(8, 8), cpu=True)

    assert len(texts) == 1
