"""examples/cifar10: models match their papers, learn when narrowed, resume, and run alike under any launcher."""

import importlib
import json
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runnerkit import dl, read_metrics, utils
from runnerkit.torchvision_cpu import import_torchvision
from tests.cifar10_layout import write_cifar10
from tests.engines.launch_commands import needs_horovod, needs_mpi
from tests.examples.start import ROOT, TORCHRUN, start, whole_and_resumed
from tests.fashion_mnist_layout import write_fashion_mnist

FOLDER = ROOT / "examples" / "cifar10"
HOROVODRUN = "horovodrun --gloo -np 2 -H localhost:2 python"
HOROVODRUN_MPI = "horovodrun --mpi -np 2 python"  # equals `horovodrun -np 2 python` if Horovod was built with MPI
SMALL = ("--width", "0.125", "--batch-size", "20", "--lr", "0.05")

# The parameters of the models of github.com/kuangliu/pytorch-cifar, the additional ones of ours, and the reference's
# multiplications for one image, in millions, as thop counts them (from a fork's README).
REFERENCE = {
    "VGG16": (14_728_266, 0, 314.03),
    "ResNet18": (11_173_962, 0, 556.65),
    "ResNet50": (23_520_842, 0, 1304.71),
    "ResNet101": (42_512_970, 0, None),
    "ResNeXt29_32x4d": (4_774_218, 3 * 64 * (3 * 3 - 1), 779.63),  # the stem is 3 x 3, as in the paper, and not 1 x 1
    "ResNeXt29_2x64d": (9_128_778, 3 * 64 * (3 * 3 - 1), 1416.64),
    "SimpleDLA": (15_142_970, 0, None),
    "DLA": (16_291_386, 0, None),
    "DenseNet121": (6_956_298, 2 * 64, 898.06),  # a norm after the stem, as in the paper
    "PreActResNet18": (11_171_146, 2 * 512, 556.52),  # a norm before the pooling, as in the paper
    "DPN92": (34_236_634, 0, 2053.89),
}
# ImageNet models' parameters, as torchvision publishes them (RegNetX-200MF: timm's regnetx_002), and the number of
# channels of the classifier, which has a weight for each channel and a bias per class.
IMAGENET = {
    "RegNetX_200MF": (2_684_792, 368),
    "RegNetY_400MF": ("regnet_y_400mf", 440),
    "MobileNetV2": ("mobilenet_v2", 1280),
}
NAMES = [*REFERENCE, *IMAGENET]


@pytest.fixture
def example(monkeypatch):
    """Import examples/cifar10/main.py, which imports its neighbors."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("examples.cifar10.main")


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def expected_parameters(name):
    if name in REFERENCE:
        return sum(REFERENCE[name][:2])
    published, channels = IMAGENET[name]
    if isinstance(published, str):
        published = import_torchvision().models.get_model_weights(published).DEFAULT.meta["num_params"]
    return published - (1000 - 10) * (channels + 1)


def logged(logdir):
    """Return all metrics, without the name of the logdir."""
    return read_metrics(logdir).drop(columns="run")


def launch(launcher, folder, logdir):
    """Train for one epoch on the CIFAR-10 files in `folder`; return the output."""
    options = [*SMALL, "--epochs", 1, "--logdir", logdir]
    return start(f"{launcher} examples/cifar10/main.py", folder, *options, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("name", NAMES)
def test_each_model_has_its_parameters_and_uses_them_all(example, name):
    """Counts match the reference or the publisher; logits are ten finite numbers per image; all parameters get
    gradients. One stride too many costs a quarter of the multiplications; thop also counts norms, up to 1.1 %."""
    model = example.MODELS[name]()

    with FlopCounterMode(display=False) as counter:
        logits = model(torch.randn(2, 3, 32, 32))
    nn.functional.cross_entropy(logits, torch.tensor([3, 7])).backward()

    assert num_parameters(model) == expected_parameters(name)
    assert logits.shape == (2, 10) and logits.isfinite().all()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if expected := REFERENCE.get(name, [None])[-1]:
        # Two images; a multiplication and an addition count as two.
        assert 0.985 < counter.get_total_flops() / 4e6 / expected <= 1.003


@pytest.mark.parametrize("name", NAMES)
def test_a_quarter_of_the_channels_has_a_sixteenth_of_the_parameters(example, name):
    """The ratio is not exact, as groups and multiples of 8 round some channels up. Narrow models take any number of
    classes."""
    narrow = example.MODELS[name](num_classes=4, width=0.25)

    assert narrow(torch.randn(2, 3, 32, 32)).shape == (2, 4)
    assert 1 / 17 < num_parameters(narrow) / expected_parameters(name) < 1 / 8


@pytest.mark.parametrize("name", ["ResNet18", "ResNet50"])
def test_a_resnet_computes_what_torchvisions_does(example, name):
    """Given the same weights, outputs equal torchvision's with its stem replaced."""
    theirs = import_torchvision().models.get_model(name.lower(), num_classes=10).eval()
    theirs.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    ours = example.MODELS[name]().eval()
    weights = zip(ours.state_dict(), theirs.state_dict().values(), strict=True)  # both are ordered from stem to head
    ours.load_state_dict(dict(weights))
    images = torch.randn(2, 3, 32, 32)

    torch.testing.assert_close(ours(images), theirs(images))


def test_a_group_without_channels_is_refused(example):
    """The error gives the smallest valid width."""
    with pytest.raises(ValueError, match=re.escape("width=0.05 leaves no channel in a group; it must be >= 0.25")):
        example.MODELS["ResNeXt29_32x4d"](width=0.05)


def test_a_misspelt_model_is_refused_with_those_that_there_are(example, capsys):
    """The error is raised before any file is read or downloaded."""
    with pytest.raises(SystemExit):
        example.main(["--model", "ResNet19"])

    assert "ResNet19" in (message := capsys.readouterr().err) and all(name in message for name in NAMES)


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ({}, "CPUEngine"),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "DistributedDataParallelEngine"),
        ({"HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_SIZE": "2"}, "HorovodEngine"),
    ],
)
def test_the_launcher_chooses_the_engine(example, monkeypatch, variables, engine):
    """Plain python uses one process, and only Horovod's launcher needs Horovod."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert type(example.default_engine()) is getattr(dl, engine)


@pytest.mark.slow
def test_a_narrow_one_learns_and_resumes_as_if_it_had_never_stopped(example, monkeypatch, tmp_path, capsys):
    """The run fails within the third epoch and resumes bit for bit, crops and flips included; chance is 0.1."""
    monkeypatch.chdir(tmp_path)
    write_cifar10("data", num_train=300, num_test=200)
    arguments = [*SMALL, "--engine", "CPUEngine", "--epochs", "4"]

    whole, parts = whole_and_resumed(example.main, example.ZooRunner, arguments, tmp_path, epoch=3, batch=7)

    assert whole.epoch_metrics["valid"]["accuracy"] > 0.2  # 60 steps lead to another model on another CPU
    assert f"valid accuracy {whole.epoch_metrics['valid']['accuracy']:.2%}" in capsys.readouterr().out
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert logged(tmp_path / "parts").equals(logged(tmp_path / "whole"))


@pytest.mark.slow
def test_fashion_mnist_by_one_cycle_learns(example, monkeypatch, tmp_path, capsys):
    """The README's command learns on small data (chance is 0.1), and the cycle ends with the last batch's low rate."""
    monkeypatch.chdir(tmp_path)
    write_fashion_mnist("data", num_train=500, num_test=200)
    arguments = ["--dataset", "fashion-mnist", "--schedule", "one-cycle", "--engine", "CPUEngine", "--epochs", "4"]

    runner = example.main([*SMALL, *arguments])

    assert runner.epoch_metrics["valid"]["accuracy"] > 0.3
    assert runner.epoch_metrics["train"]["lr"] < 0.05 / 1000
    assert "logs in logs/fashion-mnist/ResNet18" in capsys.readouterr().out


def test_grey_images_get_a_border_and_three_channels(example):
    """Images become 32 x 32, as the models need them, with unchanged pixels."""
    grey = torch.randint(1, 256, (5, 28, 28), dtype=torch.uint8)

    images = sys.modules["images"].for_cifar_stem(grey)

    assert images.shape == (5, 3, 32, 32)
    assert all(torch.equal(images[:, channel, 2:-2, 2:-2], grey) for channel in range(3))
    assert (images != 0).sum() == 3 * grey.numel()


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """Train for one epoch with two processes under torchrun; return the folder and the output."""
    folder = tmp_path_factory.mktemp("torchrun")
    write_cifar10(folder / "data", num_train=81, num_test=41)
    return folder, launch(TORCHRUN, folder, "logdir")


@pytest.mark.timeout(400)
def test_two_processes_log_once_what_all_images_say(torchrun, example):
    """Accuracy covers 41 images, each scored once by plain PyTorch, and the learning rate is doubled."""
    folder, output = torchrun
    table = logged(folder / "logdir")
    values = {(row.loader, row.metric): row.value for row in table.itertuples()}

    model = example.with_normalization(example.MODELS["ResNet18"](width=0.125)).eval()
    model.load_state_dict(utils.load_checkpoint(folder / "logdir" / "checkpoints" / "last.pth")["model_state_dict"])
    [(images, targets)] = example.image_loaders(folder / "data", batch_size=41)["valid"]
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == targets).double().mean().item()

    assert values["valid", "accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert values["train", "lr"] == pytest.approx(2 * 0.05)
    assert not table.duplicated(["loader", "epoch", "metric"]).any()
    assert output.count("valid accuracy") == output.count("train | loss") == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.horovod
@pytest.mark.parametrize("launcher", [HOROVODRUN, HOROVODRUN_MPI], ids=["gloo", "mpi"])
def test_horovodrun_gives_the_same_run_by_horovod(torchrun, launcher):
    """Two processes with Horovod give DDP's numbers, up to the order of float sums."""
    needs_mpi() if launcher == HOROVODRUN_MPI else needs_horovod()
    folder, _ = torchrun
    logdir = folder / f"by_{launcher.split()[1]}"

    output = launch(launcher, folder, logdir)

    ours, theirs = logged(logdir), logged(folder / "logdir")
    assert json.loads((logdir / "environment.json").read_text())["engine"]["name"] == "HorovodEngine"
    assert output.count("valid accuracy") == 1
    assert ours.drop(columns="value").equals(theirs.drop(columns="value"))
    assert ours["value"].tolist() == pytest.approx(theirs["value"].tolist(), rel=1e-4)


def test_the_readme_lists_every_model_with_its_parameters(example):
    """Each has an accuracy with its source, and an expected count above."""
    rows = re.findall(r"^\| (\w+) \| ([\d,]+) \| (\d\d\.\d\d) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)

    expected = {name: expected_parameters(name) for name in NAMES}
    assert {name: int(count.replace(",", "")) for name, count, _ in rows} == expected
    assert set(NAMES) == set(example.MODELS)
