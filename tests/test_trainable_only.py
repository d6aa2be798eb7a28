"""Checkpoints without frozen parameters, such as adapters of a pretrained model, and models of the library peft."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.torchvision_cpu import import_torchvision
from tests.tiny import train


class Adapted(nn.Module):
    """A frozen base with batch norm, a trained adapter, and a trained head."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.base = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
            torch.manual_seed(9)
            self.adapter, self.head = nn.Linear(64, 2, bias=False), nn.Linear(2, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(self.adapter(self.base(x)))


def with_peft():
    """Return an MLP with adapters of rank 2 in both of its layers."""
    import_torchvision()  # transformers imports torchvision, which may need the workaround
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.1))


MAKERS = [Adapted, pytest.param(with_peft, marks=pytest.mark.slow)]  # peft takes 7 s to import


def fit(model, logdir, *, num_epochs=2, engine=None, **options):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 8, generator=generator), torch.arange(48) % 3)
    loaders = {key: DataLoader(data, batch_size=8, shuffle=key == "train") for key in ("train", "valid")}
    start = logdir if (logdir / "checkpoints").exists() else None
    judge = {"monitor": "valid/loss", "mode": "min", "resume_runner": start}
    save = dl.CheckpointCallback(logdir, **{"content": "runner", "trainable_only": True, **judge, **options})
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    options = {"num_epochs": num_epochs, "engine": engine or dl.CPUEngine(), "callbacks": [save]}
    return train(model, optimizer=optimizer, loaders=loaders, **options)


def assert_same(mine, theirs):
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("make", MAKERS)
def test_an_interrupted_run_continues_bit_for_bit(tmp_path, make):
    """The checkpoint holds what is trained, buffers and the optimizer; the base comes from the model that is passed."""
    whole, first, second = make(), make(), make()
    fit(whole, tmp_path / "whole", num_epochs=4)
    fit(first, tmp_path / "parts", num_epochs=2)
    fit(second, tmp_path / "parts", num_epochs=4)

    assert_same(second, whole)
    saved = load_checkpoint(tmp_path / "parts" / "checkpoints" / "last.pth")
    frozen = {name for name, each in whole.named_parameters() if not each.requires_grad}
    assert frozen
    assert set(saved["model_state_dict"]) == set(whole.state_dict()) - frozen


@pytest.mark.slow
@pytest.mark.parametrize("make", [Adapted, with_peft])
@pytest.mark.parametrize(
    "engine",
    [
        lambda: dl.DistributedDataParallelEngine(2, device="cpu"),
        lambda: dl.FullyShardedDataParallelEngine(2, device="cpu", shard_modules=[nn.Linear]),
        lambda: dl.FullyShardedDataParallelEngine(2, device="cpu", sharded_checkpoints=True),
    ],
    ids=["ddp", "fsdp", "sharded checkpoints"],
)
def test_it_continues_on_several_processes(tmp_path, make, engine):
    """Weights equal those of the uninterrupted run, with checkpoints of each process's shards, too."""
    whole, first, second = make(), make(), make()
    fit(whole, tmp_path / "whole", num_epochs=2, engine=engine())
    fit(first, tmp_path / "parts", num_epochs=1, engine=engine())
    fit(second, tmp_path / "parts", num_epochs=2, engine=engine())

    assert_same(second, whole)


@pytest.mark.parametrize("content", ["model", "runner"])
def test_weights_are_loaded_into_the_same_base(tmp_path, content):
    """`load`, `load_best_on_end` and evaluation take the base of the model; another base is refused."""
    model = Adapted()
    runner = fit(model, tmp_path, content=content, load_best_on_end=True)
    loaded = dl.SupervisedRunner().load(tmp_path, model=Adapted()).model

    assert_same(loaded, model)
    file = tmp_path / "checkpoints" / "best.pth"
    with pytest.raises(ValueError, match=r"best\.pth holds the trainable part of a model whose frozen parameters"):
        dl.SupervisedRunner().load(file, model=Adapted(seed=1))
    other = Adapted()
    other.head.requires_grad_(False)
    dl.SupervisedRunner().load(file, model=other)  # frozen after training: the file has it
    assert_same(other, model)
    unfrozen = Adapted().requires_grad_(True)
    with pytest.raises(ValueError, match="and freeze the same parameters, before"):
        dl.SupervisedRunner().load(file, model=unfrozen)
    assert runner.epoch_metrics["valid"]


def test_several_models_and_averaged_weights(tmp_path):
    """Each model has its own frozen part, and averages are saved without theirs."""

    class Pair(dl.Runner):
        def handle_batch(self, batch):
            x, y = batch
            logits = self.model["a"](x) + self.model["b"](x)
            self.batch_metrics["loss"] = nn.functional.cross_entropy(logits, y)

    def run(start):
        models = {"a": Adapted(), "b": Adapted(seed=2).requires_grad_(True)}
        data = TensorDataset(torch.linspace(-1, 1, 96).reshape(12, 8), torch.arange(12) % 3)
        parameters = [each for model in models.values() for each in model.parameters() if each.requires_grad]
        save = dl.CheckpointCallback(tmp_path, content="runner", trainable_only=True, resume_runner=start)
        callbacks = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss"), save]
        options = {"optimizer": torch.optim.SGD(parameters, lr=0.1), "loaders": {"train": DataLoader(data, 4)}}
        train(models, runner=Pair(), criterion=None, callbacks=callbacks, **options)
        return models

    models, again = run(None), run(str(tmp_path))

    for key in models:
        assert_same(again[key], models[key])
    saved = load_checkpoint(tmp_path / "checkpoints" / "last.pth")["model_state_dict"]
    assert "base.0.weight" not in saved["a"]
    assert "base.0.weight" in saved["b"]


def test_a_model_without_frozen_parameters_is_saved_whole(tmp_path):
    """The file is that of any other run, also for other libraries."""
    model = Adapted().requires_grad_(True)
    fit(model, tmp_path, content="model")

    state = torch.load(tmp_path / "checkpoints" / "last.pth", weights_only=True)
    assert set(state) == set(model.state_dict())
