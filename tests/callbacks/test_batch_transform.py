"""A function transforms batches before or after the model."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.callbacks.training.batch_transform import BatchTransformCallback
from runnerkit.data import BatchNormalize, BatchRandomCrop, BatchRandomHorizontalFlip, TensorLoader
from tests.callbacks.stand_ins import make_runner
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, quiet, sgd, weights


def transformed(callback, batch, *, event="on_batch_start", **attributes):
    """Return the batch after an event of the runner."""
    runner = make_runner(batch=batch, **attributes)
    callback.on_stage_start(runner)
    getattr(callback, event)(runner)
    return runner.batch


@pytest.mark.parametrize(
    ("arguments", "batch", "expected"),
    [
        ({"input_key": "a"}, {"a": 1, "b": 2}, {"a": -1, "b": 2}),
        ({"input_key": "a", "output_key": "c"}, {"a": 1}, {"a": 1, "c": -1}),
        ({"input_key": 1}, (1, 2), (1, -2)),
        ({"input_key": 1}, {"a": 1, "b": 2}, {"a": 1, "b": -2}),
        ({"input_key": 1}, {"a": 1, 1: 2, "b": 3}, {"a": 1, 1: -2, "b": 3}),
        ({"input_key": 0}, [1, 2], [-1, 2]),
        ({"input_key": "features"}, (1, 2), (-1, 2)),
        ({"input_key": "targets"}, [1, 2], [1, -2]),
        ({}, 3, -3),
    ],
)
def test_a_part_of_the_batch_is_replaced(arguments, batch, expected):
    """A part is selected by key, by index, or by the supervised runner's name for it; the container keeps its type."""
    callback = BatchTransformCallback(lambda value: -value, **arguments)

    result = transformed(callback, batch, input_key="features", target_key="targets")

    assert result == expected and type(result) is type(batch)


def test_several_parts_go_in_and_out():
    """Parts are passed in the order of the keys, together with keyword arguments."""
    callback = BatchTransformCallback(
        lambda a, b, *, by: (b * by, a), input_key=["a", "b"], transform_kwargs={"by": 10}
    )
    joined = BatchTransformCallback(lambda a, b: a + b, input_key=["a", "b"], output_key="sum")

    assert transformed(callback, {"a": 1, "b": 2}) == {"a": 20, "b": 1}
    assert transformed(joined, {"a": 1, "b": 2}) == {"a": 1, "b": 2, "sum": 3}


def test_the_users_batch_is_left_as_it_was():
    """Another callback may hold the same batch, so it must not change."""
    batch = {"a": 1}

    transformed(BatchTransformCallback(lambda value: -value, input_key="a"), batch)

    assert batch == {"a": 1}


@pytest.mark.parametrize(("scope", "other"), [("on_batch_start", "on_batch_end"), ("on_batch_end", "on_batch_start")])
def test_it_acts_in_its_scope_only(scope, other):
    """The function runs before the model or after it, not both."""
    callback = BatchTransformCallback(lambda value: -value, scope, input_key="a")

    assert transformed(callback, {"a": 1}, event=scope) == {"a": -1}
    assert transformed(callback, {"a": 1}, event=other) == {"a": 1}


class Seen(dl.SupervisedRunner):
    """A runner that records each batch the model gets as (loader, features)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def handle_batch(self, batch):
        self.seen.append((self.loader_key, batch["features"].clone()))
        super().handle_batch(batch)


def test_random_modules_leave_evaluation_alone_also_in_the_middle_of_an_epoch():
    """Training pixels are flipped before and after a validation within the epoch; validation pixels never are."""
    pixels = torch.arange(6.0).reshape(1, 1, 1, 6).expand(8, 1, 1, 6).contiguous()
    data = {"batch_size": 2}
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    runner = Seen()

    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={key: TensorLoader(pixels, torch.zeros(8).long(), **data) for key in ("train", "valid")},
        callbacks=[BatchTransformCallback(BatchRandomHorizontalFlip(p=1.0), input_key="features")],
        valid_every_steps=2,
        cpu=True,
        **quiet(),
    )

    assert [key for key, _ in runner.seen] == (["train"] * 2 + ["valid"] * 4) * 2
    for key, batch in runner.seen:
        assert torch.equal(batch, pixels[:2].flip(-1) if key == "train" else pixels[:2])


def test_what_the_model_gave_is_transformed_before_the_criterion():
    """In any order of callbacks, a step, with its gradient, equals that of a model with the factor inside."""

    def train(model, *callbacks):
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            loaders={"train": loader(16, 4)},
            callbacks=[dl.CriterionCallback("logits", "targets"), *callbacks],
            cpu=True,
            **quiet(),
        )
        return weights(model)

    class Doubled(nn.Sequential):
        def forward(self, features):
            return 2 * super().forward(features)

    got = train(mlp(), BatchTransformCallback(lambda logits: 2 * logits, "on_batch_end", input_key="logits"))

    assert torch.equal(got, train(Doubled(*mlp())))
    assert not torch.equal(got, train(mlp()))


def test_a_resumed_run_draws_the_same_augmentation(tmp_path):
    """Interrupted within an epoch, the run ends with equal weights bit for bit, given random crops and flips."""

    pixels = torch.randint(0, 256, (24, 1, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(24) % 3

    def train(logdir, *callbacks, augment=True, **kwargs):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 3))
        random = [BatchRandomCrop(2), BatchRandomHorizontalFlip()] if augment else []
        transform = nn.Sequential(*random, BatchNormalize([0.5], [0.25]))
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            loaders={"train": TensorLoader({"features": pixels, "targets": targets}, batch_size=4, shuffle=True)},
            callbacks=[
                dl.CheckpointCallback(logdir, mode="runner", every_steps=2),
                BatchTransformCallback(transform, input_key="features"),
                *callbacks,
            ],
            num_epochs=3,
            logdir=logdir,
            cpu=True,
            **quiet(),
            **kwargs,
        )
        return weights(model)

    expected = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", Interrupt(9))

    assert torch.equal(train(tmp_path / "broken", resume="auto"), expected)
    assert not torch.equal(train(tmp_path / "plain", augment=False), expected)


def test_channels_last_outlives_a_transform():
    """A crop makes a new tensor, which becomes channels-last again if the engine asks for it."""
    engine = dl.CPUEngine(channels_last=True)
    engine.setup()

    batch = transformed(
        BatchTransformCallback(BatchRandomCrop(1), input_key=0), (torch.rand(2, 3, 4, 4), 1), engine=engine
    )

    assert batch[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"transform": "flip"}, TypeError, "transform must be callable, got 'flip'"),
        ({"transform": abs, "scope": "on_batch"}, ValueError, "scope must be .* got 'on_batch'"),
        ({"transform": abs, "output_key": "a"}, ValueError, "output_key needs input_key"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    """The error is raised before training."""
    with pytest.raises(error, match=message):
        BatchTransformCallback(**arguments)


@pytest.mark.parametrize(
    ("key", "batch", "message"),
    [
        ("image", {"features": 1}, r"reads 'image' of a batch of loader 'train', which has \['features'\]"),
        (2, (1, 2), r"reads 2 of a batch of loader 'train', which has \[0, 1\]"),
        ("image", (1, 2), r"reads 'image' .* has \[0, 1\]"),
    ],
)
def test_a_missing_part_is_named(key, batch, message):
    """The error lists the keys or indices that exist."""
    with pytest.raises(KeyError, match=message):
        transformed(BatchTransformCallback(abs, input_key=key), batch)


def test_a_wrong_number_of_results_is_refused():
    """Each output key needs one result."""
    with pytest.raises(ValueError, match="shorter"):
        transformed(BatchTransformCallback(lambda a: (a,), input_key="a", output_key=["b", "c"]), {"a": 1})
