"""Small learnable images in the file layout of CIFAR-10, for tests without network access."""

import pickle
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_cifar10(root: str | Path, num_train: int = 500, num_test: int = 100, seed: int = 0) -> Path:
    """Write ``root/cifar-10-batches-py`` and return it: tinted 32 x 32 digits; the two splits share none."""
    rng = np.random.default_rng(seed)
    digits, targets = load_digits(return_X_y=True)
    order = rng.permutation(len(targets))
    cut = len(order) * 4 // 5
    folder = Path(root, "cifar-10-batches-py")
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    parts = np.array_split(np.resize(order[:cut], num_train), len(names))  # repeats digits if num_train exceeds them
    for name, part in zip([*names, "test_batch"], [*parts, np.resize(order[cut:], num_test)], strict=True):
        batch = {
            "batch_label": name,
            "labels": targets[part].tolist(),
            "data": _tint(digits[part], rng),
            "filenames": [f"digit_{index:04d}.png" for index in part],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {"num_cases_per_batch": num_train // len(names), "label_names": _CLASSES, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return folder


def _tint(digits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Convert (N, 64) in [0, 16] to (N, 3072) uint8: red, green and blue planes of 32 x 32, each dimmed at random."""
    grey = digits.reshape(-1, 1, 8, 8).repeat(4, axis=2).repeat(4, axis=3) / 16
    dimmed = grey * rng.uniform(0.5, 1.0, size=(len(digits), 3, 1, 1))
    return np.rint(255 * dimmed).astype(np.uint8).reshape(len(digits), -1)
