"""examples/imagenet: one script learns on every engine like a hand-written recipe, resumes, and runs under any
launcher."""

import importlib
import math
import re
import shlex

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl, read_metrics, utils
from runnerkit.torchvision_cpu import import_torchvision
from tests.examples.start import ROOT, TORCHRUN, start, whole_and_resumed
from tests.launchers.slurm import Slurm, why_not

FOLDER = ROOT / "examples" / "imagenet"
SMALL = ("--image-size", "16", "--warmup-epochs", "0")
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


@pytest.fixture
def example(monkeypatch):
    """Import examples/imagenet/main.py, which imports its neighbors."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("examples.imagenet.main")


def valid_metrics(logdir):
    """Return the last epoch's validation metrics, as logged."""
    table = read_metrics(logdir)
    table = table[(table.loader == "valid") & (table.epoch == table.epoch.max())]
    return dict(zip(table.metric, table.value, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        *("CPUEngine", "DistributedDataParallelEngine", "FullyShardedDataParallelEngine"),
        pytest.param("HorovodEngine", marks=pytest.mark.horovod),
    ],
)
def test_it_runs_on_one_process_and_on_several(example, tmp_path, capsys, engine):
    """One process learns (chance is 0.1 and 0.5), others take some steps; plain python starts several processes."""
    if engine == "HorovodEngine":
        pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")
    learns, num_processes = engine == "CPUEngine", 2 if getattr(dl, engine).is_ddp else 1
    work = ["--synthetic", "320"] if learns else ["--synthetic", "48", "--epochs", "1"]
    rate = ["--batch-size", str(16 // num_processes), "--lr", str(0.006 / num_processes)]

    runner = example.main([*SMALL, *work, *rate, "--engine", engine, "--logdir", str(tmp_path)])

    valid = runner.epoch_metrics["valid"]
    assert runner.engine.num_processes == num_processes
    assert not learns or (valid["accuracy"] > 0.5 and valid["accuracy05"] > 0.8)
    line = f"resnet18 on {engine}: top-1 {valid['accuracy']:.2%}, top-5 {valid['accuracy05']:.2%}"
    assert capsys.readouterr().out.count(line) == 1


class Evidence(dl.Callback):
    """A callback that records the initial weights, and each step's batch and learning rate."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Internal)
        self.initial, self.batches, self.rates = {}, [], []

    def on_stage_start(self, runner):
        state = runner.engine.unwrap(runner.model)[1].state_dict()
        self.initial = {name: tensor.clone() for name, tensor in state.items()}

    def on_batch_end(self, runner):
        if runner.is_train_loader:
            self.batches.append((runner.batch["features"], runner.batch["targets"]))
            self.rates.append(runner.optimizer.param_groups[0]["lr"])


def rate_by_hand(step, scheduler):
    """Compute the rate for 5 epochs of 2 steps: 2 epochs of warm-up to 0.02, then drops after epochs 3 and 4, or a
    cosine."""
    epoch = step // 2
    if epoch < 2:
        return 0.02 * step / 4
    return {"step": 0.02 / 10 ** (epoch - 2), "cosine": 0.01 * (1 + math.cos(math.pi * (epoch - 1) / 4))}[scheduler]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["step", "cosine"])
def test_every_step_is_that_of_the_recipe_by_hand(example, tmp_path, scheduler):
    """Plain PyTorch on the same batches matches to 1e-6: rates by formula, SGD, label smoothing, normalized floats."""
    evidence = Evidence()
    size = ["--engine", "CPUEngine", "--synthetic", "16", "--image-size", "16", "--batch-size", "8", "--epochs", "5"]
    rates = ["--lr", "0.02", "--warmup-epochs", "2", "--scheduler", scheduler, "--drops", "3", "4"]
    options = example.parse([*size, *rates, "--label-smoothing", "0.1", "--logdir", str(tmp_path)])

    runner = example.train(options, [evidence])

    expected_rates = [rate_by_hand(step, scheduler) for step in range(10)]
    model = import_torchvision().models.resnet18(num_classes=10)
    model.load_state_dict(evidence.initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4)
    for (images, targets), rate in zip(evidence.batches, expected_rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        logits = model((images / 255 - MEAN) / STD)
        nn.functional.cross_entropy(logits, targets, label_smoothing=0.1).backward()
        optimizer.step()
    assert evidence.rates == pytest.approx(expected_rates, rel=0, abs=1e-9)
    torch.testing.assert_close(runner.model[1].state_dict(), model.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_it_resumes_as_if_it_had_never_stopped(example, tmp_path):
    """The run fails within the second epoch and resumes bit for bit."""
    few = [*SMALL, "--synthetic", "32", "--batch-size", "8", "--engine", "CPUEngine"]

    whole, parts = whole_and_resumed(example.main, example.ImageNetRunner, few, tmp_path, epoch=2, batch=3)

    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert parts.experiment_metrics == whole.experiment_metrics


def accuracies_by_hand(checkpoint, images, *, num_classes):
    """Compute a checkpoint's top-1 and top-5 accuracy on pairs of normalized image and class with plain PyTorch."""
    state = utils.load_checkpoint(checkpoint)["model_state_dict"]
    model = import_torchvision().models.resnet18(num_classes=num_classes).eval()
    model.load_state_dict({name.removeprefix("1."): tensor for name, tensor in state.items()})
    [(features, targets)] = DataLoader(images, batch_size=len(images))
    with torch.no_grad():
        best = model(features).topk(5).indices
    hits = (best == targets[:, None]).double()
    return hits[:, 0].mean().item(), hits.sum(dim=1).mean().item()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_score_as_one_does(example, tmp_path):
    """Under torchrun, 21 images are each scored once, as plain PyTorch does; the rate is doubled; one line is
    printed."""
    few = ("--synthetic", "86", "--batch-size", "8", "--lr", "0.002", "--epochs", "1", "--logdir", "logdir")

    output = start(f"{TORCHRUN} examples/imagenet/main.py", tmp_path, *SMALL, *few, CUDA_VISIBLE_DEVICES="")

    made_up = example.image_loaders(None, num_made_up=86, num_classes=10, image_size=16, batch_size=1, num_workers=0)
    dataset = made_up["valid"].dataset
    images = [((image / 255 - MEAN) / STD, target) for image, target in map(dataset.__getitem__, range(len(dataset)))]
    last = tmp_path / "logdir" / "checkpoints" / "last.pth"
    table = read_metrics(tmp_path / "logdir")
    assert len(images) == 21
    valid = valid_metrics(tmp_path / "logdir")
    by_hand = accuracies_by_hand(last, images, num_classes=10)
    assert (valid["accuracy"], valid["accuracy05"]) == pytest.approx(by_hand, abs=1e-9)
    assert table[table.metric == "lr"].value.tolist() == pytest.approx([0.004])
    assert output.count("resnet18 on DistributedDataParallelEngine: top-1") == 1


def write_folders(root):
    """Write six classes of noisy colors as PNG files: eight training and three validation images each."""
    image = import_torchvision().transforms.ToPILImage()
    for folder, count in (("train", 8), ("val", 3)):
        for number in range(6):
            color = torch.tensor([number >> place & 1 for place in range(3)])[:, None, None]
            (root / folder / f"color{number}").mkdir(parents=True)
            for index in range(count):
                pixels = 128 * color + torch.randint(128, (3, 20, 26))
                image(pixels.byte()).save(root / folder / f"color{number}" / f"{index}.png")


@pytest.mark.slow
def test_it_reads_folders_of_images(example, tmp_path):
    """Images are cropped and flipped by a worker, normalized on the device, and scored as with torchvision's
    transforms."""
    write_folders(tmp_path / "data")
    few = ["--model", "resnet18", "--batch-size", "8", "--lr", "0.003", "--epochs", "5", "--workers", "1"]
    places = ["--data", str(tmp_path / "data"), "--logdir", str(tmp_path / "logdir")]

    runner = example.main([*SMALL, *few, *places, "--engine", "CPUEngine"])

    vision = import_torchvision()
    steps = [vision.transforms.Resize(18), vision.transforms.CenterCrop(16), vision.transforms.ToTensor()]
    usual = vision.transforms.Compose([*steps, vision.transforms.Normalize(MEAN.flatten(), STD.flatten())])
    images = vision.datasets.ImageFolder(tmp_path / "data" / "val", usual)
    by_hand = accuracies_by_hand(tmp_path / "logdir" / "checkpoints" / "last.pth", images, num_classes=6)
    valid = runner.epoch_metrics["valid"]
    assert (valid["accuracy"], valid["accuracy05"]) == pytest.approx(by_hand, abs=1e-9)
    assert valid["accuracy"] > 0.5  # chance is 1/6


def test_other_classes_to_evaluate_than_to_train_are_refused(example, tmp_path):
    """The error lists folders that are in one part only."""
    write_folders(tmp_path)
    (tmp_path / "val" / "color5").rename(tmp_path / "val" / "colour5")

    with pytest.raises(ValueError, match=r"\['color5', 'colour5'\] are only in one of them"):
        example.image_loaders(tmp_path, num_made_up=0, num_classes=0, image_size=16, batch_size=1, num_workers=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup-epochs", "3", "--drops", "2", "4"], "must not be within the warm-up of 3 epochs"),
        (["--classes", "3"], "must be at least 5 for top-5 accuracy"),
    ],
)
def test_what_no_training_could_follow_is_refused_at_once(example, capsys, arguments, message):
    """argparse exits with code 2 and prints one line."""
    with pytest.raises(SystemExit, match="2"):
        example.parse(arguments)

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "given", "engine"),
    [
        ({}, [], "CPUEngine"),
        ({}, ["--device", "cpu"], "DeviceEngine"),
        ({}, ["--engine", "HorovodAMPEngine"], "HorovodAMPEngine"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["--device", "cpu"], "DistributedDataParallelEngine"),
        ({"HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_SIZE": "2"}, [], "HorovodEngine"),
    ],
)
def test_the_engine_is_that_of_the_option_or_of_the_launcher(example, monkeypatch, variables, given, engine):
    """Horovod sends gradients in 16 bits."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    made = example.make_engine(example.parse(given))

    assert type(made) is getattr(dl, engine)
    assert getattr(made, "compression", "fp16") == "fp16"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_job_script_runs_on_two_nodes(tmp_path):
    """Slurm on this machine runs one task on each of two nodes without GPUs, and these train together."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = (FOLDER / "slurm.sh").read_text()
    (tmp_path / "job.sh").write_text(script.replace("#SBATCH --gpus-per-node=8\n", ""))
    few = ["--synthetic", "32", "--batch-size", "8", "--lr", "0.002", "--epochs", "1", "--logdir", "logdir"]

    with Slurm() as slurm:
        command, variables = "sbatch --wait --ntasks-per-node=1 --cpus-per-task=1 job.sh", slurm.environment
        start(command, tmp_path, *SMALL, *few, **{"CUDA_VISIBLE_DEVICES": "", **variables})

    table = read_metrics(tmp_path / "logdir")
    assert table[table.metric == "lr"].value.tolist() == pytest.approx([0.004])  # two processes


def test_timing_has_a_row_for_each_engine_and_leaves_the_rest_of_the_page(monkeypatch, tmp_path):
    """The hand-written loop comes first, and an engine with missing requirements has its reason."""
    monkeypatch.syspath_prepend(str(FOLDER))
    timing = importlib.import_module("examples.imagenet.timing")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{timing.BEGIN}{timing.END}\n\nafter\n")

    few = [*SMALL, "--synthetic", "16", "--batch-size", "8", "--device", "cpu"]
    text = timing.main(few, ["DeviceEngine", "APEXEngine"], page)

    assert page.read_text() == f"before\n\n{timing.BEGIN}{text}{timing.END}\n\nafter\n"
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| engine", "| raw PyTorch", "| DeviceEngine", "| APEXEngine"]
    assert float(rows[1][2]) > 0 and float(rows[2][2]) > 0 and "not run: APEXEngine needs" in text


def test_the_readme_has_a_command_for_every_engine(example):
    """Each command parses, so every option exists."""
    page = (FOLDER / "README.md").read_text()

    commands = [shlex.split(each) for each in re.findall(r"^\|.*main\.py([^`]*)`", page, re.MULTILINE)]

    assert {example.parse(each).engine for each in commands} == {None, *example.ENGINES}
