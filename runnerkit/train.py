"""`Runner`: a whole run by the arguments of one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from runnerkit import before_training, run_logs
from runnerkit.callback import (
    ICallback,
    ICheckpointCallback,
    innermost,
)
from runnerkit.callbacks import (
    BatchOverfitCallback,
    CheckpointCallback,
    CheckRunCallback,
    HangCallback,
    LRScaleCallback,
    NonFiniteCallback,
    ProfilerCallback,
    TimerCallback,
    TqdmCallback,
)
from runnerkit.engine import IEngine
from runnerkit.engines import choose_engine, get_available_engine
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.evaluation import evaluate
from runnerkit.logger import ILogger
from runnerkit.loggers import ConsoleLogger, CSVLogger, TensorboardLogger
from runnerkit.non_finite import check_policy
from runnerkit.prediction import Prediction, stream, write
from runnerkit.resume_options import Source, check_source
from runnerkit.runner import IRunner
from runnerkit.storage.checkpoint import as_path, find_checkpoint
from runnerkit.types import Batch, Criterion, Metrics, Model, Optimizers, Scheduler


class Runner(IRunner):
    """A runner whose components are passed to :meth:`train`; the user writes `handle_batch`.

    Args:
        model: may also be given to `train`.
        engine: may also be given to `train`.
    """

    def __init__(self, model: Model | None = None, engine: IEngine | None = None) -> None:
        super().__init__(model, engine)
        self._own_engine = engine
        self._loaders: Mapping[str, Any] | None = None
        self._given_criterion: Criterion | None = None
        self._given_optimizer: Optimizers | None = None
        self._given_scheduler: Scheduler | None = None
        self._given_callbacks: dict[str, ICallback] = {}
        self._given_loggers: dict[str, ILogger] | None = {}
        self._num_epochs = 1

    def train(
        self,
        *,
        loaders: Mapping[str, Any] | None = None,
        model: Model | None = None,
        criterion: Criterion | None = None,
        optimizer: Optimizers | None = None,
        scheduler: Scheduler | None = None,
        engine: IEngine | None = None,
        callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None = None,
        loggers: Mapping[str, ILogger | None] | None = None,
        seed: int = 42,
        hparams: Mapping[str, Any] | None = None,
        num_epochs: int = 1,
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
        """Train; afterwards `model` is trained and the metrics attributes are filled, in the calling process.

        Args:
            loaders: {"train": ..., "valid": ...}; None if `get_loaders` is overridden.
            model, criterion, optimizer, scheduler: one each, or dicts of several.
            engine: where to run; or choose by the flags `cpu`, `fp16`, `amp`, `apex`, `ddp`.
            callbacks: what else happens around batches.
            loggers: in addition to the console and, with `logdir`, CSV and TensorBoard; replaced by key
                ("console", "csv", "tensorboard"), left out by None.
            seed: of everything random.
            hparams: written beside the logs.
            num_epochs: passes over the loaders.
            lr_scale: multiply the learning rate by the number of processes, or by its square root; None leaves it. For
                a warmup pass LRScaleCallback among the callbacks.
            logdir: folder of logs and checkpoints; without it nothing is written.
            resume: a checkpoint, a logdir (its newest good checkpoint), or "auto" (that of `logdir`, if there is one).
            resume_options: where a resumed run takes the optimizer's options (learning rate, weight decay, ...) and its
                schedule from: the "checkpoint", or the "arguments", whose schedule is stepped to the same place.
            valid_loader, valid_metric, minimize_valid_metric: what makes a checkpoint the best one; given one of the
                first two, the other is "valid" or "loss". Given neither, no best checkpoint is kept.
            valid_every_steps: evaluate, and look for the best checkpoint, also every so many training steps.
            log_every: training steps from one step log to the next, for loggers with ``log_batch_metrics``.
            non_finite: "raise" ends a loader with an error if one of its ``batch_metrics`` was NaN or infinite;
                "locate" ends the batch and names the module, see NonFiniteCallback; "keep" lets it be.
            detect_anomaly: let autograd raise where a gradient becomes NaN, and print the traceback of the operation's
                forward pass; slow.
            deterministic: let torch take only algorithms that give the same bits each time; an operation that has none
                raises, and what torch does not know of is warned about.
            verbose: show progress bars, unless a RichDashboardCallback is among the callbacks; tell the model's layers
                with the first batch, and the metrics at the end.
            timeit: log how long batches take.
            hang_timeout_s: end with the stacks of all processes if no batch ends for so many seconds; see HangCallback.
            check: 3 epochs of 3 batches, in which samples, weights and metrics of the processes are held against each
                other; see VerifyRanksCallback.
            overfit: the same batch of each loader again and again.
            profile: trace a few steps to `logdir`/trace.json.
            load_best_on_end: end with the best weights.
            cpu: use no GPU.
            fp16, amp: mixed precision; `amp` in the type that suits the device, `fp16` in float16.
            apex: mixed precision by NVIDIA Apex.
            ddp: one process a GPU, or 2 processes without GPUs; under torchrun the processes there are.
        Raises:
            ValueError, TypeError, KeyError, OSError: bad input, named, before training.
        """
        before_training.check_count("num_epochs", num_epochs)
        if valid_every_steps is not None:
            before_training.check_count("valid_every_steps", valid_every_steps, hint="; None evaluates once an epoch")
        before_training.check_count("log_every", log_every)
        check_policy(non_finite)
        check_source(resume_options)
        flags = {"cpu": cpu, "fp16": fp16, "amp": amp, "apex": apex, "ddp": ddp}
        self._given_engine = choose_engine(engine or self._own_engine, **flags)
        self._loaders = loaders
        self.model = model if model is not None else self.model
        self.criterion, self.optimizer, self.scheduler = criterion, optimizer, scheduler
        self._given_criterion, self._given_optimizer, self._given_scheduler = criterion, optimizer, scheduler
        self._seed, self._hparams, self._num_epochs = seed, dict(hparams or {}), num_epochs
        self.valid_every_steps, self.log_every, self.non_finite = valid_every_steps, log_every, "keep"
        if non_finite != "keep":
            self.non_finite = "raise"
        self.detect_anomaly, self.deterministic = detect_anomaly, deterministic
        self.resume_options = resume_options
        # Relative to where the call is made: the run may change its working directory.
        folder = Path(logdir).absolute() if logdir is not None else None
        if resume == "auto" and folder is None:
            raise ValueError('resume="auto" looks in logdir: pass logdir=')
        if resume is not None and resume != "auto":
            resume = as_path(resume).absolute()
            if ProcessEnvironment.read() is None:  # else rank zero looks, for all: others may not see the files
                find_checkpoint(resume)
        if folder is None and (profile or load_best_on_end):
            raise ValueError("profile=True and load_best_on_end=True write files: pass logdir=")
        if load_best_on_end and holds(_by_key(callbacks), ICheckpointCallback):
            raise ValueError("load_best_on_end=True is for the CheckpointCallback that train makes: pass it to yours")
        self._resume, self._resumes_if_found = (folder, True) if resume == "auto" else (resume, False)
        self._continues = resume == "auto" or (resume is not None and _is_inside(folder, resume))
        self._given_callbacks = {
            **_by_key(callbacks),
            **(_shown_by(_by_key(callbacks)) if verbose else {}),
            **_flag_callbacks(folder, timeit=timeit, check=check, overfit=overfit, profile=profile),
            **({"_non_finite": NonFiniteCallback()} if non_finite == "locate" else {}),
            **({"_lr_scale": LRScaleCallback(lr_scale)} if lr_scale is not None else {}),
            **({"_hang": HangCallback(hang_timeout_s)} if hang_timeout_s is not None else {}),
        }
        if valid_loader is not None or valid_metric is not None:
            valid_loader, valid_metric = valid_loader or "valid", valid_metric or "loss"
            if minimize_valid_metric is None and valid_metric == "loss":
                minimize_valid_metric = True
        if folder is not None and not holds(self._given_callbacks, ICheckpointCallback):
            _check_best(valid_metric, minimize_valid_metric, load_best_on_end=load_best_on_end)
            self._given_callbacks["_checkpoint"] = CheckpointCallback(
                folder,
                loader_key=valid_loader,
                metric_key=valid_metric,
                minimize=minimize_valid_metric,
                mode="runner",
                load_best_on_end=load_best_on_end,
            )
        self._given_loggers = _loggers(loggers, folder)
        self._check(loaders, valid_loader)
        return self.run()

    def _check(self, loaders: Mapping[str, Any] | None, valid_loader: str | None) -> None:
        """Refuse here, before any process is started, what can be told from the arguments."""
        if self.model is not None:
            before_training.check_optimizer(self._given_optimizer, self.model, self._given_criterion)
        before_training.check_scheduler(self._given_scheduler, self._given_optimizer)
        if loaders is not None:
            before_training.check_callbacks(self._given_callbacks, before_training.check_loaders(loaders))
            if self._given_optimizer is not None and not any(key.startswith("train") for key in loaders):
                raise ValueError(
                    f"the loaders are {sorted(loaders)}, and only those whose key starts with 'train' are trained on; "
                    "to evaluate call evaluate_loader, or leave out the optimizer"
                )
            if valid_loader is not None:
                before_training.check_loader_key(valid_loader, loaders, reader="valid_loader")

    def get_loggers(self) -> dict[str, ILogger]:
        return dict(self._given_loggers or {})

    def get_stage_len(self, stage: str) -> int:
        return self._num_epochs

    def get_loaders(self, stage: str) -> dict[str, Any]:
        if self._loaders is None:
            raise ValueError("no loaders: pass loaders={'train': ..., 'valid': ...} or override get_loaders(stage)")
        return dict(before_training.check_loaders(self._loaders))

    def get_criterion(self, stage: str) -> Criterion | None:
        return self._given_criterion

    def get_optimizer(self, stage: str, model: Any) -> Optimizers | None:
        return self._given_optimizer

    def get_scheduler(self, stage: str, optimizer: Any) -> Scheduler | None:
        return self._given_scheduler

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        return dict(self._given_callbacks)

    def predict_batch(self, batch: Batch, **kwargs: Any) -> Any:
        """Run the model on a batch that is on the device; the user's inference step."""
        raise NotImplementedError(
            f"predict_loader() calls {type(self).__name__}.predict_batch(batch, **kwargs): write it"
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
        """Yield what `predict_batch` gives for each batch, in the loader's order, each sample once.

        Nothing starts before the first is asked for; a few batches at most are ahead of the caller, and a generator
        left half-way ends its processes. Under a launcher every process calls, gets all, and takes equally many.

        Args:
            loader: whole: several processes share it. With one process any iterable of batches will do. One that
                shuffles gives a shuffled order, with a warning; so does a sampler of one's own whose drop_last=True
                cannot be undone.
            engine: where to run, or choose by the flags; by default the runner's own, else in this process. What
                several processes give comes on the CPU, in batches as many times larger.
            resume: checkpoint or logdir to take the weights from.
            kwargs: handed to `predict_batch`.
        Raises:
            ValueError, TypeError, FileNotFoundError: bad input, named.
            Exception: the first that any process raised.
        """
        self._use(model, engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp)
        return stream(self, Prediction(loader, seed=seed, resume=resume, arguments=kwargs, as_rows=self.engine.is_ddp))

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
        """Write what `predict_batch` gives to a file, a row for each sample, in the loader's order; return its path.

        Batch by batch: memory does not grow with the loader. The file is whole or, after a failure, as it was before.
        Under a launcher every process calls; rank zero writes, and the file is there when any of them returns.

        Args:
            path: .parquet and .csv have a column for each tensor, .pt holds one structure of whole tensors.
            loader, model, engine, seed, resume, cpu, fp16, amp, apex, ddp, kwargs: as those of :meth:`predict_loader`.
        Raises:
            ImportError: .parquet without pyarrow.
            ValueError: another suffix; predictions that are no rows or differ in form; an empty loader.
        """
        self._use(model, engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp)
        return write(self, Prediction(loader, seed=seed, resume=resume, arguments=kwargs, as_rows=True), Path(path))

    def _use(self, model: Model | None, engine: IEngine | None, **flags: bool) -> None:
        self.engine = choose_engine(engine or self._own_engine, **flags) or get_available_engine()
        self.model = model if model is not None else self.model

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
        """Return the loader's metrics by name, under any engine; nothing is trained or written.

        Args:
            loader: one, not a dict of several.
            callbacks: the metrics to compute beside the loss; by default the runner's, but those that train or save.
            criterion: the loss, or several by key; by default that of :meth:`train`, and without either there is none.
            engine: where to run, or choose by the flags; by default where the runner trained.
        Returns:
            {metric: value}; empty, with a warning, where nothing computes any.
        """
        given = None if callbacks is None else _by_key(callbacks)
        bar: dict[str, ICallback] = {"_tqdm": TqdmCallback()} if verbose else {}
        chosen = choose_engine(engine, cpu=cpu, fp16=fp16, amp=amp, apex=apex, ddp=ddp) or self._given_engine
        return evaluate(
            self, loader, model=model, criterion=criterion, engine=chosen, callbacks=given, shown_by=bar, seed=seed
        )


def _check_best(valid_metric: str | None, minimize: bool | None, *, load_best_on_end: bool) -> None:
    """Refuse, by the names of `train`, what CheckpointCallback refuses by its own."""
    if load_best_on_end and valid_metric is None:
        raise ValueError("load_best_on_end=True needs valid_loader and valid_metric, which tell the best one")
    if valid_metric is not None and minimize is None:
        raise ValueError(
            f"is a small {valid_metric!r} good? pass minimize_valid_metric=True or minimize_valid_metric=False"
        )


def _by_key(callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None) -> dict[str, ICallback]:
    if isinstance(callbacks, Mapping):
        return dict(callbacks)
    if isinstance(callbacks, ICallback):
        raise TypeError(f"callbacks must be a list or a dict, got {type(callbacks).__name__}; write [...] around it")
    return {f"{position:02d}_{type(each).__name__}": each for position, each in enumerate(callbacks or ())}


def _shown_by(callbacks: Mapping[str, ICallback]) -> dict[str, ICallback]:
    from runnerkit.callbacks import ModelSummaryCallback, RichDashboardCallback, RunSummaryCallback

    shown: dict[str, ICallback] = {"_model_summary": ModelSummaryCallback(), "_run_summary": RunSummaryCallback()}
    if not holds(callbacks, RichDashboardCallback):
        shown["_tqdm"] = TqdmCallback()
    return {key: each for key, each in shown.items() if not holds(callbacks, type(each))}


def _flag_callbacks(
    folder: Path | None, *, timeit: bool, check: bool, overfit: bool, profile: bool
) -> dict[str, ICallback]:
    callbacks: dict[str, ICallback] = {}
    if timeit:
        callbacks["_timer"] = TimerCallback()
    if check:
        from runnerkit.callbacks import VerifyRanksCallback  # and all that it needs: asked for by few

        callbacks |= {"_check": CheckRunCallback(), "_verify_ranks": VerifyRanksCallback()}
    if overfit:
        callbacks["_overfit"] = BatchOverfitCallback()
    if profile:
        assert folder is not None
        callbacks["_profiler"] = ProfilerCallback(folder / "trace.json")
    return callbacks


def holds(callbacks: Mapping[str, ICallback], kind: type[ICallback]) -> bool:
    """Whether a callback of `kind` is among `callbacks`, wrapped or not."""
    return any(isinstance(innermost(each), kind) for each in callbacks.values())


def _loggers(given: Mapping[str, ILogger | None] | None, folder: Path | None) -> dict[str, ILogger]:
    loggers: dict[str, ILogger | None] = {"console": ConsoleLogger()}
    if folder is not None:
        loggers |= {"csv": CSVLogger(folder), "tensorboard": TensorboardLogger(folder)}
    if given is not None:
        run_logs.check_loggers(given)
    loggers |= given or {}
    chosen = {key: each for key, each in loggers.items() if each is not None}
    run_logs.check_loggers(chosen)  # those given beside the others
    return chosen


def _is_inside(folder: Path | None, path: str | Path) -> bool:
    return folder is not None and Path(path).resolve().is_relative_to(folder.resolve())
