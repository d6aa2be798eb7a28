"""Runs from a config: their components, created in a fixed order, and their logdir."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import nn

from runnerkit.commands.config import Config, TrainingError, yaml_of
from runnerkit.engine import IEngine
from runnerkit.engines.by_name import engine_by_name
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.seeding.generators import set_global_seed
from runnerkit.storage.atomic_file import write_text
from runnerkit.storage.logdir_lock import holder, is_held, lock
from runnerkit.storage.remote.copies import holds_run, name_of
from runnerkit.storage.remote.logdir import NEW
from runnerkit.storage.remote.urls import as_url, local_path
from runnerkit.supervised import SupervisedRunner
from runnerkit.support.deprecation import old_names
from runnerkit.support.members import overrides
from runnerkit.train import Runner
from runnerkit.train_options import ELSEWHERE
from runnerkit.types import as_dict
from runnerkit.version import __version__

FILE = "config.yml"
SEED = 42
_PARTS = {  # each with an example
    "runner": "{_target_: runnerkit.dl.SupervisedRunner}",
    "model": "{_target_: torch.nn.Linear, in_features: 64, out_features: 10}",
    "criterion": "{_target_: torch.nn.CrossEntropyLoss}",
    "optimizer": "{_target_: torch.optim.SGD, lr: 0.1}",
    "scheduler": "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 10}",
    "loaders": "{_target_: torch.utils.data.DataLoader, dataset: {_target_: runnerkit.contrib.Digits}}",
    "callbacks": "{_target_: runnerkit.dl.TimerCallback}",
    "loggers": "{_target_: runnerkit.dl.JSONLLogger, logdir: logs}",
}
_PLURAL = tuple(name for name in _PARTS if name.endswith("s"))  # the others are one component or a dict of them
_ENGINE = ("engine", "nproc", "precision", "launcher")
_NOT_PLAIN = {*_PARTS, *_ENGINE, "self", "cpu", "fp16", "amp", "apex", "ddp", "resume"}  # of `train`
_MEANT = {**ELSEWHERE, "amp": "precision: amp", "fp16": "precision: fp16", "ddp": "engine: ddp", "cpu": "engine: cpu"}
_NOT_SAVED = {"logdir", "search"}
_TRACES = ("csv", "checkpoints", "tensorboard")  # any of these marks the logdir of a run


def train(config: Config, runner: Runner, arguments: dict[str, Any]) -> None:
    """Train.

    Raises:
        ValueError: the arguments were refused before training began, or one of them names an unknown key.
        TrainingError: training raised.
    """
    try:
        runner.train(**arguments)
    except Exception as error:
        if runner.engine is None or isinstance(error, UnknownKeyError):
            raise ValueError(f"{config.path}: {error}") from error
        raise TrainingError from error


def make_run(config: Config) -> tuple[Runner, dict[str, Any]]:
    """Create the runner and the arguments of its `train`, seeded with the config's seed.

    Raises:
        ValueError: the config has an unknown key or an invalid value.
    """
    plain = [name for name in inspect.signature(Runner.train).parameters if name not in _NOT_PLAIN]
    accepted = {*plain, *old_names(Runner.train)}
    for key in config.values:
        if key not in {*_PARTS, *_ENGINE, *accepted, "search"}:
            known = (*_PARTS, *_ENGINE, *plain)
            meant = f"; did you mean {_MEANT[key]!r}?" if key in _MEANT else did_you_mean(key, known)
            raise config.refused(key, f"unknown key; expected one of {', '.join(known)}{meant}")
    for key in _PARTS:
        if not isinstance(config.values.get(key), dict | list | None):
            raise config.refused(key, f"expected _target_ and its arguments, got {config.values[key]!r}")
        _check_targets(config, key)
        config.check(key)  # check all of them before creating any
    given = {key: value for key, value in config.values.items() if key in accepted}
    if "hparams" in given:
        given["hparams"] = config.written["hparams"]  # hparams are written to files
    given = config.check_call(given, "", Runner.train)
    config.rename(given, "", Runner.train)
    arguments = {"seed": SEED, **given, "engine": _make_engine(config)}
    try:
        set_global_seed(arguments["seed"])  # the initial weights
    except ValueError as error:
        raise config.refused("seed", str(error)) from error
    runner = config.make("runner") or SupervisedRunner()
    if not isinstance(runner, Runner):
        raise config.refused("runner", f"is a {type(runner).__name__}; expected a dl.Runner")
    for key in ("model", "loaders"):
        if config.values.get(key) is None and not overrides(runner, Runner, f"get_{key}"):
            raise config.refused(key, "is missing")
    model, criterion = config.make("model"), config.make("criterion")
    for name, each in as_dict(model).items():
        if not isinstance(each, nn.Module):
            raise config.refused(f"model.{name}".removesuffix("."), f"is {each!r}; expected _target_ and its arguments")
    optimizer = _make_for(config, "optimizer", {key: each.parameters() for key, each in as_dict(model).items()})
    scheduler = _make_for(config, "scheduler", as_dict(optimizer))
    parts = {"model": model, "criterion": criterion, "optimizer": optimizer, "scheduler": scheduler}
    return runner, {**arguments, **parts, **{key: config.make(key) for key in _PLURAL}}


def _check_targets(config: Config, key: str) -> None:
    """Raise if a component lacks its ``_target_``."""
    node = config.values.get(key)
    if node is None or "_target_" in node:
        return
    several = dict(enumerate(node)) if isinstance(node, list) else node
    is_one = key not in _PLURAL and not all(isinstance(each, dict | None) for each in several.values())
    places = {key: node} if is_one or key == "runner" else {f"{key}.{name}": each for name, each in several.items()}
    for place, each in places.items():
        if each is not None and not (isinstance(each, dict) and "_target_" in each):
            raise config.refused(place, f"_target_, its import path, is missing; expected for example {_PARTS[key]}")


def _make_for(config: Config, key: str, owners: Mapping[str, Any]) -> Any:
    """Create one component for the only owner, or a dict of components, each for the owner with its key."""
    node = config.values.get(key)
    if node is None or "_target_" in node:
        if node is not None and list(owners) != [""]:
            raise config.refused(key, f"got one component for the keys {sorted(owners)}; expected one per key")
        return config.make(key, *owners.values())
    for name in node:
        if name not in owners:
            found = f"no component has this key; expected one of {sorted(owners)}"
            raise config.refused(f"{key}.{name}", found + did_you_mean(name, owners))
    return {name: config.make(f"{key}.{name}", owners[name]) for name in node}


def _make_engine(config: Config) -> IEngine | None:
    """Create the engine, if the config has one, and check that this machine meets its requirements."""
    engine = _engine_component(config) if isinstance(config.values.get("engine"), dict) else _named_engine(config)
    if engine is not None:
        try:
            engine.check()
        except (ImportError, RuntimeError) as error:
            raise config.refused("engine", str(error)) from error
    return engine


def _engine_component(config: Config) -> IEngine:
    if "_target_" not in config.values["engine"]:
        raise config.refused(
            "engine", "_target_ is missing; expected a name, or for example {_target_: runnerkit.dl.CPUEngine}"
        )
    if any(config.values.get(key) is not None for key in _ENGINE[1:]):
        raise config.refused("engine", "is a component: pass nproc, precision and launcher as its own arguments")
    engine = config.make("engine")
    if not isinstance(engine, IEngine):
        raise config.refused("engine", f"is a {type(engine).__name__}; expected an engine of dl")
    return engine


def _named_engine(config: Config) -> IEngine | None:
    name, nproc, precision, launcher = (config.values.get(key) for key in _ENGINE)
    if all(each is None for each in (name, nproc, precision, launcher)):
        return None
    if not isinstance(name, str | None):
        raise config.refused("engine", f"expected a name, or _target_ and its arguments, got {name!r}")
    num_processes = config.converted(nproc, int | tuple[int, int] | None, "nproc")
    if isinstance(launcher, dict):
        launcher = config.make("launcher")
    try:
        return engine_by_name(name, num_processes=num_processes, precision=precision, launcher=launcher)
    except (TypeError, ValueError) as error:
        raise config.refused("engine", str(error)) from error


def choose_logdir(config: Config, *, resume: bool) -> Path:
    """Return the config's logdir, perhaps a URL, else a free one named after the file in logs/, or beside the run of a
    saved config.

    Raises:
        FileExistsError: the folder contains a run that is not to be resumed, or another process is using it.
        ValueError: a launcher started several processes, which cannot agree on a name.
    """
    job, path = ProcessEnvironment.read(), config.path
    if config.values.get("logdir") is None:
        if job is not None:
            raise ValueError(f"{job.launcher} started several processes: pass --logdir, which they share")
        logdir = path.parent if path.name == FILE and _holds_run(path.parent) else Path("logs", path.stem)
        others = (logdir.with_name(f"{logdir.name}-{number}") for number in count(2))
        if not resume:
            return next(each for each in chain([logdir], others) if not (_holds_run(each) or _is_in_use(each)))
    else:
        logdir = name_of(config.values["logdir"])
    if (url := as_url(logdir)) is not None:
        if (job is None or job.rank == 0) and not resume and holds_run(url):
            raise FileExistsError(f"{url} contains a run: continue it with --resume, or choose another --logdir")
        return Path(url)
    if job is None or job.rank == 0:
        if _is_in_use(logdir):
            raise FileExistsError(f"another run is writing to {logdir}: {holder(logdir)}")
        if _holds_run(logdir) and not resume:
            raise FileExistsError(f"{logdir} contains a run: continue it with --resume, or choose another --logdir")
    return logdir


def save_config(config: Config, path: Path) -> None:
    """Write a config that reproduces the run with `runnerkit run`, without the logdir and the ranges of a search.

    Raises:
        OSError: `path` cannot be written; for example, another run is using the folder.
    """
    values = {"seed": SEED, **config.written}
    text = yaml_of({key: value for key, value in values.items() if key not in _NOT_SAVED})
    if as_url(path.parent) is not None:  # training puts it there when no other run has the logdir
        path = local_path(path.parent) / NEW / path.name
    with _explain_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    unlock = lock(path.parent)  # keeps the config of a run that is in progress here; training locks again
    try:
        with _explain_unwritable(path):
            write_text(path, f"# {config.path}, as runnerkit {__version__} ran it\n{text}")
    finally:
        unlock()


@contextmanager
def _explain_unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path} ({error.strerror}): choose another --logdir") from error


def _is_in_use(folder: Path) -> bool:
    return folder.is_dir() and is_held(folder)


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TRACES)
