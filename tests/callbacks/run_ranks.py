"""Metric callbacks over the batches of several ranks, to the loader's end."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runnerkit.loader_metrics import reduce_metrics
from runnerkit.metrics import LoaderMeans
from tests.callbacks.exact_metrics import CASES
from tests.callbacks.stand_ins import make_runner
from tests.ranks import Ranks


def run_ranks(
    shares: Sequence[Iterable[Any]],
    cases: Sequence[str],
    *,
    batch_metrics: Callable[[Any], dict[str, Any]] = lambda batch: {},
) -> tuple[list[Any], list[int], int]:
    """Run each rank's batches, and end the loader on all.

    Args:
        shares: the batches of each rank.
        cases: keys of CASES, whose callbacks take part.
        batch_metrics: what else is logged of a batch.
    Returns:
        the runners, the samples that each counted over all ranks, and the number of collectives.
    """
    ranks = Ranks(len(shares))
    runners = []
    for engine, batches in zip(ranks.engines, shares, strict=True):
        callbacks = {name: CASES[name][0]() for name in cases}
        runner = make_runner(engine=engine, callbacks=callbacks, loggers={}, _means=LoaderMeans())
        runners.append(runner)
        for callback in callbacks.values():
            callback.on_loader_start(runner)
        for batch in batches:
            runner.batch, runner.batch_metrics = batch, batch_metrics(batch)
            runner.batch_size = len(batch["classes"])
            for callback in callbacks.values():
                callback.on_batch_end(runner)
            runner._means.update(runner.batch_metrics, runner.batch_size)
    counts = ranks.call(*(lambda r=runner: reduce_metrics(r) for runner in runners))
    return runners, counts, ranks.num_collectives
