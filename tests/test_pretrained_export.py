"""Tests of export_pretrained: weights that huggingface_hub reads, configs, replaced folders, errors."""

import json
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn

from runnerkit import dl, utils
from runnerkit.checkpoints import pretrained_folder
from tests.pretrained import CONFIG, SMALL, Config, Configured, Tied, assert_same, files_of, read_by_hugging_face, train
from tests.tiny import mlp, sgd, weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a logdir and the model whose weights it holds."""
    folder, model = tmp_path_factory.mktemp("run"), Tied(seed=1)
    train(model, folder=folder, optimizer=sgd(model))
    return folder, model


@pytest.mark.parametrize("source", ["logdir", "checkpoint", "model", "compiled", "weights", "exported"])
@pytest.mark.parametrize("max_shard_size", ["5GB", SMALL])
def test_the_weights_are_those_of_the_source(tmp_path, run, source, max_shard_size):
    """huggingface_hub reads each export, of one file or of several, and `load` does; tied weights stay tied."""
    logdir, model = run
    torch.save({f"module.{name}": each for name, each in model.state_dict().items()}, tmp_path / "weights.pth")
    sources = {
        "logdir": logdir,
        "checkpoint": logdir / "checkpoints" / "last.pth",
        "model": model,
        "compiled": torch.compile(model, backend="eager"),
        "weights": tmp_path / "weights.pth",
        "exported": utils.export_pretrained(model, tmp_path / "first", config=CONFIG, max_shard_size=SMALL),
    }

    options = {"config": CONFIG, "max_shard_size": max_shard_size, "which": "last"}
    out = utils.export_pretrained(sources[source], tmp_path / "new" / "out", **options)

    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert ("model.safetensors" in files_of(out)) == (max_shard_size == "5GB")
    for each in out.glob("model-*.safetensors"):
        with safe_open(each, framework="pt") as file:
            tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  # not a dict
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= SMALL
    assert_same(read_by_hugging_face(out), model)
    places = [out, *out.glob("*.index.json"), *out.glob("model.safetensors")]
    assert len(places) == 2
    for place in places:
        loaded = dl.SupervisedRunner().load(place, model=Tied(seed=9)).model
        assert_same(loaded, model)
        assert loaded.a_head.weight is loaded.embed.weight


def test_tied_weights_are_stored_once_under_their_first_name(tmp_path):
    """The index names what the files hold: the first layer, which models without the last one need."""
    out = utils.export_pretrained(Tied(), tmp_path, config=CONFIG, max_shard_size=SMALL)

    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {}
    for path in out.glob("model-*-of-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == held
    assert "embed.weight" in held and "a_head.weight" not in held
    assert index["metadata"]["total_size"] == sum(
        each.nbytes for name, each in Tied().state_dict().items() if name != "a_head.weight"
    )


def test_an_earlier_export_is_replaced_and_other_files_stay(tmp_path, monkeypatch):
    """No file of the earlier export remains; if the new one cannot be written, all of them do."""
    out, first, second = tmp_path / "out", Tied(seed=1), Tied(seed=2)
    utils.export_pretrained(first, out, config=CONFIG)
    (out / "tokenizer.json").write_text("{}")
    before = files_of(out)

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("runnerkit.checkpoints.pretrained_export.write_safetensors", fail)
    for folder in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="the disk is full"):
            utils.export_pretrained(second, folder, config=CONFIG, max_shard_size=SMALL)
    monkeypatch.undo()
    assert files_of(out) == before
    assert not (tmp_path / "new").exists()
    assert_same(read_by_hugging_face(out), first)

    utils.export_pretrained(second, out, config=CONFIG, max_shard_size=SMALL)
    assert "model.safetensors" not in files_of(out) and "tokenizer.json" in files_of(out)
    assert_same(read_by_hugging_face(out), second)
    utils.export_pretrained(first, out, config=CONFIG)
    assert files_of(out) == before
    assert_same(read_by_hugging_face(out), first)


def test_a_kill_never_leaves_files_of_two_exports(tmp_path, monkeypatch):
    """After each step of replacing an export, the folder holds one of them, or none."""
    first, second = Tied(seed=1), Tied(seed=2)
    seen = []

    def counted(step, *, at):
        def call(*arguments, **options):
            seen.append(step)
            if len(seen) > at:
                raise KeyboardInterrupt
            return step(*arguments, **options)

        return call

    for at in range(40):
        seen.clear()
        out = tmp_path / str(at)
        utils.export_pretrained(first, out, config=CONFIG, max_shard_size=SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(pretrained_folder, "replace", counted(pretrained_folder.replace, at=at))
            try:
                utils.export_pretrained(second, out, config=CONFIG, max_shard_size=SMALL)
            except KeyboardInterrupt:
                assert pretrained_folder.pretrained_weights(out) is None
            else:
                break
    assert at == len(files_of(out))
    assert_same(read_by_hugging_face(out), second)


def test_a_folder_of_torch_distributed_checkpoint_is_exported(tmp_path):
    """Of a state with several parts, the model's weights."""
    model = Tied(seed=1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
    state = {"model": model.state_dict(), "optimizer": {"step": torch.ones(1)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)

    out = utils.export_pretrained(tmp_path / "dcp", tmp_path / "out", config=CONFIG, max_shard_size=SMALL)

    assert_same(dl.SupervisedRunner().load(out, model=Tied(seed=9)).model, model)


# Configs.


def test_a_config_comes_from_where_it_is(tmp_path):
    """A dict, a file, a folder, an object with to_dict, a model, or the source; only a model names its class."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    from_objects = {**CONFIG, "architectures": ["Configured"]}
    cases = [
        (Tied(), CONFIG, CONFIG),
        (Tied(), tmp_path / "config.json", CONFIG),
        (Tied(), str(tmp_path), CONFIG),
        (Tied(), Config(), CONFIG),
        (Tied(), Configured(), from_objects),
        (Configured(), None, from_objects),
        (torch.compile(Configured(), backend="eager"), None, from_objects),
        (
            Tied().double(),
            {"model_type": "mine", "torch_dtype": "bfloat16"},
            {"model_type": "mine", "dtype": "float64"},
        ),
    ]
    for number, (source, config, expected) in enumerate(cases):
        out = utils.export_pretrained(source, tmp_path / str(number), config=config)
        assert json.loads((out / "config.json").read_text()) == expected


# Errors.


def export(source, tmp_path, **options):
    return utils.export_pretrained(source, tmp_path / "out", **{"config": CONFIG, **options})


class Adapted(Tied):
    """A model with the names of peft's."""

    def __init__(self):
        super().__init__()
        self.base_model = nn.ModuleDict({"model": nn.Linear(2, 2)})
        for name in ("embed", "body", "back", "a_head", "classes"):
            delattr(self, name)


def trained_in_part(folder):
    model = Tied()
    model.embed.requires_grad_(False)
    part = dl.CheckpointCallback(folder / "part", content="runner", trainable_only=True)
    train(model, optimizer=torch.optim.SGD(model.classes.parameters(), lr=0.1), callbacks=[part])
    return folder / "part" / "checkpoints" / "last.pth"


def two(folder):
    torch.save({"one": mlp().state_dict(), "two": mlp().state_dict()}, folder / "two.pth")
    return folder / "two.pth"


def on_meta(folder):
    with utils.parameters_on_meta():
        return Tied()


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (lambda folder: Tied(), {"config": None}, ValueError, r"from_pretrained needs a config\.json: pass as confi"),
        (two, {"config": None}, ValueError, r"from_pretrained needs a config\.json: pass as config a dict, the path"),
        (lambda folder: Tied(), {"config": 3}, ValueError, "must be a dict, a path, or have a method to_dict, got a i"),
        (lambda folder: Tied(), {"config": "nowhere.json"}, FileNotFoundError, r"nowhere\.json"),
        (lambda folder: Tied(), {"config": __file__}, ValueError, r"test_pretrained_export\.py is not a JSON file: "),
        (lambda folder: Tied(), {"max_shard_size": "5 apples"}, ValueError, "Supported units are TB, GB, MB, KB"),
        (two, {}, ValueError, r"two\.pth holds the models \['one', 'two'\]: pass the key of one, such as key='one'"),
        (two, {"key": "three"}, ValueError, r"two\.pth does not hold a model 'three', but the mod"),
        (lambda folder: Tied(), {"key": "three"}, ValueError, "Tied does not hold a model 'three', but one model, wi"),
        (trained_in_part, {}, ValueError, r"last\.pth holds the trainable part of a model only: load it into the mo"),
        (lambda folder: Adapted(), {}, ValueError, r"holds adapters of peft .*: pass runner\.model\.merge_and_unl"),
        (on_meta, {}, ValueError, "the Tied has parameters on the meta device, without values: pass the logdir or a"),
        (lambda folder: folder / "none", {}, FileNotFoundError, "none: no such checkpoint, file of weights or logdir"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_said(tmp_path, make, options, error, words):
    """An error names the problem and the remedy, and leaves no folder."""
    source = make(tmp_path)

    with pytest.raises(error, match=words):
        export(source, tmp_path, **options)
    assert not (tmp_path / "out").exists()


def test_a_model_of_several_is_exported_by_its_key(tmp_path):
    export(mlp(), tmp_path, which="first")  # ignored: a model is not a logdir
    out = export(two(tmp_path), tmp_path, key="two")

    assert torch.equal(weights(dl.SupervisedRunner().load(out, model=mlp(seed=9)).model), weights(mlp()))


def test_places_and_packages_that_will_not_do_are_named(tmp_path, monkeypatch):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(NotADirectoryError, match="out: it is a file; pass the path of a folder"):
        export(Tied(), tmp_path)
    with pytest.raises(OSError, match=r"cannot write /proc/model/config\.json: folder /proc/model cannot be created"):
        utils.export_pretrained(Tied(), "/proc/model", config=CONFIG)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"needs the package huggingface_hub: pip install 'runnerkit\[hf\]'"):
        utils.export_pretrained(Tied(), tmp_path / "new", config=CONFIG)
    assert not (tmp_path / "new").exists()
