"""Pruned weights are those that torch.nn.utils.prune would leave, stay zero, and survive a resume."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from runnerkit import dl, utils
from tests.tiny import loader, mlp, quiet, sgd

NUM_EPOCHS = 3


def weights(model):
    """As one vector in the names' order: torch's reparametrization leaves another one."""
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
    """Train, and prune each layer after each epoch, by torch's reparametrization; its masks are removed at the end."""
    model = mlp()
    optimizer = sgd(model)
    for _ in range(NUM_EPOCHS):
        for features, targets in loader(16, 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        model(features)  # torch ranks layer.weight, which a forward pass makes of weight_orig: else that of a step ago
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
    """Gradients are clipped by a norm to which pruned weights add nothing; to rounding, zeros exactly."""
    expected = by_hand(prune_one)

    runner = train(
        dl.PruningCallback(**arguments, prune_on_epoch_end=True), callbacks=[dl.OptimizerCallback("loss", **CLIP)]
    )

    torch.testing.assert_close(weights(runner.model), weights(expected), rtol=0, atol=1e-6)
    assert torch.equal(runner.model[0].weight == 0, expected[0].weight == 0)
    assert [name for name, _ in runner.model.named_parameters()] == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_sparsity_is_logged_and_evaluation_sees_it():
    """Half of what is left each time, of 96 and 48 weights; the metrics are of the pruned model."""
    runner = train(dl.PruningCallback(prune_on_epoch_end=True))

    logged = [epoch["train"]["sparsity"] for epoch in runner.experiment_metrics.values()]
    assert logged == [0.5, 0.75, 0.875]
    pruned = sum(int((layer.weight == 0).sum()) for layer in (runner.model[0], runner.model[3]))
    assert pruned == 126
    alone = runner.evaluate_loader(loader(8, 4, seed=1))
    assert alone["loss"] == pytest.approx(runner.epoch_metrics["valid"]["loss"], abs=1e-6)


def test_by_default_the_trained_model_is_pruned_once(tmp_path):
    """After training, of which nothing is changed: checkpoints hold all weights."""
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
    """Killed within the second epoch, or at its end; the checkpoint loads into a bare model."""

    class Fail(dl.Callback):
        def on_batch_start(self, runner):
            if runner.batch_step == step:
                raise RuntimeError("the power is gone")

    def pruning():
        return dl.PruningCallback(amount=0.3, prune_on_epoch_end=True)

    def saving():
        return dl.CheckpointCallback(tmp_path, mode="runner", every_steps=1)

    whole = train(pruning())
    with pytest.raises(RuntimeError, match="the power is gone"):
        train(pruning(), callbacks=[saving(), Fail()], logdir=tmp_path)
    resumed = train(pruning(), callbacks=[saving()], logdir=tmp_path, resume="auto")
    bare = dl.SupervisedRunner(mlp()).load(tmp_path, which="last")

    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert torch.equal(weights(bare.model), weights(whole.model))


def test_two_processes_have_one_mask():
    """A random method draws in each; everybody takes rank zero's, or the ranks would part."""
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
    """One's own, of (module, name, amount), with arguments of its own."""
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
        ({"pruning_fn": "l7"}, "pruning_fn='l7' is none of l1_unstructured, random_unst"),
        ({"amount": 0.0}, r"amount must be a share in \(0, 1\), or an int >= 1, got 0.0"),
        ({"amount": 1.5}, "got 1.5"),
        ({"amount": 1000}, "amount=1000 is more than 0.weight has to prune: 96"),
        (
            {"pruning_fn": "random_structured", "amount": 99, "dim": 1},
            "amount=99 is more than 0.weight has to prune: 6",
        ),
        ({"pruning_fn": "random_structured", "dim": 2}, "dim=2 is none of 0.weight, which has 2 dimensions"),
        ({"pruning_fn": "ln_structured", "dim": 0}, "ln_structured wants dim=.* got dim=0, l_norm=None"),
        ({"layers_to_prune": ["7"]}, r"layers_to_prune has '7'; the model's layers are \['0', '1', '2', '3'\]"),
        ({"layers_to_prune": ["1"]}, r"layer '1' has none of the parameters \['weight'\] to prune"),
        ({"keys_to_prune": ["bias"]}, r"no parameter of two dimensions among \['bias'\]"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    """By name, before training."""
    with pytest.raises(ValueError, match=words):
        train(dl.PruningCallback(**arguments))
