"""Tests of functions that read and write single files, with URLs instead of paths."""

import json
import os
from pathlib import Path

import pytest
import torch

from runnerkit import dl, utils
from runnerkit.models.tracing import save_program
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.urls import as_url
from tests.storage.stored_runs import objects, saving, train
from tests.tiny import NUM_FEATURES, mlp

OUT = "memory://out"


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
    """Let the current folder be an empty one, and check that nothing is written there."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert os.listdir(folder) == []


@pytest.fixture
def run():
    """Train a run in a store; return its URL."""
    train("memory://runs/mine", saving("memory://runs/mine"), num_epochs=2)
    return "memory://runs/mine"


def test_checkpoints_are_saved_and_loaded(run):
    """The path that is returned is the URL, from which a run can resume."""
    path = utils.save_checkpoint({"step": 3}, f"{OUT}/a.pth")
    whole = utils.export_full_state(run, f"{OUT}/whole.pth")

    assert as_url(path) == f"{OUT}/a.pth" and utils.load_checkpoint(path) == {"step": 3}
    assert objects(OUT) == ["a.pth", "whole.pth"]
    assert train("memory://next/run", resume=whole, num_epochs=3).epoch_step == 3
    with pytest.raises(FileNotFoundError, match=r"memory://out/none.pth: nothing is there"):
        utils.load_checkpoint(f"{OUT}/none.pth")


def test_weights_of_a_stored_run_are_averaged(run):
    """A pattern matches the names in a logdir; the folders of a URL cannot be one, since stores are not searched."""
    copy = local_copy(run) / "checkpoints"
    expected = utils.get_averaged_weights_by_path_mask(f"{copy}/model.*.pth")

    for mask, logdir in [("model.*.pth", run), (f"{run}/checkpoints/model.*.pth", None), (f"{run}/model.*.pth", None)]:
        found = utils.get_averaged_weights_by_path_mask(mask, logdir)
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    with pytest.raises(ValueError, match="only the last part of a URL may be a pattern"):
        utils.get_averaged_weights_by_path_mask("memory://runs/*/checkpoints/last.pth")
    with pytest.raises(FileNotFoundError, match="no checkpoint matches 'memory://runs/mine/checkpoints/none"):
        utils.get_averaged_weights_by_path_mask("none*", run)


def test_pretrained_folders_are_written(run):
    """A smaller export replaces a larger one, whose files would otherwise be read."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    out = f"{OUT}/model"

    utils.export_pretrained(run, out, config={"width": 4}, max_shard_size=100)
    large = objects(out)
    path = utils.export_pretrained(run, out, config=f"{out}/config.json")

    assert "model.safetensors.index.json" in large and as_url(path) == out
    assert objects(out) == ["config.json", "model.safetensors"]
    assert json.loads((local_copy(out) / "config.json").read_text()) == {"width": 4}
    dl.SupervisedRunner(mlp(dropout=0.3)).load(out)


def test_programs_are_written():
    """The model is traced as for a local file."""
    path = save_program(mlp(), torch.zeros(2, NUM_FEATURES), f"{OUT}/model.pt2")

    assert as_url(path) == f"{OUT}/model.pt2" and objects(OUT) == ["model.pt2"]
    assert torch.export.load(local_copy(path)).module()(torch.zeros(3, NUM_FEATURES)).shape[0] == 3


def test_onnx_models_are_written_and_quantized():
    """Both the source and the result may be URLs."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)

    path = utils.onnx_export(mlp(), torch.zeros(2, NUM_FEATURES), f"{OUT}/model.onnx")
    small = utils.quantize_onnx(path, f"{OUT}/small.onnx")

    assert as_url(small) == f"{OUT}/small.onnx" and objects(OUT) == ["model.onnx", "small.onnx"]


def test_the_plot_of_an_lr_finder_is_written():
    """Its sweep is not repeated for it."""
    pytest.importorskip("matplotlib")
    finder = dl.LRFinder(final_lr=1.0)
    finder.lrs, finder.losses, finder.smoothed_losses = [0.1, 0.2], [2.0, 1.0], [2.0, 1.5]

    path = finder.plot(f"{OUT}/lr.png")

    assert as_url(path) == f"{OUT}/lr.png" and Path(local_copy(path)).stat().st_size > 1000
