"""Verification that processes agree: their samples, weights and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.callbacks.debug.parts import rank_metrics, rank_samples, rank_weights
from runnerkit.callbacks.debug.parts.rank_samples import SeenSamples
from runnerkit.callbacks.debug.parts.recorded_loader import (
    Passes,
    is_stream,
    record_loader,
    replay,
    split_batches_unequally,
    stop_recording,
)
from runnerkit.engine import IEngine
from runnerkit.passes.recomputation import evaluate_on_one_rank
from runnerkit.precision import FP32
from runnerkit.sampling.sharding import share_of
from runnerkit.sampling.streams.heads import fingerprint_of
from runnerkit.types import Metrics

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["VerifyRanksCallback"]

_ROUNDING = 1e-5  # of float32: a matrix product of another size sums in another order


class VerifyRanksCallback(Callback):
    """Raise an error if the processes of a job are inconsistent; print the findings on the console.

    After each pass over a loader: no sample was repeated or left out. After training and before evaluation: weights are
    the same on all ranks, bit for bit; before evaluation buffers too. After evaluation: metrics equal those that a
    single process computes on the same batches. After an epoch: metrics are the same on all ranks.

    If something cannot be verified, a finding gives the reason. All ranks go through the evaluation loaders three
    times, so use it for short runs, as `train(check=True)` does.

    Attributes:
        findings: the printed texts.

    >>> VerifyRanksCallback().findings
    []
    """

    shapes_training = True

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.External + 1)  # after those of the user's order
        self.findings: list[str] = []
        self._passes: dict[str, _Pass] = {}
        self._is_within_epoch = False  # the batch evaluated before training, to find the metrics, does not count

    def on_stage_start(self, runner: IRunner) -> None:
        self._passes = {}

    def on_epoch_start(self, runner: IRunner) -> None:
        self._is_within_epoch = True

    def on_loader_start(self, runner: IRunner) -> None:
        if not self._is_within_epoch:
            return
        self._passes[runner.loader_key] = _Pass(runner)
        if not runner.is_train_loader:
            self._check_weights(runner, f"before loader {runner.loader_key!r}")

    def on_batch_start(self, runner: IRunner) -> None:
        is_idle = runner.gradient_step.is_idle
        if self._is_within_epoch and (current := self._passes[runner.loader_key]).is_stream and not is_idle:
            current.fingerprints.append(fingerprint_of(runner.batch))

    def on_batch_end(self, runner: IRunner) -> None:
        if self._is_within_epoch and not runner.gradient_step.is_idle:  # else its samples are another rank's
            self._passes[runner.loader_key].num_batches += 1

    def on_loader_end(self, runner: IRunner) -> None:
        if not self._is_within_epoch:
            return
        current = self._passes[runner.loader_key]
        if runner.is_train_loader:
            self._check_weights(runner, f"after training on loader {runner.loader_key!r}")
        shares = runner.engine.data_parallel.gather_object(current.share(runner))
        tells = current.recorded is not None and all(share.batches is not None for share in shares)
        if current.recorded is not None and tells:
            order = current.recorded.order
            words = rank_samples.describe_samples(shares, loader=runner.loader, key=runner.loader_key, order=order)
        elif current.is_stream and current.is_from_start:
            words = self._check_stream(runner, current)
        else:
            why = rank_samples.why_unknown(runner.loader)
            words = f"{why}, so those seen of loader {runner.loader_key!r} are unknown"
        self._report(runner, words)
        if not runner.is_train_loader:
            self._check_evaluation(runner, shares, why_not=self._why_not_replayed(runner, current, tells=tells))

    def _check_stream(self, runner: IRunner, current: _Pass) -> str:
        engine, key = runner.engine, runner.loader_key
        seen = engine.data_parallel.gather_object(current.fingerprints)
        found = rank_samples.first_difference_of_stream(runner.loader, seen) if engine.is_main_process else None
        difference = engine.gather_object(found)[0]
        if difference is not None:
            rank, batch = difference
            raise ValueError(
                f"loader {key!r}: rank {rank} saw other samples in its batch {batch} than its share of the stream that "
                "rank 0 reads, so some samples are repeated and others left out. The stream is split or shuffled by "
                "process, or differs each time it is read"
            )
        num_batches, who = sum(map(len, seen)), f"{len(seen)} ranks" if len(seen) > 1 else "1 process"
        return f"{who} saw {num_batches} batches of loader {key!r}, which are shares of one common stream"

    def _why_not_replayed(self, runner: IRunner, current: _Pass, *, tells: bool) -> str | None:
        """Return why one process cannot evaluate the batches of all ranks again; None if it can."""
        if not current.is_from_start:
            return "they include batches before an interruption"
        if tells or is_stream(runner.loader):
            return None
        if runner.engine.num_processes == 1:
            name = type(runner.loader).__name__
            return f"a {name} yields its batches once" if isinstance(runner.loader, Iterator) else None
        return rank_samples.why_unknown(runner.loader)

    def on_epoch_end(self, runner: IRunner) -> None:
        self._is_within_epoch = False
        rank_metrics.check_alike(runner.engine.gather_object(runner.epoch_metrics))

    def on_stage_end(self, runner: IRunner) -> None:
        self._is_within_epoch = False
        for each in self._passes.values():
            if each.recorded is not None:
                stop_recording(each.loader)
        self._passes = {}

    on_exception = on_stage_end

    def _check_weights(self, runner: IRunner, when: str) -> None:
        engine = runner.engine
        if engine.num_processes == 1:
            return
        tensors = rank_weights.tensors_of(runner.model, with_buffers=not runner.is_train_loader)
        unlike = rank_weights.differing(engine.gather_object(rank_weights.hashes_of(tensors)))
        if unlike:
            name, rank = next(iter(unlike.items()))
            mine = tensors[name].to("cpu", copy=True) if name in tensors else None
            difference = rank_weights.largest_difference(engine.gather_object(mine))
            raise ValueError(
                f"the model differs between ranks {when}: {name!r} on rank {rank} by up to {difference:.3g} from rank "
                f"0's, and {len(unlike)} of {len(tensors)} tensors in all. To have gradients averaged, call the model "
                "as self.model(...) and self.engine.backward(loss) for the backward pass; do not change weights in a "
                "way that depends on the rank"
            )
        what = "parameters" if runner.is_train_loader else "parameters and buffers"
        held = f"the model's {len(tensors)} {what} are the same" if tensors else f"the model's {what} are sharded"
        self._report(runner, f"{held} on {engine.num_processes} ranks {when}")

    def _check_evaluation(self, runner: IRunner, shares: Sequence[SeenSamples], *, why_not: str | None) -> None:
        if why_not is not None:
            self._report(
                runner, f"metrics of loader {runner.loader_key!r} were not recomputed by one process: {why_not}"
            )
            return
        self._check_metrics(runner, [(share.num_batches, share.batches) for share in shares])

    def _check_metrics(self, runner: IRunner, passes: Passes) -> None:
        engine, key, num_samples = runner.engine, runner.loader_key, runner.loader_sample_step
        tolerance = rank_metrics.tolerance_of(engine)
        together = {name: float(value) for name, value in runner.loader_metrics.items()}
        alone = _evaluate_again(runner, passes)
        unlike = _on_any_rank(engine, rank_metrics.differing(together, alone, tolerance=tolerance))
        drawn, again = set[str](), dict[str, float]()
        if unlike:
            again = _evaluate_again(runner, passes, attempt=1)
            drawn = _on_any_rank(engine, rank_metrics.differing(again, alone, tolerance=tolerance))
        for name in sorted(unlike - drawn):
            raise ValueError(
                f"metric {name!r} of loader {key!r} depends on the number of processes: {engine.num_processes} give "
                f"{together.get(name, math.nan):.7g}, one alone gives {alone[name]:.7g} for the same {num_samples} "
                "samples. Put the mean of each batch into batch_metrics, which the runner weights and reduces, or use "
                "LoaderMetricCallback with a torchmetrics object; the metric must not depend on the rank"
            )
        for name in sorted(drawn):
            self._report(
                runner,
                f"{name} of loader {key!r} is random: the same {num_samples} samples give {alone[name]:.4g} and "
                f"{again[name]:.4g}; is there dropout or augmentation in evaluation?",
            )
        exact = [name for name in alone if name in together and name not in unlike]
        if exact:
            self._report(
                runner,
                f"one process computes the same {', '.join(exact)} of loader {key!r} from these {num_samples} samples, "
                f"to {tolerance:.0e}",
            )
        pieces = split_batches_unequally(passes)
        # In half precision, rounding depends on the batch size.
        if pieces is not None and isinstance(engine.precision, FP32) and not drawn:
            self._check_batch_size(runner, pieces, {name: alone[name] for name in exact}, tolerance)

    def _check_batch_size(self, runner: IRunner, pieces: Passes, metrics: Metrics, tolerance: float) -> None:
        """Report metrics that depend on the batch size, without raising: some losses do by design."""
        cut = _evaluate_again(runner, pieces)
        for name in sorted(rank_metrics.differing(metrics, cut, tolerance=max(tolerance, _ROUNDING))):
            self._report(
                runner,
                f"{name} of loader {runner.loader_key!r} depends on how samples are batched, so on batch_size and the "
                f"number of processes: {metrics[name]:.4g}, and {cut[name]:.4g} in smaller batches; use "
                "LoaderMetricCallback for a metric that is not a mean over samples",
            )

    def _report(self, runner: IRunner, finding: str) -> None:
        if finding in self.findings:  # each epoch repeats the findings
            return
        self.findings.append(finding)
        runner.log_text("check", finding)


class _Pass:
    """A running pass over a loader; a validation may interrupt another pass."""

    def __init__(self, runner: IRunner) -> None:
        self.loader = runner.loader
        self.recorded = record_loader(runner.loader)
        self.is_from_start = runner.loader_batch_step == 0  # else metrics include batches before a resume
        self.is_stream = is_stream(runner.loader) and share_of(runner.loader).is_at_start
        self.num_batches = 0
        self.fingerprints: list[int] = []  # of each batch of a stream

    def share(self, runner: IRunner) -> SeenSamples:
        is_complete = runner.loader_batch_step == runner.loader_batch_len
        return SeenSamples.of(self.recorded, num_batches=self.num_batches, is_complete=is_complete)


def _evaluate_again(runner: IRunner, passes: Passes, *, attempt: int = 0) -> Metrics:
    num_batches = sum(number for number, _ in passes)
    return evaluate_on_one_rank(runner, replay(runner.loader, passes), num_batches=num_batches, attempt=attempt)


def _on_any_rank(engine: IEngine, names: set[str]) -> set[str]:
    return set().union(*engine.gather_object(names))
