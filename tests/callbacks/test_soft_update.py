"""A target network that follows another, against the formula."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights


class TwoModels(dl.Runner):
    """Trains the model "policy" of two."""

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model["policy"](features), targets)
        self.batch_metrics["loss"] = loss
        if self.is_train_loader:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        steps.append(weights(self.model["policy"]))


steps = []


def fit(models, **options):
    return train(models, runner=TwoModels(), optimizer=sgd(models["policy"]), **options)


@pytest.mark.parametrize("kind", [dict, nn.ModuleDict])
@pytest.mark.parametrize(
    ("scope", "of_source"),
    [
        ("on_batch_start", [0, 1, 2, 3, 4, 5]),  # the weights of the policy after so many steps
        ("on_batch_end", [1, 2, 3, 4, 5, 6]),
        ("on_epoch_start", [0, 3]),
        ("on_epoch_end", [3, 6]),
    ],
)
def test_the_target_is_the_moving_average(scope, of_source, kind):
    """The source's weights count with tau at each update, also under the name in Catalyst, and not in evaluation."""
    models = kind({"policy": mlp(seed=1), "target": mlp(seed=2)})
    steps[:] = [weights(models["policy"])]
    expected = weights(models["target"])
    callbacks = [dl.SoftUpdateCallaback("target", "policy", tau=0.25, scope=scope)]

    fit(models, callbacks=callbacks, loaders={"train": loader(24, 8)}, num_epochs=2)

    for index in of_source:
        expected = 0.75 * expected + 0.25 * steps[index]
    torch.testing.assert_close(weights(models["target"]), expected, rtol=0, atol=1e-6)


class OnePolicy(dl.Runner):
    """Leaves the step to callbacks."""

    def handle_batch(self, batch):
        features, targets = batch
        self.batch_metrics["loss"] = nn.functional.cross_entropy(self.model["policy"](features), targets)


def test_batches_that_only_accumulate_do_not_update():
    """At the end of a batch, the target follows an optimizer step."""
    mine, theirs = ({"policy": mlp(seed=1), "target": mlp(seed=2)} for _ in range(2))
    callbacks = [
        dl.BackwardCallback("loss"),
        dl.OptimizerCallback("loss", accumulation_steps=2),
        dl.SoftUpdateCallback("target", "policy", tau=0.25, scope="on_batch_end"),
    ]
    options = {"runner": OnePolicy(), "optimizer": sgd(mine["policy"]), "loaders": {"train": loader(32, 8)}}
    train(mine, callbacks=callbacks, criterion=None, **options)

    optimizer, expected = sgd(theirs["policy"]), weights(theirs["target"])
    for batch in loader(32, 16):
        train_by_hand(theirs["policy"], optimizer, [batch])
        expected = 0.75 * expected + 0.25 * weights(theirs["policy"])
    torch.testing.assert_close(weights(mine["target"]), expected, rtol=0, atol=1e-6)


def test_evaluation_does_not_update():
    policy, target = mlp(seed=1), mlp(seed=2)
    before = weights(target)
    TwoModels().evaluate_loader(
        loader(8, 4),
        model={"policy": policy, "target": target},
        callbacks=[dl.SoftUpdateCallback("target", "policy", tau=1.0, scope="on_batch_end")],
    )

    assert torch.equal(weights(target), before)


def test_a_missing_model_is_named():
    with pytest.raises(KeyError, match=r"SoftUpdateCallback needs models \['target'\]; the runner has \['policy'\]"):
        fit({"policy": mlp()}, callbacks=[dl.SoftUpdateCallback("target", "policy", tau=0.1, scope="on_batch_end")])
