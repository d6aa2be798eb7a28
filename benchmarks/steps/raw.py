"""Case a by hand: what a careful user writes, with no copy from the device in a step."""

import csv
from pathlib import Path

import torch
from torch import nn

from benchmarks.steps import work


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    model = work.make_model()
    optimizer = work.make_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    model.train()
    if variant == "nothing":
        for features, targets in batches:
            optimizer.zero_grad()
            criterion(model(features), targets).backward()
            optimizer.step()
        return work.Trained(model)

    loss_sum, hits, num_samples = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64), 0
    bar = log = None
    if variant == "bar":
        from tqdm import tqdm

        bar = tqdm(batches)
    elif variant == "log":
        log = StepLog(folder)
    for step, (features, targets) in enumerate(bar if bar is not None else batches, start=1):
        optimizer.zero_grad()
        logits = model(features)
        loss = criterion(logits, targets)
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * len(targets)
        num_samples += len(targets)
        if variant == "loss":
            continue
        right = work.num_right(logits, targets)
        hits += right
        if step % work.LOG_EVERY == 0:
            if log is not None:
                log.add(step, loss.item(), right.item() / len(targets))
            if bar is not None:
                bar.set_postfix_str(f"loss={loss.item():.4g}", refresh=False)
    if log is not None:
        log.close()
    accuracy = None if variant == "loss" else hits.item() / num_samples
    return work.Trained(model, loss_sum.item() / num_samples, accuracy)


class StepLog:
    """Numbers of single steps to CSV and TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = (folder / "steps.csv").open("w", newline="")
        self._rows = csv.writer(self._file)
        self._events = SummaryWriter(folder)

    def add(self, step: int, loss: float, accuracy: float) -> None:
        self._rows.writerow([step, loss, accuracy])
        self._events.add_scalar("loss", loss, step)
        self._events.add_scalar("accuracy", accuracy, step)

    def close(self) -> None:
        self._file.close()
        self._events.close()


if __name__ == "__main__":
    work.main(train)
