"""The loop: stages, epochs, loaders, batches; what the user overrides, and when it is called."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from runnerkit import before_training, components, media, required_metrics, run_logs, snapshot
from runnerkit.callback import ICallback, IListener
from runnerkit.engine import IEngine
from runnerkit.logger import ILogger, Step, StepQueue
from runnerkit.metrics import LoaderMeans
from runnerkit.resume_options import Source
from runnerkit.sampling.sharding import batches_of
from runnerkit.seeding import keep_rng
from runnerkit.step_watch import StepWatch
from runnerkit.storage.weights import load_weights
from runnerkit.types import Batch, Criterion, Metrics, Model, Optimizers, Scheduler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from runnerkit.outcome import Outcome


class IRunner(IListener):
    """Runs what the user writes; `handle_batch`, `get_loaders` and `get_model` are a must, the rest has defaults.

    Its own events (``on_loader_start`` and so on) may be overridden to keep meters: they come before the callbacks'
    start events and after their end events.

    Attributes:
        engine: devices, processes, precision.
        model, criterion, optimizer, scheduler: one object each, or a dict of them.
        loaders, callbacks, loggers: by key; `loggers` is empty but on rank zero.
        stage_key, loader_key: where the run stands; `loader` is the one under way.
        is_train_loader, is_valid_loader, is_infer_loader: a key that starts with "train" trains, any other evaluates.
        epoch_step, batch_step, sample_step: epoch under way (1, 2, ...), training steps and training samples (of all
            processes) so far; `global_*` are the same numbers, `stage_*` and `loader_*` count within.
        batch, batch_size: what `handle_batch` got, on the device, and its number of samples, by which its metrics are
            weighted: the length of the first tensor. `handle_batch` sets it where that is something else.
        batch_metrics: () tensors or numbers of this batch and process; their means become `loader_metrics`.
        loader_metrics, epoch_metrics, experiment_metrics: Python floats over all processes: {metric: value},
            {loader: {metric: value}}, {epoch: {loader: {metric: value}}}.
        need_early_stop: set in a batch event it ends the loader; set in another, the stage after this epoch.
        exception: what ended the run, if anything did.
        valid_every_steps: evaluate also every so many training steps; None is once an epoch.
        log_every: training steps from one step log to the next, for loggers that want batch metrics.
        non_finite: "raise" ends a loader with an error if a value of `batch_metrics` was NaN or infinite, and names the
            first batch, rank and key; "keep" lets it be.
        detect_anomaly: whether autograd raises where a gradient becomes NaN; slow.
        deterministic: whether torch takes only algorithms that give the same bits each time, or raises.
        resume_options: "checkpoint", or "arguments" to resume with the learning rate, other optimizer options and
            schedule that are passed.
    """

    def __init__(self, model: Model | None = None, engine: IEngine | None = None) -> None:
        self._given_engine = engine
        self._seed = 42
        self._hparams: dict[str, Any] = {}
        self._resume: str | Path | None = None
        self._resumes_if_found = False  # whether there may be no checkpoint, as with resume="auto"
        self._continues = False  # whether what a logdir holds is this run's own, even without a checkpoint
        self._evaluation: Any = None  # hooks of a run that evaluates one loader, instead of the runner's own
        self.engine: IEngine = engine  # type: ignore[assignment]  # given, or made by get_engine() in run()
        self.model: Any = model
        self.criterion: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.loaders: dict[str, Any]
        self.callbacks: dict[str, ICallback]
        self.loggers: dict[str, ILogger]
        self.valid_every_steps: int | None = None
        self.log_every = 10
        self.non_finite: Literal["raise", "keep"] = "keep"
        self.detect_anomaly = False
        self.deterministic = False
        self.resume_options: Source = "checkpoint"
        self._reset()

    def _reset(self) -> None:
        self.loaders = {}
        self.callbacks = {}
        self.loggers = {}
        self.stage_key = self.loader_key = ""
        self.loader: Any = None
        self.is_train_loader = self.is_valid_loader = self.is_infer_loader = False
        self.is_within_loader = False
        self.epoch_step = self.batch_step = self.sample_step = 0
        self.stage_epoch_step = self.stage_batch_step = self.stage_sample_step = self.stage_epoch_len = 0
        self.loader_batch_step = self.loader_sample_step = 0
        self.loader_batch_len: int | None = None
        self.batch: Batch = None
        self.batch_size = 0
        self.batch_metrics: dict[str, Any] = {}
        self.loader_metrics: Metrics = {}
        self.epoch_metrics: dict[str, Metrics] = {}
        self.experiment_metrics: dict[int, dict[str, Metrics]] = {}
        self.need_early_stop = False
        self.exception: BaseException | None = None
        self._training_model: Any = None
        self._autocast: AbstractContextManager[Any] = nullcontext()  # the engine's, once that is set up
        self._means = LoaderMeans()
        self._step_queue = StepQueue()
        self._wants_batch_metrics = False
        self._known_callbacks: list[ICallback] = []
        self._is_open = False  # whether the loggers are
        self._early_logs: list[tuple[str, str, Any, Step]] | None = None  # of before that; None takes none
        self._more_hparams: dict[str, Any] = {}  # from log_hparams()
        self._logdirs: dict[Path, Callable[[], None]] = {}  # how to let go of those that are this run's
        self._ends_stage = False
        self._skipped_batches = 0
        self._checked_batch_sizes: set[str] = set()  # keys of loaders
        self._compared_streams: set[str] = set()  # keys of loaders
        self._snapshot: snapshot.Snapshot | None = None
        self._step_watch: StepWatch | None = None  # until the stage's first training loader is over
        self._listeners = components.bind_listeners(self)

    # What the user overrides. All but `stages`, `get_engine` and the properties is called in the processes that
    # train, after the engine was set up there.

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self._seed

    @property
    def hparams(self) -> dict[str, Any]:
        """Hyperparameters to write beside the logs: numbers, strings, lists and dicts of them."""
        return self._hparams

    @property
    def stages(self) -> Iterable[str]:
        """Names of the stages, in order; one that starts with "infer" runs without optimizer."""
        return ["train"]

    def get_stage_len(self, stage: str) -> int:
        """Number of epochs of a stage."""
        return 1

    def get_engine(self) -> IEngine:
        """Engine to run on: the one given, else DataParallel on several GPUs, the GPU, or the CPU."""
        from runnerkit.engines.choose import get_available_engine  # against the layers: a default

        return self._given_engine or get_available_engine()

    def get_loggers(self) -> dict[str, ILogger]:
        """Loggers by key; called on rank zero only."""
        return {}

    @abstractmethod
    def get_loaders(self, stage: str) -> dict[str, Any]:
        """Loaders by key, whole: the engine gives each process its share."""

    def get_model(self, stage: str) -> Model:
        """The model, or several by key."""
        if self.model is None:
            raise ValueError(f"{type(self).__name__} has no model: pass model= or override get_model(stage)")
        return self.model  # type: ignore[no-any-return]

    def get_criterion(self, stage: str) -> Criterion | None:
        """The criterion, or several by key, or none."""
        return None

    def get_optimizer(self, stage: str, model: Any) -> Optimizers | None:
        """The optimizer of `model`, which is on the device by now; or several by key, or none."""
        return None

    def get_scheduler(self, stage: str, optimizer: Any) -> Scheduler | None:
        """The learning-rate scheduler of `optimizer`, or several by key, or none."""
        return None

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        """Callbacks by key."""
        return {}

    @abstractmethod
    def handle_batch(self, batch: Batch) -> None:
        """Run the model on `batch`; fill `self.batch` and `self.batch_metrics`."""

    def load(
        self,
        source: str | PathLike[str],
        *,
        model: Model | None = None,
        which: Literal["best", "last"] = "best",
        strict: bool = True,
        prefix: str = "",
    ) -> Self:
        """Load weights into `model`, for inference say; under a launcher every process reads the file.

        Args:
            source: a checkpoint of any engine, a file of weights (``.safetensors`` too), or a logdir.
            model: by default the runner's, else that of ``get_model("infer")``.
            which, strict, prefix, and what is raised: see :func:`runnerkit.storage.weights.load_weights`.
        """
        self.model = model if model is not None else self.model
        if self.model is None:
            self.model = self.get_model("infer")
        load_weights(self.model, source, which=which, strict=strict, prefix=prefix)
        return self

    # What callbacks and `handle_batch` may call. Where no logger takes such things, as on all ranks but zero, nothing
    # is looked at or copied. What is logged counts for the loader under way, or the last one.

    def log_image(self, tag: str, image: Tensor | np.ndarray) -> None:
        """Log a tensor (C, H, W) or (H, W), or an array (H, W, C) or (H, W): see :func:`runnerkit.media.image_of`."""
        run_logs.log_media(self, "log_image", tag, media.image_of, image)

    def log_figure(self, tag: str, figure: Figure) -> None:
        """Log a picture of Matplotlib's figure, which stays open."""
        run_logs.log_media(self, "log_image", tag, media.image_of_figure, figure)

    def log_text(self, tag: str, text: str) -> None:
        """Log words for people to read."""
        run_logs.log_media(self, "log_text", tag, media.text_of, text)

    def log_histogram(self, tag: str, values: Tensor | np.ndarray) -> None:
        """Log how `values`, of any shape, are distributed: see :func:`runnerkit.media.histogram_of`."""
        run_logs.log_media(self, "log_histogram", tag, media.histogram_of, values)

    def log_pr_curve(self, tag: str, *, scores: Tensor | np.ndarray, targets: Tensor | np.ndarray) -> None:
        """Log precision against recall of this process's scores in [0, 1] and targets in {0, 1}, of one shape."""
        run_logs.log_media(self, "log_pr_curve", tag, media.pr_curve_of, scores, targets)

    def log_artifact(self, tag: str, path_to_artifact: str | PathLike[str]) -> None:
        """Log a file, or a folder with all that is in it, as it is now."""
        run_logs.log_media(self, "log_artifact", tag, media.path_of, path_to_artifact)

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Add hyperparameters that are known only now to those of `hparams`; the same names are replaced."""
        self._more_hparams.update(hparams)
        if self._is_open:
            run_logs.tell_hparams(self)

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> Self:
        """Run all stages on the engine's processes; afterwards the calling process holds model and metrics.

        Under a launcher (torchrun) every process must call.
        """
        from runnerkit.engines.by_name import commanded_engine  # `runnerkit run SCRIPT.py --engine ...`

        self._reset()
        self.engine = (None if self._evaluation else commanded_engine()) or self._hooks.get_engine()
        from runnerkit import outcome  # late, as what a run alone needs

        outcome.adopt(self, self.engine.launch(self._run_experiment))
        return self

    def _run_experiment(self) -> Outcome:
        from runnerkit import outcome

        data = outcome.data_of(self)
        with components.experiment(self):  # set up; closed whatever happens, on_exception included
            self._emit("on_experiment_start")
            for stage in self._hooks.stages:
                self._run_stage(stage)
            components.end_experiment(self)
        self.engine.cleanup()  # after a failure launch() does, once it is on record: peers fail when this one leaves
        return outcome.capture(self, had=data)

    def _run_stage(self, stage: str) -> None:
        if not components.setup_stage(self, stage):
            return  # the run resumes in a later one
        self._emit("on_stage_start")
        snapshot.restore(self)
        required_metrics.check_required_metrics(self)
        components.open_loggers(self)
        while snapshot.is_epoch_left(self) and not self.need_early_stop:
            self._run_epoch()
        self._emit("on_stage_end")

    def _run_epoch(self) -> None:
        snapshot.start_epoch(self)
        self._emit("on_epoch_start")
        for key in snapshot.loaders_left(self):
            self._run_loader(key)
        self.experiment_metrics[self.epoch_step] = self.epoch_metrics
        self._emit("on_epoch_end")

    def _run_loader(self, key: str) -> None:
        components.setup_loader(self, key)
        with torch.set_grad_enabled(self.is_train_loader):
            self._emit("on_loader_start")
            for batch in self._batches():
                self._run_batch(batch)
                if self.is_train_loader:
                    self._finish_step()
                if self.need_early_stop:
                    break
            components.finish_loader(self, key)

    def _run_batch(self, batch: Batch) -> None:
        # A step's events are sent without _emit: here each call counts.
        components.start_batch(self, batch)
        for listener in self._listeners["on_batch_start"]:
            listener(self)
        with self._autocast:
            self.handle_batch(self.batch)
        for listener in self._listeners["on_batch_end"]:
            listener(self)
        components.finish_batch(self)

    # --------------------------------------------------------------------------------------------------------------

    def _emit(self, event: str) -> None:
        for listener in self._listeners[event]:
            listener(self)

    def _batches(self) -> Iterator[Batch]:
        if getattr(self.loader, "num_workers", 0):
            self.engine.settle()
        iterator = batches_of(self.loader)
        snapshot.restore_rng(self)  # after iter(), which draws the workers' seed
        try:
            if self.engine.num_processes > 1:
                iterator = before_training.compare_streams(self, iterator)
            for batch in iterator:
                yield self.engine.to_device(batch)
        except Exception:
            self.loader_batch_step, self.batch = self.loader_batch_step + 1, None  # the one that is not there
            raise

    def _finish_step(self) -> None:
        if self.valid_every_steps is not None and self.batch_step % self.valid_every_steps == 0:
            self._run_validation()
        for listener in self._listeners["on_step_end"]:
            listener(self)

    def _run_validation(self) -> None:
        """Run the evaluation loaders in the middle of a training loader, then go on as if nothing had been."""
        paused = components.pause_loader(self)
        with keep_rng():
            for key in self.loaders:
                if not key.startswith("train"):
                    self._run_loader(key)
        components.continue_loader(self, paused)
        self._emit("on_validation_end")

    @property
    def _hooks(self) -> Any:
        return self._evaluation or self

    @property
    def step(self) -> Step:
        """Where the run stands, for loggers."""
        return Step(stage=self.stage_key, loader=self.loader_key, epoch=self.epoch_step, batch=self.batch_step)

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on with what its logdir holds."""
        return self._snapshot is not None or self._continues

    @property
    def global_epoch_step(self) -> int:
        """Same as `epoch_step`."""
        return self.epoch_step

    @property
    def global_batch_step(self) -> int:
        """Same as `batch_step`."""
        return self.batch_step

    @property
    def global_sample_step(self) -> int:
        """Same as `sample_step`."""
        return self.sample_step
