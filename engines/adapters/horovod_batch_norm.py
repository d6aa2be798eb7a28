"""Replacement of a model's batch norms by Horovod's SyncBatchNorm during training."""

from __future__ import annotations

from torch import nn

from runnerkit.engines.communicators.horovod import import_horovod
from runnerkit.support.torch_internals import BatchNorm, children


class SynchronizedBatchNorms:
    """Batch norms swapped for Horovod's SyncBatchNorm, which runs on GPUs only, and restored afterwards.

    Parameters stay the same objects in both directions, as the optimizer holds them.

    >>> SynchronizedBatchNorms().put_in(nn.ReLU())
    ReLU()
    """

    def __init__(self) -> None:
        self._swapped: dict[int, tuple[nn.Module, nn.Module]] = {}  # {id of the user's: (the user's, Horovod's)}
        self._places: list[tuple[nn.Module, str, nn.Module]] = []  # (parent, name in it, the user's)

    def put_in(self, module: nn.Module) -> nn.Module:
        """Swap the batch norms in `module` and return it; if it is a batch norm itself, return Horovod's."""
        if isinstance(module, BatchNorm):
            return self._synchronized(module)
        for name, child in children(module):
            if child is not None and (swapped := self.put_in(child)) is not child:
                setattr(module, name, swapped)
                self._places.append((module, name, child))
        return module

    def _synchronized(self, own: BatchNorm) -> nn.Module:
        if id(own) not in self._swapped:  # a batch norm that two modules share stays shared
            hvd = import_horovod()
            synchronized: nn.Module = hvd.SyncBatchNorm(
                own.num_features, own.eps, own.momentum, own.affine, own.track_running_stats
            )
            _hand_over(own, synchronized)
            self._swapped[id(own)] = own, synchronized
        return self._swapped[id(own)][1]

    def own(self, module: nn.Module) -> nn.Module:
        """Return the user's batch norm that `module` replaces, or else `module`."""
        return next((own for own, synchronized in self._swapped.values() if synchronized is module), module)

    def put_back(self) -> None:
        """Restore the original batch norms of all models, with the trained weights and statistics."""
        for own, synchronized in self._swapped.values():
            _hand_over(synchronized, own)
        for parent, name, own in self._places:
            setattr(parent, name, own)
        self._swapped, self._places = {}, []


def _hand_over(source: nn.Module, target: nn.Module) -> None:
    """Share the tensors and the training mode of `source` with `target`."""
    for name, parameter in source.named_parameters(recurse=False):
        setattr(target, name, parameter)
    for name, buffer in source.named_buffers(recurse=False):  # Horovod counts batches in a new tensor each time.
        setattr(target, name, buffer)
    target.train(source.training)
