"""Passes that leave no trace: modes, generators and a runner's attributes are restored."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from runnerkit.models.evaluation_weights import EvaluationWeights
from runnerkit.models.modes import Modes
from runnerkit.seeding.generators import Generators, keep_rng

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

T = TypeVar("T")


@contextmanager
def restoring_rng_and_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore every generator, and the modes of `modules`, after the body or its error."""
    modes = Modes(modules)
    try:
        with keep_rng():
            yield
    finally:
        modes.restore()


@contextmanager
def restoring_attributes(runner: IRunner) -> Iterator[None]:
    """Give the runner back all attributes that it had, user-defined ones too, after the body or its error.

    For a second run of the same runner, to which bound methods and callbacks of the user refer.
    """
    kept = dict(vars(runner))
    try:
        yield
    finally:
        vars(runner).clear()
        vars(runner).update(kept)


def modules_in(values: Iterable[Any]) -> Iterator[nn.Module]:
    """Yield the modules among `values`, and in lists and dicts among them."""
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, dict):
            yield from (each for each in value.values() if isinstance(each, nn.Module))
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, nn.Module))


def isolated(
    values: Generator[T, None, None], modules: Iterable[nn.Module], weights: EvaluationWeights
) -> Generator[T, None, None]:
    """Yield `values`, whose computation has generators and modes of its own: those of the caller do not change.

    Args:
        values: closed with the result.
        modules: those whose modes it may change.
        weights: exchanged for each value, as the caller may train in between.
    """
    modes, own = Modes(modules), None
    with closing(values):
        while True:
            callers = Generators()
            if own is not None:
                modes.swap()
                own.restore()
            try:
                with weights.evaluating():
                    value = next(values)
            except StopIteration:
                return
            finally:
                own = Generators()
                callers.restore()
                modes.swap()
            yield value
