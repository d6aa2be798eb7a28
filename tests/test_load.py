"""Tests of runner.load and export_safetensors: supported files, wrapped models and mismatch errors."""

import shutil
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import nn

from runnerkit import dl, utils
from tests.engines.together import together
from tests.pretrained import Tied
from tests.tiny import classification, loader, mlp, sgd, train, weights


def diverged(folder, model=None, **options):
    """Train for six epochs with a diverging learning rate, so that the best checkpoint is not the last."""
    model = model or mlp()
    loaders = {"train": loader(40, 4, shuffle=True), "valid": loader(21, 4, seed=1)}
    options = {"optimizer": sgd(model, lr=3.0), "num_epochs": 6, "loaders": loaders, "logdir": folder, **options}
    return train(model, monitor="valid/loss", **options).model


def load(source, model=None, **options):
    return dl.SupervisedRunner().load(source, model=model or mlp(seed=9), **options).model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the logdir of a finished run, its last weights, and a model with its best weights, read by torch alone."""
    folder = tmp_path_factory.mktemp("run")
    last = weights(diverged(folder))
    best = mlp()
    best.load_state_dict(torch.load(folder / "checkpoints" / "best.pth", weights_only=True)["model_state_dict"])
    assert not torch.equal(weights(best), last)
    return folder, last, best


def test_a_logdir_gives_its_best_or_its_last_and_predicts(run):
    """`load` gives the best or last weights, which predict_loader then uses, also to the model of get_model."""
    folder, last, best = run

    runner = dl.SupervisedRunner().load(folder, model=mlp(seed=9))

    rows = classification(8).tensors[0]
    [batch] = runner.predict_loader(loader=[(rows,)], cpu=True)
    with torch.no_grad():
        assert torch.equal(batch["logits"], best.eval()(rows))
    assert torch.equal(weights(runner.load(folder, which="last").model), last)
    assert torch.equal(weights(runner.load(folder / "checkpoints").model), weights(best))
    assert torch.equal(weights(runner.load(folder / "checkpoints" / "last.pth").model), last)
    runner = dl.SupervisedRunner()
    runner.get_model = lambda stage: mlp(seed=7)
    assert torch.equal(weights(runner.load(folder).model), weights(best))


def wrapped(model):
    """Return state dicts as other wrappers and frameworks write them, by their names."""
    plain = model.state_dict()
    return {
        "DistributedDataParallel": {f"module.{name}": value for name, value in plain.items()},
        "compiled": {f"_orig_mod.{name}": value for name, value in plain.items()},
        "both": {f"module._orig_mod.{name}": value for name, value in plain.items()},
        "compiled in parts": {name.replace("0.", "0._orig_mod."): value for name, value in plain.items()},
        "AveragedModel": torch.optim.swa_utils.AveragedModel(model).state_dict(),
        "Lightning": {"state_dict": plain, "epoch": 3},
    }


@pytest.mark.parametrize("writer", wrapped(mlp()))
def test_prefixes_of_wrappers_do_not_matter(tmp_path, writer):
    """Prefixes that wrappers add are ignored in the file and in the model."""
    model = mlp()
    torch.save(wrapped(model)[writer], tmp_path / "theirs.pth")

    for mine in (mlp(seed=9), nn.DataParallel(mlp(seed=9)), torch.compile(mlp(seed=9), backend="eager")):
        load(tmp_path / "theirs.pth", mine)

        assert torch.equal(weights(mine), weights(model))


def test_a_model_of_which_a_part_is_called_module_keeps_its_names(tmp_path):
    """A model with a submodule called `module` loads files written by itself and by a wrapper around it."""
    model = nn.ModuleDict({"module": mlp(seed=1)})
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "wrapped.pth")

    for name in ("plain", "wrapped"):
        loaded = load(tmp_path / f"{name}.pth", nn.ModuleDict({"module": mlp(seed=2)}))

        assert torch.equal(weights(loaded), weights(model))


def test_a_compiled_part_leaves_no_trace_in_files(tmp_path):
    """Checkpoints of a model with a compiled submodule have plain names and load with and without compilation."""
    model = mlp()
    model[0] = torch.compile(model[0], backend="eager")
    diverged(tmp_path, model, callbacks=[dl.EMACallback(0.5)])

    state = utils.load_checkpoint(tmp_path / "checkpoints" / "last.pth")

    for name in ("model_state_dict", "trained_model_state_dict"):
        assert list(state[name]) == list(mlp().state_dict())
    assert torch.equal(weights(load(tmp_path, which="last")), weights(model))
    again = mlp(seed=9)
    again[0] = torch.compile(again[0], backend="eager")
    diverged(tmp_path, again, callbacks=[dl.EMACallback(0.5)], resume="auto")
    assert torch.equal(weights(again), weights(model))


def on_ranks(folder):
    engines = {
        "ddp": dl.DistributedDataParallelEngine(2, device="cpu", compile={"backend": "eager"}),
        "shards": dl.FullyShardedDataParallelEngine(2, device="cpu", sharded_checkpoints=True),
    }
    return {name: weights(diverged(folder / name, engine=engine)) for name, engine in engines.items()}


def test_checkpoints_of_other_engines_load(tmp_path):
    """Checkpoints of compiled DDP and sharded checkpoints load, and so do their safetensors exports."""
    last = together(lambda: on_ranks(tmp_path))

    for name, expected in last.items():
        checkpoint = tmp_path / name / "checkpoints" / ("last" if name == "shards" else "last.pth")
        exported = utils.export_safetensors(checkpoint, tmp_path / f"{name}.safetensors")
        for loaded in (load(tmp_path / name, which="last"), load(checkpoint), load(exported)):
            assert torch.equal(weights(loaded), expected)


def test_weights_that_do_not_fit_are_named_and_what_fits_is_loaded_when_asked(tmp_path, caplog):
    """The error lists missing and unexpected names and different shapes, and the model is unchanged."""
    state = mlp().state_dict()
    state["head.weight"] = state.pop("0.weight")
    state["3.weight"] = torch.zeros(5, 16)
    torch.save(state, tmp_path / "theirs.pth")
    model = mlp(seed=9)
    before = weights(model)

    with pytest.raises(ValueError, match="does not fit the model; strict=False loads what fits") as refused:
        load(tmp_path / "theirs.pth", model)

    assert str(refused.value).splitlines()[1:] == [
        "  missing: 0.weight",
        "  unexpected: head.weight",
        "  of another shape: 3.weight is (5, 16), the model's is (3, 16)",
    ]
    assert torch.equal(weights(model), before)
    head = model[-1].weight.clone()
    load(tmp_path / "theirs.pth", model, strict=False)
    assert torch.equal(model[0].bias, mlp()[0].bias) and torch.equal(model[-1].weight, head)
    assert "of another shape: 3.weight is (5, 16), the model's is (3, 16)" in caplog.text


def test_a_part_of_another_model_is_loaded_by_its_prefix(tmp_path):
    """`prefix` loads one submodule of another model's weights; a prefix without weights raises an error."""
    whole = nn.ModuleDict({"encoder": mlp(), "decoder": mlp(seed=2)})
    torch.save({f"module.{name}": value for name, value in whole.state_dict().items()}, tmp_path / "whole.pth")

    assert torch.equal(weights(load(tmp_path / "whole.pth", prefix="encoder.")), weights(whole["encoder"]))
    with pytest.raises(ValueError, match=r"not hold weights whose names begin with 'coder\.': encoder\.0\.weight"):
        load(tmp_path / "whole.pth", prefix="coder.")


def test_names_that_only_the_modules_own_hooks_know_are_left_to_torch(tmp_path):
    """BatchNorm loads a file without num_batches_tracked, even from safetensors, which stores no module version."""
    model = mlp(batch_norm=True)
    old = {name: value for name, value in model.state_dict().items() if "num_batches_tracked" not in name}
    save_file(old, tmp_path / "old.safetensors")

    assert torch.equal(weights(load(tmp_path / "old.safetensors", mlp(seed=9, batch_norm=True))), weights(model))


def tied(seed, *, parts=False):
    """Create a model with a tied weight and, if `parts`, two views of one tensor, which save_model refuses."""
    model = Tied(seed)
    if parts:
        for name, part in zip(("first", "second"), torch.full((2, 4), float(seed)), strict=True):
            model.register_buffer(name, part)
    return model


@pytest.mark.parametrize(("content", "parts"), [("model", False), ("runner", False), ("runner", True)])
def test_exported_weights_are_read_by_safetensors_and_by_load(tmp_path, content, parts):
    """Tied weights are exported once, as safetensors does it, and views of one tensor separately."""
    model = tied(1, parts=parts)
    train(model, callbacks=[dl.CheckpointCallback(tmp_path, content=content)])

    exported = utils.export_safetensors(tmp_path, tmp_path / "out" / "model.safetensors", which="last")

    with safe_open(exported, framework="pt") as file:
        assert len(file.keys()) == len(model.state_dict()) - 1
    loaded = [load(exported, tied(2, parts=parts))]
    if not parts:
        save_model(model, tmp_path / "theirs.safetensors")
        loaded += [load(tmp_path / "theirs.safetensors", tied(4)), tied(3)]
        load_model(loaded[-1], exported)
    for each in loaded:
        assert torch.equal(weights(each), weights(model))
        assert each.a_head.weight is each.embed.weight


class Two(dl.SupervisedRunner):
    def handle_batch(self, batch):
        self.batch_metrics["loss"] = sum(
            nn.functional.cross_entropy(model(batch["features"]), batch["targets"]) for model in self.model.values()
        )


def test_several_models_load_by_key_from_either_format(tmp_path):
    """Weights of several models load by key from checkpoints and from safetensors, where the key is a prefix."""
    models = {"one": mlp(seed=1), "two": mlp(seed=2)}
    optimizer = torch.optim.SGD([each for model in models.values() for each in model.parameters()], lr=0.1)
    train(models, runner=Two(), criterion=None, optimizer=optimizer, logdir=tmp_path)
    exported = utils.export_safetensors(tmp_path, tmp_path / "both.safetensors", which="last")

    for source in (tmp_path, exported):
        loaded = {"one": mlp(seed=8), "two": mlp(seed=9)}
        Two().load(source, model=loaded, which="last")
        assert all(torch.equal(weights(loaded[key]), weights(models[key])) for key in models)
        with pytest.raises(ValueError, match=r"the models \[('', )?'one'.*\], the runner has \['one', 'three'\]"):
            Two().load(source, model={"one": mlp(), "three": mlp()}, which="last")
    with pytest.raises(ValueError, match="has none of the model's weights"):
        load(exported)


def test_weights_to_start_from_may_be_of_any_of_these_files(tmp_path, run):
    """CheckpointCallback(resume_model=), predict_loader(resume=) and evaluate_loader(resume=) accept the same files as
    `load`."""
    exported = utils.export_safetensors(run[0], tmp_path / "best.safetensors")
    torch.save(wrapped(run[2])["both"], tmp_path / "theirs.pth")
    rows = classification(8).tensors[0]
    for source in (exported, tmp_path / "theirs.pth"):
        [batch] = dl.SupervisedRunner(mlp(seed=9)).predict_loader(loader=[(rows,)], resume=source, cpu=True)
        with torch.no_grad():
            assert torch.equal(batch["logits"], run[2].eval()(rows))
        scored = {"loader": loader(8, 4), "criterion": nn.CrossEntropyLoss(), "cpu": True}
        metrics = dl.SupervisedRunner(mlp(seed=9)).evaluate_loader(resume=source, **scored)
        assert metrics == dl.SupervisedRunner(run[2]).evaluate_loader(**scored)
        model = mlp(seed=9)
        start = dl.CheckpointCallback(tmp_path / source.stem, resume_model=source)
        train(model, optimizer=sgd(model, lr=0.0), callbacks=[start])
        assert torch.equal(weights(model), weights(run[2]))


def unmonitored(folder, run):
    train(logdir=folder / "log")
    return folder / "log"


def damaged(folder, run):
    shutil.copytree(run[0], folder / "log")
    best = folder / "log" / "checkpoints" / "best.pth"
    content = bytearray(best.read_bytes())
    content[len(content) // 2] ^= 1
    best.unlink()
    best.write_bytes(content)
    return folder / "log"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda folder, run: folder / "none", FileNotFoundError, "no such checkpoint, file of weights or logdir"),
        (lambda folder, run: folder, FileNotFoundError, "no checkpoint is called 'best'.*its checkpoints: none"),
        (unmonitored, FileNotFoundError, "no checkpoint is called 'best'.*pass which='last'"),
        (damaged, ValueError, "best.pth is damaged"),
        (lambda folder, run: save(folder / "list.pth", [1]), ValueError, "must hold weights by name, but holds a list"),
        (lambda folder, run: torn(folder / "torn.safetensors"), ValueError, "not a complete .safetensors file"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, run, make, error, words):
    """Files that cannot be read raise errors that name the problem."""
    source = make(tmp_path, run)

    with pytest.raises(error, match=words):
        load(source)


def save(path, value):
    torch.save(value, path)
    return path


def torn(path):
    save_file(mlp().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-8])
    return path


def test_bad_arguments_and_a_missing_package_are_refused(tmp_path, run, monkeypatch):
    """Invalid arguments and a missing safetensors package raise errors, and no file is written."""
    with pytest.raises(ValueError, match="which must be 'best' or 'last', got 'first'"):
        load(run[0], which="first")
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        utils.export_safetensors(run[0], tmp_path / "model.pth")
    extra = save(tmp_path / "extra.pth", {"weight": torch.zeros(1), "version": 3})
    with pytest.raises(ValueError, match="holds tensors only, and these are not: version"):
        utils.export_safetensors(extra, tmp_path / "extra.safetensors")
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'runnerkit\[safetensors\]'"):
        utils.export_safetensors(run[0], tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*.safetensors*"))
