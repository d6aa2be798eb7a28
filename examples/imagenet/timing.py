"""Time passes over synthetic images on every engine and in raw PyTorch, and write the table in README.md.

python examples/imagenet/timing.py
python examples/imagenet/timing.py --synthetic 51200 --model resnet50 --image-size 224 --batch-size 256 --workers 8
Takes the options of main.py. Engines that this machine cannot run are listed with the reason.
"""

import argparse
import datetime
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from runnerkit import dl, utils

from main import ENGINES, ImageNetRunner, parse, train

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- timing: written by timing.py -->\n", "<!-- end of timing -->"


def clock(device: torch.device) -> float:
    """Return wall-clock time for a GPU, or this process's CPU time, which other load on the machine does not affect."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


class Stopwatch(dl.Callback):
    """A callback that records the seconds of each training pass, summed over all processes."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.seconds: list[float] = []
        self.num_processes = 1
        self._began_at = 0.0

    def on_loader_start(self, runner: dl.IRunner) -> None:
        self._began_at = clock(runner.engine.device)

    def on_loader_end(self, runner: dl.IRunner) -> None:
        if runner.is_train_loader:
            spent = clock(runner.engine.device) - self._began_at
            self.seconds.append(sum(runner.engine.gather_object(spent)))
            self.num_processes = runner.engine.num_processes


def by_hand(options: argparse.Namespace) -> list[float]:
    """Train with a hand-written loop on one device; return the seconds of each pass."""
    device = torch.device(options.device) if options.device else utils.get_device()
    runner, seconds = ImageNetRunner(options), []
    loader = runner.get_loaders("train")["train"]
    model = runner.get_model("train").to(device)
    optimizer = runner.get_optimizer("train", model)
    for _ in range(options.epochs):
        began_at = clock(device)
        for images, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to(device)), targets.to(device)).backward()
            optimizer.step()
        seconds.append(clock(device) - began_at)
    return seconds


def count_images(options: argparse.Namespace) -> int:
    """Count the images in a pass."""
    return len(ImageNetRunner(options).get_loaders("train")["train"].dataset)


def measure(name: str, options: argparse.Namespace) -> tuple[list[float], int] | str:
    """Return the seconds of each pass and the number of processes, or the reason why `name` cannot run here."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        here = argparse.Namespace(**{**vars(options), "engine": name, "logdir": Path(folder, "logdir")})
        try:
            train(here, [watch])
        except (ImportError, RuntimeError, ValueError) as error:
            return re.split(r"[.;] ", str(error))[0]
    return watch.seconds, watch.num_processes


def table(options: argparse.Namespace, names: Sequence[str], *, num_images: int) -> str:
    """Measure the engines in `names` and format a row for each."""
    outcomes: dict[str, tuple[list[float], int] | str] = {"raw PyTorch": (by_hand(options), 1)}
    outcomes |= {name: measure(name, options) for name in names}
    unit = "core" if utils.get_device().type == "cpu" or options.device == "cpu" else "GPU"
    lines = [f"| engine | processes | images per second and {unit} | range | ratio to raw PyTorch |"]
    lines.append("|---|---|---|---|---|")
    first = None
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            lines.append(f"| {name} | | not run: {outcome} | | |")
            continue
        rates = [num_images / seconds for seconds in outcome[0][1:]]  # the first pass warms up
        middle = statistics.median(rates)
        first = first or middle
        lines.append(
            f"| {name} | {outcome[1]} | {middle:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} | {middle / first:.2f} |"
        )
    return "\n".join(lines)


def conditions(options: argparse.Namespace, *, num_images: int) -> str:
    """Describe the date, machine and size of a measurement."""
    hardware = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[:1] or [platform.machine()]
    if torch.cuda.is_available():
        hardware = [torch.cuda.get_device_name()]
    size = f"{options.image_size} x {options.image_size}"
    return (
        f"{datetime.date.today()}, {hardware[0]}, threads: {torch.get_num_threads()}, torch "
        f"{torch.__version__}: {options.model}, {num_images} images of {size}, batches of {options.batch_size} "
        f"per process, median of {options.epochs - 1} passes."
    )


def main(
    arguments: Sequence[str] | None = None, names: Sequence[str] = tuple(sorted(ENGINES)), page: Path = README
) -> str:
    """Measure and write the table into `page`."""
    options = parse(arguments)
    options.epochs = max(options.epochs, 4)
    num_images = count_images(options)
    text = f"{conditions(options, num_images=num_images)}\n\n{table(options, names, num_images=num_images)}\n"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    print(text)
    return text


if __name__ == "__main__":
    main()
