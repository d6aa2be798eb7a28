"""A run that trains nothing is told of once, after its first training loader; one that trains is not."""

import logging

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from runnerkit import dl
from runnerkit.contrib.lookahead import Lookahead
from tests.tiny import loader, mlp, quiet, sgd, weights


class ByHand(dl.Runner):
    """Does with the loss what it is told to."""

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
    """Two epochs, one warning, with the optimizer, the loader and what to write; the weights are as they were."""
    model = mlp()
    before = weights(model)

    train(ByHand(finish), model=model, callbacks=callbacks)

    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "optimizer SGD did not step in the first pass over loader 'train' (4 batches), so that nothing was trained: "
        "put the loss, a tensor, into self.batch_metrics['loss'] and pass callbacks=[BackwardCallback('loss'), "
        "OptimizerCallback('loss')], or call self.engine.backward(loss) and self.engine.step(self.optimizer)"
    )
    assert torch.equal(weights(model), before)
    assert not _global_optimizer_post_hooks


def test_several_optimizers_are_named_by_their_keys(caplog):
    """Where one of them steps, the others may wait, as a generator does."""
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
    """A callback of the user's own that steps is as good as an optimizer that is passed."""

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
        "there is a criterion and no optimizer, and none of your own stepped in the first pass over loader 'train' "
        "(4 batches), so that nothing was trained: pass optimizer= or override get_optimizer; to evaluate call "
        "evaluate_loader"
    )


class NotTorchs:
    """An optimizer that has the methods, and is none of torch's classes."""

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
        (lambda: dl.SupervisedRunner(), {"optimizer": None}),  # neither optimizer nor criterion: not meant to train
        (lambda: dl.SupervisedRunner().evaluate_loader, {}),
    ],
    ids=["by hand", "Lookahead", "not torch's", "infer", "nothing to train by", "evaluation"],
)
def test_what_trains_or_is_not_meant_to_is_not_told_of(caplog, make, options):
    """Nothing is said, and no hook is left."""
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
    """An OptimizerCallback steps by itself, later."""

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
    """As it does with the first of a run, until the scale is small enough; where nobody steps, it is told."""
    options = {"engine": dl.AMPEngine("cpu", dtype=torch.float16), "num_epochs": 1}

    train(ByHand(lambda runner, loss: step(runner, loss * float("inf"))), **options)
    assert not caplog.records
    train(ByHand(forget), **options)

    assert "optimizer SGD did not step" in caplog.text


def test_the_rest_of_an_interrupted_loader_is_not_judged_and_the_next_one_is(tmp_path, caplog):
    """One that steps with the first batch only does not step in the last two."""

    def rarely(runner, loss):
        runner.engine.backward(loss)
        if runner.loader_batch_step == 1 and runner.epoch_step < 2:
            runner.engine.step(runner.optimizer)

    class Break(dl.Callback):
        def on_step_end(self, runner):
            if runner.batch_step == 2:
                raise ZeroDivisionError

    def checkpoint(**options):
        return dl.CheckpointCallback(tmp_path, mode="runner", every_steps=2, **options)

    with pytest.raises(ZeroDivisionError):
        train(ByHand(rarely), callbacks=[checkpoint(), Break()])
    assert not _global_optimizer_post_hooks
    train(ByHand(rarely), callbacks=[checkpoint(resume_runner=tmp_path)], num_epochs=1)
    assert "did not step" not in caplog.text
    train(ByHand(rarely), callbacks=[checkpoint(resume_runner=tmp_path)], num_epochs=3)

    assert caplog.text.count("did not step in the first pass over loader 'train' (4 batches)") == 1


def test_after_the_first_step_nothing_is_called_any_more():
    """The hook is gone, and so is who takes it away."""
    seen = []

    class Look(dl.Callback):
        def on_batch_start(self, runner):
            if runner.is_train_loader:
                ours = [each for each in runner._listeners["on_step_end"] if each.__module__ != __name__]
                seen.append((len(_global_optimizer_post_hooks), len(ours)))

    train(ByHand(step), callbacks=[Look()])

    assert seen == [(1, 1)] + [(0, 0)] * 7


def test_of_several_processes_rank_zero_says_so(capfd):
    """Once."""
    train(ByHand(forget), engine=dl.DistributedDataParallelEngine(2, device="cpu"), num_epochs=1)

    assert capfd.readouterr().err.count("optimizer SGD did not step") == 1
