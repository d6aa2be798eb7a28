"""Pruned weights equal those of torch.nn.utils.prune, stay zero, and survive a resume."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from runnerkit import dl, utils
from tests.tiny import loader, mlp, sgd, train

NUM_EPOCHS = 3


def weights(model):
    """Return the weights as one vector, ordered by name: torch's reparametrization changes the order."""
    return torch.cat([each.flatten() for _, each in sorted(model.state_dict().items())])


CLIP = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 0.2}}


def run(*callbacks, batch_size=4, **options):
    loaders = {"train": loader(16, batch_size), "valid": loader(8, 4, seed=1)}
    return train(loaders=loaders, num_epochs=NUM_EPOCHS, callbacks=list(callbacks), **options)


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

    runner = run(dl.PruningCallback(**arguments, prune_on_epoch_end=True), dl.OptimizerCallback("loss", **CLIP))

    torch.testing.assert_close(weights(runner.model), weights(expected), rtol=0, atol=1e-6)
    assert torch.equal(runner.model[0].weight == 0, expected[0].weight == 0)
    assert [name for name, _ in runner.model.named_parameters()] == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_sparsity_is_logged_and_evaluation_sees_it():
    """Each epoch prunes half of the remaining weights, of 96 and 48; metrics are those of the pruned model."""
    runner = run(dl.PruningCallback(prune_on_epoch_end=True))

    logged = [epoch["train"]["sparsity"] for epoch in runner.experiment_metrics.values()]
    assert logged == [0.5, 0.75, 0.875]
    pruned = sum(int((layer.weight == 0).sum()) for layer in (runner.model[0], runner.model[3]))
    assert pruned == 126
    alone = runner.evaluate_loader(loader(8, 4, seed=1))
    assert alone["loss"] == pytest.approx(runner.epoch_metrics["valid"]["loss"], abs=1e-6)


def test_by_default_the_trained_model_is_pruned_once(tmp_path):
    """Pruning comes after training and does not change it, so checkpoints contain all weights."""
    whole = run(dl.GradNormCallback())

    runner = run(dl.PruningCallback(amount=0.25, layers_to_prune=["0"]), logdir=tmp_path)

    expected = whole.model
    prune.l1_unstructured(expected[0], "weight", 0.25)
    prune.remove(expected[0], "weight")
    assert torch.equal(weights(runner.model), weights(expected))
    saved = utils.load_checkpoint(tmp_path / "checkpoints" / "last.pth")["model_state_dict"]
    assert not (saved["0.weight"] == 0).any()


def test_a_checkpoint_between_two_prunings_is_that_of_a_plain_model(tmp_path):
    """Neither masks nor reparametrized weights are in it."""
    saving = dl.CheckpointCallback(tmp_path, content="runner", every_steps=1)
    runner = run(dl.PruningCallback(amount=0.3, prune_on_epoch_end=True), saving, logdir=tmp_path)

    bare = dl.SupervisedRunner(mlp()).load(tmp_path, which="last")

    assert torch.equal(weights(bare.model), weights(runner.model))


def test_two_processes_have_one_mask():
    """All ranks use rank zero's mask, since a random method draws another one in each process."""
    pruning = dl.PruningCallback("random_unstructured", 0.5, prune_on_epoch_end=True)

    runner = run(pruning, dl.VerifyRanksCallback(), num_processes=2, batch_size=2)

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
