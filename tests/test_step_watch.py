"""Tests of the warning about a first training loader that ends without an optimizer step."""

import logging

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from runnerkit import dl
from runnerkit.contrib.lookahead import Lookahead
from tests.interrupt import Interrupt, at
from tests.tiny import loader, mlp, sgd, train, weights


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


def fit(runner, *, model=None, **options):
    options = {"criterion": None, "num_epochs": 2, **options}
    return train(model, runner=runner, loaders={"train": loader(16, 4), "valid": loader(8, 4)}, **options)


@pytest.mark.parametrize(
    ("finish", "callbacks"),
    [(forget, []), (log_number, []), (log_loss, []), (log_loss, {"backward": dl.BackwardCallback("loss")})],
    ids=["returned", "no tensor", "no callbacks", "no OptimizerCallback"],
)
def test_a_run_in_which_nobody_steps_is_told_so_once(caplog, finish, callbacks):
    """A run without optimizer steps causes one warning that names the optimizer, the loader and the fix."""
    model = mlp()

    fit(ByHand(finish), model=model, callbacks=callbacks)

    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "optimizer SGD did not step in the first pass over loader 'train' (4 batches), so nothing was trained: "
        "put the loss, a tensor, into self.batch_metrics['loss'] and pass callbacks=[BackwardCallback('loss'), "
    )
    assert torch.equal(weights(model), weights(mlp()))
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

    for finish in (forget, step_one):
        fit(Two(finish), model=model, optimizer={key: sgd(each) for key, each in model.items()})

    [record] = caplog.records
    assert record.getMessage().startswith("optimizer 'one' (SGD), 'two' (SGD) did not step in the first pass over")


@pytest.mark.parametrize("is_stepped", [False, True])
def test_an_optimizer_beside_those_of_the_callbacks_is_named_unless_it_steps(caplog, is_stepped):
    """Its part of the model would silently stay as it is."""
    model = mlp()
    optimizers = {"body": sgd(model[0]), "head": sgd(model[3])}
    own_step = at("on_batch_end", lambda runner: runner.engine.step(runner.optimizer["head"]))
    callbacks = [dl.OptimizerCallback("loss", optimizer_key="body"), *[own_step] * is_stepped]

    train(model, optimizer=optimizers, callbacks=callbacks, num_epochs=2)

    found = [each.getMessage() for each in caplog.records if "did not step" in each.getMessage()]
    assert len(found) == (not is_stepped)
    assert all("optimizer 'head' (SGD)" in each and "optimizer_key='head'" in each for each in found)


def test_a_criterion_without_an_optimizer_is_told_of_unless_somebody_steps(caplog):
    """A criterion without an optimizer causes a warning, unless a user-defined callback steps an optimizer."""
    model = mlp()
    own = sgd(model)

    def step_own(runner):
        if runner.is_train_loader:
            runner.batch_metrics["loss"].backward()
            own.step()

    common = {"model": model, "criterion": nn.CrossEntropyLoss(), "optimizer": None}
    fit(dl.SupervisedRunner(), callbacks=[at("on_batch_end", step_own)], **common)
    assert not caplog.records
    fit(dl.SupervisedRunner(), **common)

    [record] = caplog.records
    assert record.getMessage().startswith(
        "there is a criterion but no optimizer, and no other optimizer stepped in the first pass over loader 'train' "
        "(4 batches), so nothing was trained: pass optimizer="
    )


class NotTorchs:
    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        pass


class Infer(ByHand):
    stages = ("infer",)


@pytest.mark.parametrize(
    ("runner", "optimizer"),
    [
        (ByHand(step), sgd),
        (ByHand(step), lambda model: Lookahead(sgd(model))),
        (ByHand(forget), lambda model: NotTorchs(sgd(model))),
        (Infer(forget), sgd),
        (dl.SupervisedRunner(), lambda model: None),  # without optimizer and criterion
    ],
    ids=["hand-written", "Lookahead", "not torch's", "infer", "nothing to train by"],
)
def test_what_trains_or_is_not_meant_to_is_not_told_of(caplog, runner, optimizer):
    """Runs that train, or that are not meant to, and evaluations cause no warning and leave no hook."""
    model = mlp()
    fit(runner, model=model, optimizer=optimizer(model))
    runner.evaluate_loader(loader(8, 4), callbacks=[at("on_loader_end", lambda _: None)])

    assert not [each for each in caplog.messages if "step" in each]
    assert not _global_optimizer_post_hooks


def test_gradients_that_accumulate_beyond_a_loader_are_let_be(caplog):
    """Gradients that accumulate beyond the loader's end cause no warning."""
    end = at("on_batch_end", lambda runner: setattr(runner, "need_early_stop", True))  # the loader's end

    fit(dl.SupervisedRunner(), criterion=nn.CrossEntropyLoss(), callbacks=[end], accumulation_steps=8)

    assert not caplog.records


def test_steps_that_a_scaler_skips_are_let_be(caplog):
    """Steps that the gradient scaler skips cause no warning; a run without steps does, also in fp16."""
    fit(ByHand(lambda runner, loss: step(runner, loss * float("inf"))), precision="fp16")
    assert not caplog.records
    fit(ByHand(forget), precision="fp16")

    assert "optimizer SGD did not step" in caplog.text


def test_the_rest_of_an_interrupted_loader_is_not_judged_and_the_next_one_is(tmp_path, caplog):
    """The rest of a resumed loader is not checked for steps; the next loader is."""

    def rarely(runner, loss):
        runner.engine.backward(loss)
        if runner.loader_batch_step == 1 and runner.epoch_step < 2:
            runner.engine.step(runner.optimizer)

    def run(*callbacks, num_epochs=2, **options):
        save = dl.CheckpointCallback(tmp_path, content="runner", every_steps=2, **options)
        fit(ByHand(rarely), callbacks=[save, *callbacks], num_epochs=num_epochs)

    with pytest.raises(KeyboardInterrupt):
        run(Interrupt(3, "on_batch_start"))
    assert not _global_optimizer_post_hooks
    run(resume_runner=tmp_path, num_epochs=1)
    assert "did not step" not in caplog.text
    run(resume_runner=tmp_path, num_epochs=3)

    assert caplog.text.count("did not step in the first pass over loader 'train' (4 batches)") == 1


def test_of_several_processes_rank_zero_says_so(capfd):
    """With several processes, only rank zero warns."""
    fit(ByHand(forget), num_processes=2, num_epochs=1)

    assert capfd.readouterr().err.count("optimizer SGD did not step") == 1
