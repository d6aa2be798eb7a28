"""Mixup against a hand-written loop, and its errors."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.tiny import NUM_CLASSES, classification, mlp, sgd, train, weights


def soft_targets(num_samples):
    features, targets = classification(num_samples).tensors
    return DataLoader(TensorDataset(features, nn.functional.one_hot(targets, NUM_CLASSES).float()), batch_size=8)


def mix(model, *callbacks, **options):
    loaders = {"train": soft_targets(24), "valid": soft_targets(16)}
    return train(model, loaders=loaders, callbacks=list(callbacks), seed=3, **options)


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

    mix(model, Fixed(["features", "targets"], alpha=0.4))

    torch.testing.assert_close(weights(model), weights(by_hand), rtol=0, atol=1e-6)


def test_shares_have_the_beta_distribution():
    """Mean 1/2 and variance 1 / (4 * (2 * alpha + 1))."""
    torch.manual_seed(0)
    shares = dl.MixupCallback("features", alpha=0.2).draw(20_000)

    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.var() == pytest.approx(1 / (4 * 1.4), abs=0.01)


@pytest.mark.parametrize(("output", "size"), [("replace", 8), ("add", 16)])
def test_evaluation_is_left_as_it_is(output, size):
    """In training, "add" doubles the batch and keeps the samples themselves in front."""
    sizes, firsts = {}, []

    class Watch(dl.Callback):
        def on_batch_end(self, runner):
            sizes.setdefault(runner.loader_key, set()).add(len(runner.batch["features"]))
            firsts.append(runner.batch["features"][:8])

    mix(mlp(), Watch(dl.CallbackOrder.External), dl.MixupCallback(["features", "targets"], output=output))

    assert sizes == {"train": {size}, "valid": {8}}
    original = next(iter(soft_targets(24)))[0]
    assert torch.equal(firsts[0], original) == (output == "add")
