"""A target network that follows another, against the formula."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd, weights


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


@pytest.mark.parametrize(
    ("scope", "of_source"),
    [
        ("on_batch_start", [0, 1, 2, 3, 4, 5]),  # the weights of the policy after so many steps
        ("on_batch_end", [1, 2, 3, 4, 5, 6]),
        ("on_epoch_start", [0, 3]),
        ("on_epoch_end", [3, 6]),
    ],
)
def test_the_target_is_the_moving_average(scope, of_source):
    """The source's weights count with tau at each update, also under the name in Catalyst, and not in evaluation."""
    policy, target = mlp(seed=1), mlp(seed=2)
    steps[:] = [weights(policy)]
    expected = weights(target)
    runner = TwoModels()
    runner.train(
        model={"policy": policy, "target": target},
        optimizer=sgd(policy),
        loaders={"train": loader(24, 8)},
        callbacks=[dl.SoftUpdateCallaback("target", "policy", tau=0.25, scope=scope)],
        num_epochs=2,
        **quiet(),
    )

    for index in of_source:
        expected = 0.75 * expected + 0.25 * steps[index]
    torch.testing.assert_close(weights(target), expected, rtol=0, atol=1e-6)


def test_evaluation_does_not_update():
    policy, target = mlp(seed=1), mlp(seed=2)
    before = weights(target)
    TwoModels().evaluate_loader(
        loader(8, 4),
        model={"policy": policy, "target": target},
        callbacks=[dl.SoftUpdateCallback("target", "policy", tau=1.0, scope="on_batch_end")],
    )

    assert torch.equal(weights(target), before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tau": 2.0}, ValueError, "SoftUpdateCallback: tau must be in \\[0, 1\\], got 2.0"),
        ({"scope": "on_stage_end"}, ValueError, "scope must be one of .*on_batch_end.*, got 'on_stage_end'"),
        ({"source_model": 1}, TypeError, "source_model must be a str, got 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    given = {"target_model": "target", "source_model": "policy", "tau": 0.1, "scope": "on_batch_end"}
    with pytest.raises(error, match=message):
        dl.SoftUpdateCallback(**{**given, **arguments})


def test_a_missing_model_is_named():
    policy = mlp()
    with pytest.raises(KeyError, match=r"SoftUpdateCallback needs models \['target'\]; the runner has \['policy'\]"):
        TwoModels().train(
            model={"policy": policy},
            optimizer=sgd(policy),
            loaders={"train": loader(8, 4)},
            callbacks=[dl.SoftUpdateCallback("target", "policy", tau=0.1, scope="on_batch_end")],
            **quiet(),
        )
