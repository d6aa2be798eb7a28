"""MovieLens 100K: ratings of movies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["MovieLens"]


class MovieLens(Dataset[Tensor]):
    """The ratings of 1,682 movies by each of 943 users, read from a local copy: GroupLens allows no redistribution.

    Its parts are ``ua.base``, and ``ua.test`` with ten ratings of each user. Source and license:
    https://grouplens.org/datasets/movielens/100k/

    Args:
        root: the folder with ``ml-100k``, as unpacked, or with ``MovieLens/raw/ml-100k``.
        train: read ``ua.base``, else ``ua.test``.
        download: ignored: without a copy, the error says where to get one.
        min_rating: smaller ratings become 0.
    Attributes:
        data: (users, movies) float32, 0 without a rating.
    Raises:
        FileNotFoundError: the copy is missing.

    >>> MovieLens("no-such-folder")
    Traceback (most recent call last):
    FileNotFoundError: no MovieLens in 'no-such-folder': unpack ml-100k.zip of grouplens.org there
    """

    def __init__(self, root: str | Path, train: bool = True, download: bool = False, min_rating: float = 0.0) -> None:
        folders = [Path(root).expanduser() / each for each in ("ml-100k", "MovieLens/raw/ml-100k")]
        folder = next((each for each in folders if (each / "ua.base").is_file()), None)
        if folder is None:
            raise FileNotFoundError(f"no MovieLens in {str(root)!r}: unpack ml-100k.zip of grouplens.org there")
        tables = [np.loadtxt(folder / name, dtype=np.int64, ndmin=2) for name in ("ua.base", "ua.test")]
        num_users, num_movies = np.concatenate(tables)[:, :2].max(axis=0)  # both parts have the same shape
        users, movies, ratings = torch.from_numpy((tables[0] if train else tables[1])[:, :3]).unbind(1)
        kept = ratings >= min_rating
        self.data = torch.zeros(int(num_users), int(num_movies))
        self.data[users[kept] - 1, movies[kept] - 1] = ratings[kept].float()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        """Return the ratings of one user, (movies,)."""
        return self.data[index]
