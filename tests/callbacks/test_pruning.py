"""Pruned weights equal those of torch.nn.utils.prune, stay zero, and survive a resume."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from runnerkit import dl, utils
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, quiet, sgd

NUM_EPOCHS = 3


def weights(model):
    """Return the weights as one vector, ordered by name: torch's reparametrization changes the order."""
    return torch.cat([each.flatten() for _, each in sorted(model.state_dict().items())])


CLIP = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 0.2}}


def train(callback, *, model=None, num_epochs=NUM_EPOCHS, batch_size=4, callbacks=(), **kwargs):
    model = model or mlp()
    return dl.SupervisedRunner().train(
        **{
            "model": model,
            "criterion": nn.CrossEntropyLoss(),
            "optimizer": sgd(model),
            "loaders": {"train": loader(16, batch_size), "valid": loader(8, 4, seed=1)},
            "callbacks": {"prune": callback, **{str(place): each for place, each in enumerate(callbacks)}},
            "num_epochs": num_epochs,
            "engine": dl.CPUEngine(),
            **quiet(),
            **kwargs,
        }
    )


def by_hand(prune_one):
    """Train, prune each layer after each epoch with torch's reparametrization, and remove its masks at the end."""
    model = mlp()
    optimizer = sgd(model)
    for _ in range(NUM_EPOCHS):
        for features, targets in loader(16, 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        model(features)  # computes layer.weight from weight_orig: torch would otherwise rank an older one
        for layer in (model[0], model[3]):
            prune_one(layer)
    for layer in (model[0], model[3]):
        prune.remove(layer, "weight")
    return model


@pytest.mark.parametrize(
    ("arguments", "prune_one"),
    [
        ({}, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
        ({"pruning_fn": "ln_structured", "amount": 1, "dim": 1, "l_norm": 2},
         lambda layer: prune.ln_structured(layer, "weight", 1, n=2, dim=1)),
        ({"pruning_fn": "ln_structured", "amount": 1, "dim": 1, "l_norm": "fro"},
         lambda layer: prune.ln_structured(layer, "weight", 1, n="fro", dim=1)),
    ],
    ids=["l1", "columns", "norm by name"],
)  # fmt: skip
def test_pruned_after_each_epoch_the_weights_are_torchs(arguments, prune_one):
    """Pruned weights do not count in the gradient norm that clips; weights agree up to rounding, and zeros exactly."""
    expected = by_hand(prune_one)

    runner = train(
        dl.PruningCallback(**arguments, prune_on_epoch_end=True), callbacks=[dl.OptimizerCallback("loss", **CLIP)]
    )

    torch.testing.assert_close(weights(runner.model), weights(expected), rtol=0, atol=1e-6)
    assert torch.equal(runner.model[0].weight == 0, expected[0].weight == 0)
    assert [name for name, _ in runner.model.named_parameters()] == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_sparsity_is_logged_and_evaluation_sees_it():
    """Each epoch prunes half of the remaining weights, of 96 and 48; metrics are those of the pruned model."""
    runner = train(dl.PruningCallback(prune_on_epoch_end=True))

    logged = [epoch["train"]["sparsity"] for epoch in runner.experiment_metrics.values()]
    assert logged == [0.5, 0.75, 0.875]
    pruned = sum(int((layer.weight == 0).sum()) for layer in (runner.model[0], runner.model[3]))
    assert pruned == 126
    alone = runner.evaluate_loader(loader(8, 4, seed=1))
    assert alone["loss"] == pytest.approx(runner.epoch_metrics["valid"]["loss"], abs=1e-6)


def test_by_default_the_trained_model_is_pruned_once(tmp_path):
    """Pruning comes after training and does not change it, so checkpoints contain all weights."""
    whole = train(dl.GradNormCallback())

    runner = train(dl.PruningCallback(amount=0.25, layers_to_prune=["0"]), logdir=tmp_path)

    expected = whole.model
    prune.l1_unstructured(expected[0], "weight", 0.25)
    prune.remove(expected[0], "weight")
    assert torch.equal(weights(runner.model), weights(expected))
    saved = utils.load_checkpoint(tmp_path / "checkpoints" / "last.pth")["model_state_dict"]
    assert not (saved["0.weight"] == 0).any()


@pytest.mark.parametrize("step", [6, 9])
def test_a_resumed_run_is_the_whole_one(tmp_path, step):
    """The run is interrupted within the second epoch or at its end, and its checkpoint loads into a plain model."""

    def pruning():
        return dl.PruningCallback(amount=0.3, prune_on_epoch_end=True)

    def saving():
        return dl.CheckpointCallback(tmp_path, mode="runner", every_steps=1)

    whole = train(pruning())
    with pytest.raises(KeyboardInterrupt):
        train(pruning(), callbacks=[saving(), Interrupt(step, "on_batch_start")], logdir=tmp_path)
    resumed = train(pruning(), callbacks=[saving()], logdir=tmp_path, resume="auto")
    bare = dl.SupervisedRunner(mlp()).load(tmp_path, which="last")

    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert torch.equal(weights(bare.model), weights(whole.model))


def test_two_processes_have_one_mask():
    """All ranks use rank zero's mask, since a random method draws another one in each process."""
    pruning = dl.PruningCallback("random_unstructured", 0.5, prune_on_epoch_end=True)

    runner = train(
        pruning,
        engine=dl.DistributedDataParallelEngine(2, device="cpu"),
        batch_size=2,
        callbacks=[dl.VerifyRanksCallback()],
    )

    assert torch.equal(runner.model[0].weight == 0, ~pruning.masks["0.weight"])
    assert runner.epoch_metrics["train"]["sparsity"] == 0.875


def test_a_model_is_pruned_by_a_function():
    """A function of (module, name, amount) may have further arguments."""
    model = mlp()

    def first_rows(module, name, amount, *, skip):
        mask = torch.ones_like(getattr(module, name))
        mask[skip : skip + amount] = 0
        prune.custom_from_mask(module, name, mask)

    masks = utils.prune_model(model, first_rows, amount=2, layers_to_prune=["3"], skip=1)

    assert (model[3].weight == 0).all(dim=1).tolist() == [False, True, True]
    assert masks["3.weight"].any(dim=1).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pruning_fn": "l7"}, "pruning_fn must be one of l1_unstructured, .* got 'l7'"),
        ({"amount": 0.0}, r"amount must be a fraction in \(0, 1\) or an int >= 1, got 0.0"),
        ({"amount": 1.5}, "got 1.5"),
        ({"amount": 1000}, "amount=1000 exceeds the size of 0.weight: 96"),
        (
            {"pruning_fn": "random_structured", "amount": 99, "dim": 1},
            "amount=99 exceeds the size of 0.weight: 6",
        ),
        ({"pruning_fn": "random_structured", "dim": 2}, "dim=2 is out of range for 0.weight, which has 2 dimensions"),
        ({"pruning_fn": "ln_structured", "dim": 0}, "ln_structured needs dim=.* got dim=0, l_norm=None"),
        ({"layers_to_prune": ["7"]}, r"layers_to_prune names '7'; the model's layers are \['0', '1', '2', '3'\]"),
        ({"layers_to_prune": ["1"]}, r"layer '1' does not have any of the parameters \['weight'\] to prune"),
        ({"keys_to_prune": ["bias"]}, r"does not have parameters \['bias'\] with two or more"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    """The error names the argument or layer, and is raised before training."""
    with pytest.raises(ValueError, match=words):
        train(dl.PruningCallback(**arguments))
