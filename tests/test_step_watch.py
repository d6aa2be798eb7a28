"""Tests of the warning about a first training loader that ends without an optimizer step."""

import logging

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from runnerkit import dl
from runnerkit.contrib.lookahead import Lookahead
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, quiet, sgd, weights


class ByHand(dl.Runner):
    """Runner that calls `finish(runner, loss)` in training."""

    def __init__(self, finish):
        super().__init__()
        self.finish = finish

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        if self.is_train_loader:
            self.finish(self, loss)


def forget(runner, loss):
    return {"loss": loss}


def log_number(runner, loss):
    runner.batch_metrics["loss"] = loss.item()


def log_loss(runner, loss):
    runner.batch_metrics["loss"] = loss


def step(runner, loss):
    runner.engine.zero_grad(runner.optimizer)
    runner.engine.backward(loss)
    runner.engine.step(runner.optimizer)


def train(runner, **kwargs):
    model = kwargs.pop("model", None) or mlp()
    options = {"engine": dl.CPUEngine(), "loaders": {"train": loader(16, 4), "valid": loader(8, 4)}, "num_epochs": 2}
    return runner.train(model=model, **{"optimizer": sgd(model), **options, **quiet(), **kwargs})


@pytest.mark.parametrize(
    ("finish", "callbacks"),
    [(forget, []), (log_number, []), (log_loss, []), (log_loss, {"backward": dl.BackwardCallback("loss")})],
    ids=["returned", "no tensor", "no callbacks", "no OptimizerCallback"],
)
def test_a_run_in_which_nobody_steps_is_told_so_once(caplog, finish, callbacks):
    """A run without optimizer steps causes one warning that names the optimizer, the loader and the fix."""
    model = mlp()
    before = weights(model)

    train(ByHand(finish), model=model, callbacks=callbacks)

    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "optimizer SGD did not step in the first pass over loader 'train' (4 batches), so nothing was trained: "
        "put the loss, a tensor, into self.batch_metrics['loss'] and pass callbacks=[BackwardCallback('loss'), "
        "OptimizerCallback('loss')], or call self.learn(loss) in handle_batch"
    )
    assert torch.equal(weights(model), before)
    assert not _global_optimizer_post_hooks


def test_several_optimizers_are_named_by_their_keys(caplog):
    """The warning names all optimizers by key and is not logged if one of them steps."""
    model = nn.ModuleDict({"one": nn.Linear(6, 3), "two": nn.Linear(6, 3)})

    class Two(ByHand):
        def handle_batch(self, batch):
            if self.is_train_loader:
                self.finish(self, self.model["one"](batch[0]).mean())

    def step_one(runner, loss):
        runner.engine.backward(loss)
        runner.engine.step(runner.optimizer["one"])

    def both():
        return {key: sgd(each) for key, each in model.items()}

    train(Two(forget), model=model, optimizer=both())
    [record] = caplog.records
    caplog.clear()
    train(Two(step_one), model=model, optimizer=both())

    assert record.getMessage().startswith("optimizer 'one' (SGD), 'two' (SGD) did not step in the first pass over")
    assert not caplog.records


def test_a_criterion_without_an_optimizer_is_told_of_unless_somebody_steps(caplog):
    """A criterion without an optimizer causes a warning, unless a user-defined callback steps an optimizer."""

    class Step(dl.Callback):
        def on_batch_end(self, runner):
            if runner.is_train_loader:
                runner.batch_metrics["loss"].backward()
                own.step()

    model = mlp()
    own = sgd(model)
    common = {"model": model, "criterion": nn.CrossEntropyLoss(), "optimizer": None}

    train(dl.SupervisedRunner(), callbacks=[Step()], **common)
    assert not caplog.records
    train(dl.SupervisedRunner(), **common)

    [record] = caplog.records
    assert record.getMessage() == (
        "there is a criterion but no optimizer, and no other optimizer stepped in the first pass over loader 'train' "
        "(4 batches), so nothing was trained: pass optimizer= or override get_optimizer; to evaluate, call "
        "evaluate_loader"
    )


class NotTorchs:
    """Optimizer that does not derive from torch's class."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        pass


def as_one_stage(name):
    class OneStage(ByHand):
        stages = (name,)

    return OneStage


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: ByHand(step), {}),
        (lambda: ByHand(step), {"optimizer": lambda model: Lookahead(sgd(model))}),
        (lambda: ByHand(forget), {"optimizer": lambda model: NotTorchs(sgd(model))}),
        (lambda: as_one_stage("infer")(forget), {}),
        (lambda: dl.SupervisedRunner(), {"optimizer": None}),  # without optimizer and criterion
        (lambda: dl.SupervisedRunner().evaluate_loader, {}),
    ],
    ids=["hand-written", "Lookahead", "not torch's", "infer", "nothing to train by", "evaluation"],
)
def test_what_trains_or_is_not_meant_to_is_not_told_of(caplog, make, options):
    """Runs that train, or that are not meant to, cause no warning and leave no hook."""
    model = mlp()
    runner = make()
    if not isinstance(runner, dl.Runner):
        runner(loader(8, 4), model=model, engine=dl.CPUEngine(), callbacks=[dl.AccuracyCallback("logits", "targets")])
    else:
        optimizer = options.get("optimizer", sgd)
        train(runner, model=model, optimizer=optimizer and optimizer(model))

    assert not caplog.records
    assert not _global_optimizer_post_hooks


def test_gradients_that_accumulate_beyond_a_loader_are_let_be(caplog):
    """Gradients that accumulate beyond the loader's end cause no warning."""

    class End(dl.Callback):
        def on_batch_end(self, runner):
            runner.need_early_stop = True  # the loader's end

    train(
        dl.SupervisedRunner(),
        criterion=nn.CrossEntropyLoss(),
        callbacks=[dl.OptimizerCallback("loss", accumulation_steps=8), End()],
    )

    assert not caplog.records


def test_steps_that_a_scaler_skips_are_let_be(caplog):
    """Steps that the gradient scaler skips cause no warning; a run without steps does, also in fp16."""
    options = {"engine": dl.AMPEngine("cpu", dtype=torch.float16), "num_epochs": 1}

    train(ByHand(lambda runner, loss: step(runner, loss * float("inf"))), **options)
    assert not caplog.records
    train(ByHand(forget), **options)

    assert "optimizer SGD did not step" in caplog.text


def test_the_rest_of_an_interrupted_loader_is_not_judged_and_the_next_one_is(tmp_path, caplog):
    """The rest of a resumed loader is not checked for steps; the next loader is."""

    def rarely(runner, loss):
        runner.engine.backward(loss)
        if runner.loader_batch_step == 1 and runner.epoch_step < 2:
            runner.engine.step(runner.optimizer)

    def checkpoint(**options):
        return dl.CheckpointCallback(tmp_path, mode="runner", every_steps=2, **options)

    with pytest.raises(KeyboardInterrupt):
        train(ByHand(rarely), callbacks=[checkpoint(), Interrupt(3, "on_batch_start")])
    assert not _global_optimizer_post_hooks
    train(ByHand(rarely), callbacks=[checkpoint(resume_runner=tmp_path)], num_epochs=1)
    assert "did not step" not in caplog.text
    train(ByHand(rarely), callbacks=[checkpoint(resume_runner=tmp_path)], num_epochs=3)

    assert caplog.text.count("did not step in the first pass over loader 'train' (4 batches)") == 1


def test_after_the_first_step_nothing_is_called_any_more():
    """After the first step, the optimizer hook and its listener are removed."""
    seen = []

    class Look(dl.Callback):
        def on_batch_start(self, runner):
            if runner.is_train_loader:
                ours = [each for each in runner._stage.listeners["on_step_end"] if each.__module__ != __name__]
                seen.append((len(_global_optimizer_post_hooks), len(ours)))

    train(ByHand(step), callbacks=[Look()])

    assert seen == [(1, 1)] + [(0, 0)] * 7


def test_of_several_processes_rank_zero_says_so(capfd):
    """With several processes, only rank zero warns."""
    train(ByHand(forget), engine=dl.DistributedDataParallelEngine(2, device="cpu"), num_epochs=1)

    assert capfd.readouterr().err.count("optimizer SGD did not step") == 1
