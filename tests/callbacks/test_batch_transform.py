"""A function transforms batches before or after the model."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.callbacks.training.batch_transform import BatchTransformCallback
from runnerkit.data import BatchRandomCrop, BatchRandomHorizontalFlip, TensorLoader
from tests.callbacks.stand_ins import make_runner
from tests.tiny import mlp, train, weights


def transformed(callback, batch, *, event="on_batch_start", **attributes):
    """Return the batch after an event of the runner."""
    runner = make_runner(batch=batch, **attributes)
    callback.on_stage_start(runner)
    getattr(callback, event)(runner)
    return runner.batch


def sum_of(a, b):
    return a + b


Pair = namedtuple("Pair", "first second")
SWAPPED = {"input_key": ["a", "b"], "transform": lambda a, b, *, by=1: (b * by, a)}


@pytest.mark.parametrize(
    ("arguments", "batch", "expected"),
    [
        ({"input_key": "a"}, {"a": 1, "b": 2}, {"a": -1, "b": 2}),
        ({"input_key": "a", "output_key": "c"}, {"a": 1}, {"a": 1, "c": -1}),
        ({"input_key": 1}, (1, 2), (1, -2)),
        ({"input_key": 1}, {"a": 1, "b": 2}, {"a": 1, "b": -2}),
        ({"input_key": 1}, {"a": 1, 1: 2, "b": 3}, {"a": 1, 1: -2, "b": 3}),
        ({"input_key": 0}, [1, 2], [-1, 2]),
        ({"input_key": 1}, Pair(1, 2), Pair(1, -2)),
        ({"input_key": "features"}, (1, 2), (-1, 2)),
        ({"input_key": "targets"}, [1, 2], [1, -2]),
        ({}, 3, -3),
        ({**SWAPPED, "transform_kwargs": {"by": 10}}, {"a": 1, "b": 2}, {"a": 20, "b": 1}),
        ({**SWAPPED, "output_key": ["c", "d"]}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 2, "d": 1}),
        ({"input_key": ["a", "b"], "output_key": "c", "transform": sum_of}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
    ],
)
def test_a_part_of_the_batch_is_replaced(arguments, batch, expected):
    """Parts are selected by key, by index, or by the supervised runner's name for it; the container keeps its type."""
    callback, before = BatchTransformCallback(**{"transform": lambda value: -value, **arguments}), copy.copy(batch)

    result = transformed(callback, batch, input_key="features", target_key="targets")

    assert result == expected and type(result) is type(batch)
    assert batch == before, "another callback may hold the same batch"


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
    model, targets = nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), torch.zeros(8).long()
    loaders = {key: TensorLoader(pixels, targets, batch_size=2) for key in ("train", "valid")}
    flip = BatchTransformCallback(BatchRandomHorizontalFlip(p=1.0), input_key="features")

    runner = train(model, runner=Seen(), loaders=loaders, callbacks=[flip], valid_every_steps=2)

    assert [key for key, _ in runner.seen] == (["train"] * 2 + ["valid"] * 4) * 2
    for key, batch in runner.seen:
        assert torch.equal(batch, pixels[:2].flip(-1) if key == "train" else pixels[:2])


def test_what_the_model_gave_is_transformed_before_the_criterion():
    """In any order of callbacks, a step, with its gradient, equals that of a model with the factor inside."""

    def fit(model, *callbacks):
        return weights(train(model, callbacks=[dl.CriterionCallback("logits", "targets"), *callbacks]).model)

    class Doubled(nn.Sequential):
        def forward(self, features):
            return 2 * super().forward(features)

    got = fit(mlp(), BatchTransformCallback(lambda logits: 2 * logits, "on_batch_end", input_key="logits"))

    assert torch.equal(got, fit(Doubled(*mlp())))
    assert not torch.equal(got, fit(mlp()))


def test_channels_last_outlives_a_transform():
    """A crop makes a new tensor, which becomes channels-last again if the engine asks for it."""
    engine = dl.CPUEngine(channels_last=True)
    engine.setup()

    crop = BatchTransformCallback(BatchRandomCrop(1), input_key=0)
    batch = transformed(crop, (torch.rand(2, 3, 4, 4), 1), engine=engine)

    assert batch[0].is_contiguous(memory_format=torch.channels_last)


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
