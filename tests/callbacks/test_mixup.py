"""Mixup against a hand-written loop, and its errors."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.tiny import NUM_CLASSES, classification, mlp, quiet, sgd, weights


def soft_targets(num_samples):
    features, targets = classification(num_samples).tensors
    return DataLoader(TensorDataset(features, nn.functional.one_hot(targets, NUM_CLASSES).float()), batch_size=8)


def train(model, callback, **named):
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": soft_targets(24), "valid": soft_targets(16)},
        callbacks=[callback],
        seed=3,
        **quiet(),
        **named,
    )


def test_training_equals_a_loop_by_hand():
    """Shares are from Beta(alpha, alpha), one for each sample, whose partner is the next one of the batch."""
    model, by_hand = mlp(), mlp()
    torch.manual_seed(0)
    shares = torch.distributions.Beta(0.4, 0.4).sample((3, 8))
    optimizer = sgd(by_hand)
    for (features, targets), share in zip(soft_targets(24), shares, strict=True):
        features, targets = (
            torch.stack([s * a + (1 - s) * b for s, a, b in zip(share, part, [*part[1:], part[0]], strict=True)])
            for part in (features, targets)
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(features), targets).backward()
        optimizer.step()
    drawn = iter(shares)

    class Fixed(dl.MixupCallback):
        def draw(self, num_samples):
            assert num_samples == 8
            return next(drawn)

    train(model, Fixed(["features", "targets"], alpha=0.4))

    torch.testing.assert_close(weights(model), weights(by_hand), rtol=0, atol=1e-6)


def test_shares_have_the_beta_distribution():
    """Mean 1/2 and variance 1 / (4 * (2 * alpha + 1))."""
    torch.manual_seed(0)
    shares = dl.MixupCallback("features", alpha=0.2).draw(20_000)

    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.var() == pytest.approx(1 / (4 * 1.4), abs=0.01)


@pytest.mark.parametrize(("mode", "size"), [("replace", 8), ("add", 16)])
def test_evaluation_is_left_as_it_is(mode, size):
    """In training, "add" doubles the batch and keeps the samples themselves in front."""
    sizes, firsts = {}, []

    class Watch(dl.Callback):
        def on_batch_end(self, runner):
            sizes.setdefault(runner.loader_key, set()).add(len(runner.batch["features"]))
            firsts.append(runner.batch["features"][:8])

    model = mlp()
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": soft_targets(24), "valid": soft_targets(16)},
        callbacks=[Watch(dl.CallbackOrder.External), dl.MixupCallback(["features", "targets"], mode=mode)],
        **quiet(),
    )

    assert sizes == {"train": {size}, "valid": {8}}
    original = next(iter(soft_targets(24)))[0]
    assert torch.equal(firsts[0], original) == (mode == "add")


def test_a_resumed_run_mixes_as_an_uninterrupted_one(tmp_path):
    """The shares come from the run's random stream, which checkpoints hold."""
    whole, parts = mlp(), mlp()
    callback = dl.MixupCallback(["features", "targets"], alpha=0.4)

    train(whole, callback, num_epochs=2)
    train(parts, callback, num_epochs=1, logdir=tmp_path)
    train(parts, callback, num_epochs=2, logdir=tmp_path, resume="auto")

    assert torch.equal(weights(whole), weights(parts))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keys": ["features", "labels"]}, KeyError, "MixupCallback mixes .* of a batch, which has .*targets"),
        ({"keys": "features", "alpha": -1.0}, ValueError, "alpha must be >= 0, got -1.0"),
        ({"keys": "features", "mode": "append"}, ValueError, "mode must be 'replace' or 'add', got 'append'"),
        ({"keys": 3}, TypeError, "keys must be a list of str, got 3"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        train(mlp(), dl.MixupCallback(**arguments))


def test_integers_cannot_be_mixed():
    """Class indices would become meaningless numbers."""
    model = mlp()
    with pytest.raises(TypeError, match=r"'targets' is torch\.int64, which cannot be mixed; use one-hot vectors"):
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            loaders={"train": DataLoader(classification(8), batch_size=4)},
            callbacks=[dl.MixupCallback(["features", "targets"])],
            **quiet(),
        )
