"""Reads of a Hugging Face stream by two processes with two data workers each, and the samples that they train on.

python -m benchmarks.stream_readers --peers .venv-peers/bin/python

The stream has 96 samples in 16 shards. Each framework trains on it for an epoch, as its documentation shows: with a
DataLoader of the data set, once as it is and once split by split_dataset_by_node. Bytes read are proportional to the
reads. The time of a step is that of rank zero in a stream of 9,600 samples, in which each step and each read writes a
line to a file. `--write` writes the table to RESULTS.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

NUM_SHARDS, BATCH_SIZE, NUM_WORKERS = 16, 4, 2
SHARD_SIZE, LARGE_SHARD_SIZE = 6, 600
NUM_SAMPLES = NUM_SHARDS * SHARD_SIZE
NUM_UNTIMED = 20  # first steps


def samples(shards: list[int], folder: str, size: int) -> Iterator[dict[str, int]]:
    """Yield the samples of some shards, and append their numbers to a file."""
    for shard in shards:
        for number in range(shard * size, (shard + 1) * size):
            with open(Path(folder, "reads"), "a") as file:
                file.write(f"{number}\n")
            yield {"n": number}


def shard_size() -> int:
    """Return the number of samples in each shard."""
    return int(os.environ.get("BENCHMARK_SHARD_SIZE", SHARD_SIZE))


def stream_in(folder: Path, *, is_split: bool) -> Any:
    """Return the stream; if wanted, this process's part of it."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    arguments = {"shards": list(range(NUM_SHARDS)), "folder": str(folder), "size": shard_size()}
    stream = datasets.IterableDataset.from_generator(samples, gen_kwargs=arguments)
    if not is_split:
        return stream
    return split_dataset_by_node(stream, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def loader_of(folder: Path, *, is_split: bool = False) -> Any:
    """Return the DataLoader that all frameworks get."""
    from torch.utils.data import DataLoader

    return DataLoader(stream_in(folder, is_split=is_split), batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)


def note(folder: Path, batch: Any) -> None:
    """Append the numbers of a batch, and the time, to files of this process."""
    with open(folder / f"seen {os.environ['RANK']}", "a") as file:
        file.writelines(f"{number}\n" for number in batch["n"].tolist())
    with open(folder / f"times {os.environ['RANK']}", "a") as file:
        file.write(f"{time.perf_counter()}\n")


def lightning(folder: Path, *, is_split: bool) -> None:
    """Train with Lightning's Trainer."""
    import lightning as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            note(folder, batch)
            return self.layer(batch["n"].float().unsqueeze(1)).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader_of(folder, is_split=is_split))


def accelerate(folder: Path, *, is_split: bool, dispatch: bool | None = None) -> None:
    """Iterate over the loader that Accelerate prepares."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    for batch in accelerator.prepare(loader_of(folder, is_split=is_split)):
        note(folder, batch)


def runnerkit(folder: Path, *, lanes: tuple[int, int] | None) -> None:
    """Train with runnerkit: to the end of lanes, or for the steps of an epoch."""
    import torch

    from runnerkit import dl

    class Noting(dl.Runner):
        def handle_batch(self, batch: Any) -> None:
            note(folder, batch)
            self.batch_metrics["loss"] = self.model(batch["n"].float().unsqueeze(1)).mean()

    model, loader = torch.nn.Linear(1, 1), loader_of(folder)
    loader.dataset.lanes = lanes
    Noting().train(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), loaders={"train": loader},
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")], ddp=True, loggers={"console": None},
        epoch_steps=None if lanes else NUM_SHARDS * shard_size() // (2 * BATCH_SIZE),
    )  # fmt: skip


# What it is called in the table: what it runs, and whether it belongs to the environment of the other frameworks.
CONTENDERS = {
    "runnerkit, lanes": (partial(runnerkit, lanes=(8, 2)), False),
    "runnerkit, epoch_steps": (partial(runnerkit, lanes=None), False),
    "Lightning, the data set": (partial(lightning, is_split=False), True),
    "Lightning, split_dataset_by_node": (partial(lightning, is_split=True), True),
    "Accelerate, the data set": (partial(accelerate, is_split=False), True),
    "Accelerate, dispatch_batches=False": (partial(accelerate, is_split=False, dispatch=False), True),
    "Accelerate, split_dataset_by_node": (partial(accelerate, is_split=True), True),
}


def run(name: str, python: str, folder: str, size: int) -> bool:
    """Run a contender in two processes; return whether it succeeded."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(
        [*command, "--contender", name, "--folder", folder], capture_output=True, text=True, timeout=300,
        env=os.environ | {"BENCHMARK_SHARD_SIZE": str(size)},
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    return done.returncode == 0


def row(name: str, python: str) -> str:
    """Run a contender on the small stream and on the large one, and return its line of the table."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as large:
        if not run(name, python, folder, SHARD_SIZE) or not run(name, python, large, LARGE_SHARD_SIZE):
            return f"| {name} | failed | | | | |"
        reads = Path(folder, "reads").read_text().split()
        seen = [each.read_text().split() for each in sorted(Path(folder).glob("seen *"))]
        times = [float(each) for each in Path(large, "times 0").read_text().split()[NUM_UNTIMED:]]
    found = Counter(number for numbers in seen for number in numbers)
    batches = " and ".join(str(len(each)) for each in seen)
    step_ms = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
    return (
        f"| {name} | {len(reads) / NUM_SAMPLES:.2f} | {NUM_SAMPLES - len(found)} | {found.total() - len(found)} | "
        f"{batches} | {step_ms:.2f} |"
    )


def main() -> None:
    """Run every contender, or in a process of theirs, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with the other frameworks and datasets")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if options.contender:
        CONTENDERS[options.contender][0](options.folder)
        return
    lines = [
        "| 2 processes x 2 workers | reads of each sample | missed | repeated | samples on the ranks | ms a step |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for name, (_, is_peer) in CONTENDERS.items():
        python = options.peers if is_peer else sys.executable
        if python:
            lines.append(row(name, python))
            print(lines[-1], flush=True)
    if options.write:
        from benchmarks.results import versions, write_section

        names = ("torch", "lightning", "accelerate", "datasets")
        text = "\n".join([*(f"{versions(options.peers, names)}.\n" for _ in range(bool(options.peers))), *lines])
        title = "Reads of a stream with shards by two processes"
        write_section("stream readers", text, command="python -m benchmarks.stream_readers --write", title=title)


if __name__ == "__main__":
    main()
