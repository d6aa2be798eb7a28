"""The hooks that users override, and the public state of a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from runnerkit.callback import ICallback, IListener
from runnerkit.checkpoints.weights import load_weights
from runnerkit.engine import IEngine
from runnerkit.logger import ILogger, Step
from runnerkit.loop import media
from runnerkit.loop.hooks import call_hook
from runnerkit.loop.loader_pass import Pass
from runnerkit.loop.own_names import OwnAttribute, check_initialized, check_names
from runnerkit.loop.run import Run
from runnerkit.resume.overrides import Source
from runnerkit.steps.budget import Budget
from runnerkit.steps.schedulers import Interval
from runnerkit.types import Batch, Criterion, Metrics, Model, Optimizers, Scheduler, StateDict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class IRunner(IListener):
    """A training run; subclasses implement `handle_batch`, `get_loaders` and `get_model`, other hooks have defaults.

    Its own events, such as ``on_loader_start``, may be overridden too, for example to update meters. They are called
    before the callbacks' start events and after their end events, but before a checkpoint is saved.

    Attributes:
        current_run: the run under way, or the last one; docs/loop.md says what callbacks may read of it.
        engine: devices, processes, precision.
        model, criterion, optimizer, scheduler: one object each, or a dict of them.
        loaders, callbacks, loggers: by key; `loggers` is empty on all ranks except zero.
        stage_key, loader_key: keys of the current stage and loader; `loader` is the current loader.
        is_train_loader, is_valid_loader, is_infer_loader: loaders whose key starts with "train" are trained on, all
            others are evaluated.
        epoch_step, batch_step, sample_step: current epoch (1, 2, ...), training batches (per process) and training
            samples (of all processes) so far; `global_*` are the same numbers, `stage_*` and `loader_*` count within
            stage or loader.
        optimizer_step: optimizer steps so far: batches, groups of accumulated batches, or steps of :meth:`learn`.
        steps_itself: True in a class whose `handle_batch` makes the steps: SupervisedRunner then adds neither a
            BackwardCallback nor an OptimizerCallback.
        scheduler_interval: the unit in which schedulers are stepped, see :meth:`Runner.train`; "manual" in a class that
            steps them in `handle_batch`. An argument of `train` precedes it.
        steps_per_batch: steps that :meth:`learn` makes in each batch, by which `num_steps` counts.
        num_steps: optimizer steps of the stage, for schedules; None if one of its limits does not tell (docs/loop.md).
        stage_epoch_len: epochs of the stage; None if unknown.
        batch, batch_size: the batch on the device, and its number of samples, which weights its metrics. The default is
            the length of the first tensor; `handle_batch` may set another number.
        batch_weight: set in `handle_batch`, the weight of the batch in gradients and logged means, for example its
            number of tokens: a number, or a () tensor on the device. None is its number of samples.
        gradient_step: what the losses of this pass over a loader weigh in their optimizer steps, for callbacks; see
            docs/own_steps.md. A validation within a training loader has its own.
        loader_pass: the pass over the current loader, or the last one; its `means` are this process's sums so far.
        batch_metrics: () tensors or numbers of this batch on this rank; their means become `loader_metrics`.
        loader_metrics, epoch_metrics, experiment_metrics: Python floats over all processes: {metric: value},
            {loader: {metric: value}}, {epoch: {loader: {metric: value}}}.
        need_early_stop: ends the loader if set in an event of its batches; in another event, it ends the stage after
            the epoch (docs/loop.md has a table).
        exception: the exception that ended the run, if any.
        valid_every_steps: also evaluate each time this many optimizer steps were taken; None evaluates once per epoch.
        epoch_steps: training batches per process in an epoch, which continues where the previous one ended; None is a
            pass over the data.
        accumulation_steps: batches whose gradients an OptimizerCallback without a number of its own averages into a
            step.
        gradient_clip: largest norm of all gradients of a step, for OptimizerCallbacks without clipping of their own.
        log_every: number of optimizer steps between logs of batch metrics, for loggers that take them.
        non_finite: "raise" ends a loader with an error if a value of `batch_metrics` was NaN or infinite, and names the
            first batch, rank and key; "keep" ignores it.
        detect_anomaly: make autograd raise at the operation whose gradient becomes NaN; slow.
        loss_reduction: "mean" if losses are means over a batch, which processes and accumulated batches average; "sum"
            if they are sums, which they add up.
        deterministic: make torch use deterministic algorithms only; an operation without one raises.
        resume_options: "checkpoint", or "arguments" to resume with the learning rate, other optimizer options and
            schedule that are passed.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_names(cls, IRunner)

    def __init__(self, model: Model | None = None, engine: IEngine | str | None = None) -> None:
        if isinstance(engine, str):
            from runnerkit.engines.by_name import engine_by_name  # an exception to the layers, as below

            engine = engine_by_name(engine)
        self._given_engine = engine
        self._seed = 42
        self._hparams: dict[str, Any] = {}
        self._current_run = Run()
        # Settings: written by the user, or by train().
        self.valid_every_steps: int | None = None
        self.epoch_steps: int | None = None
        self.accumulation_steps = 1
        self.gradient_clip: float | None = None
        self.log_every = 10
        self.non_finite: Literal["raise", "keep"] = "keep"
        self.detect_anomaly = False
        self.deterministic = False
        self.loss_reduction: Literal["mean", "sum"] = "mean"
        self.resume_options: Source = "checkpoint"
        # Written by run().
        self.engine: IEngine = engine  # type: ignore[assignment]  # passed in, or made by get_engine()
        # Written by `Stage`; before a run they hold what was passed in, afterwards what `Run.launch` brings back.
        self.model: Any = model
        self.criterion: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._reset()

    def _reset(self) -> None:
        """Forget the last run."""
        self._current_run = self._current_run.renewed()
        # Written by `Stage`.
        self.stage_key = ""
        self.stage_epoch_len: int | None = None
        self.loaders: dict[str, Any] = {}
        self.callbacks: dict[str, ICallback] = {}
        # Written by `RunLogs`.
        self.loggers: dict[str, ILogger] = {}
        # Written by `Position`; optimizer steps are counted where they are made.
        self.epoch_step = self.batch_step = self.optimizer_step = self.sample_step = 0
        self.stage_epoch_step = self.stage_batch_step = self.stage_optimizer_step = self.stage_sample_step = 0
        self.epoch_metrics: dict[str, Metrics] = {}
        self.experiment_metrics: dict[int, dict[str, Metrics]] = {}
        # Written by `Pass`; handle_batch and callbacks may change the last five.
        self.loader_key = ""
        self.loader: Any = None
        self.loader_pass = Pass()
        self.gradient_step = self.loader_pass.gradient_step
        self.is_train_loader = self.is_valid_loader = self.is_infer_loader = False
        self.is_within_loader = False
        self.loader_batch_step = self.loader_sample_step = 0
        self.loader_batch_len: int | None = None
        self.loader_metrics: Metrics = {}
        self.batch: Batch = None
        self.batch_size = 0
        self.batch_weight: Any = None
        self.batch_metrics: dict[str, Any] = {}
        # Set by callbacks and `Run`, cleared by `Stage` and `Pass`.
        self.need_early_stop = False
        # Written by `Run`.
        self.exception: BaseException | None = None

    # Hooks for users to override. All methods except `get_engine` are called in the processes that train, after the
    # engine was set up there; properties may be read anywhere. They may leave `stage` out, or take it last.

    _num_epochs: int | None = 1  # a subclass may set it before __init__
    steps_itself = False
    steps_per_batch = 1
    scheduler_interval: Interval | None = None
    current_run: Run = cast(Any, OwnAttribute("current_run"))

    @property
    def device(self) -> torch.device:
        """The engine's device."""
        return self.engine.device

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self._seed

    @property
    def hparams(self) -> dict[str, Any]:
        """Hyperparameters to log: numbers, strings, lists and dicts of them."""
        return self._hparams

    @property
    def stages(self) -> Iterable[str]:
        """Names of the stages, in order; one that starts with "infer" runs without optimizer."""
        return ["train"]

    @property
    def num_epochs(self) -> int | None:
        """Epochs of each stage, unless `get_stage_len` is overridden; may be set; None if something else ends it."""
        return self._num_epochs

    @num_epochs.setter
    def num_epochs(self, value: int | None) -> None:
        self._num_epochs = value

    def get_stage_len(self, stage: str) -> int | Budget:
        """Return the number of epochs of a stage, or a Budget of epochs, optimizer steps and samples."""
        return Budget(num_epochs=self.num_epochs)

    def get_engine(self) -> IEngine | str:
        """Return the engine to run on, or its name: the one passed in, else DataParallel on several GPUs, the GPU, or
        the CPU."""
        from runnerkit.engines.choose import get_available_engine  # an exception to the layers: a default

        return self._given_engine or get_available_engine()

    def get_loggers(self) -> dict[str, ILogger]:
        """Return loggers by key; called on rank zero only."""
        return {}

    @abstractmethod
    def get_loaders(self, stage: str) -> dict[str, Any]:
        """Return loaders by key, whole: the engine gives each process its share."""

    def get_model(self, stage: str) -> Model:
        """Return the model, or several by key."""
        if self.model is None:
            raise ValueError(f"{type(self).__name__} needs a model: pass model= or override get_model(stage)")
        return self.model  # type: ignore[no-any-return]

    def get_criterion(self, stage: str) -> Criterion | None:
        """Return the criterion, several by key, or None."""
        return None

    def get_optimizer(self, stage: str, model: Any) -> Optimizers | None:
        """Return the optimizer of `model`, which is already on the device; several by key, or None."""
        return None

    def get_scheduler(self, stage: str, optimizer: Any) -> Scheduler | None:
        """Return the learning-rate scheduler of `optimizer`, several by key, or None.

        It is called again if the callbacks accumulate batches, so that `num_steps` is another number than before.
        """
        return None

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        """Return callbacks by key."""
        return {}

    @abstractmethod
    def handle_batch(self, batch: Batch) -> None:
        """Run the model on `batch`; fill `self.batch_metrics`, and `self.batch` with what callbacks read."""

    def learn(
        self,
        loss: Tensor,
        *,
        optimizer: str | Optimizer | Sequence[str | Optimizer] | None = None,
        gradient_clip: float | None = None,
        clip: Callable[[list[Tensor]], Any] | float | None = None,
    ) -> None:
        """Make an optimizer step on `loss`, in `handle_batch`: reset gradients, backpropagate, clip, step, count.

        The gradients are those of the global batch, weighted by samples or `batch_weight`, which is set before. In
        evaluation loaders it does nothing. A loss that is NaN raises in the first batch of a pass, a later one at its
        end.

        Args:
            loss: a () tensor.
            optimizer: the one that steps, or its key; may be left out if the runner has one. A list of several: each
                steps on the gradients of one backward pass, which are clipped together.
            gradient_clip: largest norm of the gradients; by default the runner's `gradient_clip`.
            clip: a function of the list of parameters, called before the step instead; a number is deprecated.
        """
        self.loader_pass.own_steps.learn(self, loss, optimizer=optimizer, gradient_clip=gradient_clip, clip=clip)

    def load(
        self,
        source: str | PathLike[str],
        *,
        model: Model | None = None,
        which: Literal["best", "last"] = "best",
        strict: bool = True,
        prefix: str = "",
    ) -> Self:
        """Load weights into `model`, for example for inference; under a launcher every process reads the file.

        Args:
            source: a checkpoint of any engine, a file of weights (also ``.safetensors``), a logdir, or a pretrained
                model's folder.
            model: by default the runner's, else that of ``get_model("infer")``.
            which, strict, prefix, and what is raised: see :func:`runnerkit.checkpoints.weights.load_weights`.
        """
        self.model = model if model is not None else self.model
        if self.model is None:
            self.model = call_hook(self.get_model, stage="infer")
        load_weights(self.model, source, which=which, strict=strict, prefix=prefix)
        return self

    def state_dict(self) -> StateDict:
        """Return what the runner keeps beside its components, for checkpoints; each rank may have another state.

        It may contain what a callback's state may, except for sharded tensors; every rank calls this, and rank zero
        saves the states of all if they differ.
        """
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a :meth:`state_dict`, this rank's if they differ; called unless it is empty, after all else is restored.

        With another number of processes, rank r takes the state of rank r modulo their former number.
        """

    # Logging methods for callbacks and `handle_batch`. Without a logger that supports the method, as on ranks other
    # than zero, the value is neither read nor copied. The value belongs to the current loader, or to the last one.

    def log_image(self, tag: str, image: Tensor | np.ndarray) -> None:
        """Log a tensor (C, H, W) or (H, W), or an array (H, W, C) or (H, W): see :mod:`runnerkit.loop.media`."""
        self.current_run.logs.log_media(self, "log_image", tag, media.image_of, image)

    def log_figure(self, tag: str, figure: Figure) -> None:
        """Log a Matplotlib figure as an image; the figure stays open."""
        self.current_run.logs.log_media(self, "log_image", tag, media.image_of_figure, figure)

    def log_text(self, tag: str, text: str) -> None:
        """Log text."""
        self.current_run.logs.log_media(self, "log_text", tag, media.text_of, text)

    def log_histogram(self, tag: str, values: Tensor | np.ndarray) -> None:
        """Log the distribution of `values`, of any shape: see :func:`runnerkit.loop.media.histogram_of`."""
        self.current_run.logs.log_media(self, "log_histogram", tag, media.histogram_of, values)

    def log_pr_curve(self, tag: str, *, scores: Tensor | np.ndarray, targets: Tensor | np.ndarray) -> None:
        """Log precision against recall of this process's scores in [0, 1] and targets in {0, 1}, of equal shape."""
        self.current_run.logs.log_media(self, "log_pr_curve", tag, media.pr_curve_of, scores, targets)

    def log_table(self, tag: str, table: Mapping[str, Any]) -> None:
        """Log a table of columns (N,) with strings or numbers, for example to ``tables/TAG.csv``."""
        self.current_run.logs.log_media(self, "log_table", tag, media.table_of, table)

    def log_artifact(self, tag: str, path_to_artifact: str | PathLike[str]) -> None:
        """Log a file or folder with its current content."""
        self.current_run.logs.log_media(self, "log_artifact", tag, media.path_of, path_to_artifact)

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Add hyperparameters to those of `hparams` during the run; existing names are replaced."""
        self.current_run.logs.more_hparams.update(hparams)
        if self.current_run.logs.is_open:
            self.current_run.logs.log_hparams(self)

    def run(self) -> Self:
        """Run all stages on the engine's processes; afterwards the calling process holds model and metrics.

        Under a launcher such as torchrun, every process must call. The loop is :class:`runnerkit.loop.run.Run`.
        """
        from runnerkit.engines.by_name import commanded_engine, named_engine  # `runnerkit run SCRIPT.py --engine ...`

        check_initialized(self)
        self._reset()
        run = self.current_run
        commanded = None if run.given_hooks else commanded_engine()
        self.engine = commanded or named_engine(run.hooks_of(self).get_engine())
        run.launch(self)
        return self

    def _repr_html_(self) -> str:
        """Show the state of the run, its last metrics and their curves in a notebook."""
        from runnerkit.history.run_html import html_of  # only notebooks need it

        run = self.current_run
        epochs = run.position.metrics_of_epochs(self)
        return html_of(type(self).__name__, run.describe(self), failure=run.failure, epochs=epochs)

    @property
    def _caller_callbacks(self) -> Mapping[str, ICallback]:
        """Callbacks of the calling process, which get the state of those that ran."""
        return {}

    @property
    @final
    def step(self) -> Step:
        """The current position of the run, for loggers."""
        return Step(stage=self.stage_key, loader=self.loader_key, epoch=self.epoch_step, batch=self.batch_step)

    @property
    @final
    def num_steps(self) -> int | None:
        """Optimizer steps of the current stage, known before its scheduler is made."""
        return self.current_run.stage.num_steps

    @property
    @final
    def is_resumed(self) -> bool:
        """True if the run continues with the contents of its logdir."""
        return self.current_run.resume_point.is_used

    @property
    @final
    def global_epoch_step(self) -> int:
        """Same as `epoch_step`."""
        return self.epoch_step

    @property
    @final
    def global_batch_step(self) -> int:
        """Same as `batch_step`."""
        return self.batch_step

    @property
    @final
    def global_sample_step(self) -> int:
        """Same as `sample_step`."""
        return self.sample_step
