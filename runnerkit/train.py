"""`Runner`: training, evaluation and prediction, each with one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from runnerkit import callbacks as parts  # each is imported when it is first used
from runnerkit.callback import (
    ICallback,
    ICheckpointCallback,
    innermost,
    optimizer_callbacks,
)
from runnerkit.checkpoints.folder import as_path, find_checkpoint
from runnerkit.engine import IEngine
from runnerkit.engines import choose_engine, get_available_engine
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.errors import UnknownKeyError
from runnerkit.logger import ILogger
from runnerkit.loggers import ConsoleLogger, CSVLogger, TensorboardLogger
from runnerkit.loop import checks, parameter_checks, run_logs
from runnerkit.loop.attributes import ProcessState
from runnerkit.metrics.first_non_finite import check_policy
from runnerkit.passes.engine_in_use import lent
from runnerkit.passes.evaluation import EvaluationHooks, evaluate
from runnerkit.passes.prediction import Prediction, stream, write
from runnerkit.resume.overrides import Source, check_source
from runnerkit.resume.resume_point import ResumePoint
from runnerkit.runner import IRunner
from runnerkit.steps.budget import Budget
from runnerkit.storage.remote.urls import as_url, local_path, url_of
from runnerkit.support.arguments import check_integers, check_numbers
from runnerkit.types import Batch, Criterion, Metrics, Model, Optimizers, Scheduler, as_dict, is_maker, like


class _Given(ProcessState):
    """Components passed to :meth:`Runner.train`."""

    is_shared_by_scratch_copies = True

    def __init__(
        self,
        loaders: Mapping[str, Any] | None = None,
        criterion: Criterion | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> None:
        self.loaders, self.criterion = loaders, criterion
        self.optimizer, self.scheduler = optimizer, scheduler
        self.callbacks: dict[str, ICallback] = {}
        self.loggers: dict[str, ILogger] = {}


class Runner(IRunner):
    """A runner whose components are passed to :meth:`train`; subclasses implement `handle_batch`.

    Args:
        model: may also be passed to `train`.
        engine: may also be passed to `train`.
    """

    def __init__(self, model: Model | None = None, engine: IEngine | None = None) -> None:
        super().__init__(model, engine)
        self._own_engine = engine
        self._given = _Given()
        self._budget = Budget(num_epochs=1)

    def train(
        self,
        *,
        loaders: Mapping[str, Any] | None = None,
        model: Model | None = None,
        criterion: Criterion | None = None,
        optimizer: Optimizers | Callable[[list[Any]], Any] | None = None,
        scheduler: Scheduler | Callable[[Any, int | None], Any] | None = None,
        engine: IEngine | None = None,
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
        precision: Literal["fp32", "fp16", "bf16", "fp8"] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        lr_scale: Literal["linear", "sqrt"] | None = None,
        logdir: str | Path | None = None,
        resume: str | Path | None = None,
        resume_options: Source = "checkpoint",
        valid_loader: str | None = None,
        valid_metric: str | None = None,
        minimize_valid_metric: bool | None = None,
        valid_every_steps: int | None = None,
        log_every: int = 10,
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
            engine: the engine to run on; or choose one with the flags `cpu`, `fp16`, `amp`, `apex`, `ddp`.
            callbacks: additional callbacks.
            loggers: in addition to the console and, with `logdir`, CSV and TensorBoard. The keys "console", "csv" and
                "tensorboard" replace these; None disables a logger.
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
            valid_loader, valid_metric, minimize_valid_metric: select the best checkpoint; given one of the first two,
                the other is "valid" or "loss". Without both, no best checkpoint is kept.
            valid_every_steps: also evaluate, and update the best checkpoint, each time this many optimizer steps
                passed.
            log_every: optimizer steps between two step logs, for loggers with ``log_batch_metrics``.
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
            load_best_on_end: load the best weights at the end.
            cpu: run on the CPU.
            fp16, amp: mixed precision: `fp16` in float16, `amp` in a dtype chosen by device, bf16 if it computes in it.
            precision: "bf16", "fp16", "fp32" or "fp8" (in linear layers), instead of a flag; an engine takes its own.
            apex: mixed precision with NVIDIA Apex.
            ddp: one process per GPU, or 2 processes without GPUs; under torchrun, the processes it started.
        Raises:
            ValueError, TypeError, KeyError, OSError: an argument is invalid; raised before training.
        """
        check_integers(self, log_every=log_every, accumulation_steps=accumulation_steps)
        limits: dict[str, Any] = {"num_epochs": num_epochs, "num_steps": num_steps, "num_samples": num_samples}
        check_integers(self, **{name: limit for name, limit in limits.items() if limit is not None})
        check_integers(self, or_none=True, valid_every_steps=valid_every_steps, epoch_steps=epoch_steps)
        check_numbers(self, above=0, or_none=True, max_hours=max_hours, gradient_clip=gradient_clip)
        if num_epochs is None and num_steps is None and num_samples is None:
            num_epochs = 1
        self._num_epochs, self._budget = num_epochs, Budget(num_epochs, num_steps, num_samples)
        check_policy(non_finite)
        check_source(resume_options)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        flags = {"cpu": cpu, "fp16": fp16, "amp": amp, "apex": apex, "ddp": ddp}
        self._given_engine = choose_engine(engine or self._own_engine, **flags, precision=precision)
        self.model = model if model is not None else self.model
        self.criterion, self.optimizer, self.scheduler = criterion, optimizer, scheduler
        self._given = _Given(loaders, criterion, optimizer, scheduler)
        self._seed, self._hparams = seed, dict(hparams or {})
        self.accumulation_steps, self.gradient_clip = accumulation_steps, gradient_clip
        self.valid_every_steps, self.log_every, self.non_finite = valid_every_steps, log_every, "keep"
        self.epoch_steps, self.loss_reduction = epoch_steps, loss_reduction
        if non_finite != "keep":
            self.non_finite = "raise"
        self.detect_anomaly, self.deterministic = detect_anomaly, deterministic
        self.resume_options = resume_options
        # Resolve now: the run may change its working directory.
        folder = local_path(logdir) if logdir is not None else None
        if resume == "auto" and folder is None:
            raise ValueError('resume="auto" resumes from logdir: pass logdir=')
        if resume is not None and resume != "auto":
            resume = as_path(resume)
            # Not a URL, whose checkpoint is large, and not under a launcher, where others may not see the files.
            if as_url(resume) is None and ProcessEnvironment.read() is None:
                find_checkpoint(resume)
        if folder is None and (profile or load_best_on_end or max_hours is not None):
            raise ValueError("profile=True, load_best_on_end=True and max_hours write files: pass logdir=")
        for name, value in {"load_best_on_end": load_best_on_end, "max_hours": max_hours}.items():
            if value and holds(_by_key(callbacks), ICheckpointCallback):
                raise ValueError(f"train({name}={value}) does not reach your CheckpointCallback: pass it there")
        self._resume_point = ResumePoint(
            folder if resume == "auto" else resume,
            may_be_missing=resume == "auto",
            continues_logs=resume == "auto" or (resume is not None and _is_inside(folder, resume)),
        )
        self._given.callbacks = {
            **_by_key(callbacks),
            **(_shown_by(_by_key(callbacks)) if verbose else {}),
            **_flag_callbacks(folder, timeit=timeit, check=check, overfit=overfit, profile=profile),
            **({"_non_finite": parts.NonFiniteCallback()} if non_finite == "locate" else {}),
            **({"_lr_scale": parts.LRScaleCallback(lr_scale)} if lr_scale is not None else {}),
            **({"_hang": parts.HangCallback(hang_timeout_s)} if hang_timeout_s is not None else {}),
        }
        if valid_loader is not None or valid_metric is not None:
            valid_loader, valid_metric = valid_loader or "valid", valid_metric or "loss"
            if minimize_valid_metric is None and valid_metric == "loss":
                minimize_valid_metric = True
        if folder is not None and not holds(self._given.callbacks, ICheckpointCallback):
            _check_best(valid_metric, minimize_valid_metric, load_best_on_end=load_best_on_end)
            self._given.callbacks["_checkpoint"] = parts.CheckpointCallback(
                folder,
                loader_key=valid_loader,
                metric_key=valid_metric,
                minimize=minimize_valid_metric,
                mode="runner",
                load_best_on_end=load_best_on_end,
                max_hours=max_hours,
            )
        own = [each.own_accumulation_steps for each in optimizer_callbacks(self._given.callbacks)]
        if accumulation_steps == 1 and own:
            self.accumulation_steps = min(own)
        self._given.loggers = _loggers(loggers, folder)
        self._check(loaders, valid_loader)
        return self.run()

    def _check(self, loaders: Mapping[str, Any] | None, valid_loader: str | None) -> None:
        """Check the arguments before any process is started."""
        if self.model is not None:
            parameter_checks.check_optimizer(self._given.optimizer, self.model, self._given.criterion)
        checks.check_scheduler(self._given.scheduler, self._given.optimizer)
        if any(map(is_maker, (*as_dict(self._given.optimizer).values(), *as_dict(self._given.scheduler).values()))):
            from runnerkit.steps.makers import check_makers  # late, as few runs need it

            check_makers(self._given.optimizer, self._given.scheduler)
        if loaders is not None:
            checks.check_callbacks(self._given.callbacks, checks.check_loaders(loaders))
            trains_nothing = checks.check_trains(loaders, has_optimizer=self._given.optimizer is not None)
            if trains_nothing is not None:
                raise ValueError(trains_nothing)
            if valid_loader is not None:
                checks.check_loader_key(valid_loader, loaders, reader="valid_loader")

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
        given: dict[str, Any] = as_dict(self._given.optimizer)
        models = as_dict(model)

        def parameters(key: str) -> list[Any]:
            own = [models[key]] if key in models else models.values()  # one optimizer may train several models
            return [parameter for each in own for parameter in each.parameters()]

        made = {key: each(parameters(key)) if is_maker(each) else each for key, each in given.items()}
        if any(map(is_maker, given.values())):
            from runnerkit.steps.makers import check_made  # late, as few runs need it

            check_made(made, what="optimizer")
        optimizers: Optimizers | None = like(self._given.optimizer, made)
        return optimizers

    def get_scheduler(self, stage: str, optimizer: Any) -> Scheduler | None:
        given = as_dict(self._given.scheduler)
        if not any(map(is_maker, given.values())):
            return self._given.scheduler
        optimizers = as_dict(optimizer)
        missing = sorted(given.keys() - optimizers.keys())
        if missing:
            raise UnknownKeyError(
                f"scheduler {missing[0]!r} is a function of an optimizer; there are {sorted(optimizers)}"
            )
        made = {key: each(optimizers[key], self.num_steps) if is_maker(each) else each for key, each in given.items()}
        from runnerkit.steps.makers import check_made  # late, as few runs need it

        check_made(made, what="scheduler")
        return like(self._given.scheduler, made)

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        return dict(self._given.callbacks)

    def predict_batch(self, batch: Batch, **kwargs: Any) -> Any:
        """Return the predictions for a batch that is on the device; implement it for inference."""
        raise NotImplementedError(
            f"predict_loader() calls {type(self).__name__}.predict_batch(batch, **kwargs): implement it"
        )

    def predict_loader(
        self,
        *,
        loader: Iterable[Any],
        model: Model | None = None,
        engine: IEngine | None = None,
        seed: int = 42,
        resume: str | Path | None = None,
        cpu: bool = False,
        fp16: bool = False,
        amp: bool = False,
        apex: bool = False,
        ddp: bool = False,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Yield the result of `predict_batch` for each batch, in the loader's order, each sample once.

        Nothing runs before the first result is requested, at most a few batches are computed ahead of the caller, and
        closing the generator ends its processes. Under a launcher, every process must call this and take the same
        number of results; each gets all of them.

        Args:
            loader: the whole loader, which is sharded among processes. One process accepts any iterable of batches. A
                loader that shuffles, or a custom sampler whose drop_last=True cannot be undone, causes a warning.
            engine: the engine to run on, or choose one with the flags; by default the runner's engine, else this
                process. Results of several processes are on the CPU, in batches larger by the number of processes.
            resume: checkpoint or logdir to load the weights from. Within a run, `model` must be passed too.
            kwargs: passed to `predict_batch`.
        Raises:
            ValueError, TypeError, FileNotFoundError: an argument is invalid.
            Exception: the first exception that any process raised.
        """
        engine = choose_engine(engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp)
        runner = self._for_inference(model, engine, loads=resume is not None)
        as_rows = runner.engine.is_ddp
        return stream(runner, Prediction(loader, seed=seed, resume=resume, arguments=kwargs, as_rows=as_rows))

    def predict_to(
        self,
        path: str | Path,
        *,
        loader: Iterable[Any],
        model: Model | None = None,
        engine: IEngine | None = None,
        seed: int = 42,
        resume: str | Path | None = None,
        cpu: bool = False,
        fp16: bool = False,
        amp: bool = False,
        apex: bool = False,
        ddp: bool = False,
        **kwargs: Any,
    ) -> Path:
        """Write the results of `predict_batch` to a file, one row per sample, in the loader's order; return its path.

        Batches are written as they are computed, so memory does not grow with the loader. The file is written
        atomically: after a failure it is unchanged. Under a launcher every process must call this; rank zero writes,
        and the file exists when any process returns.

        Args:
            path: .parquet and .csv have one column per tensor, .pt has one structure of concatenated tensors. May be a
                URL.
            loader, model, engine, seed, resume, cpu, fp16, amp, apex, ddp, kwargs: see :meth:`predict_loader`.
        Raises:
            ImportError: .parquet without pyarrow.
            ValueError: another suffix; predictions that are not rows or differ in structure; an empty loader.
        """
        engine = choose_engine(engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp)
        runner = self._for_inference(model, engine, loads=resume is not None)
        prediction = Prediction(loader, seed=seed, resume=resume, arguments=kwargs, as_rows=True)
        return write(runner, prediction, Path(as_url(path) or path))

    def _for_inference(self, model: Model | None, engine: IEngine | None, *, loads: bool) -> Self:
        """Return the runner that predicts: a copy within a run, whose model and engine stay, or for other processes."""
        own = model is None or model is self.model
        with self._stage.evaluation_weights.evaluating():  # for a copy of the model
            model, engine = lent(self, model, engine, otherwise=lambda: self._own_engine or get_available_engine())
        is_running = self._stage.training_model is not None or engine.in_use
        if loads and own and is_running:
            raise ValueError(
                "resume= within a run would replace the weights in training: pass a model of its own, such as "
                "model=copy.deepcopy(runner.engine.unwrap(runner.model))"
            )
        runner = copy.copy(self) if is_running else self
        runner.model, runner.engine = model if model is not None else self.model, engine
        if not engine.is_ddp or engine.in_use:
            return runner
        worker = copy.copy(runner)
        worker.criterion = worker.optimizer = worker.scheduler = None
        worker._given, worker._given_engine, worker._own_engine = _Given(), None, None
        worker._resume_point = ResumePoint()
        worker._reset()
        return worker

    @property
    def _caller_callbacks(self) -> dict[str, ICallback]:
        return self._given.callbacks

    def evaluate_loader(
        self,
        loader: Iterable[Any],
        callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None = None,
        model: Model | None = None,
        engine: IEngine | None = None,
        seed: int = 42,
        verbose: bool = False,
        *,
        criterion: Criterion | None = None,
        cpu: bool = False,
        fp16: bool = False,
        amp: bool = False,
        apex: bool = False,
        ddp: bool = False,
    ) -> Metrics:
        """Evaluate on a loader with any engine and return its metrics; nothing is trained or written.

        Args:
            loader: one loader, not a dict.
            callbacks: metrics to compute in addition to the loss; by default the runner's callbacks, except those that
                train or save.
            criterion: the loss, or a dict of several; by default that of :meth:`train`. Without either, no loss is
                computed.
            engine: the engine to run on, or choose one with the flags; by default that of the training.
        Returns:
            {metric: value}; empty, with a warning, if no metric is computed.
        """
        given = None if callbacks is None else _by_key(callbacks)
        bar: dict[str, ICallback] = {"_tqdm": parts.TqdmCallback()} if verbose else {}
        chosen = choose_engine(engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp)
        hooks = EvaluationHooks(
            self, loader, model=model, criterion=criterion, engine=chosen, callbacks=given, shown_by=bar,
            trained_with=self._given.callbacks,
        )  # fmt: skip
        with hooks.entered():
            self.valid_every_steps, self._seed, self._resume_point = None, seed, ResumePoint()
            self._given_hooks = hooks
            return evaluate(self)


def _check_best(valid_metric: str | None, minimize: bool | None, *, load_best_on_end: bool) -> None:
    """Raise the errors of CheckpointCallback, but with the argument names of `train`."""
    if load_best_on_end and valid_metric is None:
        raise ValueError("load_best_on_end=True needs valid_loader and valid_metric to select the best checkpoint")
    if valid_metric is not None and minimize is None:
        raise ValueError(
            f"pass minimize_valid_metric=True if a smaller {valid_metric!r} is better, else minimize_valid_metric=False"
        )


def _by_key(callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None) -> dict[str, ICallback]:
    if isinstance(callbacks, Mapping):
        return dict(callbacks)
    if isinstance(callbacks, ICallback):
        raise TypeError(f"callbacks must be a list or a dict, got {type(callbacks).__name__}; put it in a list")
    return {f"{position:02d}_{type(each).__name__}": each for position, each in enumerate(callbacks or ())}


def _shown_by(callbacks: Mapping[str, ICallback]) -> dict[str, ICallback]:
    shown: dict[str, ICallback] = {
        "_model_summary": parts.ModelSummaryCallback(),
        "_run_summary": parts.RunSummaryCallback(),
    }
    if not holds(callbacks, parts.RichDashboardCallback):
        shown["_tqdm"] = parts.TqdmCallback()
    return {key: each for key, each in shown.items() if not holds(callbacks, type(each))}


def _flag_callbacks(
    folder: Path | None, *, timeit: bool, check: bool, overfit: bool, profile: bool
) -> dict[str, ICallback]:
    callbacks: dict[str, ICallback] = {}
    if timeit:
        callbacks["_timer"] = parts.TimerCallback()
    if check:
        callbacks |= {"_check": parts.CheckRunCallback(), "_verify_ranks": parts.VerifyRanksCallback()}
    if overfit:
        callbacks["_overfit"] = parts.BatchOverfitCallback()
    if profile:
        assert folder is not None
        callbacks["_profiler"] = parts.ProfilerCallback(folder / "trace.json")
    return callbacks


def holds(callbacks: Mapping[str, ICallback], kind: type[ICallback]) -> bool:
    """Check if `callbacks` contains a callback of `kind`, wrapped or not."""
    return any(isinstance(innermost(each), kind) for each in callbacks.values())


def _loggers(given: Mapping[str, ILogger | None] | None, folder: Path | None) -> dict[str, ILogger]:
    loggers: dict[str, ILogger | None] = {"console": ConsoleLogger()}
    if folder is not None:
        loggers |= {"csv": CSVLogger(folder), "tensorboard": TensorboardLogger(folder)}
    if given is not None:
        run_logs.check_loggers(given)
    loggers |= given or {}
    chosen = {key: each for key, each in loggers.items() if each is not None}
    run_logs.check_loggers(chosen)  # passed and default loggers together
    return chosen


def _is_inside(folder: Path | None, path: str | Path) -> bool:
    if folder is None:
        return False
    if (url := as_url(path)) is not None:
        return f"{url}/".startswith(f"{url_of(folder)}/")
    return Path(path).resolve().is_relative_to(folder.resolve())
