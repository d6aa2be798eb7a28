"""Checkpoints without frozen parameters, such as adapters of a pretrained model, and models of the library peft."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl, utils
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.torchvision_cpu import import_torchvision
from tests.fake_apex.use import stand_in
from tests.tiny import train

SEED = 42  # the runner's default


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


def with_peft(dropout=0.1):
    """Return an MLP with adapters of rank 2 in both of its layers."""
    import_torchvision()  # transformers imports torchvision, which may need the workaround
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=dropout))


MAKERS = [Adapted, pytest.param(with_peft, marks=pytest.mark.slow)]  # peft takes 7 s to import


def fit(model, logdir, *, num_epochs=2, engine=None, accumulate=1, **options):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 8, generator=generator), torch.arange(48) % 3)
    loaders = {key: DataLoader(data, batch_size=8, shuffle=key == "train") for key in ("train", "valid")}
    start = logdir if (logdir / "checkpoints").exists() else None
    judge = {"monitor": "valid/loss", "mode": "min", "resume_runner": start}
    save = dl.CheckpointCallback(logdir, **{"content": "runner", "trainable_only": True, **judge, **options})
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    options = {"num_epochs": num_epochs, "engine": engine or dl.CPUEngine(), "callbacks": [save]}
    options["accumulation_steps"] = accumulate
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
@pytest.mark.parametrize(
    ("make", "engine"),
    [
        (Adapted, lambda: dl.DistributedDataParallelEngine(2, device="cpu")),
        (with_peft, lambda: dl.DistributedDataParallelAPEXEngine(2, device="cpu", opt_level="O2")),
        pytest.param(with_peft, lambda: dl.HorovodEngine(2, device="cpu"), marks=pytest.mark.horovod),
        (Adapted, lambda: dl.FullyShardedDataParallelEngine(2, device="cpu", shard_modules=[nn.Linear])),
        (with_peft, lambda: dl.FullyShardedDataParallelEngine(2, device="cpu", sharded_checkpoints=True)),
    ],
    ids=["ddp", "apex", "horovod", "fsdp", "sharded checkpoints"],
)
def test_it_continues_on_several_processes(tmp_path, make, engine, monkeypatch):
    """Weights equal those of the uninterrupted run, of steps of two batches, also with checkpoints of each process's
    shards.
    """
    whole, first, second = make(), make(), make()
    with stand_in(monkeypatch):
        fit(whole, tmp_path / "whole", num_epochs=2, engine=engine(), accumulate=2)
        fit(first, tmp_path / "parts", num_epochs=1, engine=engine(), accumulate=2)
        fit(second, tmp_path / "parts", num_epochs=2, engine=engine(), accumulate=2)

    assert_same(second, whole)


PLAN = {"0.base_layer": "colwise", "0.lora_B.*": "colwise", "2.base_layer": "rowwise", "2.lora_A.*": "rowwise"}


@pytest.mark.slow
def test_adapters_of_divided_layers_train_as_in_one_process(tmp_path):
    """Tensor parallelism divides the base, which stays as it is, and one matrix of each adapter."""
    plan = {f"base_model.model.{name}": style for name, style in PLAN.items()}
    engine = partial(dl.FullyShardedDataParallelEngine, 2, device="cpu", tensor_parallel=2, plan=plan)
    one, whole, first, second = (with_peft(dropout=0.0) for _ in range(4))
    fit(one, tmp_path / "one", num_epochs=2)
    fit(whole, tmp_path / "whole", num_epochs=2, engine=engine())
    fit(first, tmp_path / "parts", num_epochs=1, engine=engine(sharded_checkpoints=True))
    fit(second, tmp_path / "parts", num_epochs=2, engine=engine(sharded_checkpoints=True))

    torch.testing.assert_close(whole.state_dict(), one.state_dict(), rtol=0, atol=1e-6)  # the order of float sums
    assert_same(second, whole)
    loaded = dl.SupervisedRunner().load(tmp_path / "parts", model=with_peft(), which="last").model
    assert_same(loaded, whole)


ALONE = {
    "data parallel": lambda: dl.DataParallelEngine("cpu"),
    "bf16": lambda: dl.AMPEngine("cpu"),
    "fp16": lambda: dl.DataParallelAMPEngine("cpu", dtype=torch.float16),
    "Apex O1": lambda: dl.DataParallelAPEXEngine("cpu", opt_level="O1"),
    "Apex O2": lambda: dl.APEXEngine("cpu", opt_level="O2"),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ALONE)
def test_it_continues_in_one_process(tmp_path, make, name, monkeypatch):
    """Steps of two batches train adapters and leave the base as it was; the checkpoint fits it in full precision."""
    with stand_in(monkeypatch):
        whole, first, second = make(), make(), make()
        fit(whole, tmp_path / "whole", num_epochs=2, engine=ALONE[name](), accumulate=2)
        fit(first, tmp_path / "parts", num_epochs=1, engine=ALONE[name](), accumulate=2)
        fit(second, tmp_path / "parts", num_epochs=2, engine=ALONE[name](), accumulate=2)
    loaded = dl.SupervisedRunner().load(tmp_path / "parts", model=make(), which="last").model

    assert_same(second, whole)
    saved = load_checkpoint(tmp_path / "parts" / "checkpoints" / "last.pth")["model_state_dict"]
    for key, before in make().named_parameters():
        assert torch.equal(whole.get_parameter(key), before) != before.requires_grad, key
        assert torch.equal(loaded.get_parameter(key), saved.get(key, before).float()), key


def on_meta(make):
    with utils.parameters_on_meta():
        return make()


def meta():
    return dl.FullyShardedDataParallelEngine(2, device="cpu", init="meta", shard_modules=[nn.Linear])


def last(logdir):
    return load_checkpoint(logdir / "checkpoints" / "last")


@pytest.mark.slow
@pytest.mark.parametrize("make", [Adapted, with_peft])
def test_it_continues_though_no_process_has_the_base(tmp_path, make):
    """With init="meta", weights and moments are those of the uninterrupted run. The hash is that of an ordinary model
    with the same base, into which the checkpoint is loaded; a run with another base is refused."""
    fit(on_meta(make), tmp_path / "whole", num_epochs=2, engine=meta())
    fit(on_meta(make), tmp_path / "parts", num_epochs=1, engine=meta())
    fit(on_meta(make), tmp_path / "parts", num_epochs=2, engine=meta())

    saved, expected = last(tmp_path / "parts"), last(tmp_path / "whole")
    for part in ("model_state_dict", "optimizer_state_dict"):
        torch.testing.assert_close(saved[part], expected[part], rtol=0, atol=0)
    model = utils.initialize_parameters(make(), seed=SEED)
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert set(saved["model_state_dict"]) == set(model.state_dict()) - frozen
    loaded = dl.SupervisedRunner().load(tmp_path / "parts", model=model, which="last").model
    for name, value in saved["model_state_dict"].items():
        assert torch.equal(loaded.state_dict()[name], value), name

    torch.save(utils.initialize_parameters(make(), seed=1).state_dict(), tmp_path / "other.pth")
    with pytest.raises(
        ValueError, match="holds the trainable part of a model whose frozen parameters had other values"
    ):
        fit(on_meta(make), tmp_path / "parts", num_epochs=3, engine=meta(), resume_model=tmp_path / "other.pth")


@pytest.mark.slow
@pytest.mark.parametrize("engine", [dl.CPUEngine, meta])
def test_adapters_are_added_to_weights_without_adapters(tmp_path, engine):
    """resume_model= reads the weights under the names that they have without peft; adapters keep theirs."""
    model = on_meta(with_peft) if engine is meta else with_peft()
    base = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    base = utils.initialize_parameters(base, seed=9).state_dict()
    save_file(base, tmp_path / "base.safetensors")

    runner = fit(
        model, tmp_path / "log", engine=engine(), trainable_only=False, resume_model=tmp_path / "base.safetensors"
    )

    model = runner.load(tmp_path / "log", which="last").model
    adapted = dict(model.named_parameters())
    for name, value in base.items():
        assert torch.equal(adapted[f"base_model.model.{name.replace('.', '.base_layer.')}"], value), name
    assert len(adapted) == len(base) + 4
    assert all(each.any() for each in adapted.values())  # the second matrices, too, are trained


@pytest.mark.slow
def test_adapters_start_as_peft_lets_them():
    """Two matrices of LoRA, of which the second is zero, so that at first the model computes what its base does."""
    model = utils.initialize_parameters(with_peft(), seed=SEED).eval()
    x = torch.randn(4, 8)

    with model.disable_adapter():
        expected = model(x)
    assert torch.equal(model(x), expected)
    for name, each in model.named_parameters():
        assert bool(each.any()) == ("lora_B" not in name), name
    assert all(torch.equal(a, b) for a, b in zip(
        model.parameters(), utils.initialize_parameters(on_meta(with_peft), seed=SEED).parameters(), strict=True
    ))  # fmt: skip


@pytest.mark.slow
def test_adapters_of_an_embedding_start_as_peft_lets_them():
    """Its matrices are in dicts of parameters; the first one is zero."""
    with_peft()
    import peft

    model = peft.get_peft_model(nn.Sequential(nn.Embedding(5, 4)), peft.LoraConfig(r=2, target_modules=["0"]))
    model, rows = utils.initialize_parameters(model, seed=SEED), torch.arange(5)

    with model.disable_adapter():
        expected = model(rows)
    assert torch.equal(model(rows), expected)
    for name, each in model.named_parameters():
        assert bool(each.any()) == ("lora_embedding_A" not in name), name


@pytest.mark.slow
def test_adapters_of_other_kinds_are_refused_without_values():
    """Their layers would get other values than peft's."""
    with_peft()
    import peft

    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 3)), peft.LoHaConfig(r=2, target_modules=["0"]))
    with pytest.raises(ValueError, match=r"loha.* holds adapters, and of those only the initial values of LoRA"):
        utils.initialize_parameters(model, seed=SEED)


@pytest.mark.slow
def test_initial_values_that_depend_on_the_base_are_refused():
    """OLoRA's matrices are factors of the base's weights."""
    with_peft()
    import peft

    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights="olora")
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 3)), config)
    with pytest.raises(ValueError, match=r"'default' has init_lora_weights='olora'; .* must be True, False or"):
        utils.initialize_parameters(model, seed=SEED)


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
