"""Tests of pretrained models' folders as initial weights, in one process and in two."""

import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from runnerkit import dl, utils
from runnerkit.checkpoints import pretrained_folder
from tests.engines.together import together
from tests.pretrained import CONFIG, SMALL, Tied, assert_same, train
from tests.tiny import NUM_FEATURES, mlp, weights


@pytest.mark.parametrize("max_shard_size", [10**6, SMALL])
def test_a_run_starts_with_an_exported_model(tmp_path, max_shard_size):
    """CheckpointCallback(resume_model=) and predict_loader(resume=) read the folder and its index."""
    model = Tied(seed=1)
    out = utils.export_pretrained(model, tmp_path / "out", config=CONFIG, max_shard_size=max_shard_size)
    for source in (out, pretrained_folder.pretrained_weights(out)):
        started = Tied(seed=9).eval()
        train(started, callbacks=[dl.CheckpointCallback(tmp_path / f"log of {source.name}", resume_model=source)])
        torch.testing.assert_close(dict(started.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
        rows = torch.randn(4, NUM_FEATURES)
        [batch] = dl.SupervisedRunner(Tied(seed=9)).predict_loader(loader=[(rows,)], resume=source, cpu=True)
        assert torch.equal(batch["logits"], model.eval()(rows))


ENGINES = {
    "ddp": dl.DistributedDataParallelEngine,
    "fsdp": partial(dl.FullyShardedDataParallelEngine, sharded_checkpoints=True),
    "meta": partial(dl.FullyShardedDataParallelEngine, init="meta", shard_modules=[nn.Sequential]),
}


def start_in_two_processes(folder):
    for name, engine in ENGINES.items():
        with utils.parameters_on_meta() if name == "meta" else nullcontext():
            model = Tied(seed=9)
        start = dl.CheckpointCallback(folder / name, content="runner", resume_model=folder / "out")
        train(model, engine(2, device="cpu"), callbacks=[start])


@pytest.mark.slow
def test_two_processes_start_with_an_exported_model_and_export_their_checkpoints(tmp_path):
    """Each takes its shards of the files; a sharded checkpoint is exported file by file."""
    model = Tied(seed=1)
    utils.export_pretrained(model, tmp_path / "out", config=CONFIG, max_shard_size=SMALL)

    together(lambda: start_in_two_processes(tmp_path))

    for name in ENGINES:
        log = tmp_path / name
        assert (log / "checkpoints" / "last").is_dir() == (name != "ddp")
        exported = utils.export_pretrained(log, log / "hf", config=CONFIG, max_shard_size=SMALL, which="last")
        loaded = dl.SupervisedRunner().load(exported, model=Tied(seed=8)).model
        torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


def index_with(change):
    """Return a function that changes an index in its file."""

    def rewrite(path):
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return rewrite


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_text("{"), r"index\.json is not an index of \.safetensors files \(JSONDecodeError"),
        (lambda path: path.write_text("[]"), r"index\.json is not an index of \.safetensors files \(TypeError"),
        (lambda path: path.write_text('{"weight_map": {"a": 3}}'), "is not an index of .*TypeError"),
        (
            index_with(lambda names: names.update(a="../model.safetensors")),
            r"in its own folder, but names \.\./model\.",
        ),
        (lambda path: next(path.parent.glob("model-00002*")).unlink(), "of which these are missing: model-00002-of-"),
        (lambda path: next(path.parent.glob("model-00002*")).write_bytes(b"torn"), "is not a complete .safetensors fi"),
        (index_with(lambda names: names.update(z=names["embed.weight"])), "names 1 weights that are not in its files"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, change, words):
    out = utils.export_pretrained(Tied(), tmp_path / "out", config=CONFIG, max_shard_size=SMALL)
    change(out / "model.safetensors.index.json")
    model = Tied(seed=9)

    with pytest.raises(ValueError, match=words):
        dl.SupervisedRunner().load(out, model=model)
    assert torch.equal(weights(model), weights(Tied(seed=9)))


def test_a_logdir_is_not_mistaken_for_a_pretrained_model(tmp_path):
    """Weights that were exported into a logdir do not hide its checkpoints."""
    train(model := Tied(seed=1), folder=tmp_path / "log")
    for folder in (tmp_path / "log", tmp_path / "log" / "checkpoints"):
        save_file(mlp().state_dict(), folder / "model.safetensors")

        assert_same(dl.SupervisedRunner().load(folder, model=Tied(seed=9), which="last").model, model)


@pytest.mark.parametrize("missing", ["embed.weight", "a_head.weight"])
def test_tied_weights_are_loaded_from_either_name(tmp_path, missing):
    """Files of other libraries hold one of the names, and do not say which weights are tied."""
    state = Tied(seed=1).state_dict()
    del state[missing]
    save_file(state, tmp_path / "model.safetensors")

    loaded = dl.SupervisedRunner().load(tmp_path, model=Tied(seed=9)).model
    started = Tied(seed=9)
    train(started, callbacks=[dl.CheckpointCallback(tmp_path / "log", resume_model=tmp_path / "model.safetensors")])

    assert_same(loaded, Tied(seed=1))
    for model in (loaded, started):
        assert model.a_head.weight is model.embed.weight
        assert torch.equal(model.embed.weight, Tied(seed=1).embed.weight)


def test_a_missing_weight_is_not_mistaken_for_a_tied_one(tmp_path):
    """Another model whose weights are equal in value, but not tied, needs all of them."""
    state = Tied().state_dict()
    del state["a_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    model = Tied()
    model.a_head.weight = nn.Parameter(model.embed.weight.detach().clone())

    with pytest.raises(ValueError, match=r"missing: a_head\.weight"):
        dl.SupervisedRunner().load(tmp_path, model=model)
