"""Utilization of the machine: throughput, wait for data, memory and MFU."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runnerkit.callback import CallbackOrder
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.metrics.reduction import PartialSums
from runnerkit.support.arguments import check_numbers
from runnerkit.types import Metrics, StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["SystemMetricsCallback"]

logger = logging.getLogger(__name__)

_GIB = 2**30
_COUNTED = ("cuda", "xpu")  # GPUs whose peak memory torch counts


class SystemMetricsCallback(LoaderStateCallback["_Times"]):
    """Log system metrics of the whole job, for each loader and every ``log_every`` optimizer steps.

    - ``_system/samples_per_s``: samples of all processes, divided by the mean time of a process.
    - ``_system/step_s``: time of a batch, from the wait for it to the optimizer step; mean over processes.
    - ``_system/data_wait_share``: fraction of that time spent waiting for the loader, in [0, 1].
    - ``_system/memory_gib``: peak resident memory of a process; on a GPU ``_system/gpu_memory_gib``, the peak that
      torch allocated there. Since the start of the process; the maximum over processes. Not available on Windows, where
      a warning says so; MPS counts as the process's memory.
    - ``_system/gpu_utilization``: fraction of the time in which the GPU was busy, in [0, 1], by NVML's latest sample;
      mean over log points and processes. Needs nvidia-ml-py.
    - ``_system/mfu``: model FLOPs utilization, relative to the peak FLOPS of all devices; training only.

    Validations and checkpoints within an epoch do not count. Times are measured by the host's clock, without GPU
    synchronization: over many steps the host is as slow as the GPU whose queue it fills. Callbacks at the start of a
    batch count as waiting. Metrics of steps (since the previous log point) are rank zero's times and memory, and its
    samples multiplied by the number of processes, so steps need no collective.

    Args:
        peak_flops: operations per second of one device, in the training dtype, from its data sheet; None does not log
            the MFU.
        flops_per_sample: of forward and backward pass together; None counts those of the first training batch with
            ``torch.utils.flop_counter``: matrix products, convolutions and attention, two for each multiply-add.

    >>> SystemMetricsCallback(peak_flops=312e12).provides[-1]
    '_system/mfu'
    """

    def __init__(self, peak_flops: float | None = None, flops_per_sample: float | None = None) -> None:
        super().__init__()
        self.order = CallbackOrder.External  # last of all, after the optimizer step
        check_numbers(self, above=0, or_none=True, peak_flops=peak_flops, flops_per_sample=flops_per_sample)
        if flops_per_sample is not None and peak_flops is None:
            raise ValueError(
                "SystemMetricsCallback: flops_per_sample is only for the MFU: also pass peak_flops= of one device"
            )
        self.peak_flops = peak_flops
        self.flops_per_sample = flops_per_sample
        self.provides = tuple(f"_system/{name}" for name in ("samples_per_s", "step_s", "data_wait_share"))
        self.provides += ("_system/memory_gib", "_system/gpu_memory_gib", "_system/gpu_utilization")
        if peak_flops is not None:
            self.provides += ("_system/mfu",)
        self._is_given = self._is_counted = flops_per_sample is not None
        self._counter: Any = None  # counts FLOPs in the first training batch
        self._has_utilization = True  # until reading it fails

    def on_experiment_start(self, runner: IRunner) -> None:
        super().on_experiment_start(runner)
        if sys.platform == "win32" and runner.engine.device.type not in _COUNTED:
            logger.warning("_system/memory_gib is not available: the peak memory of a process needs Linux or macOS")

    def on_stage_start(self, runner: IRunner) -> None:
        super().on_stage_start(runner)
        self._is_counted = self._is_given  # another stage may have another model

    def new_state(self, runner: IRunner) -> _Times:
        return _Times()

    def on_batch_start(self, runner: IRunner) -> None:
        if runner.loader_key not in self._under_way:
            self._begin(runner)
        self._under_way[runner.loader_key].working_since = time.perf_counter()
        if not self._is_counted and self.peak_flops is not None and runner.is_train_loader:
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
        if runner.is_train_loader and runner.gradient_step.is_due(runner, runner.log_every):
            runner.batch_metrics.update(self._since_log(runner, times))

    def on_step_end(self, runner: IRunner) -> None:
        # Do not count a validation or checkpoint since the batch's end as waiting for data.
        self._under_way[runner.loader_key].waiting_since = time.perf_counter()

    def on_exception(self, runner: IRunner) -> None:
        super().on_exception(runner)
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def share(self, runner: IRunner) -> PartialSums | None:
        share = super().share(runner)
        if share is None:
            return None
        times = self._under_way[runner.loader_key]
        self._sample_utilization(runner, times)
        # One element per process, so that a sum over processes gathers them.
        memory = torch.zeros(runner.engine.num_processes, dtype=torch.float64)
        memory[runner.engine.rank] = _peak_memory_gib(runner.engine.device)
        utilization = torch.tensor(times.utilization, dtype=torch.float64)
        return PartialSums({**share.sums, "memory_gib": memory, "utilization": utilization})

    def finish(self, runner: IRunner, state: _Times, total: PartialSums) -> None:
        sums = total.sums["times"].tolist()
        metrics = self._metrics(runner, sums, memory_gib=float(total.sums["memory_gib"].max()))
        utilization, num_sampled = total.sums["utilization"].tolist()
        if num_sampled:
            metrics["_system/gpu_utilization"] = utilization / num_sampled
        runner.loader_metrics.update(metrics)

    def _since_log(self, runner: IRunner, times: _Times) -> Metrics:
        now, num_processes = times.sums(), runner.engine.data_parallel.num_processes
        sums = [(after - before) * num_processes for after, before in zip(now, times.at_log, strict=True)]
        times.at_log = now
        metrics = self._metrics(runner, sums, memory_gib=_peak_memory_gib(runner.engine.device))
        utilization = self._sample_utilization(runner, times)
        return metrics if utilization is None else {**metrics, "_system/gpu_utilization": utilization}

    def _metrics(self, runner: IRunner, sums: Sequence[float], *, memory_gib: float) -> Metrics:
        """Compute the metrics from sums over all processes."""
        num_batches, num_samples, waiting_s, batch_s = sums
        where = "gpu_memory_gib" if runner.engine.device.type in _COUNTED else "memory_gib"
        metrics = {
            "_system/samples_per_s": num_samples / (batch_s / runner.engine.data_parallel.num_processes),
            "_system/step_s": batch_s / num_batches,
            "_system/data_wait_share": waiting_s / batch_s,
        }
        if not math.isnan(memory_gib):
            metrics[f"_system/{where}"] = memory_gib
        if runner.is_train_loader and self.peak_flops is not None and self.flops_per_sample is not None:
            metrics["_system/mfu"] = num_samples * self.flops_per_sample / (batch_s * self.peak_flops)
        return metrics

    def _start_count(self, runner: IRunner) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        is_parallel = any(isinstance(model, nn.DataParallel) for model in as_dict(runner.model).values())
        if is_parallel or runner.engine.compile_arguments is not None:
            raise ValueError(
                "FLOPs can only be counted in one thread and for uncompiled operations: with torch.compile, or "
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
                "torch counts only matrix products, convolutions and attention, and the first training batch ran none: "
                "pass flops_per_sample= to SystemMetricsCallback, or leave out peak_flops"
            )
        self.flops_per_sample, self._is_counted = num_flops / runner.batch_size, True

    def _sample_utilization(self, runner: IRunner, times: _Times) -> float | None:
        if runner.engine.device.type != "cuda" or not self._has_utilization:
            return None
        try:
            sample = torch.cuda.utilization(runner.engine.device) / 100
        except Exception as error:  # not installed, or not reported by NVML, as for a MIG partition
            self._has_utilization = False
            logger.warning("_system/gpu_utilization is not available: %s", error)
            return None
        times.utilization = times.utilization[0] + sample, times.utilization[1] + 1
        return sample


class _Times:
    """Sums over the batches of one loader in this process, in seconds."""

    def __init__(self) -> None:
        self.num_batches = self.num_samples = 0
        self.waiting_s = self.batch_s = 0.0  # a batch's total time, including waiting
        self.waiting_since = self.working_since = time.perf_counter()
        self.utilization = 0.0, 0  # sum and number of samples
        self.at_log = self.sums()

    def sums(self) -> list[float]:
        return [self.num_batches, self.num_samples, self.waiting_s, self.batch_s]

    def share(self) -> PartialSums | None:
        return PartialSums({"times": torch.tensor(self.sums(), dtype=torch.float64)}) if self.num_batches else None

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
    if device.type in _COUNTED:
        return float(torch.get_device_module(device.type).max_memory_allocated(device) / _GIB)
    if sys.platform == "win32":
        return math.nan
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB
