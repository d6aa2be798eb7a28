"""What a config says of a whole run: its parts, made in an order that is always the same, and where it is logged."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import nn

from runnerkit.commands.config import Config
from runnerkit.engine import IEngine
from runnerkit.engines.by_name import engine_by_name
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.seeding import set_global_seed
from runnerkit.storage.atomic_file import write_text
from runnerkit.storage.logdir_lock import holder, is_held
from runnerkit.supervised import SupervisedRunner
from runnerkit.train import Runner
from runnerkit.types import as_dict
from runnerkit.version import __version__

FILE = "config.yml"
SEED = 42
_PARTS = ("runner", "model", "criterion", "optimizer", "scheduler", "loaders", "callbacks", "loggers")
_ENGINE = ("engine", "nproc", "precision")
_NOT_PLAIN = {*_PARTS, *_ENGINE, "self", "cpu", "fp16", "amp", "apex", "ddp", "resume"}  # of what `train` takes
_NOT_SAVED = {"logdir", "search"}
_TRACES = ("csv", "checkpoints", "tensorboard")  # what a run leaves in its logdir


class TrainingError(Exception):
    """Training raised, for a reason that is its cause."""


def train(config: Config, runner: Runner, arguments: dict[str, Any]) -> None:
    """Train.

    Raises:
        ValueError: the arguments will not do, as was seen before it began.
        TrainingError: something was raised later.
    """
    try:
        runner.train(**arguments)
    except Exception as error:
        if runner.engine is None:
            raise ValueError(f"{config.path}: {error}") from error
        raise TrainingError from error


def make_run(config: Config) -> tuple[Runner, dict[str, Any]]:
    """Make the runner and the arguments of its `train`, from the config's seed.

    Raises:
        ValueError: the file has a key that is none, or a value will not do.
    """
    plain = [name for name in inspect.signature(Runner.train).parameters if name not in _NOT_PLAIN]
    for key in config.values:
        if key not in {*_PARTS, *_ENGINE, *plain, "search"}:
            raise config.refused(key, f"no such key; there are {', '.join((*_PARTS, *_ENGINE, *plain))}")
    for key in _PARTS:
        if not isinstance(config.values.get(key), dict | list | None):
            raise config.refused(key, f"expected _target_ and its arguments, got {config.values[key]!r}")
        config.check(key)  # all of them before any is made
    given = {key: value for key, value in config.values.items() if key in plain}
    arguments = {"seed": SEED, **config.check_call(given, "", Runner.train), "engine": _make_engine(config)}
    set_global_seed(arguments["seed"])  # the initial weights
    runner = config.make("runner") or SupervisedRunner()
    if not isinstance(runner, Runner):
        raise config.refused("runner", f"is a {type(runner).__name__}; expected a dl.Runner")
    for key in ("model", "loaders"):
        if config.values.get(key) is None and getattr(type(runner), f"get_{key}") is getattr(Runner, f"get_{key}"):
            raise config.refused(key, "is missing")
    model, criterion = config.make("model"), config.make("criterion")
    for name, each in as_dict(model).items():
        if not isinstance(each, nn.Module):
            raise config.refused(f"model.{name}".removesuffix("."), f"is {each!r}; expected _target_ and its arguments")
    optimizer = _make_for(config, "optimizer", {key: each.parameters() for key, each in as_dict(model).items()})
    scheduler = _make_for(config, "scheduler", as_dict(optimizer))
    parts = {"model": model, "criterion": criterion, "optimizer": optimizer, "scheduler": scheduler}
    return runner, {**arguments, **parts, **{key: config.make(key) for key in ("loaders", "callbacks", "loggers")}}


def _make_for(config: Config, key: str, owners: Mapping[str, Any]) -> Any:
    """Make one component for the lone owner, or each of several for the owner of its name."""
    node = config.values.get(key)
    if node is None or "_target_" in node:
        if node is not None and list(owners) != [""]:
            raise config.refused(key, f"one for {sorted(owners) or 'nothing'}; give one to each, by its key")
        return config.make(key, *owners.values())
    for name in node:
        if name not in owners:
            raise config.refused(f"{key}.{name}", f"there is none of that name to give it to, only {sorted(owners)}")
    return {name: config.make(f"{key}.{name}", owners[name]) for name in node}


def _make_engine(config: Config) -> IEngine | None:
    name, *options = (config.values.get(key) for key in _ENGINE)
    if isinstance(name, dict):
        if options != [None, None]:
            raise config.refused("engine", "is a component: nproc and precision are among its own arguments")
        engine = config.make("engine")
        if not isinstance(engine, IEngine):
            raise config.refused("engine", f"is a {type(engine).__name__}; expected an engine of dl")
        return engine
    if [name, *options] == [None] * 3:
        return None
    if not isinstance(name, str | None):
        raise config.refused("engine", f"expected a name, or _target_ and its arguments, got {name!r}")
    num_processes = config.converted(options[0], int | None, "nproc")
    try:
        return engine_by_name(name, num_processes=num_processes, precision=options[1])
    except ValueError as error:
        raise config.refused("engine", str(error)) from error


def choose_logdir(config: Config, *, resume: bool) -> Path:
    """Take the config's logdir, else one of its name below logs/; a saved config runs anew beside where it lies.

    Raises:
        FileExistsError: the folder holds a run that is not to be resumed, or another process has it.
        ValueError: a launcher started several processes, which could not agree on a name.
    """
    job, path = ProcessEnvironment.read(), config.path
    if config.values.get("logdir") is None:
        if job is not None:
            raise ValueError(f"{job.launcher} started several processes: pass --logdir, which they share")
        first = path.parent if path.name == FILE and _holds_run(path.parent) else Path("logs", path.stem)
        others = (first.with_name(f"{first.name}-{number}") for number in count(2))
        return first if resume else next(each for each in chain([first], others) if not _holds_run(each))
    logdir = Path(config.values["logdir"])
    if job is None or job.rank == 0:
        if logdir.is_dir() and is_held(logdir):
            raise FileExistsError(f"another run is writing to {logdir}: {holder(logdir)}")
        if _holds_run(logdir) and not resume:
            raise FileExistsError(f"{logdir} holds a run: go on with it by --resume, or choose another by --logdir")
    return logdir


def save_config(config: Config, path: Path) -> None:
    """Write what `runnerkit run` takes to reproduce the run: all but where it is logged, and ranges of a search.

    Raises:
        OSError: with what to do.
    """
    import yaml

    values = {"seed": SEED, **config.values}
    text = yaml.safe_dump({key: value for key, value in values.items() if key not in _NOT_SAVED}, sort_keys=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"# {config.path}, as runnerkit {__version__} ran it\n{text}")
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path} ({error.strerror}): choose another --logdir") from error


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TRACES)
