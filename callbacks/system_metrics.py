"""How well the machine is used: throughput, wait for data, memory, share of the peak FLOPS."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runnerkit.arguments import check_numbers
from runnerkit.callback import CallbackOrder
from runnerkit.callbacks.loader_state import LoaderStateCallback
from runnerkit.fused_reduction import Share
from runnerkit.types import Metrics, StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

_GIB = 2**30


class SystemMetricsCallback(LoaderStateCallback["_Times"]):
    """Log what the whole job gets out of its machines: for each loader, and every ``log_every`` training steps.

    - ``_system/samples_per_s``: samples of all processes, by the time of a process (their mean).
    - ``_system/step_s``: time of a batch, from the wait for it to the optimizer's step; mean over processes.
    - ``_system/data_wait_share``: part of that time in which the loader was waited for, in [0, 1].
    - ``_system/memory_gib``: peak of a process's resident memory; on a GPU ``_system/gpu_memory_gib``: peak of what
      torch allocated there. Since the process began, of the process that has most.
    - ``_system/gpu_utilization``: part of the time in which the GPU did anything, in [0, 1], by NVML's latest sample;
      mean over log points and processes. Needs nvidia-ml-py.
    - ``_system/mfu``: FLOPs of the model by those that the devices could have done, training only.

    Validations and checkpoints within an epoch are left out. Times are those of the host's clock, without waiting for
    a GPU: over many steps the host is as slow as the GPU whose queue it fills. What callbacks do at a batch's start
    counts as waiting. Of single steps (since the log point before) rank zero logs its own times and memory, and its
    samples times the number of processes, so that no step has a collective.

    Args:
        peak_flops: operations a second that one device is able to, in the type that is trained in, from its data sheet;
            None logs no MFU.
        flops_per_sample: of forward and backward together; None counts those of the first training batch by
            ``torch.utils.flop_counter``: matrix products, convolutions and attention, two for each multiply-add.

    >>> SystemMetricsCallback(peak_flops=312e12).provides[-1]
    '_system/mfu'
    """

    def __init__(self, peak_flops: float | None = None, flops_per_sample: float | None = None) -> None:
        super().__init__()
        self.order = CallbackOrder.External  # last of all: at a batch's end, the optimizer has stepped
        check_numbers(self, above=0, or_none=True, peak_flops=peak_flops, flops_per_sample=flops_per_sample)
        if flops_per_sample is not None and peak_flops is None:
            raise ValueError(
                "SystemMetricsCallback: flops_per_sample is for the MFU: pass peak_flops= of one device too"
            )
        self.peak_flops = peak_flops
        self.flops_per_sample = flops_per_sample
        self.provides = tuple(f"_system/{name}" for name in ("samples_per_s", "step_s", "data_wait_share"))
        self.provides += ("_system/memory_gib", "_system/gpu_memory_gib", "_system/gpu_utilization")
        if peak_flops is not None:
            self.provides += ("_system/mfu",)
        self._counter: Any = None  # of FLOPs, while it counts
        self._has_utilization = True  # until it cannot be read

    def new_state(self, runner: IRunner) -> _Times:
        return _Times()

    def on_batch_start(self, runner: IRunner) -> None:
        if runner.loader_key not in self._under_way:
            self._begin(runner)
        self._under_way[runner.loader_key].working_since = time.perf_counter()
        if self.flops_per_sample is None and self.peak_flops is not None and runner.is_train_loader:
            self._start_count(runner)

    def on_batch_end(self, runner: IRunner) -> None:
        times, now = self._under_way[runner.loader_key], time.perf_counter()
        times.num_batches += 1
        times.num_samples += runner.batch_size
        times.waiting_s += times.working_since - times.waiting_since
        times.batch_s += now - times.waiting_since
        times.waiting_since = now
        if self._counter is not None:
            self._take_count(runner)
        if runner.is_train_loader and runner.batch_step % runner.log_every == 0:
            runner.batch_metrics.update(self._since_log(runner, times))

    def on_step_end(self, runner: IRunner) -> None:
        # A validation or a checkpoint since the batch's end was no waiting for data.
        self._under_way[runner.loader_key].waiting_since = time.perf_counter()

    def on_exception(self, runner: IRunner) -> None:
        super().on_exception(runner)
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def share(self, runner: IRunner) -> Share | None:
        share = super().share(runner)
        if share is None:
            return None
        times = self._under_way[runner.loader_key]
        self._sample_utilization(runner, times)
        # Each process has a place of its own, so that a sum of all tells them apart.
        memory = torch.zeros(runner.engine.num_processes, dtype=torch.float64)
        memory[runner.engine.rank] = _peak_memory_gib(runner.engine.device)
        utilization = torch.tensor(times.utilization, dtype=torch.float64)
        return Share({**share.sums, "memory_gib": memory, "utilization": utilization})

    def finish(self, runner: IRunner, state: _Times, total: Share) -> None:
        sums = total.sums["times"].tolist()
        metrics = self._metrics(runner, sums, memory_gib=float(total.sums["memory_gib"].max()))
        utilization, num_sampled = total.sums["utilization"].tolist()
        if num_sampled:
            metrics["_system/gpu_utilization"] = utilization / num_sampled
        runner.loader_metrics.update(metrics)

    def _since_log(self, runner: IRunner, times: _Times) -> Metrics:
        now = times.sums()
        sums = [(after - before) * runner.engine.num_processes for after, before in zip(now, times.at_log, strict=True)]
        times.at_log = now
        metrics = self._metrics(runner, sums, memory_gib=_peak_memory_gib(runner.engine.device))
        utilization = self._sample_utilization(runner, times)
        return metrics if utilization is None else {**metrics, "_system/gpu_utilization": utilization}

    def _metrics(self, runner: IRunner, sums: Sequence[float], *, memory_gib: float) -> Metrics:
        """Compute from the sums over all processes."""
        num_batches, num_samples, waiting_s, batch_s = sums
        where = "gpu_memory_gib" if runner.engine.device.type == "cuda" else "memory_gib"
        metrics = {
            "_system/samples_per_s": num_samples / (batch_s / runner.engine.num_processes),
            "_system/step_s": batch_s / num_batches,
            "_system/data_wait_share": waiting_s / batch_s,
            f"_system/{where}": memory_gib,
        }
        if runner.is_train_loader and self.peak_flops is not None and self.flops_per_sample is not None:
            metrics["_system/mfu"] = num_samples * self.flops_per_sample / (batch_s * self.peak_flops)
        return metrics

    def _start_count(self, runner: IRunner) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        is_parallel = any(isinstance(model, nn.DataParallel) for model in as_dict(runner.model).values())
        if is_parallel or runner.engine.compile_arguments is not None:
            raise ValueError(
                "FLOPs are counted in one thread, and of operations that are not compiled: with torch.compile, or "
                "DataParallel on GPUs, pass flops_per_sample= to SystemMetricsCallback"
            )
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()

    def _take_count(self, runner: IRunner) -> None:
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        num_flops = counter.get_total_flops()
        if not num_flops:
            raise ValueError(
                "the first training batch has no matrix product, convolution or attention that torch counts: pass "
                "flops_per_sample= to SystemMetricsCallback, or no peak_flops"
            )
        self.flops_per_sample = num_flops / runner.batch_size

    def _sample_utilization(self, runner: IRunner, times: _Times) -> float | None:
        if runner.engine.device.type != "cuda" or not self._has_utilization:
            return None
        try:
            sample = torch.cuda.utilization(runner.engine.device) / 100
        except Exception as error:  # not installed, or NVML does not tell: of a part of a GPU (MIG), say
            self._has_utilization = False
            logger.warning("no _system/gpu_utilization: %s", error)
            return None
        times.utilization = times.utilization[0] + sample, times.utilization[1] + 1
        return sample


class _Times:
    """Sums over the batches of one loader in this process, in seconds."""

    def __init__(self) -> None:
        self.num_batches = self.num_samples = 0
        self.waiting_s = self.batch_s = 0.0  # all of a batch's time, waiting included
        self.waiting_since = self.working_since = time.perf_counter()
        self.utilization = 0.0, 0  # sum and number of samples
        self.at_log = self.sums()

    def sums(self) -> list[float]:
        return [self.num_batches, self.num_samples, self.waiting_s, self.batch_s]

    def share(self) -> Share | None:
        return Share({"times": torch.tensor(self.sums(), dtype=torch.float64)}) if self.num_batches else None

    def state_dict(self) -> StateDict:
        return {"sums": self.sums(), "utilization": list(self.utilization)}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        for state in states:
            num_batches, num_samples, waiting_s, batch_s = state["sums"]
            self.num_batches, self.num_samples = self.num_batches + num_batches, self.num_samples + num_samples
            self.waiting_s, self.batch_s = self.waiting_s + waiting_s, self.batch_s + batch_s
            utilization, num_sampled = state["utilization"]
            self.utilization = self.utilization[0] + utilization, self.utilization[1] + num_sampled
        self.at_log = self.sums()


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB
