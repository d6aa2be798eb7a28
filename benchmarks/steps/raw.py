"""Case a in raw PyTorch: a careful user's loop, without copies from the device in a step that logs nothing."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps import work

Log = Callable[[int, dict[str, float]], None]


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    model = work.make_model()
    log, close = step_log(folder) if variant == "log" else (None, None)
    trained = loop(batches, variant, model=model, optimizer=work.make_optimizer(model), log=log)
    if close is not None:
        close()
    return trained


def loop(
    batches: work.Batches,
    variant: str,
    *,
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], object] = Tensor.backward,
    log: Log | None = None,
) -> work.Trained:
    """Train; also used by frameworks that leave the loop to the user."""
    criterion = nn.CrossEntropyLoss()
    model.train()
    if variant == "nothing":
        for features, targets in batches:
            optimizer.zero_grad()
            backward(criterion(model(features), targets))
            optimizer.step()
        return work.Trained(model)

    loss_sum, hits, num_samples = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64), 0
    bar = progress_bar(batches) if variant == "bar" else None
    for step, (features, targets) in enumerate(batches if bar is None else bar, start=1):
        optimizer.zero_grad()
        logits = model(features)
        loss = criterion(logits, targets)
        backward(loss)
        optimizer.step()
        loss_sum += loss.detach() * len(targets)
        num_samples += len(targets)
        if variant == "loss":
            continue
        right = work.num_right(logits, targets)
        hits += right
        if step % work.LOG_EVERY == 0:
            if log is not None:
                log(step, {"loss": loss.item(), "accuracy": right.item() / len(targets)})
            if bar is not None:
                bar.set_postfix_str(f"loss={loss.item():.4g}", refresh=False)
    accuracy = None if variant == "loss" else hits.item() / num_samples
    return work.Trained(model, loss_sum.item() / num_samples, accuracy)


def progress_bar(batches: work.Batches) -> Any:
    from tqdm import tqdm  # imported only if it is used

    return tqdm(batches)


def step_log(folder: Path) -> tuple[Log, Callable[[], None]]:
    """Return functions that write a step's metrics to CSV and TensorBoard, and that close the files."""
    from torch.utils.tensorboard import SummaryWriter

    file = (folder / "steps.csv").open("w", newline="")
    rows, events = csv.writer(file), SummaryWriter(folder)

    def log(step: int, scalars: dict[str, float]) -> None:
        rows.writerow([step, *scalars.values()])
        for name, value in scalars.items():
            events.add_scalar(name, value, step)

    def close() -> None:
        file.close()
        events.close()

    return log, close


if __name__ == "__main__":
    work.main(train)
