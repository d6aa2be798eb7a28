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
from tests.interrupt import Interrupt
from tests.tiny import NUM_CLASSES, NUM_FEATURES, classification, loader, mlp, quiet, sgd, weights


class Augmented(Dataset):
    """Data set that adds noise from torch's generator to each sample."""

    def __init__(self, num_samples):
        self.data = classification(num_samples)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        features, target = self.data[index]
        return features + 0.1 * torch.randn_like(features), target


def run(
    logdir, *, interrupt_at=None, resume=None, num_epochs=4, every_steps=None, num_workers=0, persistent=False,
    model=None, **kwargs,
):  # fmt: skip
    model = model or mlp(dropout=0.3, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    callbacks = {
        "accuracy": dl.AccuracyCallback("logits", "targets"),
        "stop": dl.EarlyStoppingCallback(50, loader_key="valid", metric_key="loss", minimize=True),
        "checkpoint": dl.CheckpointCallback(
            logdir, loader_key="valid", metric_key="loss", minimize=True, mode="runner", every_steps=every_steps
        ),
    }
    if interrupt_at is not None:
        callbacks["interrupt"] = Interrupt(interrupt_at)
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs),
        loaders={
            "train": DataLoader(
                Augmented(40), batch_size=4, shuffle=True, num_workers=num_workers, persistent_workers=persistent
            ),
            "valid": loader(21, 4, num_workers=int(persistent), persistent_workers=persistent),
        },
        callbacks=callbacks,
        num_epochs=num_epochs,
        logdir=logdir,
        resume=resume,
        **{"cpu": True, **quiet(), **kwargs},
    )


def read_csv(logdir, key):
    with (logdir / "csv" / f"{key}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("resume", ["auto", "logdir", "file"])
def test_a_run_resumed_at_an_epochs_start_equals_the_uninterrupted_one(tmp_path, resume):
    """Weights, metrics and logs equal those of an uninterrupted run, with dropout, augmentation and shuffling."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(broken, interrupt_at=25)

    source = {"auto": "auto", "logdir": broken, "file": broken / "checkpoints" / "last.pth"}[resume]
    resumed = run(broken, resume=source)

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics
    assert resumed.epoch_step == 4 and resumed.batch_step == 40
    assert read_csv(broken, "train") == read_csv(whole, "train")
    assert read_csv(broken, "valid") == read_csv(whole, "valid")


@pytest.mark.parametrize("interrupt_at", [24, 25, 30, 31])
def test_a_run_resumed_within_an_epoch_equals_the_uninterrupted_one(tmp_path, interrupt_at):
    """A resume within an epoch restores the position in the loader, partial sums and random generators."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole, every_steps=3)
    with pytest.raises(KeyboardInterrupt):
        run(broken, interrupt_at=interrupt_at, every_steps=3)

    resumed = run(broken, resume="auto", every_steps=3)

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics
    assert read_csv(broken, "train") == read_csv(whole, "train")


def test_workers_that_augment_draw_in_a_resumed_epoch_what_they_would_have_drawn(tmp_path):
    """Augmentation in worker processes is the same after a resume, with any number of workers, bit for bit."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole, every_steps=3)
    with pytest.raises(KeyboardInterrupt):
        run(broken, interrupt_at=13, every_steps=3, num_workers=2)

    resumed = run(broken, resume="auto", every_steps=3, num_workers=1)

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics


@pytest.mark.parametrize("every_steps", [None, 3])
def test_workers_that_outlive_an_epoch_change_nothing_in_a_resumed_run(tmp_path, every_steps):
    """Persistent workers, which a resume restarts, give the bits of an uninterrupted run without workers."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole, every_steps=every_steps)
    with pytest.raises(KeyboardInterrupt):
        run(broken, interrupt_at=13, every_steps=every_steps, num_workers=1, persistent=True)

    resumed = run(broken, resume="auto", every_steps=every_steps, num_workers=1, persistent=True)

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics
    del resumed
    gc.collect()  # runners are reference cycles that keep the loaders' workers alive


def test_ddp_resumes_within_an_epoch(tmp_path):
    """A DDP run resumed within an epoch equals an uninterrupted DDP run, bit for bit."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole, every_steps=3, ddp=True)
    with pytest.raises(KeyboardInterrupt):
        run(broken, interrupt_at=13, every_steps=3, ddp=True)

    resumed = run(broken, resume="auto", every_steps=3, ddp=True)

    assert resumed.is_resumed and not expected.is_resumed
    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics


def test_three_processes_resume_with_the_same_bits(tmp_path):
    """A resume on three processes keeps DDP's bucket layout, which torch would rebuild and on which sums depend."""

    # Enough weights for another layout to change some bits.
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 1000), nn.ReLU(), nn.Linear(1000, NUM_CLASSES))

    def run_on_three(name, **options):
        engine = dl.DistributedDataParallelEngine(3, device="cpu")
        return run(tmp_path / name, model=copy.deepcopy(model), every_steps=3, cpu=False, engine=engine, **options)

    expected = run_on_three("whole")
    with pytest.raises(KeyboardInterrupt):
        run_on_three("broken", interrupt_at=8)

    resumed = run_on_three("broken", resume="auto")

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics


def test_resume_runner_of_the_checkpoint_callback_is_the_same(tmp_path):
    """CheckpointCallback(resume_runner=) resumes like `train(resume=)`, for runners without this argument."""
    expected = run(tmp_path / "whole")
    run(tmp_path / "part", num_epochs=4, interrupt_at=None)
    callback = dl.CheckpointCallback(tmp_path / "part", resume_runner=tmp_path / "part", mode="runner")

    model = mlp(dropout=0.3, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders={
            "train": DataLoader(Augmented(40), batch_size=4, shuffle=True),
            "valid": loader(21, 4),
        },
        callbacks={"checkpoint": callback},
        num_epochs=4,
        cpu=True,
        **quiet(),
    )

    assert runner.epoch_step == 4 and runner.batch_step == 40, "no epoch was left"
    assert torch.equal(weights(runner.model), weights(expected.model))


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path, caplog):
    """A finished run resumes if `num_epochs`, which counts from the first epoch, is increased."""
    run(tmp_path / "log", num_epochs=2)

    longer = run(tmp_path / "log", num_epochs=3, resume="auto")

    assert longer.epoch_step == 3 and "are done" not in caplog.text
    assert [row["epoch"] for row in read_csv(tmp_path / "log", "train")] == ["1", "2", "3"]


@pytest.mark.parametrize("ddp", [False, True])
def test_a_finished_run_that_is_started_again_says_that_it_is(tmp_path, capfd, caplog, ddp):
    """Starting a finished run again logs one message that explains how to continue."""
    run(tmp_path / "log", num_epochs=2)

    run(tmp_path / "log", num_epochs=2, resume="auto", cpu=not ddp, ddp=ddp)

    said = capfd.readouterr().err + "\n".join(record.getMessage() for record in caplog.records)
    assert said.count("2 of 2 epochs are done; raise num_epochs to continue") == 1


def test_the_end_of_a_stage_is_no_end_of_the_run(tmp_path, caplog):
    """A resume after the end of a stage continues with the next stage and logs no message."""

    class Two(dl.SupervisedRunner):
        stages = ("first", "second")

        def get_stage_len(self, stage):
            return 1

    def train(*callbacks):
        model = mlp()
        return Two().train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": loader(8, 4)},
            callbacks=callbacks, logdir=tmp_path, resume="auto", cpu=True, **quiet(),
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        train(Interrupt(3))
    train()
    assert "are done" not in caplog.text
    train()

    assert caplog.text.count("1 of 1 epochs are done") == 1


def test_every_second_epoch_and_the_last_are_saved(tmp_path):
    """every_epochs=2 saves every second epoch and the last one, also after an early stop."""

    class Stop(dl.Callback):
        def on_epoch_end(self, runner):
            runner.need_early_stop = runner.epoch_step == 5

    model = mlp()
    checkpoint = dl.CheckpointCallback(tmp_path, "train", "loss", minimize=True, every_epochs=2, topk=9)
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": loader(8, 4)},
        callbacks=[checkpoint, Stop(order=0)],
        num_epochs=9,
        cpu=True,
        **quiet(),
    )

    assert [record.epoch for record in CheckpointFolder(tmp_path / "checkpoints").records] == [2, 4, 5]


def test_auto_without_a_checkpoint_starts_anew(tmp_path):
    """resume="auto" without a checkpoint starts a new run."""
    runner = run(tmp_path / "log", resume="auto", num_epochs=1)

    assert runner.epoch_step == 1


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
    model = mlp()
    snapshots = {}

    class Keep(dl.Callback):
        def on_epoch_end(self, runner):
            snapshots[runner.epoch_step] = weights(runner.model).clone()

    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model, lr=3.0),
        loaders={"train": loader(40, 4, shuffle=True), "valid": loader(21, 4, seed=1)},
        callbacks=[Keep()],
        num_epochs=6,
        logdir=tmp_path / "log",
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        load_best_on_end=True,
        cpu=True,
        **quiet(),
    )

    losses = {epoch: metrics["valid"]["loss"] for epoch, metrics in runner.experiment_metrics.items()}
    best = min(losses, key=losses.get)
    assert best != 6, "the test needs a run that gets worse"
    saved = mlp()
    saved.load_state_dict(utils.load_checkpoint(tmp_path / "log" / "checkpoints" / "best.pth")["model_state_dict"])
    assert torch.equal(weights(saved), snapshots[best])
    assert torch.equal(weights(runner.model), snapshots[best]), "load_best_on_end"


@pytest.mark.parametrize("ddp", [False, True])
def test_every_checkpoint_loads_into_the_plain_module(tmp_path, ddp):
    """A checkpoint with mode="model" is a state dict without wrapper prefixes, also from DDP."""
    model = mlp()
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": loader(16, 4)},
        callbacks=[dl.CheckpointCallback(tmp_path, mode="model")],
        cpu=True,
        ddp=ddp,
        **quiet(),
    )

    saved = mlp(seed=9)
    saved.load_state_dict(torch.load(tmp_path / "checkpoints" / "last.pth", weights_only=True))

    assert torch.equal(weights(saved), weights(model))


def test_state_that_no_callback_takes_up_is_told_of(tmp_path, caplog):
    """A warning names saved callback states without a callback."""
    stop = dl.EarlyStoppingCallback(5, loader_key="valid", metric_key="loss", minimize=True)
    for callbacks in ([stop], [dl.TimerCallback()]):
        model = mlp()
        dl.SupervisedRunner().train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loaders={"train": loader(8, 4), "valid": loader(8, 4)}, callbacks=callbacks, logdir=tmp_path,
            resume="auto", cpu=True, **quiet(),
        )  # fmt: skip

    assert "state of callbacks that the run does not have: ['00_EarlyStoppingCallback valid/loss" in caplog.text


class StopAfter(dl.Callback):
    """User-defined callback that ends a stage before the epoch's checkpoint."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Scheduler)

    def on_epoch_end(self, runner):
        if runner.epoch_step == 2:
            runner.need_early_stop = True


def early_stopped(logdir, *, callbacks, num_epochs=5):
    model = mlp()
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": loader(16, 4), "valid": loader(8, 4)},
        callbacks=callbacks,
        num_epochs=num_epochs,
        logdir=logdir,
        resume="auto",
        cpu=True,
        **quiet(),
    )
    return runner.epoch_step, weights(model)


def patient(patience):
    """Return early stopping whose min_delta no epoch reaches."""
    return {"stop": dl.EarlyStoppingCallback(patience, "valid", "loss", minimize=True, min_delta=10.0)}


def test_a_larger_patience_lets_an_early_stopped_run_go_on(tmp_path, caplog):
    """A larger patience resumes an early-stopped run and keeps its count of bad epochs."""
    expected = early_stopped(tmp_path / "whole", callbacks=patient(3))

    assert early_stopped(tmp_path / "log", callbacks=patient(1))[0] == 2
    assert "stopped early" not in caplog.text
    resumed = early_stopped(tmp_path / "log", callbacks=patient(3))

    assert "stage 'train' was stopped early by 'stop' after epoch 2: its condition no longer holds" in caplog.text
    assert resumed[0] == expected[0] == 4
    assert torch.equal(resumed[1], expected[1])


def test_without_the_callback_that_stopped_it_a_run_goes_on(tmp_path):
    """An early-stopped run resumes if the callback that stopped it was removed."""
    early_stopped(tmp_path, callbacks=patient(1))

    assert early_stopped(tmp_path, callbacks={})[0] == 5


@pytest.mark.parametrize(
    ("callbacks", "who"),
    [(lambda: patient(1), " by 'stop'"), (lambda: {"own": StopAfter()}, "")],
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
    runner = dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": loader(16, 4)},
        num_epochs=2, logdir=logdir, resume=logdir if resume == "logdir" else resume, engine=engine,
        loggers={"console": None, "tensorboard": None},
    )  # fmt: skip
    return runner.engine.gather_object((runner.epoch_step, runner.batch_step, weights(model).tolist()))


class Gathers(dl.DistributedDataParallelEngine):
    """Engine that keeps its process group after the run."""

    def cleanup(self):
        pass


def resumed_on_two_machines(folder, resume):
    return on_its_own_machine(folder, resume, Gathers(device="cpu", timeout_s=20))


@pytest.mark.parametrize(("holder", "resume"), [(0, "auto"), (0, "logdir"), (1, "auto")])
def test_rank_zero_decides_for_all_whether_there_is_a_checkpoint(tmp_path, holder, resume):
    """Rank zero decides whether to resume, even if other machines see no logdir or another one, and no rank hangs."""
    model = mlp()
    dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": loader(16, 8)},
        logdir=tmp_path / f"machine{holder}", cpu=True, **quiet(),
    )  # fmt: skip

    first, second = together(lambda: resumed_on_two_machines(tmp_path, resume))

    assert first == second
    assert first[0] == 2 and first[1] == 4
    one = mlp()
    dl.SupervisedRunner().train(
        model=one, criterion=nn.CrossEntropyLoss(), optimizer=sgd(one), loaders={"train": loader(16, 8)},
        num_epochs=2, cpu=True, **quiet(),
    )  # fmt: skip
    torch.testing.assert_close(torch.tensor(first[2], dtype=torch.float64), weights(one), rtol=0, atol=1e-6)
