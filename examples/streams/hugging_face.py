"""Train on a streaming Hugging Face data set, which the whole job reads once.

python examples/streams/hugging_face.py
python examples/streams/hugging_face.py --ddp --workers 2
torchrun --standalone --nproc-per-node=2 examples/streams/hugging_face.py --ddp

The parquet files are written on the first run, from scikit-learn's digits: 64 pixels, and the class.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from runnerkit import dl, utils
from runnerkit.contrib import Digits

FILE_SIZE = 100


def write_files(folder: Path) -> None:
    """Write the digits in parquet files of 100 samples."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid"):
        digits = Digits(train=split == "train")
        pixels, classes = digits.images.flatten(1).float() / 255, digits.targets
        for begin in range(0, len(classes), FILE_SIZE):
            rows = {
                "pixels": pixels[begin : begin + FILE_SIZE].tolist(),
                "label": classes[begin : begin + FILE_SIZE].tolist(),
            }
            parquet.write_table(pa.table(rows), folder / f"{split}-{begin // FILE_SIZE:03d}.parquet")


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with noise; a sample's noise is a function of its place in the epoch."""
    pixels = torch.tensor(sample["pixels"])
    return {"pixels": pixels + 0.02 * torch.randn(pixels.shape), "label": sample["label"]}


def collate(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return pixels, (N, 64) float32, and classes, (N,) int64."""
    pixels = torch.stack([torch.as_tensor(sample["pixels"]) for sample in samples])
    return pixels, torch.tensor([sample["label"] for sample in samples])


def main(arguments: Sequence[str] | None = None) -> dl.SupervisedRunner:
    """Train, print the accuracy, and return the runner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/digits-parquet"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--epoch-steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0, help="data workers per process")
    parser.add_argument("--logdir", type=Path, default=None)
    parser.add_argument("--ddp", action="store_true", help="train in several processes")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # these files are local
    import datasets

    if not options.data.exists():
        write_files(options.data)
    files = {split: sorted(map(str, options.data.glob(f"{split}-*.parquet"))) for split in ("train", "valid")}
    cache = str(options.data / "cache")
    streams: Any = datasets.load_dataset("parquet", data_files=files, streaming=True, cache_dir=cache)
    train, valid = streams["train"].shuffle(seed=0, buffer_size=50).map(augmented), streams["valid"]
    utils.set_global_seed(42)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    batch_size = 32 if options.ddp else 64  # two processes see the batches of one
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loaders={
            "train": DataLoader(train, batch_size=batch_size, num_workers=options.workers, collate_fn=collate),
            "valid": DataLoader(valid, batch_size=batch_size, collate_fn=collate),
        },
        callbacks=[dl.AccuracyCallback()],
        num_epochs=options.epochs,
        epoch_steps=options.epoch_steps,
        logdir=options.logdir,
        ddp=options.ddp,
    )
    if runner.engine.is_main_process:
        print(f"accuracy {runner.epoch_metrics['valid']['accuracy']:.4f}")
    return runner


if __name__ == "__main__":
    main()
