"""Draw the figures of the gallery: the curves of each small example, or what its model makes.

    python scripts/example_figures.py [NAME ...]

A name is that of a file in examples/minimal; without one, all that have a figure are run, in a few minutes of a CPU.
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from runnerkit import dl
from runnerkit.contrib import Digits

ROOT = Path(__file__).parents[1]
EXAMPLES, FIGURES = ROOT / "examples" / "minimal", ROOT / "docs" / "images" / "examples"
SIZE, DPI, NUM_COLORS = (4.8, 3.2), 120, 64
STYLES = {"train": "--"}  # loaders that are evaluated have whole lines
METRICS = {  # others draw the loss
    "contrastive": ["cmc01", "cmc10"],
    "kfold": ["accuracy"],
    "knowledge_distillation": ["accuracy"],
    "metric_learning": ["cmc01", "cmc05"],
    "mixup": ["accuracy"],
    "multi_head": ["digit_accuracy", "parity_accuracy"],
    "multi_model": ["accuracy"],
    "multi_optimizer": ["accuracy"],
    "multiclass": ["accuracy", "accuracy03"],
    "multilabel": ["accuracy", "auc"],
    "optuna_search": ["accuracy"],
    "recommender": ["hitrate10", "mrr10", "ndcg10"],
    "stages": ["accuracy"],
}
WITHOUT = {"ema_swa", "gpt", "reinforcement"}  # those with one epoch, or runs that differ only after the last
RUNS = {  # names of several runs of an example
    "knowledge_distillation": ["teacher", "student"],
    "mixup": ["with mixup", "without"],
}

Curves = dict[int, dict[str, dict[str, float]]]  # epoch: loader: metric: value


@contextmanager
def recorded() -> Iterator[list[tuple[dl.IRunner, Curves]]]:
    """Collect each runner that trains, with its metrics after the run."""
    run, runs = dl.IRunner.run, []

    def recording(runner: dl.IRunner) -> dl.IRunner:
        run(runner)
        if any(key.startswith("train") for key in runner.epoch_metrics):
            runs.append((runner, runner.experiment_metrics))
        return runner

    with mock.patch.object(dl.IRunner, "run", recording):
        yield runs


def draw_curves(axes: Axes, name: str, runs: list[tuple[dl.IRunner, Curves]]) -> None:
    """Draw the metrics of an example by epoch."""
    names = RUNS.get(name, [""] * len(runs))
    metrics = METRICS.get(name, ["loss"])
    for number, ((_, curves), run_name) in enumerate(zip(runs, names, strict=True)):
        loaders = list(next(iter(curves.values())))
        drawn = loaders if len(runs) == 1 else [key for key in loaders if key not in STYLES] or loaders
        for index, metric in enumerate(metrics):
            for loader in drawn:
                points = [
                    (epoch, each[loader][metric]) for epoch, each in curves.items() if metric in each.get(loader, {})
                ]
                label = " ".join(part for part in (run_name, loader, metric if len(metrics) > 1 else "") if part)
                style = {"color": f"C{(number + index) % 10}", "linestyle": STYLES.get(loader, "-")}
                if points:
                    axes.plot(*zip(*points, strict=True), label=label if len(runs) < 5 else None, **style)
    axes.set(xlabel="epoch", ylabel=metrics[0] if len(metrics) == 1 else "")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(runs) < 5:
        axes.legend(frameon=False, fontsize="small")


def draw_points(axes: Axes, runner: dl.IRunner, modes: Tensor) -> None:
    """Draw points of the GAN's generator and the modes of its data."""
    points = runner.model["generator"].cpu()(torch.randn(2000, 8))
    axes.scatter(*points.T, s=3, alpha=0.4, label="generated")
    axes.scatter(*modes.T, marker="x", color="C1", label="modes")
    axes.set_aspect("equal")
    axes.legend(frameon=False, fontsize="small", loc="center")


def draw_images(axes: Axes, rows: list[Tensor]) -> None:
    """Draw rows of images of 8 x 8 or 24 x 24 pixels between zero and one."""
    size = round(rows[0].shape[1] ** 0.5)
    tiles = [torch.nn.functional.pad(row.reshape(-1, size, size), (1, 1, 1, 1), value=1.0) for row in rows]
    picture = torch.cat([torch.cat([*row], dim=1) for row in tiles], dim=0)
    axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
    axes.set_axis_off()


def draw_restored(axes: Axes, model: torch.nn.Module) -> None:
    """Draw unseen digits above what the autoencoder restores from eight numbers."""
    pixels = Digits(train=False).images[:24].flatten(1) / 255
    restored = model.cpu().eval()(pixels).clamp(0, 1)
    draw_images(axes, [each for part in (0, 8, 16) for each in (pixels[part : part + 8], restored[part : part + 8])])


def draw_decoded(axes: Axes, model: Any) -> None:
    """Draw digits that the variational autoencoder decodes from random codes."""
    digits = model.cpu().eval().decoder(torch.randn(48, 8)).sigmoid()
    draw_images(axes, list(digits.split(8)))


def draw_masks(axes: Axes, model: torch.nn.Module, images: Tensor) -> None:
    """Draw images above the masks of discs and squares that the network predicts."""
    masks = model.cpu().eval()(images).sigmoid()
    draw_images(axes, [images[:, 0].flatten(1).clamp(0, 1), *masks.transpose(0, 1).flatten(2)])


def draw(name: str) -> Figure:
    """Run an example and draw its figure."""
    module = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    with recorded() as runs:
        module["main"]()
    torch.manual_seed(1)
    special: dict[str, Callable[[dl.IRunner], None]] = {
        "autoencoder": lambda runner: draw_restored(axes, runner.model),
        "gan": lambda runner: draw_points(axes, runner, module["MODES"]),
        "segmentation": lambda runner: draw_masks(axes, runner.model, module["shapes"](8)["features"]),
        "vae": lambda runner: draw_decoded(axes, runner.model),
    }
    if name in special:
        with torch.no_grad():
            special[name](runs[-1][0])
    else:
        draw_curves(axes, name, runs)
    return figure


def write(name: str) -> None:
    """Write docs/images/examples/NAME.png."""
    path = FIGURES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "lr_finder":
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](plot=str(path))
    else:
        draw(name).savefig(path)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(NUM_COLORS)
    small.save(path, optimize=True)


if __name__ == "__main__":
    for each in sys.argv[1:] or sorted({path.stem for path in EXAMPLES.glob("*.py")} - WITHOUT):
        write(each)
