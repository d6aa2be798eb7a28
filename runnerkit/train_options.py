"""The arguments of `Runner.train`, checked together before a runner changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from runnerkit import callbacks as parts  # each is imported when it is first used
from runnerkit.callback import ICallback, ICheckpointCallback, innermost, monitor_of_savers, optimizer_callbacks
from runnerkit.checkpoints.folder import as_path, find_checkpoint
from runnerkit.engine import IEngine
from runnerkit.engines import choose_engine
from runnerkit.engines.process_environment import ProcessEnvironment, get_rank
from runnerkit.errors import did_you_mean
from runnerkit.logger import ILogger
from runnerkit.loggers import ConsoleLogger, CSVLogger, TensorboardLogger
from runnerkit.loggers.tensorboard import has_tensorboard
from runnerkit.loop import checks, parameter_checks, run_logs
from runnerkit.loop.component_checks import check_components
from runnerkit.loop.loader_kinds import ends_for_good
from runnerkit.metrics.first_non_finite import check_policy
from runnerkit.monitor import Mode, Monitor, ThreeArguments
from runnerkit.resume.overrides import Source, check_source
from runnerkit.resume.resume_point import ResumePoint
from runnerkit.steps.budget import Budget
from runnerkit.steps.makers import check_makers
from runnerkit.steps.schedulers import Interval, check_interval, check_scheduler
from runnerkit.storage.remote.urls import as_url, local_path, url_of
from runnerkit.support.arguments import (
    check_flags,
    check_integers,
    check_mappings,
    check_numbers,
    check_paths,
    check_seed,
)
from runnerkit.types import Criterion, Model, Optimizers, Scheduler

_CONSOLE_S = 10.0  # between two lines of training steps, if their interval is not given
log = logging.getLogger(__name__)

# Arguments of Catalyst, Keras, Lightning and transformers, and the one of `train`.
ELSEWHERE = {
    "accelerator": "engine", "device": "engine", "learning_rate": "optimizer", "lr": "optimizer", "strategy": "engine",
    "clip": "gradient_clip", "clip_grad_norm": "gradient_clip", "dataloaders": "loaders", "epochs": "num_epochs",
    "grad_clip": "gradient_clip", "grad_clip_norm": "gradient_clip", "max_grad_norm": "gradient_clip",
    "gradient_accumulation_steps": "accumulation_steps", "gradient_clip_val": "gradient_clip",
    "greater_is_better": "mode", "log_dir": "logdir", "loss": "criterion", "loss_fn": "criterion",
    "lr_scheduler": "scheduler", "main_metric": "monitor", "max_epochs": "num_epochs", "max_steps": "num_steps",
    "metric_for_best_model": "monitor", "minimize_metric": "mode", "n_epochs": "num_epochs", "output_dir": "logdir",
    "resume_from_checkpoint": "resume", "train_loader": "loaders", "val_loader": "loaders",
}  # fmt: skip
OLD_MONITOR = ThreeArguments("valid_loader", "valid_metric", "minimize_valid_metric", defaults=("valid", "loss"))


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The arguments of :meth:`Runner.train`, where they are documented, and the values derived from them.

    Raises:
        ValueError, TypeError, KeyError, OSError: an argument is invalid, or contradicts another one.
    """

    loaders: Mapping[str, Any] | None
    model: Model | None
    criterion: Criterion | None
    optimizer: Optimizers | Callable[[list[Any]], Any] | None
    scheduler: Scheduler | Callable[[Any, int | None], Any] | None
    scheduler_interval: Interval | None
    engine: IEngine | str | None
    callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None
    loggers: Mapping[str, ILogger | None] | None
    seed: int
    hparams: Mapping[str, Any] | None
    num_epochs: int | None
    num_steps: int | None
    num_samples: int | None
    max_hours: float | None
    accumulation_steps: int
    gradient_clip: float | None
    epoch_steps: int | None
    precision: str | None
    loss_reduction: Literal["mean", "sum"]
    lr_scale: Literal["linear", "sqrt"] | None
    logdir: str | Path | None
    resume: str | Path | None
    resume_options: Source
    monitor: str | None
    mode: Mode | None
    valid_every_steps: int | None
    log_every: int | None
    non_finite: Literal["raise", "locate", "keep"]
    detect_anomaly: bool
    deterministic: bool
    verbose: bool
    timeit: bool
    hang_timeout_s: float | None
    check: bool
    overfit: bool
    profile: bool
    load_best_on_end: bool
    cpu: bool
    fp16: bool
    amp: bool
    apex: bool
    ddp: bool

    def __post_init__(self) -> None:
        self._check_values()
        self._check_files()
        self._check_components()

    @cached_property
    def budget(self) -> Budget:
        """The limits of the training; one epoch without any."""
        limits = (self.num_epochs, self.num_steps, self.num_samples)
        return Budget(*limits) if any(limit is not None for limit in limits) else Budget(num_epochs=1)

    @cached_property
    def chosen_engine(self) -> IEngine | None:
        """The engine that is passed or that the flags ask for, if any."""
        flags = {"cpu": self.cpu, "fp16": self.fp16, "amp": self.amp, "apex": self.apex, "ddp": self.ddp}
        return choose_engine(self.engine, **flags, precision=self.precision)

    @cached_property
    def folder(self) -> Path | None:
        """The logdir, independent of the working directory, which the run may change."""
        return local_path(self.logdir) if self.logdir is not None else None

    @cached_property
    def resume_point(self) -> ResumePoint:
        """The checkpoint that the run continues from, if any."""
        if self.resume is None or self.resume == "auto":
            is_auto = self.resume is not None
            return ResumePoint(self.folder if is_auto else None, may_be_missing=is_auto, continues_logs=is_auto)
        source = as_path(self.resume)
        return ResumePoint(source, may_be_missing=False, continues_logs=_is_inside(self.folder, source))

    @cached_property
    def batches_per_step(self) -> int:
        """Batches that are accumulated into a step, by optimizer callbacks that are passed as well."""
        own = [each.own_accumulation_steps for each in optimizer_callbacks(self.all_callbacks)]
        return min(own) if own and self.accumulation_steps == 1 else self.accumulation_steps

    @cached_property
    def selects(self) -> Monitor | None:
        """The monitor that selects the best checkpoint."""
        monitor = Monitor.if_given("train", self.monitor, self.mode)
        return None if monitor is None else monitor.directed("train")

    @cached_property
    def given_callbacks(self) -> dict[str, ICallback]:
        """The callbacks that are passed, by key."""
        return callbacks_by_key(self.callbacks)

    @cached_property
    def savers(self) -> list[ICheckpointCallback]:
        """The checkpoint callbacks that are passed, without their wrappers."""
        given = map(innermost, self.given_callbacks.values())
        return [each for each in given if isinstance(each, ICheckpointCallback)]

    @cached_property
    def all_callbacks(self) -> dict[str, ICallback]:
        """The callbacks that are passed and the callbacks that options add."""
        chosen = self.given_callbacks
        wanted: dict[str, ICallback] = {}
        if self.verbose:
            wanted |= _shown_by(chosen)
        if self.timeit:
            wanted["_timer"] = parts.TimerCallback()
        if self.check:
            wanted |= {"_check": parts.CheckRunCallback(), "_verify_ranks": parts.VerifyRanksCallback()}
        if self.overfit:
            wanted["_overfit"] = parts.BatchOverfitCallback()
        if self.profile and self.folder is not None:
            wanted["_profiler"] = parts.ProfilerCallback(self.folder / "trace.json")
        if self.non_finite == "locate":
            wanted["_non_finite"] = parts.NonFiniteCallback()
        if self.lr_scale is not None:
            wanted["_lr_scale"] = parts.LRScaleCallback(self.lr_scale)
        if self.hang_timeout_s is not None:
            wanted["_hang"] = parts.HangCallback(self.hang_timeout_s)
        if self.folder is not None and not self.savers:
            wanted["_checkpoint"] = parts.CheckpointCallback(
                self.folder,
                monitor=self.selects,  # type: ignore[arg-type]  # users pass its name
                content="runner",
                load_best_on_end=self.load_best_on_end,
                max_hours=self.max_hours,
            )
        return {**chosen, **wanted}

    @cached_property
    def wants_curves_of_steps(self) -> bool:
        """True if the default loggers take training steps, because an argument counts steps."""
        return any(each is not None for each in (self.log_every, self.num_steps, self.valid_every_steps))

    @cached_property
    def all_loggers(self) -> dict[str, ILogger]:
        """The loggers that are passed, and the default loggers that they do not replace."""
        steps: Any = {"log_batch_metrics": self.wants_curves_of_steps}
        pace_s = 0.0 if self.log_every is not None else _CONSOLE_S
        loggers: dict[str, ILogger | None] = {"console": ConsoleLogger(**steps, every_s=pace_s)}
        if self.loggers is not None:
            run_logs.check_loggers(self.loggers)
        if self.folder is not None:
            loggers["csv"] = CSVLogger(self.folder, **steps)
            if has_tensorboard():
                is_of_steps = self.num_steps is not None or self.valid_every_steps is not None
                x_axis: Any = "step" if is_of_steps else "epoch"
                loggers["tensorboard"] = TensorboardLogger(self.folder, **steps, x_axis=x_axis)
            elif "tensorboard" not in (self.loggers or {}) and get_rank() == 0:
                log.warning(
                    "TensorBoard is not installed, so this run logs without it: pip install runnerkit[tensorboard]; "
                    "loggers={'tensorboard': None} silences this warning"
                )
        loggers |= self.loggers or {}
        chosen = {key: each for key, each in loggers.items() if each is not None}
        run_logs.check_loggers(chosen)  # passed and default loggers together
        return chosen

    def _check_values(self) -> None:
        check_seed("train", self.seed)
        self._check_flags()
        check_paths("train", or_none=True, logdir=self.logdir)
        if self.logdir == "":
            raise ValueError("train: logdir is empty; pass a folder such as 'logs/first', or None to write no files")
        check_integers("train", accumulation_steps=self.accumulation_steps)
        limits = {"num_epochs": self.num_epochs, "num_steps": self.num_steps, "num_samples": self.num_samples}
        intervals = {"valid_every_steps": self.valid_every_steps, "epoch_steps": self.epoch_steps}
        intervals["log_every"] = self.log_every
        check_integers("train", or_none=True, **limits, **intervals)
        check_numbers("train", above=0, or_none=True, max_hours=self.max_hours, gradient_clip=self.gradient_clip)
        check_numbers("train", above=0, or_none=True, hang_timeout_s=self.hang_timeout_s)
        check_mappings("train", hparams=self.hparams)
        check_policy(self.non_finite)
        check_source(self.resume_options)
        check_interval(self.scheduler_interval)
        if self.loss_reduction not in ("mean", "sum"):
            found = f"loss_reduction must be 'mean' or 'sum', got {self.loss_reduction!r}"
            raise ValueError(found + did_you_mean(self.loss_reduction, ("mean", "sum")))
        _ = self.chosen_engine, self.selects

    def _check_flags(self) -> None:
        check_flags("train", load_best_on_end=self.load_best_on_end, detect_anomaly=self.detect_anomaly)
        check_flags("train", deterministic=self.deterministic, verbose=self.verbose, timeit=self.timeit)
        check_flags("train", check=self.check, overfit=self.overfit, profile=self.profile)

    def _check_files(self) -> None:
        if self.resume == "auto" and self.folder is None:
            raise ValueError('resume="auto" resumes from logdir: pass logdir=')
        if self.resume is not None and self.resume != "auto":
            source = as_path(self.resume)
            # Not a URL, whose checkpoint is large, and not under a launcher, where others may not see the files.
            if as_url(source) is None and ProcessEnvironment.read() is None:
                find_checkpoint(source)
        if self.folder is None and not self.savers:
            wanted = {"load_best_on_end": self.load_best_on_end, "max_hours": self.max_hours}
            needs = next((f"{name}={value}" for name, value in wanted.items() if value), None)
            if needs is not None:
                raise ValueError(f"train({needs}) reads or writes a checkpoint: pass logdir=, the folder of the run")
        if self.folder is None and self.profile:
            raise ValueError("train(profile=True) writes a trace: pass logdir=, the folder of the run")
        if self.savers:
            if self.max_hours is not None:
                raise ValueError(
                    f"train(max_hours={self.max_hours}) does not reach your CheckpointCallback: pass it there"
                )
            if self.load_best_on_end:
                self._check_one_selects_best()
            if self.selects is not None and monitor_of_savers(self.given_callbacks) is None and get_rank() == 0:
                log.warning(
                    "monitor=%r does not select a checkpoint, since your CheckpointCallback has none: pass it there",
                    self.selects.name,
                )
        elif self.load_best_on_end and self.selects is None:
            raise ValueError("load_best_on_end=True needs monitor=, such as 'valid/loss', to select a checkpoint")

    def _check_one_selects_best(self) -> None:
        """Raise unless `load_best_on_end` can mean only one CheckpointCallback that is passed."""
        found = [
            each for each in self.savers if isinstance(each, parts.CheckpointCallback) and each.monitor is not None
        ]
        if len(found) != 1:
            raise ValueError(
                "train(load_best_on_end=True) needs one CheckpointCallback with monitor=, such as 'valid/loss', to "
                f"select a checkpoint, but callbacks has {len(found)} of them; pass it to the one that should load"
            )
        own = found[0].monitor
        if own and self.selects and (own.name, own.minimize) != (self.selects.name, self.selects.minimize):
            raise ValueError(
                f"train(load_best_on_end=True): monitor={self.selects.name!r} differs from the {own.name!r} of your "
                "CheckpointCallback, or its mode does: leave out monitor and mode of train"
            )

    def _check_components(self) -> None:
        for name, given in {"model": self.model, "criterion": self.criterion, "optimizer": self.optimizer}.items():
            if isinstance(given, dict) and not given:
                raise TypeError(f"{name} is an empty dict; leave it out, or pass one object, or several by name")
        if self.model is None:
            check_components(criterion=self.criterion, optimizer=self.optimizer)
        else:
            parameter_checks.check_optimizer(self.optimizer, self.model, self.criterion)
        check_scheduler(self.scheduler, self.optimizer)
        check_makers(self.optimizer, self.scheduler)
        if self.loaders is None:
            return
        loaders = checks.check_loaders(self.loaders)
        if self.selects is not None:
            loader = self.selects.among(loaders).loader
            checks.check_loader_key(loader, loaders, reader=f"monitor={self.selects.name!r}")
        checks.check_callbacks(self.all_callbacks, loaders)
        trains_nothing = checks.check_trains(self.loaders, has_optimizer=self.optimizer is not None)
        if trains_nothing is not None:
            raise ValueError(trains_nothing)
        if self.valid_every_steps is not None and all(key.startswith("train") for key in loaders):
            log.warning(
                "valid_every_steps=%s evaluates nothing, as each of the loaders %s is trained on: add one, such as "
                "'valid'", self.valid_every_steps, sorted(loaders),
            )  # fmt: skip
        self._warn_of_iterators(self.loaders)

    def _warn_of_iterators(self, loaders: Mapping[str, Any]) -> None:
        """Warn if a loader would be empty after the first epoch, unless a callback ends epochs before it does."""
        is_cut = self.num_steps is not None or self.num_samples is not None or self.overfit or self.check
        if is_cut or (self.budget.num_epochs or 1) < 2:
            return
        for key, loader in loaders.items():
            if ends_for_good(loader) and not (self.epoch_steps is not None and key.startswith("train")):
                log.warning(
                    "loader %r is a %s, which can be read once, but num_epochs is %s: when it has ended, the next "
                    "epoch raises. Pass what it was made from, a DataLoader, or a list of its batches",
                    key, type(loader).__name__, self.num_epochs,
                )  # fmt: skip


def callbacks_by_key(callbacks: Sequence[ICallback] | Mapping[str, ICallback] | None) -> dict[str, ICallback]:
    """Return callbacks with keys in the order of a list.

    Raises:
        TypeError: not a list or a dict, such as one callback; or a list that contains a class.
    """
    if callbacks is None or isinstance(callbacks, Mapping):
        return dict(callbacks or {})
    wanted = "callbacks must be a list or a dict"
    if isinstance(callbacks, type):
        raise TypeError(f"{wanted}, got the class {callbacks.__name__}; pass callbacks=[{callbacks.__name__}(...)]")
    if isinstance(callbacks, ICallback):
        raise TypeError(f"{wanted}, got {type(callbacks).__name__}; put it in a list: callbacks=[...]")
    if isinstance(callbacks, nn.Module):
        raise TypeError(f"{wanted}, got {type(callbacks).__name__}; pass a model by name: model=")
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise TypeError(f"{wanted}, got {callbacks!r}; pass for example callbacks=[dl.TimerCallback()]")
    given = list(callbacks)
    for each in given:
        if isinstance(each, type):
            raise TypeError(f"callbacks has the class {each.__name__}; pass an instance of it: {each.__name__}(...)")
    return {f"{position:02d}_{type(each).__name__}": each for position, each in enumerate(given)}


def holds(callbacks: Mapping[str, ICallback], kind: type[ICallback]) -> bool:
    """Check if `callbacks` contains a callback of `kind`, wrapped or not."""
    return any(isinstance(innermost(each), kind) for each in callbacks.values())


def _shown_by(callbacks: Mapping[str, ICallback]) -> dict[str, ICallback]:
    """Return the callbacks that show a run, except those already in `callbacks`."""
    shown: dict[str, ICallback] = {
        "_model_summary": parts.ModelSummaryCallback(),
        "_run_summary": parts.RunSummaryCallback(),
    }
    if not holds(callbacks, parts.RichDashboardCallback):
        shown["_tqdm"] = parts.TqdmCallback()
    return {key: each for key, each in shown.items() if not holds(callbacks, type(each))}


def _is_inside(folder: Path | None, path: str | Path) -> bool:
    if folder is None:
        return False
    if (url := as_url(path)) is not None:
        return f"{url}/".startswith(f"{url_of(folder)}/")
    return Path(path).resolve().is_relative_to(folder.resolve())
