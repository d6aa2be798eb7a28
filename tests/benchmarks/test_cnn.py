"""Case b: all candidates use the same images and crops, and match the hand-written loop's results."""

import ast
import gzip
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.cases import all_cases
from benchmarks.cnn import ours, raw, seeded, tensor_loader, work
from benchmarks.harness import ROOT
from benchmarks.turns import Turns
from runnerkit.torchvision_cpu import import_torchvision

transforms = import_torchvision().transforms
AS_FLOATS = [transforms.ToTensor(), transforms.Normalize([work.MEAN], [work.STD])]
AUGMENTED = [transforms.RandomCrop(28, padding=work.PADDING), transforms.RandomHorizontalFlip(), *AS_FLOATS]


def few_images(num_train=300, num_valid=40):
    """Draw 28 x 28 images whose brightness encodes the class."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 10, num_train + num_valid)
    pixels = (targets[:, None, None] * 25 + rng.integers(0, 20, (len(targets), 28, 28))).astype(np.uint8)
    return {
        "train": work.Images(pixels[:num_train], targets[:num_train], transform=work.augmented, turns=Turns()),
        "valid": work.Images(pixels[num_train:], targets[num_train:], transform=work.as_floats, turns=Turns()),
    }


@pytest.mark.parametrize(
    ("by_hand", "published"), [(work.as_floats, AS_FLOATS), (work.augmented, AUGMENTED)], ids=["as floats", "augmented"]
)
def test_images_are_cut_as_torchvision_cuts_them(by_hand, published):
    """The crops equal torchvision's bit for bit, given the same draws from torch's generator."""
    images = [Image.fromarray(each) for each in few_images()["train"].pixels[:100]]

    torch.manual_seed(3)
    expected = [transforms.Compose(published)(each) for each in images]
    torch.manual_seed(3)
    found = [by_hand(each) for each in images]

    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("zipped", [False, True])
def test_the_first_images_of_the_files_are_taken(tmp_path, monkeypatch, zipped):
    """Images are read in order, from the published files or from Debian's gzipped ones."""
    rng = np.random.default_rng(0)
    written = {}
    for part, count in (("train", 6), ("t10k", 4)):
        written[part] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count, np.uint8)
        headers = struct.pack(">4i", 0x803, count, 28, 28), struct.pack(">2i", 0x801, count)
        for kind, header, array in zip(("images-idx3", "labels-idx1"), headers, written[part], strict=True):
            content = header + array.tobytes()
            path = tmp_path / f"{part}-{kind}-ubyte{'.gz' * zipped}"
            path.write_bytes(gzip.compress(content) if zipped else content)
    monkeypatch.setattr(work, "PUBLISHED", tmp_path)
    monkeypatch.setattr(work, "DEBIAN", tmp_path)

    images = work.read(Turns(), num_train=5, num_valid=3)

    for key, part, count in (("train", "train", 5), ("valid", "t10k", 3)):
        assert np.array_equal(images[key].pixels, written[part][0][:count])
        assert np.array_equal(images[key].targets, written[part][1][:count])


@pytest.mark.parametrize("train", [ours.train, seeded.train, tensor_loader.train])
def test_ours_trains_and_validates_as_by_hand(train):
    """Loss and accuracy agree within the case's tolerance; each candidate draws its own order and crops."""
    (case,) = (each for each in all_cases() if each.key == "cnn")
    expected, found = raw.train(few_images(3000)), train(few_images(3000))

    for name in ("loss", "accuracy"):
        assert found["train"][name] == pytest.approx(expected["train"][name], rel=case.tolerance)
    assert found["valid"].keys() >= {"loss", "accuracy"}


def test_seeded_images_draw_by_their_index_and_the_generator_is_left_as_it_was():
    """Draws depend on an image's index and the epoch only, and the global generator's state is unchanged."""
    images = seeded.Seeded(few_images()["train"])
    torch.manual_seed(5)
    state = torch.get_rng_state()

    first, again = images.__getitems__([7, 3, 200]), images.__getitems__([200, 7])
    images.epoch = 2
    other = images.__getitems__(list(range(20)))
    images.epoch = 1

    assert torch.equal(first[0][0], again[1][0]) and torch.equal(first[2][0], again[0][0])
    expected = images.__getitems__(list(range(20)))
    assert not all(torch.equal(one[0], two[0]) for one, two in zip(other, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.cold
def test_a_candidate_prints_its_figures_and_imports_nothing_large_while_timed():
    """Fewer than 50 modules are imported while timed; otherwise the first step would import torch._dynamo, 800
    modules."""
    count = (
        "import sys; from benchmarks.cnn import raw, work; before = set(sys.modules); work.main(raw.train); "
        "print(len(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", count, "--num-train", "300", "--num-valid", "40"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)

    report, num_imported = done.stdout.splitlines()[-2:]
    assert json.loads(report).keys() == {"seconds", "same"}
    assert set(json.loads(report)["same"]) == {"train loss", "train accuracy", "valid loss", "valid accuracy"}
    assert int(num_imported) < 50


def test_every_peer_has_a_script_that_needs_nothing_of_ours():
    """The peers' environment has neither runnerkit's dependencies nor torchvision."""
    with_peers, without = (
        next(case for case in all_cases(peers) if case.key == "cnn") for peers in ("python-of-peers", None)
    )
    modules = [each.module for each in with_peers.candidates[len(without.candidates) :]]

    assert len(modules) == len(set(modules)) == 8
    for module in [*modules, "benchmarks.cnn.work", "benchmarks.cnn.raw"]:
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert not {each.split(".")[0] for each in imported} & {"runnerkit", "torchvision"}
        assert module == "benchmarks.cnn.work" or "benchmarks.cnn" in imported
