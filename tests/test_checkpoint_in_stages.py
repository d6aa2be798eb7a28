"""Tests of checkpoints in several stages: signals, best checkpoint, initial weights and conflicting folders."""

import os
import signal

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.loop.stop_signals import Preempted, StopRequests
from tests.interrupt import at
from tests.tiny import loader, mlp, train, weights

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LOADERS = {"train": loader(40, 8), "valid": loader(16, 8)}


class Stages(dl.SupervisedRunner):
    """Two stages of three epochs of five steps; each stage creates its own callbacks."""

    stages = ("train_first", "train_second")

    def __init__(self, make_callbacks, *, worse_by=0.0):
        super().__init__()
        self.make_callbacks, self.worse_by, self.seen = make_callbacks, worse_by, {}

    def run_all(self):
        train(runner=self, loaders=LOADERS)

    def get_stage_len(self, stage):
        return 3

    def get_model(self, stage):
        model = super().get_model(stage)
        self.seen[stage] = weights(model)
        return model

    def get_criterion(self, stage):
        added = self.worse_by if stage == "train_second" else 0.0
        return lambda logits, targets: nn.functional.cross_entropy(logits, targets) + added

    def get_callbacks(self, stage):
        return {**super().get_callbacks(stage), **self.make_callbacks(stage)}


def at_step(step, act):
    """Return a callback that calls a function at the end of one training step."""
    return at("on_batch_end", lambda run: act(run) if run.is_train_loader and run.batch_step == step else None)


def terminate(runner):
    os.kill(os.getpid(), signal.SIGTERM)


def checkpoint(logdir, **options):
    options = {"monitor": "valid/loss", "mode": "min", "content": "runner", **options}
    return dl.CheckpointCallback(logdir, **options)


def fail(runner):
    raise LookupError("on purpose")


@pytest.fixture
def handlers():
    """Check that a run restores the signal handlers."""
    before = [signal.getsignal(each) for each in SIGNALS]
    yield before
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("step", [7, 22], ids=["first", "second"])
def test_a_signal_stops_whichever_stage_is_under_way(tmp_path, handlers, step):
    """A signal saves a checkpoint and stops the run in any stage, each of which has its own CheckpointCallback."""
    with pytest.raises(Preempted):
        Stages(lambda stage: {"save": checkpoint(tmp_path), "signal": at_step(step, terminate)}).run_all()

    record = CheckpointFolder(tmp_path / "checkpoints").records[-1]
    assert (record.batch, record.stage) == (step, "train_second" if step > 15 else "train_first")


@pytest.mark.parametrize("step", [7, 22], ids=["first", "second"])
def test_an_exception_in_any_stage_gives_the_signals_back(tmp_path, handlers, step):
    """After an exception, the signal handlers are restored and the next run in this process receives signals."""
    with pytest.raises(LookupError):
        Stages(lambda stage: {"save": checkpoint(tmp_path / "a"), "fail": at_step(step, fail)}).run_all()

    with pytest.raises(Preempted):
        Stages(lambda stage: {"save": checkpoint(tmp_path / "b"), "signal": at_step(3, terminate)}).run_all()


def test_an_exception_reaches_the_callbacks_of_stages_before(tmp_path):
    """on_exception is called for callbacks of earlier stages too, but not for callbacks that have not started."""
    told = []

    class Told(dl.Callback):
        def __init__(self, stage, late=0):
            super().__init__(order=dl.CallbackOrder.External + late)
            self.stage = stage

        def on_experiment_start(self, runner):
            if self.stage == "train_second":
                raise LookupError("on purpose")

        def on_exception(self, runner):
            told.append(self.stage)

    def callbacks(stage):
        return {"told": Told(stage), **({"not started": Told(stage, late=1)} if stage == "train_second" else {})}

    with pytest.raises(LookupError):
        Stages(callbacks).run_all()

    assert told == ["train_first", "train_second"]


def test_the_best_is_that_of_the_stage(tmp_path):
    """The best checkpoint is chosen among those of the last stage, even if an earlier stage had a lower loss."""
    kept = {}

    def keep(runner):
        kept[runner.batch_step] = weights(runner.model)

    def callbacks(stage):
        keepers = {f"at {step}": at_step(step, keep) for step in (5, 10, 15, 20, 25, 30)}
        return {"save": checkpoint(tmp_path, load_best_on_end=True), **keepers}

    runner = Stages(callbacks, worse_by=10.0)
    runner.run_all()

    records = {each.epoch: each for each in CheckpointFolder(tmp_path / "checkpoints").records}
    assert {each.stage for each in records.values()} == {"train_second"}
    best = min(records.values(), key=lambda record: record.score)
    assert torch.equal(weights(runner.model), kept[5 * best.epoch])
    saved = torch.load(tmp_path / "checkpoints" / "best.pth", weights_only=True)
    assert saved["counters"]["epoch_step"] == best.epoch


def test_weights_to_start_with_are_for_the_first_stage(tmp_path):
    """`resume_model` sets the weights of the first stage; the second continues with the trained weights."""
    start = mlp(seed=5)
    torch.save(start.state_dict(), tmp_path / "start.pth")
    seen = {}
    look = at("on_epoch_start", lambda each: seen.setdefault(each.stage_key, weights(each.model)))

    def callbacks(stage):
        return {"save": checkpoint(tmp_path / "log", resume_model=tmp_path / "start.pth"), "look": look}

    runner = Stages(callbacks)
    runner.run_all()

    assert torch.equal(seen["train_first"], weights(start))
    assert torch.equal(seen["train_second"], runner.seen["train_second"])
    assert not torch.equal(seen["train_second"], weights(start))


def train_in(logdir, *callbacks, **options):
    return train(loaders=LOADERS, callbacks=callbacks, num_epochs=2, logdir=logdir, **options).model


def test_two_that_would_save_over_each_other_are_refused(tmp_path):
    """Two checkpoint callbacks with the same folder are refused before anything is written."""
    weights_only = checkpoint(tmp_path, content="model", keep_best=2)
    with pytest.raises(ValueError, match=r"would overwrite each other's files in .*: give one another logdir"):
        train_in(tmp_path, checkpoint(tmp_path / "." / "x" / ".."), weights_only)
    assert not (tmp_path / "checkpoints").exists()

    train_in(tmp_path, checkpoint(tmp_path), checkpoint(tmp_path / "weights", content="model"))
    assert (tmp_path / "weights" / "checkpoints" / "best.pth").exists()


def test_where_no_metric_is_a_number_the_last_weights_stay(tmp_path, caplog):
    """If the metric is always NaN, load_best_on_end keeps the last weights and warns instead of raising."""

    order = dl.CallbackOrder.Metric
    nan = at("on_loader_end", lambda runner: runner.loader_metrics.update(mine=float("nan")), order=order)

    trained = train_in(tmp_path / "a", nan, checkpoint(tmp_path / "a", monitor="valid/mine", load_best_on_end=True))

    assert torch.equal(weights(trained), weights(train_in(tmp_path / "b")))
    assert "'mine' of loader 'valid' was not a number at any checkpoint of stage" in caplog.text


def test_a_stop_agreed_on_amid_an_accumulated_step_is_kept_until_its_end(tmp_path, monkeypatch):
    """A stop requested during gradient accumulation waits for the end of the optimizer step."""
    monkeypatch.setattr(StopRequests, "due", lambda self, step, engine: signal.SIGTERM if step >= 4 else None)

    with pytest.raises(Preempted):
        train_in(tmp_path, checkpoint(tmp_path), dl.OptimizerCallback("loss", accumulation_steps=3))

    assert CheckpointFolder(tmp_path / "checkpoints").records[-1].batch == 5  # the epoch's last
