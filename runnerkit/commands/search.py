"""Hyperparameter search over a config with Optuna."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runnerkit.callbacks import OptunaPruningCallback
from runnerkit.commands.config import Config, TrainingError, read_config
from runnerkit.commands.configured_run import FILE, SEED, make_run, save_config, train
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.monitor import Monitor
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import as_url
from runnerkit.train_options import OLD_MONITOR

BEST = "best.yml"


def search(
    path: Path, overrides: Sequence[str], given: Mapping[str, Any], *, num_trials: int, logdir: Path
) -> tuple[float, dict[str, Any]]:
    """Train a config once per trial; return the best metric and the values that gave it.

    Each trial has a folder in `logdir`, perhaps a URL; ``best.yml`` is the config of the best one. Trials that run in
    one process are pruned when they are worse than the median of the trials before.

    Args:
        path, given: passed to :func:`read_config`.
        overrides: likewise; those whose value is a range are searched, as are the ranges under ``search:`` in the file.
    Raises:
        ValueError: there are no ranges or no metric to optimize, or a range is invalid.
        FileExistsError: `logdir` contains trials.
        ImportError: Optuna is not installed.
    """
    optuna = _optuna()
    logdir = name_of(logdir)
    ranges, overrides = _ranges(overrides)
    config = read_config(path, overrides, given)
    ranges = {**(config.values.get("search") or {}), **ranges}
    if not ranges:
        raise config.refused("search", "expected ranges, here or on the command line as KEY=LOW..HIGH or KEY=THIS,THAT")
    if ProcessEnvironment.read() is not None:
        raise ValueError("a search starts its own processes: start it without a launcher, with --engine and --nproc")
    if _holds_trials(logdir):
        raise FileExistsError(
            f"{as_url(logdir) or logdir} contains the trials of another search: choose another folder with --logdir"
        )

    def objective(trial: Any) -> float:
        chosen = [f"{key}={suggest(trial, key, text)}" for key, text in ranges.items()]
        return _train(
            read_config(path, [*overrides, *chosen], given), trial, logdir / f"trial-{trial.number:03}", monitor
        )

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # an error in a trial ends the search and is reported by it
    sampler = optuna.samplers.TPESampler(seed=config.converted(config.values.get("seed", SEED), int, "seed") % 2**32)
    monitor = _monitor(config)
    study = optuna.create_study(direction="minimize" if monitor.minimize else "maximize", sampler=sampler)
    study.optimize(objective, n_trials=num_trials)
    chosen = [f"{key}={value}" for key, value in study.best_params.items()]
    with written(logdir / BEST) as file:
        save_config(read_config(path, [*overrides, *chosen], given), file)
    return study.best_value, study.best_params


def _holds_trials(logdir: Path) -> bool:
    url = as_url(logdir)
    names = Store(url).names() if url is not None else [path.name for path in logdir.glob("trial-*")]
    return any(name.startswith("trial-") for name in names)


def suggest(trial: Any, key: str, given: str | list[Any]) -> Any:
    """Sample a value from "low..high", "low..high:log", "this,that" or a list; of integers if both ends are.

    Raises:
        ValueError: `given` has none of these forms.
    """
    text = ",".join(map(str, given)) if isinstance(given, list) else str(given)
    if ".." not in text:
        return trial.suggest_categorical(key, text.split(","))
    ends, _, scale = text.partition(":")
    low, high = (_number(end) for end in ends.split("..", 1))
    if low is None or high is None or not low < high or scale not in ("", "log"):
        raise ValueError(f"{key}={text}: expected LOW..HIGH, LOW..HIGH:log, or choices such as 16,32,64")
    if scale == "log" and low <= 0:
        raise ValueError(f"{key}={text}: a logarithmic range must start above 0, got {low}")
    whole = isinstance(low, int) and isinstance(high, int)
    return (trial.suggest_int if whole else trial.suggest_float)(key, low, high, log=scale == "log")


def _ranges(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate overrides with a range or choices from those with a value, which may be a list in brackets."""
    ranges, fixed = dict[str, str](), list[str]()
    for override in overrides:
        key, _, text = override.partition("=")
        if ".." in text or ("," in text and text[0] not in "[{"):
            ranges[key] = text
        else:
            fixed.append(override)
    return ranges, fixed


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _monitor(config: Config) -> Monitor:
    """Return the metric that the search optimizes."""
    names = ("monitor", "mode", *OLD_MONITOR.names)
    given = {name: config.values[name] for name in names if config.values.get(name) is not None}
    try:
        OLD_MONITOR.replace("search", given)  # training warns of the old names
        if "monitor" not in given:
            raise ValueError("is missing; a search optimizes this metric: write for example valid/accuracy")
        return Monitor.of("search", given["monitor"], given.get("mode")).directed("search")
    except (TypeError, ValueError) as error:
        raise config.refused("monitor", str(error)) from error


def _train(config: Config, trial: Any, logdir: Path, monitor: Monitor) -> float:
    """Return the metric of the best epoch."""
    runner, arguments = make_run(config)
    if arguments["engine"] is None or not arguments["engine"].is_ddp:  # pruning needs the epochs in the study's process
        given = arguments["callbacks"] or {}
        callbacks = given if isinstance(given, dict) else {str(place): each for place, each in enumerate(given)}
        arguments["callbacks"] = {**callbacks, "_pruning": OptunaPruningCallback(trial, monitor=monitor.name)}
    save_config(config, logdir / FILE)
    try:
        train(config, runner, {**arguments, "logdir": logdir})
    except TrainingError as error:
        cause = error.__cause__
        if cause is not None and isinstance(cause, _optuna().TrialPruned):
            raise cause from None
        raise
    epochs = runner.experiment_metrics.values()
    loader, metric = monitor.among({key for epoch in epochs for key in epoch}).pair  # as get_loaders may name them
    scores = [epoch[loader][metric] for epoch in epochs if loader in epoch]
    return min(scores) if trial.study.direction.name == "MINIMIZE" else max(scores)


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ImportError("a search needs Optuna: pip install 'runnerkit[optuna]'") from None
