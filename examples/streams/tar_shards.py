"""Train on images in tar archives, which the whole job reads once: ShardedFiles, or a WebDataset pipeline.

python examples/streams/tar_shards.py
python examples/streams/tar_shards.py --webdataset --ddp --workers 2
torchrun --standalone --nproc-per-node=2 examples/streams/tar_shards.py

The archives are written on the first run, from scikit-learn's digits.
"""

import argparse
import io
import tarfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from runnerkit import dl, utils
from runnerkit.contrib import Digits

SHARD_SIZE = 100


def write_shards(folder: Path) -> None:
    """Write the digits in archives of 100: per sample the image as .npy and its class as .cls."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid"):
        digits = Digits(train=split == "train")
        for begin in range(0, len(digits.images), SHARD_SIZE):
            path = folder / f"{split}-{begin // SHARD_SIZE:03d}.tar"
            beside = path.with_suffix(".tmp")
            with tarfile.open(beside, "w") as archive:
                for index in range(begin, min(begin + SHARD_SIZE, len(digits.images))):
                    image = io.BytesIO()
                    np.save(image, digits.images[index].numpy())
                    for suffix, content in (
                        ("npy", image.getvalue()),
                        ("cls", str(int(digits.targets[index])).encode()),
                    ):
                        member = tarfile.TarInfo(f"{index:05d}.{suffix}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
            beside.rename(path)


def read_shard(path: Path, start: int = 0) -> Iterator[dict[str, bytes]]:
    """Yield the samples of an archive; of those before `start`, only headers are read."""
    with tarfile.open(path) as archive:
        members = islice(archive, 2 * start, None)
        for pair in zip(members, members, strict=True):
            yield {member.name.partition(".")[2]: archive.extractfile(member).read() for member in pair}  # type: ignore[union-attr]


def decode(sample: dict[str, bytes]) -> tuple[Tensor, int]:
    """Return the image, (1, 8, 8) float32 in [0, 1] with noise, and its class."""
    image = torch.from_numpy(np.load(io.BytesIO(sample["npy"]))).float().unsqueeze(0) / 255
    return image + 0.02 * torch.randn(image.shape), int(sample["cls"])


def count(path: Path) -> int:
    """Return the number of samples of an archive."""
    with tarfile.open(path) as archive:
        return sum(1 for _ in archive) // 2


def webdataset(paths: list[Path]) -> Any:
    """Return a pipeline that shuffles within each archive."""
    import webdataset as wds

    pipeline = wds.WebDataset([str(path) for path in paths], shardshuffle=100)  # pyright: ignore[reportAttributeAccessIssue]
    return pipeline.shuffle(50).map(decode)


def main(arguments: Sequence[str] | None = None) -> dl.SupervisedRunner:
    """Train, print the accuracy, and return the runner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/digits-tar"))
    parser.add_argument("--webdataset", action="store_true", help="read with a WebDataset pipeline")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0, help="data workers per process")
    parser.add_argument("--logdir", type=Path, default=None)
    parser.add_argument("--ddp", action="store_true", help="train in several processes")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)

    if not options.data.exists():
        write_shards(options.data)
    train_paths, valid_paths = (sorted(options.data.glob(f"{split}-*.tar")) for split in ("train", "valid"))
    valid: Any = dl.ShardedFiles(valid_paths, read_shard, sizes=count, transform=decode, lanes=(2, 2))
    if options.webdataset:
        train, epoch_steps = webdataset(train_paths), sum(map(count, train_paths)) // 64
    else:
        train = dl.ShardedFiles(train_paths, read_shard, sizes=count, transform=decode, shuffle=50, lanes=(4, 2))
        epoch_steps = None
    utils.set_global_seed(42)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    batch_size = 32 if options.ddp else 64  # two processes see the batches of one
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loaders={
            "train": DataLoader(train, batch_size, num_workers=options.workers, drop_last=not options.webdataset),
            "valid": DataLoader(valid, batch_size=batch_size),
        },
        callbacks=[dl.AccuracyCallback()],
        num_epochs=options.epochs,
        epoch_steps=epoch_steps,
        logdir=options.logdir,
        ddp=options.ddp,
    )
    if runner.engine.is_main_process:
        print(f"accuracy {runner.epoch_metrics['valid']['accuracy']:.4f}")
    return runner


if __name__ == "__main__":
    main()
