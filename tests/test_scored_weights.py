"""A checkpoint with a score holds the weights that were scored, and resumes with those that were trained."""

import functools
import json

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder
from runnerkit.checkpoints.weights import load_weights
from runnerkit.resume import scored_weights
from tests.engines.together import together
from tests.interrupt import at
from tests.test_schedule_free import ScheduleFreeSGD
from tests.tiny import loader, mlp, sgd, train, weights

NUM_EPOCHS, NUM_STEPS = 2, 5  # steps of an epoch
AFTER = ("on_loader_end", "on_validation_end", "on_step_end", "on_epoch_end")


def change(model):
    with torch.no_grad():
        model[-1].bias[0] += 0.5
        model[1].running_mean += 0.25


def act(runner):
    change(runner.engine.unwrap(runner.current_run.stage.training_model))


def changing_runner():
    runner = dl.SupervisedRunner()
    runner.on_epoch_end = act
    return runner


class Adapting(dl.SupervisedRunner):
    def handle_batch(self, batch):
        super().handle_batch(batch)
        if self.loader_key == "test":
            change(self.model)


def trained(folder, *, callbacks=(), keys=("train", "valid"), optimizer=sgd, content="runner", **options):
    """Train with two evaluations in each epoch, keep all checkpoints, and return the weights and metrics."""
    model = mlp(dropout=0.3, batch_norm=True)
    judge = {"monitor": "valid/loss", "mode": "min"}
    save = dl.CheckpointCallback(folder, **judge, content=content, keep_best=99, every_steps=3)
    loaders = {"train": loader(NUM_STEPS * 4, 4, shuffle=True), "valid": loader(9, 3, seed=1), "test": loader(6, 3)}
    options = {"num_epochs": NUM_EPOCHS, "valid_every_steps": 2, "logdir": folder, **options}
    loaders = {key: loaders[key] for key in keys}
    runner = train(model, optimizer=optimizer(model), loaders=loaders, callbacks=[*callbacks, save], **options)
    return weights(model), runner.experiment_metrics


def loss_of(model):
    options = {"criterion": nn.CrossEntropyLoss(), "engine": dl.CPUEngine()}
    return dl.SupervisedRunner(model).evaluate_loader(loader(9, 3, seed=1), **options)["loss"]


def scores(folder, *, rel=0):
    """Return the score of each checkpoint by its path, and check that its weights reproduce it."""
    records = json.loads((folder / "checkpoints" / "index.json").read_text())["checkpoints"]
    found = {folder / "checkpoints" / each["name"]: each["score"] for each in records}
    for path, score in found.items():
        if score is not None:
            model = mlp(dropout=0.3, batch_norm=True)
            load_weights(model, path)
            assert loss_of(model) == pytest.approx(score, rel=rel, abs=0), path.name
    return found


def cases():
    free = {"optimizer": lambda model: ScheduleFreeSGD(model.parameters())}
    wrapped = dl.ControlFlowCallbackWrapper(at("on_epoch_end", act), epochs=[1])

    def changing(event, *others, **options):
        return {"callbacks": lambda: [*others, at(event, act, **options)]}

    return {
        **{event: changing(event) for event in AFTER},
        "the runner": {"runner": changing_runner},
        "first": changing("on_loader_end", order=dl.CallbackOrder.Internal),
        "wrapped": {"callbacks": lambda: [wrapped]},
        "training follows": {"keys": ("valid", "train")},
        "a later loader": {"runner": Adapting, "keys": ("train", "valid", "test")},
        "averages": {"callbacks": lambda: [dl.EMACallback(0.5), at("on_validation_end", act)]},
        "schedule-free": {**free, **changing("on_validation_end")},
    }


CASES = cases()


def made(case):
    return {key: value() if key in ("callbacks", "runner") else value for key, value in case.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_score_of_a_checkpoint_is_that_of_its_weights(tmp_path, monkeypatch, case):
    """Whatever changes the weights between an evaluation and the save; each checkpoint resumes bit for bit."""
    monkeypatch.setattr(CheckpointFolder, "keep", lambda *_: None)

    expected = trained(tmp_path / "whole", **made(case))

    found = scores(tmp_path / "whole")
    assert sum(score is not None for score in found.values()) >= 2 * NUM_EPOCHS
    for path in [path for path in found if path.name.startswith("model.0001")]:
        again = trained(tmp_path / path.name, **made(case), resume=path)
        assert torch.equal(again[0], expected[0]) and again[1] == expected[1], path.name
        scores(tmp_path / path.name)


def last_and_best(folder):
    return [load_checkpoint(folder / "checkpoints" / f"{name}.pth") for name in ("last", "best")]


def test_plain_weights_are_those_that_were_scored(tmp_path, monkeypatch):
    """A file of content "model" holds one set of weights: the scored ones, if it has a score."""
    monkeypatch.setattr(CheckpointFolder, "keep", lambda *_: None)

    trained(tmp_path, callbacks=[at("on_epoch_end", act)], content="model")

    without = {path.name for path, score in scores(tmp_path).items() if score is None}
    assert without == {"model.0001.00000003.pth", "model.0002.00000009.pth"}


JUDGED = {"monitor": "valid/loss"}


def test_a_run_ends_with_the_weights_that_were_scored(tmp_path):
    """With load_best_on_end, and with all else as without the change."""
    flip = at("on_epoch_end", lambda runner: runner.model[0].weight.data.mul_(-1))
    loaders = {"train": loader(16, 4), "valid": loader(9, 3, seed=1)}
    options = {"loaders": loaders, "num_epochs": 3, "logdir": tmp_path, "load_best_on_end": True, **JUDGED}
    runner = train(callbacks=[flip], **options)

    best = min(metrics["valid"]["loss"] for metrics in runner.experiment_metrics.values())
    assert runner.evaluate_loader(loader(9, 3, seed=1))["loss"] == best


class TwoPaces(dl.IRunner):
    """Runner of two optimizers, one of which steps more often; saves wait for the step of both."""

    def __init__(self, folder):
        super().__init__(engine=dl.CPUEngine())
        self.folder, self.valid_every_steps, self.scored = folder, 2, {}

    def get_loaders(self, stage):
        return {"train": loader(24, 4), "valid": loader(9, 3, seed=1)}

    def get_model(self, stage):
        return mlp()

    def get_optimizer(self, stage, model):
        return {"first": sgd(model[0]), "last": sgd(model[-1])}

    def get_callbacks(self, stage):
        steppers = {
            f"{key} steps": dl.OptimizerCallback("loss", optimizer_key=key, accumulation_steps=number)
            for key, number in (("first", 1), ("last", 3))
        }
        save = dl.CheckpointCallback(self.folder, monitor="valid/loss", mode="min", keep_best=99)
        return {"backward": dl.BackwardCallback("loss"), **steppers, "save": save}

    def handle_batch(self, batch):
        features, targets = batch
        self.batch_metrics["loss"] = nn.functional.cross_entropy(self.model(features), targets)


def test_a_score_waits_with_its_weights_for_an_accumulated_step(tmp_path):
    """The evaluation after step 2 is saved after step 3, with the weights of step 2."""
    TwoPaces(tmp_path).run()

    records = json.loads((tmp_path / "checkpoints" / "index.json").read_text())["checkpoints"]
    assert [each["batch"] for each in records] == [3, 6, 6]
    for record in records:
        model = mlp()
        load_weights(model, tmp_path / "checkpoints" / record["name"])
        assert loss_of(model) == record["score"]


class Following(dl.SupervisedRunner):
    def handle_batch(self, batch):
        self.batch["logits"] = self.model["net"](batch["features"])


def test_a_target_network_is_saved_as_it_was_scored(tmp_path):
    """SoftUpdateCallback updates it after the evaluation of an epoch."""
    models = {"net": mlp(seed=1), "target": mlp(seed=2)}
    loaders = {"train": loader(8, 4), "valid": loader(9, 3, seed=1)}
    update = dl.SoftUpdateCallback("target", "net", tau=0.5, scope="on_epoch_end")
    options = {"optimizer": sgd(models["net"]), "loaders": loaders, "logdir": tmp_path, **JUDGED}
    train(models, runner=Following(), callbacks=[update], **options)

    state = last_and_best(tmp_path)[1]
    target, trained_target = mlp(), mlp()
    target.load_state_dict(state["model_state_dict"]["target"])
    trained_target.load_state_dict(state["trained_model_state_dict"]["target"])
    assert torch.equal(weights(target), weights(mlp(seed=2)))
    assert torch.equal(weights(trained_target), weights(models["target"]))


def test_weights_that_nothing_changes_are_neither_copied_nor_saved_twice(tmp_path, monkeypatch):
    """runnerkit's own callbacks do not cost a copy; one of the user costs a copy, and no second set in the file."""
    own = [dl.EMACallback(0.9), dl.EarlyStoppingCallback(9, monitor="valid/loss", mode="min")]
    monkeypatch.setattr(scored_weights, "copied", None)
    trained(tmp_path / "own", callbacks=[*own, dl.AccuracyCallback("logits", "targets")])
    monkeypatch.undo()

    trained(tmp_path / "mine", callbacks=[at("on_epoch_end", lambda runner: None)])

    assert all("trained_model_state_dict" not in state for state in last_and_best(tmp_path / "mine"))


class ChangingShards(dl.Callback):
    """A callback that changes this process's part of a parameter after an evaluation."""

    def on_validation_end(self, runner):
        model = runner.engine.trained_module(runner.current_run.stage.training_model)
        with torch.no_grad():
            for part in model.parameters():
                part.mul_(0.5)

    on_epoch_end = on_validation_end


SHARDED = functools.partial(dl.FullyShardedDataParallelEngine, 2, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "callbacks"),
    [
        (functools.partial(dl.DistributedDataParallelEngine, 2, device="cpu"), list),
        (SHARDED, list),
        (functools.partial(SHARDED, sharded_checkpoints=True), lambda: [dl.EMACallback(0.5)]),
    ],
    ids=["ddp", "fsdp", "shards"],
)
def test_two_processes_save_the_scored_weights_and_resume_with_the_trained(tmp_path, engine, callbacks):
    """Score and weights belong together; the resumed run has the same weights and metrics as the whole one."""

    def runs():
        def run(name, **more):
            return trained(tmp_path / name, callbacks=[*callbacks(), ChangingShards()], engine=engine(), **more)

        whole = run("whole")
        run("part", num_epochs=1)
        return whole, run("part", resume="auto")

    (expected, metrics), (found, again) = together(runs)

    assert torch.equal(found, expected) and again == metrics
    assert sum(score is not None for score in scores(tmp_path / "whole", rel=1e-6).values()) >= NUM_EPOCHS
