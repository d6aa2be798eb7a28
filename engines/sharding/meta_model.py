"""A sharded model that no process ever holds as a whole: its parameters are made, loaded and saved by shards."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from runnerkit.engines.sharding.sharded_model import ShardedModel
from runnerkit.models.shards import chunk, local
from runnerkit.seeding.initialization import dropped_values, initial_values, is_left_to_checkpoint
from runnerkit.support.torch_internals import num_changes
from runnerkit.types import StateDict


class MetaModel(ShardedModel):
    """The user's module with parameters on the meta device, and a sharded copy of it, which is trained.

    Args:
        seed: for the initial values of the parameters; see :func:`.seeding.initialization.initial_values`.
        weights: sharded ones to begin with instead; None computes the initial values.
        options: as in :class:`ShardedModel`.

    Attributes:
        has_values: False until :meth:`load` if the weights were left in the checkpoints of an earlier run, or dropped
            when the model was made.
    """

    def __init__(self, own: nn.Module, *, seed: int, weights: StateDict | None, **options: Any) -> None:
        self._seed, self._weights, self._dropped = seed, weights, dropped_values(own)
        self.has_values = weights is not None or not (is_left_to_checkpoint(own) or self._dropped)
        super().__init__(own, **options)
        self._initial = self._num_changes() if weights is None and self.has_values else None

    @property
    def is_initial(self) -> bool:
        """True if the weights are the initial values: none were loaded, and nothing has changed them."""
        return self._initial == self._num_changes()

    def _num_changes(self) -> int:
        return sum(num_changes(shard) for _, shard in self.pairs)

    def _fill(self) -> None:
        self._allocate()
        if self._weights is not None:
            self.load(self._weights)
            self._weights = None
        elif self.has_values:
            shards = dict(self.module.named_parameters())
            with torch.no_grad():
                for name, value in initial_values(self.own, seed=self._seed):
                    local(shards[name]).copy_(chunk(value, like=shards[name]))

    def load(self, state: StateDict) -> None:
        """Load weights, sharded or whole, under the names of the user's module; of whole ones only a part is read.

        Raises:
            RuntimeError: names or shapes differ.
        """
        super().reshard()
        self._load_shards(state)
        self.has_values = True

    def unshard(self) -> None:
        """Give all ranks rank zero's buffers. Weights stay sharded: every rank must run as many batches."""
        self.reshard()
        for buffer in self.module.buffers():
            self._broadcast(buffer)

    def reshard(self) -> None:
        if not self.has_values and not is_left_to_checkpoint(self.own):
            raise ValueError(
                f"values that {', '.join(self._dropped[:3])}{', ...' if len(self._dropped) > 3 else ''} got when the "
                "model was made were dropped, as its parameters are made without values: load weights by a "
                "CheckpointCallback's resume_model=folder, not by from_pretrained, or fill them in reset_parameters()"
            )
        if not self.has_values:
            raise ValueError(
                "the weights of this model were left in the checkpoints of its last run: pass resume= or a "
                "CheckpointCallback's resume_model=, or make a new model"
            )
        super().reshard()

    def gather(self) -> NoReturn:
        raise RuntimeError(
            'with init="meta" no process holds the whole model, which something asks for here; after the run, '
            "runner.load(logdir) loads it from a checkpoint"
        )
