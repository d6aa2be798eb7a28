"""A checkpoint holds what every callback and the runner did until then, and a resumed run does not repeat it."""

import pytest
import torch

from runnerkit import dl
from runnerkit.checkpoints.folder import CheckpointFolder
from tests.engines.together import together
from tests.interrupt import at
from tests.tiny import loader, mlp, train, weights

NUM_EPOCHS, NUM_STEPS = 2, 3  # steps of an epoch
EVENTS = ("on_batch_end", "on_step_end", "on_validation_end", "on_loader_end", "on_epoch_end")


class Drawing:
    """Something that draws a random number in each event, remembers it and changes the model's weights by it."""

    def start(self):
        self.drawn = []
        for event in EVENTS:
            setattr(self, event, lambda runner, event=event: self.act(event, runner))

    def act(self, event, runner):
        self.drawn.append((event, runner.batch_step, torch.rand(()).item()))
        if runner.is_train_loader:
            with torch.no_grad():
                runner.model[0].bias += self.drawn[-1][-1]

    def state_dict(self):
        return {"drawn": list(self.drawn)}

    def load_state_dict(self, state):
        self.drawn = list(state["drawn"])


class DrawingCallback(Drawing, dl.Callback):
    pass


class DrawingRunner(Drawing, dl.SupervisedRunner):
    pass


def fit(order, folder, *, callbacks=(), **options):
    """Train while a callback of `order` draws, or with None the runner; return weights, what was drawn and metrics."""
    model = mlp(dropout=0.3)
    runner = DrawingRunner() if order is None else dl.SupervisedRunner()
    drawing = runner if order is None else DrawingCallback(order)
    drawing.start()
    callbacks = [*callbacks, *([] if order is None else [drawing])]
    loaders = {"train": loader(NUM_STEPS * 4, 4, shuffle=True), "valid": loader(6, 3)}
    options = {"num_epochs": NUM_EPOCHS, "logdir": folder, "valid_every_steps": 2, **options}
    train(model, runner=runner, loaders=loaders, callbacks=callbacks, **options)
    return weights(model), drawing.drawn, runner.experiment_metrics


def check_each_checkpoint(folder, monkeypatch, order, callbacks=list, **options):
    """Train; check that a run resumed from each checkpoint equals the whole run; return its metrics."""
    monkeypatch.setattr(CheckpointFolder, "keep", lambda *_: None)
    save = dl.CheckpointCallback(folder / "whole", content="runner", every_steps=1)

    expected = fit(order, folder / "whole", callbacks=[save, *callbacks()], **options)

    saved = sorted((folder / "whole" / "checkpoints").glob("model.*"))
    assert len(saved) >= NUM_STEPS
    for path in saved:
        found = fit(order, folder / path.name, callbacks=callbacks(), resume=path, **options)
        assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:], path.name
    return expected[2], len(saved)


@pytest.mark.parametrize("order", [dl.CallbackOrder.External, 200, None])
def test_a_run_resumed_at_any_step_continues_with_what_was_done_until_then(tmp_path, monkeypatch, order):
    """A callback, of any order, or the runner draws numbers, keeps them and changes weights: once, bit for bit."""
    _, num_saved = check_each_checkpoint(tmp_path, monkeypatch, order)

    assert num_saved >= NUM_EPOCHS * NUM_STEPS


def stop_after_validation(runner):
    runner.need_early_stop = runner.loader_key == "valid"


@pytest.mark.parametrize(
    ("stop", "limit", "last_epoch"),
    [
        (lambda: [dl.CheckRunCallback(2, num_epoch_steps=9)], None, 2),
        (lambda: [at("on_loader_end", stop_after_validation)], None, 1),
        (list, NUM_STEPS + 1, 2),
    ],
    ids=["a loader", "a stage", "num_steps"],
)
def test_what_has_ended_stays_ended_in_a_resumed_run(tmp_path, monkeypatch, stop, limit, last_epoch):
    """A stop in a batch event ends the loader, even if a validation follows; one after a validation ends the stage."""
    metrics, _ = check_each_checkpoint(tmp_path, monkeypatch, 100, stop, num_steps=limit)

    assert [*metrics] == list(range(1, last_epoch + 1))


class Summing(dl.SupervisedRunner):
    def __init__(self):
        super().__init__()
        self.sums = []

    def on_step_end(self, runner):
        self.sums.append(self.batch["features"].sum().item())

    def state_dict(self):
        return {"sums": list(self.sums)}

    def load_state_dict(self, state):
        self.sums = list(state["sums"])


def sum_until(num_steps, folder, num_processes=2):
    runner, options = Summing(), {"num_steps": num_steps, "logdir": folder, "resume": "auto"}
    train(runner=runner, loaders={"train": loader(24, 3)}, num_processes=num_processes, **options)
    return runner.sums


@pytest.mark.slow
def test_each_process_gets_its_own_state_of_the_runner(tmp_path, caplog):
    """The states of all ranks are saved if they differ; with fewer processes, a warning says whose are left."""
    folders = [tmp_path / "whole", tmp_path / "part"]

    whole, _, resumed = together(
        lambda: [sum_until(*each) for each in zip((7, 3, 7), (*folders, folders[1]), strict=True)]
    )
    states = [torch.load(each / "checkpoints" / "last.pth", weights_only=True)["runner_states"] for each in folders]
    alone = sum_until(8, folders[1], num_processes=1)

    assert resumed == whole == states[0][0]["sums"] and len(whole) == 7
    assert states[0] == states[1] and states[0][0] != states[0][1]
    assert alone[:7] == whole and "states of the runner that differ between 2 processes" in caplog.text
