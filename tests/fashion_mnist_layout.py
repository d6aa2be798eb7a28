"""Small learnable images in the file layout of Fashion-MNIST, for tests without network access."""

import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write_fashion_mnist(root: str | Path, num_train: int = 500, num_test: int = 100, seed: int = 0) -> Path:
    """Write ``root/FashionMNIST/raw`` and return it: 24 x 24 digits in 28 x 28 images; the splits share none."""
    digits, targets = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(targets))
    cut = len(order) * 4 // 5
    folder = Path(root, "FashionMNIST", "raw")
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"train": np.resize(order[:cut], num_train), "t10k": np.resize(order[cut:], num_test)}.items():
        large = digits[part].reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2) * 255 / 16
        images = np.pad(np.rint(large).astype(np.uint8), [(0, 0), (2, 2), (2, 2)])
        header = struct.pack(">4i", 0x803, *images.shape)
        Path(folder, f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">2i", 0x801, len(part))
        Path(folder, f"{name}-labels-idx1-ubyte").write_bytes(header + targets[part].astype(np.uint8).tobytes())
    return folder
