"""A NaN is reported in the batch where it first occurs, with the module that produced it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.engines.on_cpu import fsdp
from tests.tiny import classification, loader, mlp, sgd, train, train_by_hand, weights

NAN = float("nan")


class Do(nn.Module):
    """A module that applies a function, by default from the third batch on."""

    def __init__(self, function, *, waits=True):
        super().__init__()
        self.function, self.num_calls, self.waits = function, 0, waits

    def forward(self, x):
        self.num_calls += 1
        return self.function(x) if self.num_calls >= 3 or not self.waits else x


def model_with(function, **kwargs):
    """Build linear, batch norm, the function, dropout, linear."""
    middle = Do(function, **kwargs)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), middle, nn.Dropout(0.3), nn.Linear(16, 3))


def located(model, **options):
    return train(model, **{"loaders": {"train": loader(40, 4)}, "non_finite": "locate", **options})


def told(model, **options):
    with pytest.raises(FloatingPointError) as caught:
        located(model, **options)
    return str(caught.value)


PLACE = "batch_metrics['loss'] is nan in batch 3 of loader 'train', epoch 1, step 3, rank 0: "


@pytest.mark.parametrize(
    ("function", "origin"),
    [
        (lambda x: x * NAN, "the first NaN is in the output of '2' (Do)"),
        (lambda x: x / 0, "the first NaN is in the output of '3' (Dropout), after an infinity in that of '2' (Do)"),
    ],
)
def test_the_first_module_is_named(function, origin):
    """Modules are ordered as in the forward pass, and an earlier infinity is reported too."""
    assert told(model_with(function)) == PLACE + origin


class Between(nn.Module):
    """A model whose own code produces the NaN, between or after its submodules."""

    def __init__(self, *, at_the_end):
        super().__init__()
        self.first, self.second, self.at_the_end = nn.Linear(6, 6), nn.Linear(6, 3), at_the_end

    def forward(self, x):
        x = self.first(x)
        return self.second(x) * NAN if self.at_the_end else self.second(x * NAN)


def test_code_between_modules_is_told_apart():
    """The error names the next module's input or the model's output."""
    before, after = (told(Between(at_the_end=each)) for each in (False, True))

    assert "is in the input of 'second' (Linear) but in no earlier output" in before
    assert after.endswith("is in the output of the model (Between)")


def test_what_no_module_is_to_blame_for_is_named():
    """The error blames the data, the weights, or the code after the model."""
    features, targets = classification(16).tensors
    features[9, 2] = NAN
    dirty = DataLoader(TensorDataset(features, targets), batch_size=4)
    broken = mlp()
    broken[0].bias.data[0] = NAN

    class After(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.batch["logits"] = self.batch["logits"] * NAN

    assert "batch['features'] is already not finite in the batch" in told(mlp(), loaders={"train": dirty})
    assert told(broken).endswith("parameter '0.bias' of the model is already not finite")
    assert "check the criterion and the code after the model in handle_batch" in told(mlp(), runner=After())


def test_an_infinity_is_told_as_one():
    """Without a NaN, the first infinity is located, also for a custom metric."""

    class Sum(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.batch_metrics["sum"] = self.batch["logits"].abs().sum()

    words = told(nn.Sequential(nn.Linear(6, 3), Do(lambda x: x * 3e38 * 3e38, waits=False)), runner=Sum())

    assert words.startswith("batch_metrics['sum'] is inf in batch 1 of loader 'train'")
    assert words.endswith("the first infinity is in the output of '1' (Do)")


def test_the_second_pass_leaves_no_trace():
    """The second pass draws the same dropout; buffers are those after one pass, and weights those before the step."""
    model = model_with(lambda x: x, waits=False)
    model[4].register_forward_hook(lambda module, args, out: out * torch.where(args[0].eq(0).any(), NAN, 1.0))
    reference = model_with(lambda x: x, waits=False)
    reference.load_state_dict(model.state_dict())
    reference[4].register_forward_hook(lambda module, args, out: out)
    torch.manual_seed(42)
    reference(next(iter(loader(40, 4)))[0])

    words = told(model)

    assert words.startswith("batch_metrics['loss'] is nan in batch 1 ")
    assert torch.equal(weights(model), weights(reference))


@pytest.mark.parametrize("options", [{}, {"engine": fsdp(shard_modules=[nn.Linear])}], ids=["alone", "fsdp"])
def test_a_gradient_that_is_not_finite_stops_the_step(options):
    """As for sqrt(0), the loss is finite and its gradient is not; no weight changes. A gradient in shards has the name
    of the whole parameter."""
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), Do(lambda x: (x * 0).sqrt(), waits=False), nn.Linear(3, 3))
    before = weights(model)

    words = told(model, **options)

    assert words.startswith("the gradient of '0.bias' is not finite in batch 1 of loader 'train', epoch 1, step 1, ra")
    assert "it is the last in the model of 2 such gradients out of 4. detect_anomaly=True names the operation" in words
    assert torch.equal(weights(model), before)


def test_a_healthy_run_is_the_same_with_it():
    """With `non_finite="locate"`, the weights equal the hand-written loop's bit for bit, evaluation included."""
    model, reference = mlp(dropout=0.3), mlp(dropout=0.3)

    located(model, loaders={"train": loader(40, 4), "valid": loader(8, 4)})

    train_by_hand(reference, sgd(reference), loader(40, 4))
    assert torch.equal(weights(model), weights(reference))


def test_what_cannot_run_twice_is_told():
    """The error still reports the NaN and adds that it could not be located."""

    class Once(dl.SupervisedRunner):
        def handle_batch(self, batch):
            if hasattr(self, "was_here"):
                raise LookupError("once is enough")
            self.was_here = True
            super().handle_batch(batch)

    words = told(model_with(lambda x: x * NAN, waits=False), runner=Once())

    assert words.endswith("the batch could not run through the model again: LookupError('once is enough')")


def test_anomaly_mode_names_the_operation():
    """As in torch, the error names the function and a warning shows the forward pass; the mode is off afterwards."""
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), Do(lambda x: (x * 0).sqrt(), waits=False), nn.Linear(3, 3))

    with (
        pytest.warns(UserWarning, match=r"(?s)Error detected in MulBackward0.*\(x \* 0\)\.sqrt\(\)"),
        pytest.raises(RuntimeError, match="Function 'MulBackward0' returned nan values") as caught,
    ):
        located(model, non_finite="keep", detect_anomaly=True)

    assert caught.value.__notes__[0].startswith("in batch 1 of loader 'train', epoch 1, rank 0")
    assert not torch.is_anomaly_enabled()
