"""Tests that a resumed run takes state by name, not by position, and refuses state of another kind."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, train


class Net(nn.Module):
    """Three layers of equal shape, registered in any order."""

    def __init__(self, order=("a", "b", "c")):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(NUM_FEATURES, NUM_FEATURES))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        with torch.no_grad():
            for seed, (_, parameter) in enumerate(sorted(self.named_parameters())):
                parameter.normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.3)

    def forward(self, features):
        return self.head(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(features)))))))


def by_name(model):
    return torch.cat([each.detach().flatten() for _, each in sorted(model.state_dict().items())])


def fit(model, logdir=None, *, num_epochs=4, optimizer=None, **options):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.05)
    loaders = {"train": loader(24, 4), "valid": loader(8, 4, seed=1)}
    options = {"loaders": loaders, "logdir": logdir, "resume": "auto" if logdir else None, **options}
    return train(model, optimizer=optimizer, num_epochs=num_epochs, **options)


@pytest.mark.parametrize("first", [2, {"num_steps": 9}], ids=["epochs", "within an epoch"])
def test_layers_in_another_order_keep_their_moments(tmp_path, first):
    """Adam's state belongs to parameters, in whatever order the model registers them."""
    fit(whole := Net())
    fit(Net(), tmp_path, **({"num_epochs": first} if isinstance(first, int) else first))
    fit(found := Net(("c", "a", "b")), tmp_path)
    torch.testing.assert_close(by_name(found), by_name(whole), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [dl.DistributedDataParallelEngine, dl.FullyShardedDataParallelEngine])
def test_processes_match_by_name_too(tmp_path, engine):
    """Also under DDP, and the shards of FSDP."""
    fit(whole := Net(), engine=engine(2, device="cpu"))
    fit(Net(), tmp_path, num_epochs=2, engine=engine(2, device="cpu"))
    fit(found := Net(("c", "a", "b")), tmp_path, engine=engine(2, device="cpu"))
    torch.testing.assert_close(by_name(found), by_name(whole), rtol=0, atol=1e-7)


def groups(model, *names):
    return torch.optim.SGD([{"params": getattr(model, name).parameters()} for name in names], lr=0.1, momentum=0.9)


def test_groups_of_other_parameters_are_refused(tmp_path):
    """Groups in another order would take each other's options: the message names the parameters."""
    fit(model := Net(), tmp_path, num_epochs=1, optimizer=groups(model, "a", "b", "c", "head"))
    with pytest.raises(ValueError, match=r"(?s)group 0.*a\.weight.*b\.weight|group 0.*b\.weight.*a\.weight"):
        fit(model := Net(), tmp_path, num_epochs=2, optimizer=groups(model, "b", "a", "c", "head"))


def test_two_models_and_a_criterion_match_by_name(tmp_path):
    """Names have the model's key; parameters of a criterion have names too."""

    class Two(dl.SupervisedRunner):
        def handle_batch(self, batch):
            features = batch["features"]
            logits = self.model["one"](features) + self.model["two"](features)
            self.batch = {"logits": logits, "targets": batch["targets"]}

    def start(order, num_epochs, name):
        models = {"one": Net(order), "two": Net(order)}
        optimizer = torch.optim.Adam([each for key in models for each in models[key].parameters()], lr=0.05)
        fit(models, tmp_path / name, runner=Two(), optimizer=optimizer, num_epochs=num_epochs)
        return torch.cat([by_name(model) for model in models.values()])

    whole = start("abc", 4, "whole")
    start("abc", 2, "parts")
    assert torch.equal(start("cab", 4, "parts"), whole)


@pytest.mark.parametrize("options", ["checkpoint", "arguments"])
@pytest.mark.parametrize(
    ("before", "after"), [("AdamW", "Adam"), ("Adam", "RAdam"), ("Adam", "Adamax"), ("Adam", "NAdam")]
)
def test_another_optimizer_is_refused(tmp_path, before, after, options):
    """The message names both classes and resume_options; nothing of the checkpoint changes."""

    def run(name, **options):
        model = Net()
        fit(model, tmp_path, optimizer=getattr(torch.optim, name)(model.parameters(), lr=0.01), **options)

    run(before, num_epochs=1)
    with pytest.raises(ValueError, match=rf"(?s)of {before},.*has {after}.*resume_options"):
        run(after, num_epochs=2, resume_options=options)
    run(before, num_epochs=2)


def stopping(*watched):
    return [
        dl.EarlyStoppingCallback(9, monitor=f"valid/{metric}", mode="min" if minimize else "max")
        for metric, minimize in watched
    ]


def states(callbacks):
    return {each.metric_key: each.best_score for each in callbacks if isinstance(each, dl.EarlyStoppingCallback)}


@pytest.mark.parametrize("beside", [False, True])
def test_callbacks_in_another_order_keep_their_state(tmp_path, beside):
    """Two of a class are told apart by what they watch, also with one more before them."""
    both = [("loss", True), ("accuracy", False)]
    accuracy = [dl.AccuracyCallback("logits", "targets")]
    fit(Net(), tmp_path / "whole", num_epochs=3, callbacks=[*accuracy, *(whole := stopping(*both))])
    fit(Net(), tmp_path / "parts", num_epochs=2, callbacks=[*accuracy, *stopping(*both)])
    found = stopping(*reversed(both))
    others = [dl.TimerCallback()] if beside else []
    fit(Net(), tmp_path / "parts", num_epochs=3, callbacks=[*others, *found, *accuracy])
    assert states(found) == states(whole)


class Counter(dl.Callback):
    """Counts batches by `step`, as a user's callback keeps its arguments."""

    def __init__(self, step):
        super().__init__()
        self.step, self.total = step, 0

    def on_batch_end(self, runner):
        self.total += self.step

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def test_two_that_watch_the_same_are_told_apart_by_their_settings(tmp_path):
    """In another order, and with one more before them; a patience that was raised is matched by what is left."""

    def start(folder, num_epochs, *patiences, steps, deltas):
        stops = [
            dl.EarlyStoppingCallback(patience, monitor="valid/loss", min_delta=delta)
            for patience, delta in zip(patiences, deltas, strict=True)
        ]
        counters = list(map(Counter, steps))
        fit(Net(), tmp_path / folder, num_epochs=num_epochs, callbacks=[*stops, *counters])
        return {each.min_delta: each.state_dict() for each in stops}, {each.step: each.total for each in counters}

    whole = start("whole", 4, 9, 7, steps=[1, 100], deltas=[0, 0.5])
    start("parts", 3, 9, 7, steps=[1, 100], deltas=[0, 0.5])
    found = start("parts", 4, 7, 12, steps=[50, 100, 1], deltas=[0.5, 0])

    assert found[0] == whole[0] and found[0][0] != found[0][0.5]
    assert found[1] == {**whole[1], 50: 50 * 8}, "the new one counts an epoch of 6 and 2 batches"


def test_a_callback_that_watches_something_else_starts_anew(tmp_path, caplog):
    """Its best value of another metric is not loaded, and the warning names what it watched."""
    accuracy = [dl.AccuracyCallback("logits", "targets")]
    fit(Net(), tmp_path, num_epochs=2, callbacks=[*accuracy, *stopping(("loss", True))])
    found = stopping(("accuracy", False))
    runner = fit(Net(), tmp_path, num_epochs=3, callbacks=[*accuracy, *found])
    assert found[0].best_score == runner.experiment_metrics[3]["valid"]["accuracy"]
    assert "valid/loss" in caplog.text
