"""A driver that runs metric callbacks on the batches of several ranks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.callbacks.exact_metrics import CASES
from tests.callbacks.stand_ins import make_runner
from tests.ranks import Ranks


def run_ranks(
    shares: Sequence[Iterable[Any]],
    cases: Sequence[str],
    *,
    batch_metrics: Callable[[Any], dict[str, Any]] = lambda batch: {},
) -> tuple[list[Any], list[int], int]:
    """Run each rank's batches, then end the loader on all ranks.

    Args:
        shares: the batches of each rank.
        cases: keys of CASES whose callbacks run.
        batch_metrics: computes further metrics to log for a batch.
    Returns:
        the runners, the number of samples over all ranks that each counted, and the number of collectives.
    """
    ranks = Ranks(len(shares))
    runners = []
    for engine, batches in zip(ranks.engines, shares, strict=True):
        callbacks = {name: CASES[name][0]() for name in cases}
        runner = make_runner(engine=engine, callbacks=callbacks, loggers={})
        runners.append(runner)
        for callback in callbacks.values():
            callback.on_loader_start(runner)
        for batch in batches:
            runner.batch, runner.batch_metrics = batch, batch_metrics(batch)
            runner.batch_size = len(batch["classes"])
            for callback in callbacks.values():
                callback.on_batch_end(runner)
            runner.loader_pass.means.update(runner.batch_metrics, runner.batch_size)
    counts = ranks.call(*(lambda r=runner: r.loader_pass.metrics.reduce(r) for runner in runners))
    return runners, counts, ranks.num_collectives
