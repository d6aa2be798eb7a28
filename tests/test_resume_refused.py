"""Tests that a resume from an incompatible checkpoint is refused or warned about, with the differences."""

import functools
import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint, save_checkpoint
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, train


def fit(logdir, *, model=None, optimizer=None, scheduler=None, batch_size=4, **options):
    model = model or mlp()
    made = (optimizer or functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))(model.parameters())
    loaders = {"train": loader(16, batch_size), "valid": loader(8, 4)}
    options = {"optimizer": made, "scheduler": scheduler and scheduler(made), "resume": "auto", **options}
    return train(model, loaders=loaders, logdir=logdir, **options)


@pytest.fixture
def logdir(tmp_path):
    """Return the logdir of a run of one epoch."""
    fit(tmp_path / "log", hparams={"lr": 0.1, "layers": [16], "augment": {"flip": True}})
    return tmp_path / "log"


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def deeper():
    return nn.Sequential(*mlp(), nn.ReLU(), *(nn.Linear(3, 3) for _ in range(9)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3)),
         r"3 of another shape: 0.weight \(16, 6\) instead of \(8, 6\), 0.bias \(16,\) instead of \(8,\), 3.weight"),
        (lambda: nn.Sequential(nn.Linear(6, 3)), r"2 not in the model: 3.weight, 3.bias; 2 of another shape"),
        (lambda: mlp(batch_norm=True), "missing from it: 1.weight, 1.bias, 1.running_mean"),
        (deeper, "18 missing from it: 5.weight, 5.bias, 6.weight, 6.bias, 7.weight and 13 more"),
    ],
)  # fmt: skip
def test_another_model_is_refused_with_the_names_of_what_differs(logdir, model, words):
    """The error lists missing, unexpected and differently shaped weights, shortened if many; no file changes."""
    before = files(logdir)

    with pytest.raises(ValueError, match=words) as refused:
        fit(logdir, model=model(), num_epochs=2)

    assert f"{logdir / 'checkpoints' / 'model.0001.pth'} holds another model's weights; " in str(refused.value)
    assert files(logdir) == before


def test_a_loader_that_lost_its_position_is_named(tmp_path):
    """A list of batches cannot begin in the middle of the epoch in which a DataLoader was interrupted."""
    saving = dl.CheckpointCallback(tmp_path, content="runner", every_steps=2)
    with pytest.raises(KeyboardInterrupt):
        train(loaders={"train": loader(16, 4)}, logdir=tmp_path, callbacks=[saving, Interrupt(3)])

    with pytest.raises(TypeError, match="within loader 'train', which does not have a position"):
        train(loaders={"train": [*loader(16, 4)]}, logdir=tmp_path, resume="auto")


def test_shards_of_two_processes_are_held_against_model_and_settings_too(tmp_path, caplog, capfd):
    """Changing the number of processes causes no warning about settings; another model ends every rank."""
    sharded = functools.partial(dl.FullyShardedDataParallelEngine, 2, device="cpu", sharded_checkpoints=True)
    wider = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))

    fit(tmp_path)
    fit(tmp_path, num_epochs=2, engine=sharded())
    resumed = fit(tmp_path, num_epochs=3)
    with pytest.raises(ValueError, match=r"2.* holds another model's weights; 3 of another shape: 0.weight \(16"):
        fit(tmp_path, model=wider, resume=tmp_path / "checkpoints" / "model.0002", engine=sharded())

    assert resumed.epoch_step == 3
    assert "saved by 1 processes" in capfd.readouterr().err, "the output of the processes is captured here"
    assert "settings" not in caplog.text + capfd.readouterr().err


def test_another_number_of_models_is_refused(logdir):
    """A checkpoint with other models than the runner's is refused, with the keys of both."""

    class Several(dl.Runner):
        def handle_batch(self, batch):
            pass

    def run(*keys, **options):
        train({key: mlp() for key in keys} or mlp(), runner=Several(), optimizer=None, **options)

    two = logdir.with_name("two")
    run("a", "b", logdir=two)

    with pytest.raises(ValueError, match="holds the weights of one model, the runner has the models 'a', 'b'"):
        run("a", "b", resume=logdir)
    with pytest.raises(ValueError, match="holds the models 'a', 'b', the runner has one"):
        run(resume=two)
    with pytest.raises(ValueError, match="holds the models 'a', 'b', the runner has the models 'a', 'c'"):
        run("a", "c", resume=two)


def test_predicting_with_another_models_weights_is_refused_with_names(logdir):
    """`predict_loader(resume=)` refuses another model's weights and lists the differences."""

    class Predictor(dl.Runner):
        def handle_batch(self, batch):
            pass

        def predict_batch(self, batch):
            return self.model(batch[0])

    other = Predictor(nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3)))
    with pytest.raises(ValueError, match=r"missing: 1.weight, 1.bias\n  unexpected: 3.weight, 3.bias"):
        list(other.predict_loader(loader=loader(8, 4), resume=logdir))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.Adam, "holds the state of SGD, the run has Adam"),
        (lambda parameters: torch.optim.SGD(list(parameters)[:2], lr=0.1, momentum=0.9), r"optimizer with \[4\]"),
    ],
)  # fmt: skip
def test_another_kind_of_optimizer_is_refused(logdir, optimizer, words):
    """Another optimizer class or number of parameters is refused; torch would fail in the first step."""
    with pytest.raises(ValueError, match=words):
        fit(logdir, optimizer=optimizer, num_epochs=2)


OF_CHECKPOINT = "with the checkpoint's (resume_options='arguments' uses the ones that were passed)"


def test_changed_settings_are_warned_about_key_by_key(logdir, caplog):
    """One warning lists all changed hyperparameters and settings with their old and new values."""
    sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    hparams = {"lr": 0.01, "layers": [16], "augment": {"flip": False}, "dropout": 0.5}

    runner = fit(logdir, optimizer=sgd, hparams=hparams, batch_size=2, seed=7, num_epochs=2)

    [words] = [each for each in caplog.messages if "other settings" in each]
    where = f"{logdir / 'checkpoints' / 'model.0001.pth'} was saved with other settings"
    assert words == (
        f"{where}; the run continues with the new ones: seed was 42, is 7, batch_size of train was 4, is 2; and "
        f"{OF_CHECKPOINT}: optimizer.lr is 0.1, 0.01 was passed; and logging the new hyperparameters: hparams.lr was "
        "0.1, is 0.01, hparams.augment.flip was True, is False, hparams.dropout was absent, is 0.5"
    )
    assert runner.epoch_step == 2 and runner.optimizer.param_groups[0]["lr"] == 0.1


def test_another_number_of_threads_and_lost_hyperparameters_are_warned_about(logdir, caplog):
    """Another number of threads may round sums differently; hyperparameters are missed even if the run has none."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        fit(logdir, num_epochs=2)
    finally:
        torch.set_num_threads(before)

    [words] = [each for each in caplog.messages if "other settings" in each]
    assert f"with the new ones: torch.get_num_threads() in 1 process(es) was {before}, is {before + 1}" in words
    assert "hyperparameters: hparams.lr was 0.1, is absent, hparams.layers was [16], is absent, hparams.a" in words


@dataclass
class Transform:
    """Class whose repr contains the address of the object."""

    __repr__ = object.__repr__


def test_the_same_run_started_again_is_not_warned_about(tmp_path, caplog):
    """A resume with equal arguments or more epochs does not warn, with any hyperparameters and a scheduler."""
    scheduler = functools.partial(lr_scheduler.StepLR, step_size=1)
    for num_epochs in (1, 2, 3):
        hparams = {"transform": Transform(), "names": {"a", "b", "c"}, "shape": (1, 2), "nan": float("nan")}
        fit(tmp_path, hparams=hparams, scheduler=scheduler, num_epochs=num_epochs)

    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_another_scheduler_and_precision_are_warned_about(tmp_path, caplog):
    """Another scheduler or precision causes a warning, and the compatible state is restored."""
    fit(tmp_path, scheduler=functools.partial(lr_scheduler.StepLR, step_size=1))

    exponential = functools.partial(lr_scheduler.ExponentialLR, gamma=0.5)
    fit(tmp_path, scheduler=exponential, num_epochs=2, precision="bf16")

    assert "precision was 'FP32', is 'AMP', scheduler was 'StepLR', is 'ExponentialLR'; and " in caplog.text
    assert f"{OF_CHECKPOINT}: scheduler.gamma is 0.1, 0.5 was passed" in caplog.text


def cosine(optimizer, *, num_epochs):
    return lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)


def test_a_schedule_of_another_length_is_warned_about(tmp_path, caplog):
    """A schedule of another length causes a warning with both lengths, and the checkpoint's applies."""
    fit(tmp_path, scheduler=functools.partial(cosine, num_epochs=2), num_epochs=2)

    runner = fit(tmp_path, scheduler=functools.partial(cosine, num_epochs=4), num_epochs=4)

    where = f"{tmp_path / 'checkpoints' / 'model.0002.pth'} was saved with other settings"
    words = f"{where}; the run continues {OF_CHECKPOINT}: scheduler.T_max is 2, 4 was passed"
    assert [each for each in caplog.messages if "settings" in each] == [words]
    assert runner.scheduler.get_last_lr() == pytest.approx([0.1])  # back at the initial rate of the cosine


def test_what_a_scheduler_is_made_of_is_warned_about(tmp_path, caplog):
    """Changes inside WarmupLR and SequentialLR are reported; only the warm-up's own arguments apply."""

    def warm(optimizer, kind, argument, **arguments):
        return dl.WarmupLR(optimizer, after=kind(optimizer, argument), **arguments)

    def in_turn(optimizer, milestone, step_size):
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, step_size)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[milestone])

    warmed, turned = tmp_path / "warmed", tmp_path / "turned"
    fit(warmed, scheduler=lambda each: warm(each, lr_scheduler.StepLR, 3, num_steps=4))
    exponential = functools.partial(warm, kind=lr_scheduler.ExponentialLR, argument=0.5, num_steps=8, start_lr=0.01)
    fit(warmed, scheduler=exponential, num_epochs=2)
    fit(turned, scheduler=lambda each: in_turn(each, 1, 5))
    fit(turned, scheduler=lambda each: in_turn(each, 3, 7), num_epochs=2)

    warm_up, turns = (each for each in caplog.messages if "other settings" in each)
    assert warm_up.endswith(
        "with the new ones: scheduler.num_steps was 4, is 8, scheduler.start_lr was 0.0, is 0.01, "
        f"scheduler.after was 'StepLR', is 'ExponentialLR'; and {OF_CHECKPOINT}: scheduler.after.gamma is 0.1, "
        "0.5 was passed"
    )
    assert turns.endswith("scheduler.milestones is [1], [3] was passed, scheduler.1.step_size is 5, 7 was passed")


def one_cycle(optimizer, *, num_steps):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps)


@pytest.mark.parametrize("num_steps", [8, 4])
def test_a_one_cycle_schedule_is_not_made_longer(tmp_path, num_steps):
    """A resume beyond the end of a one-cycle schedule is refused, and no file changes; torch would raise later."""
    fit(tmp_path, scheduler=functools.partial(one_cycle, num_steps=4))
    before = files(tmp_path)

    with pytest.raises(ValueError, match="start a new one with its weights") as refused:
        fit(tmp_path, scheduler=functools.partial(one_cycle, num_steps=num_steps), num_epochs=2)

    assert files(tmp_path) == before
    source = tmp_path / "checkpoints" / "model.0001.pth"
    assert str(refused.value).startswith(
        f"{source} has taken 4 of the 4 steps of its one-cycle schedule, which cannot be extended: "
        f"scheduler.total_steps is 4, {num_steps} was passed, and epochs 2 to 2 are left. "
    )


def test_a_one_cycle_schedule_is_resumed_to_its_end(tmp_path):
    """A one-cycle schedule can be resumed up to its end, also inside WarmupLR."""

    def warm(optimizer):
        return dl.WarmupLR(optimizer, num_steps=2, after=one_cycle(optimizer, num_steps=6))

    for logdir, scheduler in ((tmp_path / "1", functools.partial(one_cycle, num_steps=8)), (tmp_path / "2", warm)):
        fit(logdir, scheduler=scheduler)
        runner = fit(logdir, scheduler=scheduler, num_epochs=2)

        assert runner.batch_step == 8
    with pytest.raises(ValueError, match=r"scheduler.after.total_steps is 6, 6 was passed, and epochs 3 to 3 are left"):
        fit(tmp_path / "2", scheduler=warm, num_epochs=3)


def test_a_cycle_of_a_class_without_an_argument_for_its_length_is_resumed(tmp_path):
    """A subclass of OneCycleLR may compute its length."""

    class Cycle(lr_scheduler.OneCycleLR):
        def __init__(self, optimizer, num_epochs):
            super().__init__(optimizer, 0.1, epochs=num_epochs, steps_per_epoch=4)

    fit(tmp_path, scheduler=functools.partial(Cycle, num_epochs=2))
    assert fit(tmp_path, scheduler=functools.partial(Cycle, num_epochs=2), num_epochs=2).batch_step == 8


def test_another_schedulers_state_is_refused_by_a_warm_up(tmp_path):
    """WarmupLR refuses another scheduler's state and lists its keys."""
    fit(tmp_path, scheduler=functools.partial(cosine, num_epochs=2))

    with pytest.raises(ValueError, match=r"WarmupLR got the state of another scheduler, with \['T_max', .*: resume"):
        fit(tmp_path, scheduler=lambda optimizer: dl.WarmupLR(optimizer, num_steps=2), num_epochs=2)


def test_within_a_loader_that_is_no_more_is_refused(tmp_path):
    """A checkpoint saved within a loader that the run lacks is refused, with the keys of the loaders."""
    fit(tmp_path, callbacks=[dl.CheckpointCallback(tmp_path, content="runner", every_steps=1)])
    path = next(tmp_path.glob("checkpoints/model.0001.*.pth"))

    with pytest.raises(ValueError, match=r"saved within loader 'train'; the run has the loaders \['train_more'\]"):
        train(loaders={"train_more": loader(8, 4)}, resume=path)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (2, "has format 2, written by runnerkit 7.0; this is runnerkit 0.1.0, which reads 1 to 1: upgrade it"),
        (0, "has format 0, written by runnerkit 7.0; .*: resume with the version that wrote it, or load only"),
        ("one", "has format 'one', written"),
    ],
)
def test_a_checkpoint_of_a_format_that_is_not_read_is_refused(logdir, version, words):
    """A checkpoint with a newer, older or invalid format version is refused."""
    state = load_checkpoint(logdir / "checkpoints" / "last.pth")
    other = save_checkpoint({**state, "format_version": version, "runnerkit_version": "7.0"}, logdir / "other.pth")

    with pytest.raises(ValueError, match=words):
        fit(logdir, resume=other)


def test_a_checkpoint_from_before_there_were_settings_loads(logdir, caplog):
    """A checkpoint without settings, from an earlier version, loads without a warning about them."""
    state = load_checkpoint(logdir / "checkpoints" / "last.pth")
    del state["settings"]

    runner = fit(logdir, resume=save_checkpoint(state, logdir / "older.pth"), num_epochs=2, hparams={"lr": 7})

    assert runner.epoch_step == 2 and "settings" not in caplog.text
