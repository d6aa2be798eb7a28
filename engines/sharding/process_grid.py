"""The grid of processes that a sharded model is trained on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessGrid:
    """Sizes of the grid; the processes that are left form its dimension of shards.

    Attributes:
        replicas: number of groups that each hold the full model.
        tensor_parallel: number of processes that divide the weights of a module.

    >>> ProcessGrid(2).sizes
    {'replicas': 2, 'shards': -1}
    """

    replicas: int = 1
    tensor_parallel: int = 1

    def check(self, num_processes: int) -> None:
        """Raise unless the processes form such a grid.

        Raises:
            ValueError: a size does not divide their number.
        """
        for name, size in (("replicas", self.replicas), ("tensor_parallel", self.tensor_parallel)):
            if size < 1 or num_processes % size:
                raise ValueError(
                    f"{name} must divide the number of processes, got {size} for {num_processes}; "
                    "pass 1 to shard over all of them"
                )
        if num_processes % (self.replicas * self.tensor_parallel):
            raise ValueError(
                f"replicas={self.replicas} times tensor_parallel={self.tensor_parallel} must divide the number of "
                f"processes, {num_processes}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the device mesh by dimension; -1 is what is left."""
        sizes = {"replicas": self.replicas, "shards": -1, "tensor": self.tensor_parallel}
        return {name: size for name, size in sizes.items() if size != 1}
