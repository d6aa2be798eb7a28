"""`Runner`: training, evaluation and prediction, each with one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from runnerkit import callbacks as parts  # each is imported when it is first used
from runnerkit.callback import ICallback, IOptimizerCallback
from runnerkit.engine import IEngine
from runnerkit.engines import choose_engine, get_available_engine
from runnerkit.engines.by_name import named_engine
from runnerkit.logger import ILogger
from runnerkit.loop import checks
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.component_checks import check_components
from runnerkit.loop.own_names import check_initialized
from runnerkit.loop.run import Run
from runnerkit.monitor import Mode
from runnerkit.passes.engine_in_use import borrow_engine
from runnerkit.passes.evaluation import EvaluationHooks, WeightsCallback
from runnerkit.passes.prediction import Prediction, as_frame
from runnerkit.precision_names import PrecisionName
from runnerkit.resume.overrides import Source
from runnerkit.runner import IRunner
from runnerkit.steps.budget import Budget
from runnerkit.steps.makers import make_optimizers, make_schedulers
from runnerkit.steps.schedulers import Interval, unstepped
from runnerkit.storage.remote.urls import as_url
from runnerkit.support.arguments import check_paths, check_seed, explain_calls
from runnerkit.support.deprecation import accepts_old_names
from runnerkit.train_options import ELSEWHERE, OLD_MONITOR, TrainOptions, callbacks_by_key, holds
from runnerkit.types import Batch, Criterion, Metrics, Model, Optimizers, Scheduler, as_dict, is_maker

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class _Given(ProcessState):
    """Components passed to :meth:`Runner.train`, and the unit of its schedule."""

    loaders: Mapping[str, Any] | None = None
    criterion: Criterion | None = None
    optimizer: Any = None
    scheduler: Any = None
    callbacks: dict[str, ICallback] = field(default_factory=dict)
    loggers: dict[str, ILogger] = field(default_factory=dict)
    scheduler_interval: Interval | None = None

    is_shared_by_scratch_copies = True


class Runner(IRunner):
    """A runner whose components are passed to :meth:`train`; subclasses implement `handle_batch`.

    Args:
        model: may also be passed to `train`.
        engine: an engine or its name, such as "ddp"; may also be passed to `train`.
    """

    def __init__(self, model: Model | None = None, engine: IEngine | str | None = None) -> None:
        super().__init__(model, engine)
        self._own_engine = engine  # a name may be followed by a precision
        self._given = _Given()
        self._budget = Budget(num_epochs=1)

    @accepts_old_names(OLD_MONITOR)
    @explain_calls(**ELSEWHERE)
    def train(
        self,
        *,
        loaders: Mapping[str, Any] | None = None,
        model: Model | None = None,
        criterion: Criterion | None = None,
        optimizer: Optimizers | Callable[[list[Any]], Any] | None = None,
        scheduler: Scheduler | Callable[[Any, int | None], Any] | None = None,
        scheduler_interval: Interval | None = None,
        engine: IEngine | str | None = None,
        callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None = None,
        loggers: Mapping[str, ILogger | None] | None = None,
        seed: int = 42,
        hparams: Mapping[str, Any] | None = None,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        num_samples: int | None = None,
        max_hours: float | None = None,
        accumulation_steps: int = 1,
        gradient_clip: float | None = None,
        epoch_steps: int | None = None,
        precision: PrecisionName | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        lr_scale: Literal["linear", "sqrt"] | None = None,
        logdir: str | Path | None = None,
        resume: str | Path | None = None,
        resume_options: Source = "checkpoint",
        monitor: str | None = None,
        mode: Mode | None = None,
        valid_every_steps: int | None = None,
        log_every: int | None = None,
        non_finite: Literal["raise", "locate", "keep"] = "keep",
        detect_anomaly: bool = False,
        deterministic: bool = False,
        verbose: bool = False,
        timeit: bool = False,
        hang_timeout_s: float | None = None,
        check: bool = False,
        overfit: bool = False,
        profile: bool = False,
        load_best_on_end: bool = False,
        cpu: bool = False,
        fp16: bool = False,
        amp: bool = False,
        apex: bool = False,
        ddp: bool = False,
    ) -> Self:
        """Train; afterwards `model` and the metrics attributes of the calling process hold the results.

        Args:
            loaders: {"train": ..., "valid": ...}; None if `get_loaders` is overridden.
            model, criterion, optimizer, scheduler: one each, or dicts of several. `optimizer` may be a function of a
                list of the model's parameters, `scheduler` one of the optimizer and the number of steps (None if a
                limit does not tell, see docs/loop.md); both are called in the processes that train.
            scheduler_interval: the unit in which schedulers are stepped: "step", after each optimizer step, "epoch", or
                "manual" if your code steps them. None is the unit of the scheduler: a function's is the step, since it
                is told their number, as are those of OneCycleLR and CyclicLR; other objects, and schedulers that need a
                metric, are stepped after each epoch (docs/schedules.md).
            engine: the engine to run on, or its name: "cpu", "gpu", "dp", "ddp", "fsdp", "horovod" or that of a class.
                Or choose one with the flags `cpu`, `fp16`, `amp`, `apex`, `ddp`.
            callbacks: additional callbacks.
            loggers: in addition to the console and, with `logdir`, CSV and, if it is installed, TensorBoard. The keys
                "console", "csv" and "tensorboard" replace these; None disables a logger.
            seed: for all random numbers.
            hparams: hyperparameters to log.
            num_epochs, num_steps, num_samples: length of the training in epochs, in optimizer steps, in training
                samples of all processes; the first limit ends it. Without any, it is one epoch. A resumed run counts
                what was done.
            max_hours: save a checkpoint and exit with code 75 after this many hours of this process; needs `logdir`.
            accumulation_steps: batches whose gradients are averaged into one optimizer step.
            gradient_clip: largest norm of the gradients of a step, those of all optimizers together.
            epoch_steps: training batches per process in an epoch, which continues where the previous one ended; None is
                a pass over the data. See EpochStepsLoaderWrapper.
            loss_reduction: whether a loss is the "mean" over its batch or the "sum": processes and accumulated batches
                average means, weighted by their samples, and add up sums.
            lr_scale: multiply the learning rate by the number of processes, or by its square root; None keeps it. For a
                warm-up pass an LRScaleCallback instead.
            logdir: folder of logs and checkpoints, or a URL such as "s3://bucket/run"; without it no files are written.
            resume: a checkpoint, a logdir (its newest intact checkpoint), or "auto" (that of `logdir`, if it exists).
            resume_options: source of the optimizer's options (learning rate, weight decay, ...) and the schedule of a
                resumed run: the "checkpoint", or the "arguments", whose schedule is stepped to the same position.
            monitor: the metric that selects the best checkpoint, such as "valid/accuracy"; None keeps no best one.
            mode: whether smaller ("min") or larger ("max") values of it are better; may be left out for a loss.
            valid_every_steps: also evaluate, and update the best checkpoint, each time this many optimizer steps
                passed.
            log_every: optimizer steps between two step logs, for loggers with ``log_batch_metrics``; None is 10. Given
                this, `num_steps` or `valid_every_steps`, the default loggers take them: CSV and TensorBoard have curves
                of steps, and the console lines with the throughput (docs/logging.md).
            non_finite: "raise" raises at the end of a loader if one of its ``batch_metrics`` was NaN or infinite;
                "locate" raises within the batch and names the module, see NonFiniteCallback; "keep" ignores it.
            detect_anomaly: make autograd raise when a gradient becomes NaN, and print the traceback of the operation's
                forward pass; slow.
            deterministic: make torch use deterministic algorithms only; an operation without one raises, and known
                sources of nondeterminism that torch does not detect cause a warning.
            verbose: show progress bars, unless a RichDashboardCallback is among the callbacks; print the model's layers
                at the first batch, and the metrics at the end.
            timeit: log how long batches take.
            hang_timeout_s: print the stacks of all processes and exit if no batch ends for this many seconds; see
                HangCallback.
            check: run 3 epochs of 3 batches, and compare samples, weights and metrics between the processes; see
                VerifyRanksCallback.
            overfit: repeat one batch of each loader.
            profile: trace a few steps to `logdir`/trace.json.
            load_best_on_end: load the best weights at the end, also those that a CheckpointCallback of yours selects.
            cpu: run on the CPU.
            fp16, amp: mixed precision: `fp16` in float16, `amp` in a dtype chosen by device, bf16 if it computes in it.
            precision: "bf16", "fp16", "fp32", "fp8" (in linear layers) or "amp", instead of a flag; also beside an
                engine's name, while an engine takes its own.
            apex: mixed precision with NVIDIA Apex.
            ddp: one process per GPU, or 2 processes without GPUs; under torchrun, the processes it started.
        Raises:
            ValueError, TypeError, KeyError, OSError: an argument is invalid; raised before training.
        """
        check_initialized(self)
        model, engine = model if model is not None else self.model, self._own_engine if engine is None else engine
        arguments = locals().copy()
        del arguments["self"]
        options = TrainOptions(**arguments)  # raises before this runner changes
        if type(self).num_epochs is not Runner.num_epochs and num_epochs not in (None, self.num_epochs):
            raise ValueError(
                f"train(num_epochs={num_epochs}) contradicts {type(self).__name__}.num_epochs, {self.num_epochs}: "
                "leave one of them out"
            )
        for saver in options.savers:
            saver.load_best_of_run = load_best_on_end  # of this call: the next one states its own
        self._given = _Given(
            loaders, criterion, optimizer, scheduler, options.all_callbacks, options.all_loggers, scheduler_interval
        )
        self._given_engine = options.chosen_engine
        self._current_run = Run(resume_point=options.resume_point, monitor=options.selects)
        self._num_epochs, self._budget = options.budget.num_epochs, options.budget
        self._seed, self._hparams = seed, dict(hparams or {})
        self.model, self.criterion, self.optimizer, self.scheduler = model, criterion, optimizer, scheduler
        self.accumulation_steps, self.gradient_clip = options.batches_per_step, gradient_clip
        self.epoch_steps, self.loss_reduction = epoch_steps, loss_reduction
        self.valid_every_steps, self.log_every = valid_every_steps, 10 if log_every is None else log_every
        self.non_finite = "keep" if non_finite == "keep" else "raise"
        self.detect_anomaly, self.deterministic = detect_anomaly, deterministic
        self.resume_options = resume_options
        return self.run()

    def run(self) -> Self:
        """Run as :meth:`.IRunner.run` does; after :meth:`train`, once more with its arguments."""
        own_interval = self.scheduler_interval
        self.scheduler_interval = self._given.scheduler_interval or own_interval
        try:
            return super().run()
        finally:
            self.scheduler_interval = own_interval  # the next `train` states its own

    def get_loggers(self) -> dict[str, ILogger]:
        return dict(self._given.loggers)

    def get_stage_len(self, stage: str) -> int | Budget:
        return replace(self._budget, num_epochs=self.num_epochs)  # a property, if a subclass overrides it

    def get_loaders(self, stage: str) -> dict[str, Any]:
        if self._given.loaders is None:
            raise ValueError("no loaders: pass loaders={'train': ..., 'valid': ...} or override get_loaders(stage)")
        return dict(checks.check_loaders(self._given.loaders))

    def get_criterion(self, stage: str) -> Criterion | None:
        return self._given.criterion

    def get_optimizer(self, stage: str, model: Any) -> Optimizers | None:
        return make_optimizers(self._given.optimizer, model)

    def get_scheduler(self, stage: str, optimizer: Any) -> Scheduler | None:
        given, opened = self._given.scheduler, self.current_run.stage
        opened.made_schedulers = frozenset(key for key, each in as_dict(given).items() if is_maker(each))
        opened.schedule_counts_steps = bool(opened.made_schedulers) or given is None  # a subclass may make one itself
        return make_schedulers(given, optimizer, self.num_steps)

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        callbacks = dict(self._given.callbacks)
        # Otherwise handle_batch makes the steps, and may step the scheduler too: the stage raises.
        if self.steps_itself or self.scheduler_interval is not None or holds(callbacks, IOptimizerCallback):
            callbacks |= self._scheduler_callbacks(callbacks)
        return callbacks

    def _scheduler_callbacks(self, callbacks: Mapping[str, ICallback]) -> dict[str, ICallback]:
        """Return a callback for each scheduler that none of `callbacks` steps, unless the user's code does."""
        keys = [] if self.scheduler_interval == "manual" else unstepped(self.scheduler, callbacks)
        return {f"_scheduler_{key}" if key else "_scheduler": parts.SchedulerCallback(key or None) for key in keys}

    def predict_batch(self, batch: Batch, **kwargs: Any) -> Any:
        """Return the predictions for a batch that is on the device; implement it for inference."""
        raise NotImplementedError(
            f"predict_loader() calls {type(self).__name__}.predict_batch(batch, **kwargs): implement it"
        )

    @explain_calls()
    def predict_loader(
        self, loader: Iterable[Any], *, model: Model | None = None, engine: IEngine | str | None = None, seed: int = 42,
        resume: str | Path | None = None, precision: PrecisionName | None = None, cpu: bool = False, fp16: bool = False,
        amp: bool = False, apex: bool = False, ddp: bool = False, **kwargs: Any,
    ) -> Iterator[Any]:  # fmt: skip
        """Yield the result of `predict_batch` for each batch, in the loader's order, each sample once.

        Nothing runs before the first result is requested, at most a few batches are computed ahead of the caller, and
        closing the generator ends its processes. Under a launcher, every process must call this and take the same
        number of results; each gets all of them.

        Args:
            loader: the whole loader, which is sharded among processes. One process accepts any iterable of batches. A
                loader that shuffles, or a custom sampler whose drop_last=True cannot be undone, causes a warning.
            engine, precision: the engine to run on, or its name, or choose one with the flags; by default the runner's,
                else this process. Results of several processes are on the CPU, in batches larger by their number.
            resume: checkpoint or logdir to load the weights from. Within a run, `model` must be passed too.
            kwargs: passed to `predict_batch`.
        Raises:
            ValueError, TypeError, FileNotFoundError: an argument is invalid.
            Exception: the first exception that any process raised.
        """
        check_seed("predict_loader", seed)
        chosen = choose_engine(engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp, precision=precision)
        runner = self._for_inference(model, chosen, loads=resume is not None)
        as_rows = runner.engine.is_ddp
        return Prediction(loader, seed=seed, resume=resume, arguments=kwargs, as_rows=as_rows).stream(runner)

    @explain_calls()
    def predict_to(
        self, path: str | Path, *, loader: Iterable[Any], model: Model | None = None,
        engine: IEngine | str | None = None, seed: int = 42, resume: str | Path | None = None,
        precision: PrecisionName | None = None, cpu: bool = False, fp16: bool = False, amp: bool = False,
        apex: bool = False, ddp: bool = False, **kwargs: Any,
    ) -> Path:  # fmt: skip
        """Write the results of `predict_batch` to a file, one row per sample, in the loader's order; return its path.

        Batches are written as they are computed, so memory does not grow with the loader. The file is written
        atomically: after a failure it is unchanged. Under a launcher every process must call this; rank zero writes,
        and the file exists when any process returns.

        Args:
            path: a .parquet file with a column per tensor, or a .csv file with a column per number. May be a URL.
            loader, model, engine, seed, resume, precision, cpu, fp16, amp, apex, ddp, kwargs: see
                :meth:`predict_loader`.
        Raises:
            ImportError: .parquet without pyarrow.
            ValueError: another suffix; predictions that are not rows or differ in structure; an empty loader.
        """
        check_seed("predict_to", seed)
        check_paths("predict_to", path=path)
        chosen = choose_engine(engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp, precision=precision)
        runner = self._for_inference(model, chosen, loads=resume is not None)
        prediction = Prediction(loader, seed=seed, resume=resume, arguments=kwargs, as_rows=True)
        return prediction.write(runner, Path(as_url(path) or path))

    def predict_frame(self, loader: Iterable[Any], *, index: Any = None, **kwargs: Any) -> pd.DataFrame:
        """Return the results of `predict_batch` as a pandas frame, one row per sample, in the loader's order.

        Args:
            index: labels of the rows, such as the index of the frame that the loader reads; by default 0, 1, ...
            loader, kwargs: see :meth:`predict_loader`. The columns are those of a .csv file of :meth:`predict_to`.
        Raises:
            ValueError: an `index` of another length, or for a loader that shuffles; predictions that are not rows.
        """
        return as_frame(self.predict_loader(loader, **kwargs), loader, index=index)

    def _for_inference(self, model: Model | None, engine: IEngine | None, *, loads: bool) -> Self:
        """Return the runner that predicts: a copy within a run, whose model and engine stay, or for other processes."""
        check_initialized(self)
        check_components(model=model)
        stage = self.current_run.stage
        with stage.evaluation_weights.evaluating():  # for a copy of the model
            model, engine = borrow_engine(
                model, engine, trained=stage.training_model, trained_by=self.engine,
                otherwise=lambda: named_engine(self._own_engine or get_available_engine()),
                replaces_weights=loads and (model is None or model is self.model),
            )  # fmt: skip
        is_running = stage.training_model is not None or engine.in_use
        runner = copy.copy(self) if is_running else self
        runner.model, runner.engine = model if model is not None else self.model, engine
        if not engine.is_ddp or engine.in_use:
            return runner
        worker = copy.copy(runner)
        worker.criterion = worker.optimizer = worker.scheduler = None
        worker._given, worker._given_engine, worker._own_engine = _Given(), None, None
        worker._current_run = Run()
        worker._reset()
        return worker

    @property
    def _caller_callbacks(self) -> dict[str, ICallback]:
        return self._given.callbacks

    @accepts_old_names(by_position=("callbacks", "model", "engine", "seed", "verbose"))
    @explain_calls()
    def evaluate_loader(
        self, loader: Iterable[Any], *, model: Model | None = None, engine: IEngine | str | None = None, seed: int = 42,
        callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None = None, criterion: Criterion | None = None,
        resume: str | Path | None = None, verbose: bool = False, precision: PrecisionName | None = None,
        cpu: bool = False, fp16: bool = False, amp: bool = False, apex: bool = False, ddp: bool = False,
    ) -> Metrics:  # fmt: skip
        """Evaluate on a loader with any engine and return its metrics; nothing is trained or written.

        Args:
            loader: one loader, not a dict.
            callbacks: metrics to compute in addition to the loss; by default the runner's callbacks, except those that
                train or save.
            criterion: the loss, or a dict of several; by default that of :meth:`train`. Without either, no loss is
                computed.
            resume: checkpoint, logdir (its last checkpoint) or file of weights to load into the model. Within a run,
                `model` must be passed too.
            engine, precision: the engine to run on, or its name, or choose one with the flags; by default that of the
                training.
        Returns:
            {metric: value}; empty, with a warning, if no metric is computed.
        """
        check_initialized(self)
        check_seed("evaluate_loader", seed)
        check_components(model=model, criterion=criterion)
        given = None if callbacks is None else callbacks_by_key(callbacks)
        own: dict[str, ICallback] = {"_weights": WeightsCallback(resume)} if resume is not None else {}
        own |= {"_tqdm": parts.TqdmCallback()} if verbose else {}
        chosen = choose_engine(engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp, precision=precision)
        hooks = EvaluationHooks(
            self, loader, model=model, criterion=criterion, engine=chosen, callbacks=given, own_callbacks=own,
            trained_with=self._given.callbacks,
        )  # fmt: skip
        with hooks.entered(otherwise=lambda: named_engine(self.get_engine())):
            self.valid_every_steps, self._seed, self._current_run = None, seed, Run(hooks)
            return hooks.evaluate()
