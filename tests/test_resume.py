"""Tests that a resumed run equals an uninterrupted run, bit for bit."""

import copy
import csv
import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl, utils
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.engines.process_environment import ProcessEnvironment
from tests.engines.together import together
from tests.interrupt import Interrupt, at
from tests.tiny import NUM_CLASSES, NUM_FEATURES, classification, loader, mlp, sgd, train, weights


class Augmented(Dataset):
    """Data set that adds noise from torch's generator to each sample."""

    def __init__(self, num_samples):
        self.data = classification(num_samples)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        features, target = self.data[index]
        return features + 0.1 * torch.randn_like(features), target


def run(logdir, *, interrupt_at=None, every_steps=None, num_epochs=4, num_workers=0, persistent=False, **options):
    model = copy.deepcopy(options.pop("model", None)) or mlp(dropout=0.3, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    judge = {"monitor": "valid/loss", "mode": "min"}
    callbacks = {
        "accuracy": dl.AccuracyCallback("logits", "targets"),
        "stop": dl.EarlyStoppingCallback(50, **judge),
        "checkpoint": dl.CheckpointCallback(logdir, **judge, content="runner", every_steps=every_steps),
    }
    if interrupt_at is not None:
        callbacks["interrupt"] = Interrupt(interrupt_at)
    workers = {"num_workers": num_workers, "persistent_workers": persistent}
    loaders = {
        "train": DataLoader(Augmented(40), batch_size=4, shuffle=True, **workers),
        "valid": loader(21, 4, num_workers=int(persistent), persistent_workers=persistent),
    }
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)
    options = {"optimizer": optimizer, "scheduler": scheduler, "loaders": loaders, "logdir": logdir, **options}
    return train(model, callbacks=callbacks, num_epochs=num_epochs, **options)


def check(tmp_path, interrupt_at, *, source="auto", first=(), rest=(), **options):
    """Interrupt a run and resume it: weights, metrics and logs are those of an uninterrupted run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole, **options)
    with pytest.raises(KeyboardInterrupt):
        run(broken, interrupt_at=interrupt_at, **options, **dict(first))

    resumed = run(broken, resume=source, **options, **dict(rest))

    assert resumed.is_resumed and not expected.is_resumed
    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics
    assert (resumed.epoch_step, resumed.batch_step) == (expected.epoch_step, expected.batch_step)
    for key in ("train", "valid"):
        assert read_csv(broken, key) == read_csv(whole, key)
    if first or rest:
        del resumed
        gc.collect()  # runners are reference cycles that keep the loaders' workers alive


def read_csv(logdir, key):
    with (logdir / "csv" / f"{key}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("source", ["auto", "", "checkpoints/last.pth"])
def test_a_run_resumed_at_an_epochs_start_equals_the_uninterrupted_one(tmp_path, source):
    """Weights, metrics and logs equal those of an uninterrupted run, with dropout, augmentation and shuffling."""
    check(tmp_path, 25, source=source if source == "auto" else tmp_path / "broken" / source)


@pytest.mark.parametrize("interrupt_at", [24, 25, 30, 31])
def test_a_run_resumed_within_an_epoch_equals_the_uninterrupted_one(tmp_path, interrupt_at):
    """A resume within an epoch restores the position in the loader, partial sums and random generators."""
    check(tmp_path, interrupt_at, every_steps=3)


def test_workers_that_augment_draw_in_a_resumed_epoch_what_they_would_have_drawn(tmp_path):
    """Augmentation in worker processes is the same after a resume, with any number of workers, bit for bit."""
    check(tmp_path, 13, every_steps=3, first={"num_workers": 2}, rest={"num_workers": 1})


def test_workers_that_outlive_an_epoch_change_nothing_in_a_resumed_run(tmp_path):
    """Persistent workers, which a resume restarts, give the bits of an uninterrupted run without workers."""
    workers = {"num_workers": 1, "persistent": True}
    check(tmp_path, 13, every_steps=3, first=workers, rest=workers)


def test_three_processes_resume_with_the_same_bits(tmp_path):
    """A resume on three processes keeps DDP's bucket layout, which torch would rebuild and on which sums depend."""
    # Enough weights for another layout to change some bits.
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 1000), nn.ReLU(), nn.Linear(1000, NUM_CLASSES))
    check(tmp_path, 8, model=model, every_steps=3, num_processes=3)


def test_resume_runner_of_the_checkpoint_callback_is_the_same(tmp_path):
    """CheckpointCallback(resume_runner=) resumes like `train(resume=)`, for runners without this argument."""
    expected = run(tmp_path, num_epochs=2)
    callback = dl.CheckpointCallback(tmp_path, resume_runner=tmp_path, content="runner")

    model = mlp(dropout=0.3, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loaders = {"train": DataLoader(Augmented(40), batch_size=4, shuffle=True), "valid": loader(21, 4)}
    runner = train(model, optimizer=optimizer, loaders=loaders, callbacks={"checkpoint": callback}, num_epochs=2)

    assert runner.epoch_step == 2 and runner.batch_step == 20, "no epoch was left"
    assert torch.equal(weights(runner.model), weights(expected.model))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_finished_run_that_is_started_again_says_that_it_is(tmp_path, capfd, caplog, num_processes):
    """Starting a finished run again logs one message that explains how to continue."""
    run(tmp_path / "log", num_epochs=2)

    run(tmp_path / "log", num_epochs=2, resume="auto", num_processes=num_processes)

    said = capfd.readouterr().err + "\n".join(record.getMessage() for record in caplog.records)
    assert said.count("2 of 2 epochs are done; raise num_epochs to continue") == 1


def test_the_end_of_a_stage_is_no_end_of_the_run(tmp_path, caplog):
    """A resume after the end of a stage continues with the next stage and logs no message."""

    class Two(dl.SupervisedRunner):
        stages = ("first", "second")

        def get_stage_len(self, stage):
            return 1

    def fit(*callbacks):
        return train(runner=Two(), loaders={"train": loader(8, 4)}, callbacks=callbacks, logdir=tmp_path, resume="auto")

    with pytest.raises(KeyboardInterrupt):
        fit(Interrupt(3))
    fit()
    assert "are done" not in caplog.text
    fit()

    assert caplog.text.count("1 of 1 epochs are done") == 1


def test_every_second_epoch_and_the_last_are_saved(tmp_path):
    """every_epochs=2 saves every second epoch and the last one, also after an early stop."""
    checkpoint = dl.CheckpointCallback(tmp_path, monitor="train/loss", mode="min", every_epochs=2, keep_best=9)
    train(callbacks=[checkpoint, stop_after(5)], num_epochs=9)

    assert [record.epoch for record in CheckpointFolder(tmp_path / "checkpoints").records] == [2, 4, 5]


def test_a_torn_last_checkpoint_falls_back_to_the_one_before(tmp_path, caplog):
    """If the last checkpoint is damaged, the run warns and resumes from the previous one."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "log", interrupt_at=35)
    last = tmp_path / "log" / "checkpoints" / "last.pth"
    content = last.read_bytes()
    with last.open("r+b") as file:
        file.truncate(len(content) // 2)

    with caplog.at_level("WARNING"):
        resumed = run(tmp_path / "log", resume="auto")

    assert "model.0003.pth is damaged" in caplog.text
    expected = run(tmp_path / "whole")
    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert read_csv(tmp_path / "log", "train") == read_csv(tmp_path / "whole", "train")


def test_the_best_checkpoint_is_a_copy_of_the_best_epoch(tmp_path):
    """best.pth and load_best_on_end give the weights of the best epoch, not of the last."""
    model, snapshots = mlp(), []
    keep = at("on_epoch_end", lambda runner: snapshots.append(weights(runner.model).clone()))
    judge = {"monitor": "valid/loss", "mode": "min", "load_best_on_end": True}

    loaders = {"train": loader(40, 4, shuffle=True), "valid": loader(21, 4, seed=1)}
    options = {"loaders": loaders, "callbacks": [keep], "num_epochs": 6, "logdir": tmp_path}
    runner = train(model, optimizer=sgd(model, lr=3.0), **options, **judge)

    losses = [metrics["valid"]["loss"] for metrics in runner.experiment_metrics.values()]
    best = losses.index(min(losses))
    assert best != 5, "the test needs a run that gets worse"
    saved = mlp()
    saved.load_state_dict(utils.load_checkpoint(tmp_path / "checkpoints" / "best.pth")["model_state_dict"])
    assert torch.equal(weights(saved), snapshots[best])
    assert torch.equal(weights(runner.model), snapshots[best]), "load_best_on_end"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_checkpoint_loads_into_the_plain_module(tmp_path, num_processes):
    """A checkpoint with content="model" is a state dict without wrapper prefixes, also from DDP."""
    model = mlp()
    train(model, callbacks=[dl.CheckpointCallback(tmp_path, content="model")], num_processes=num_processes)

    saved = mlp(seed=9)
    saved.load_state_dict(torch.load(tmp_path / "checkpoints" / "last.pth", weights_only=True))

    assert torch.equal(weights(saved), weights(model))


def test_state_that_no_callback_takes_up_is_told_of(tmp_path, caplog):
    """A warning names saved callback states without a callback."""
    for callbacks in (patient(5), [dl.TimerCallback()]):
        early_stopped(tmp_path, callbacks=callbacks, num_epochs=1)

    assert "state of callbacks that the run does not have: ['stop" in caplog.text


def stop_after(epoch):
    """Return a user-defined callback that ends a stage before the epoch's checkpoint."""

    def stop(runner):
        runner.need_early_stop = runner.epoch_step == epoch

    return at("on_epoch_end", stop, order=dl.CallbackOrder.Scheduler)


def early_stopped(logdir, *, num_epochs=5, **options):
    model = mlp()
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    runner = train(model, loaders=loaders, num_epochs=num_epochs, logdir=logdir, resume="auto", **options)
    return runner.epoch_step, weights(model)


def patient(patience):
    """Return early stopping whose min_delta no epoch reaches."""
    return {"stop": dl.EarlyStoppingCallback(patience, monitor="valid/loss", mode="min", min_delta=10.0)}


def test_a_larger_patience_lets_an_early_stopped_run_go_on(tmp_path, caplog):
    """It keeps its count of bad epochs; so does a run without the callback that stopped it."""
    expected = early_stopped(tmp_path / "whole", callbacks=patient(3))

    for name in ("log", "without"):
        assert early_stopped(tmp_path / name, callbacks=patient(1))[0] == 2
    assert "stopped early" not in caplog.text
    resumed = early_stopped(tmp_path / "log", callbacks=patient(3))

    assert "stage 'train' was stopped early by 'stop' after epoch 2: its condition no longer holds" in caplog.text
    assert resumed[0] == expected[0] == 4
    assert torch.equal(resumed[1], expected[1])
    assert early_stopped(tmp_path / "without", callbacks={})[0] == 5


@pytest.mark.parametrize(
    ("callbacks", "who"),
    [(lambda: patient(1), " by 'stop'"), (lambda: {"own": stop_after(2)}, "")],
    ids=["early stopping", "custom callback"],
)
def test_an_early_stop_stays_and_is_told_of(tmp_path, caplog, callbacks, who):
    """An early-stopped run that is started again does not train further, and says why."""
    early_stopped(tmp_path, callbacks=callbacks())

    assert early_stopped(tmp_path, callbacks=callbacks())[0] == 2
    assert f"stage 'train' was stopped early{who} after epoch 2: nothing is left to do in it; to train" in caplog.text


def on_its_own_machine(folder, resume, engine):
    """Train in one of several processes without a shared logdir; return the last epoch, step and weights of all."""
    logdir = folder / f"machine{ProcessEnvironment.read().rank}"
    model = mlp()
    runner = train(
        model, num_epochs=2, logdir=logdir, resume=logdir if resume == "logdir" else resume, engine=engine,
        loggers={"console": None, "tensorboard": None},
    )  # fmt: skip
    return runner.engine.gather_object((runner.epoch_step, runner.batch_step, weights(model).tolist()))


class Gathers(dl.DistributedDataParallelEngine):
    def cleanup(self):
        pass


def resumed_on_two_machines(folder, resume):
    return on_its_own_machine(folder, resume, Gathers(device="cpu", timeout_s=20))


@pytest.mark.parametrize(("holder", "resume"), [(0, "auto"), (0, "logdir"), (1, "auto")])
def test_rank_zero_decides_for_all_whether_there_is_a_checkpoint(tmp_path, holder, resume):
    """Rank zero decides whether to resume, even if other machines see no logdir or another one, and no rank hangs."""
    train(loaders={"train": loader(16, 8)}, logdir=tmp_path / f"machine{holder}")

    first, second = together(lambda: resumed_on_two_machines(tmp_path, resume))

    assert first == second
    assert first[0] == 2 and first[1] == 4
    one = mlp()
    train(one, loaders={"train": loader(16, 8)}, num_epochs=2)
    torch.testing.assert_close(torch.tensor(first[2], dtype=torch.float64), weights(one), rtol=0, atol=1e-6)
