"""Errors of common evaluation recipes and of runnerkit, for one model and one data set.

usage: python -m benchmarks.exactness        writes the tables into docs/exactness.md; takes two minutes

The recipes are arithmetic on the model's outputs, so they need no processes. runnerkit's results come from real runs
in this process, and in 2, 3 and 4 processes with DistributedDataParallel.
"""

import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from runnerkit import dl
from runnerkit.contrib import Digits
from runnerkit.metrics import LoaderMeans

PAGE = Path(__file__).parents[1] / "docs" / "exactness.md"
RECIPES_BEGIN, SUMS_BEGIN = "<!-- recipes: written by benchmarks/exactness.py -->\n", "<!-- sums: likewise -->\n"
END = "<!-- end -->\n"

NUM_SAMPLES, BATCH_SIZE = 353, 32  # a prime, so that shards differ in size; 11 batches and one sample
WORLD_SIZES = (1, 2, 3, 4)
DIGIT = 8  # AUC and F1 are for "is it an 8?", true for 1 image in 10
Indices = np.ndarray


@dataclass(frozen=True)
class Scored:
    """Predictions for a data set: (N, 10) float64 probabilities and (N,) targets."""

    probabilities: np.ndarray
    targets: np.ndarray

    def metric(self, name: str, rows: Indices | None = None) -> float:
        """Compute a metric of the rows, or of all rows, with scikit-learn; NaN if undefined."""
        picked = slice(None) if rows is None else rows
        probabilities, targets = self.probabilities[picked], self.targets[picked]
        is_digit, predicted = targets == DIGIT, probabilities.argmax(axis=1)
        if name == "accuracy":
            return float(accuracy_score(targets, predicted))
        if name == "loss":
            return float(log_loss(targets, probabilities, labels=np.arange(10)))
        if is_digit.all() or not is_digit.any():
            return float("nan")
        if name == "AUC":
            return float(roc_auc_score(is_digit, probabilities[:, DIGIT]))
        return float(f1_score(is_digit, predicted == DIGIT))


class Images(Dataset[dict[str, torch.Tensor]]):
    """Digits to evaluate, in float64; a sample is a dict that includes the target of "is it an 8?"."""

    def __init__(self) -> None:
        digits = Digits(train=False)
        self.features = digits.images[:NUM_SAMPLES].flatten(1).double() / 255
        self.targets = digits.targets[:NUM_SAMPLES]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        target = self.targets[index]
        return {"features": self.features[index], "targets": target, "is_digit": (target == DIGIT).long()}


@cache
def trained_model() -> nn.Module:
    """Return a small network, trained briefly to 85 % accuracy, so that errors in its metrics are visible."""
    digits = Digits()
    features, targets = digits.images.flatten(1).double() / 255, digits.targets
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
    return model


@cache
def scored() -> Scored:
    """Predict the images with the trained model."""
    images, model = Images(), trained_model()
    with torch.no_grad():
        probabilities = model(images.features).softmax(dim=1)
    return Scored(probabilities.numpy(), images.targets.numpy())


# ------------------------------------------------------------------------------------------------------- the recipes


def batches(indices: Indices) -> list[Indices]:
    """Split into batches as a loader does; the last batch is smaller."""
    return [indices[start : start + BATCH_SIZE] for start in range(0, len(indices), BATCH_SIZE)]


def strided(world_size: int) -> list[Indices]:
    """Shard the samples without padding: rank r gets every world_size-th sample."""
    return [np.arange(rank, NUM_SAMPLES, world_size) for rank in range(world_size)]


def padded(metric: str, world_size: int) -> float:
    """Compute the metric over all samples of all ranks, as sharded by torch's DistributedSampler."""
    data = Images()
    shares = [DistributedSampler(data, world_size, rank, shuffle=False) for rank in range(world_size)]
    return scored().metric(metric, np.concatenate([list(share) for share in shares]))


def mean_of_batches(metric: str, world_size: int) -> float:
    """Average over all batches of all ranks, without those whose value is undefined."""
    return float(
        np.nanmean([scored().metric(metric, rows) for share in strided(world_size) for rows in batches(share)])
    )


def mean_of_ranks(metric: str, world_size: int) -> float:
    """Average the ranks' exact values, with whole batches distributed round-robin."""
    dealt = [batches(np.arange(NUM_SAMPLES))[rank::world_size] for rank in range(world_size)]
    return float(np.nanmean([scored().metric(metric, np.concatenate(share)) for share in dealt]))


@dataclass(frozen=True)
class Recipe:
    """A common way to evaluate.

    Attributes:
        compute: called with the metric and the world size.
    """

    name: str
    metric: str
    compute: Callable[[str, int], float]


RECIPES = (
    Recipe("padding", "accuracy", padded),
    Recipe("padding", "loss", padded),
    Recipe("mean of batch means", "accuracy", mean_of_batches),
    Recipe("mean of batch means", "loss", mean_of_batches),
    Recipe("mean over ranks", "accuracy", mean_of_ranks),
    Recipe("mean over ranks", "loss", mean_of_ranks),
    Recipe("AUC over batches", "AUC", mean_of_batches),
    Recipe("AUC over ranks", "AUC", mean_of_ranks),
    Recipe("F1 over batches", "F1", mean_of_batches),
    Recipe("F1 over ranks", "F1", mean_of_ranks),
)


# -------------------------------------------------------------------------------------------------------------- ours


class Evaluate(dl.SupervisedRunner):
    """A runner that adds the inputs of the one-digit metrics to the batch."""

    def handle_batch(self, batch: dict[str, torch.Tensor]) -> None:
        super().handle_batch(batch)
        self.batch["score"] = self.batch["logits"].softmax(dim=1)[:, DIGIT]
        self.batch["is_called"] = (self.batch["logits"].argmax(dim=1) == DIGIT).long()

    def get_criterion(self, stage: str) -> nn.Module:
        return nn.CrossEntropyLoss()


def ours(world_size: int) -> dict[str, float]:
    """Evaluate with runnerkit in `world_size` real processes."""
    engine = dl.CPUEngine() if world_size == 1 else dl.DistributedDataParallelEngine(world_size, device="cpu")
    found = Evaluate(trained_model()).evaluate_loader(
        DataLoader(Images(), batch_size=BATCH_SIZE),
        callbacks={
            "loss": dl.CriterionCallback("logits", "targets", metric_key="loss"),
            "accuracy": dl.AccuracyCallback("logits", "targets", topk=(1,)),
            "AUC": dl.AUCCallback("score", "is_digit"),
            "F1": dl.PrecisionRecallF1SupportCallback(
                "is_called", "is_digit", num_classes=2, compute_per_class_metrics=True
            ),
        },
        engine=engine,
    )
    names = {"accuracy": "accuracy", "loss": "loss", "AUC": "auc", "F1": "f1/class_01"}
    return {metric: found[name] for metric, name in names.items()}


def error_of_ours(world_sizes: Sequence[int]) -> dict[str, float]:
    """Return the largest difference from scikit-learn for each metric."""
    runs = [ours(world_size) for world_size in world_sizes]
    return {name: max(abs(run[name] - scored().metric(name)) for run in runs) for name in runs[0]}


# ------------------------------------------------------------------------------------------------------ running sums


def float32_mean(num_batches: int) -> float:
    """Sum losses one by one in a float32, as `total += loss * len(batch)` does."""
    return float(np.cumsum(_losses(num_batches), dtype=np.float32)[-1]) / num_batches


def our_mean(num_batches: int) -> float:
    """Sum losses one by one in a float64; see :func:`mean_of_loader_means`."""
    return float(np.cumsum(_losses(num_batches), dtype=np.float64)[-1]) / num_batches


def mean_of_loader_means(num_batches: int) -> float:
    """Sum losses with runnerkit's own LoaderMeans: the result of :func:`our_mean`, but slower."""
    means = LoaderMeans()
    for loss in torch.from_numpy(_losses(num_batches)):
        means.update({"loss": loss}, 1)
    total, count = means.totals()["loss"]
    return total / count


def exact_mean(num_batches: int) -> float:
    """Sum losses without any rounding (Shewchuk 1997)."""
    return math.fsum(_losses(num_batches)) / num_batches


@cache
def _losses(num_batches: int) -> np.ndarray:
    """Draw float32 losses of one-image batches from the model's losses, with replacement."""
    of_images = -np.log(scored().probabilities[np.arange(NUM_SAMPLES), scored().targets])
    return np.random.default_rng(0).choice(of_images, size=num_batches).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ tables


def recipe_rows(errors: dict[str, float]) -> list[list[str]]:
    """Format a row for each recipe; `errors` are runnerkit's."""
    rows = []
    for recipe in RECIPES:
        exact = scored().metric(recipe.metric)
        values = [recipe.compute(recipe.metric, world_size) for world_size in WORLD_SIZES]
        worst = max((value - exact for value in values), key=abs)
        cells = [f"{value:.4f}" for value in values]
        rows.append(
            [recipe.name, recipe.metric, f"{exact:.4f}", *cells, f"{worst:+.4f}", _small(errors[recipe.metric])]
        )
    return rows


def sum_rows(lengths: Sequence[int]) -> list[list[str]]:
    """Format a row for each length."""
    rows = []
    for length in lengths:
        exact = exact_mean(length)
        wrong, right = float32_mean(length) - exact, our_mean(length) - exact
        rows.append([f"{length:,}", f"{exact:.6f}", f"{wrong:+.1e}", _small(right)])
    return rows


def _small(error: float) -> str:
    return "under 1e-10" if abs(error) < 1e-10 else f"{abs(error):.0e}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(begin: str) -> list[list[str]]:
    """Read the cells of a table of the page, without its header."""
    text = PAGE.read_text(encoding="utf-8").split(begin)[1].split(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def main() -> None:
    """Measure and write the page's tables."""
    processes = [f"{world_size} process{'es' * (world_size > 1)}" for world_size in WORLD_SIZES]
    header = ["recipe", "metric", "exact", *processes, "largest error", "runnerkit's"]
    recipes = table(header, recipe_rows(error_of_ours(WORLD_SIZES)))
    sums = table(
        ["batches", "exact mean", "error of a float32 sum", "runnerkit's"], sum_rows((100_000, 1_000_000, 10_000_000))
    )
    versions = (
        f"Measured on {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, CPU.\n"
    )
    text = PAGE.read_text(encoding="utf-8")
    for begin, content in ((RECIPES_BEGIN, f"{recipes}\n{versions}"), (SUMS_BEGIN, sums)):
        before, rest = text.split(begin)
        text = before + begin + content + END + rest.split(END, maxsplit=1)[1]
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{recipes}\n{sums}")


if __name__ == "__main__":
    main()
