"""Traces of a few training steps, for chrome://tracing, Perfetto, or TensorBoard's profiler plugin."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from runnerkit.callback import Callback, CallbackNode, CallbackOrder
from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.storage.claims import written
from runnerkit.storage.remote.urls import as_url, local_path, shown
from runnerkit.support.arguments import check_integers, check_paths

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["ProfilerCallback"]

logger = logging.getLogger(__name__)


class ProfilerCallback(Callback):
    """Profile some steps of the first training loader, on rank zero, and write a Chrome trace.

    The first step is skipped, since it allocates memory and compiles. If its loader has no other step, the next
    training loader, or the loader's next epoch, is profiled.

    Args:
        path: JSON file to write.
        num_batches: number of steps to profile, >= 1; 5 profiles steps 2 to 6.
        tensorboard: folder for a copy, named as by ``torch.profiler.tensorboard_trace_handler``, for the plugin of the
            package torch-tb-profiler.

    >>> ProfilerCallback("trace.json").num_batches
    5
    """

    def __init__(self, path: str | Path, num_batches: int = 5, *, tensorboard: str | Path | None = None) -> None:
        # A step ends after the optimizer step.
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)
        check_integers(self, num_batches=num_batches)
        check_paths(self, path=path)
        check_paths(self, or_none=True, tensorboard=tensorboard)
        self.path = Path(as_url(path) or local_path(path))  # absolute, or a URL
        self.num_batches = num_batches
        self.tensorboard = Path(as_url(tensorboard) or local_path(tensorboard)) if tensorboard is not None else None
        self._profile: Any = None  # while it runs
        self._num_steps = 0  # with the first, which is skipped
        self._is_done = False

    def on_experiment_start(self, runner: IRunner) -> None:
        self._num_steps, self._is_done = 0, False

    def on_loader_start(self, runner: IRunner) -> None:
        if self._num_steps and not self._is_done and runner.is_train_loader:
            self._start(runner)

    def on_batch_end(self, runner: IRunner) -> None:
        if self._is_done or not runner.is_train_loader:
            return
        self._num_steps += 1
        if self._profile is None:
            self._start(runner)
        elif self._num_steps > self.num_batches:
            self._finish()

    def on_loader_end(self, runner: IRunner) -> None:
        if self._profile is None or not runner.is_train_loader:
            return
        if self._num_steps > 1:
            self._finish()  # the loader ended early
        else:
            self._stop()

    def on_experiment_end(self, runner: IRunner) -> None:
        if not self._is_done:
            logger.warning("ProfilerCallback wrote no %s: the run had no second training step", shown(self.path))

    def on_exception(self, runner: IRunner) -> None:
        if self._profile is not None:
            self._stop()

    def _start(self, runner: IRunner) -> None:
        activities = [ProfilerActivity.CPU]
        if runner.engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profile.start()

    def _stop(self) -> None:
        self._profile.stop()
        self._profile = None

    def _finish(self) -> None:
        self._profile.stop()
        with written(self.path) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            with AtomicFile(path) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            if self.tensorboard is not None:
                name = f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json"
                with written(self.tensorboard / name) as copy:
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    with AtomicFile(copy) as temporary:
                        shutil.copyfile(path, temporary)
        self._profile = None
        self._is_done = True
