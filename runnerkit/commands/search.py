"""Hyperparameter search over a config with Optuna."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from runnerkit.commands.config import Config, read_config
from runnerkit.commands.configured_run import SEED, save_config
from runnerkit.commands.ray_trials import optimize as optimize_on_ray
from runnerkit.commands.trial import optuna_package, train_trial
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.monitor import Monitor
from runnerkit.storage.remote.copies import holds_run, name_of, written
from runnerkit.storage.remote.urls import as_url
from runnerkit.train_options import OLD_MONITOR

BEST = "best.yml"


def search(
    path: Path,
    overrides: Sequence[str],
    given: Mapping[str, Any],
    *,
    num_trials: int,
    logdir: Path,
    launcher: Literal["ray"] | None = None,
) -> tuple[float, dict[str, Any]]:
    """Train a config once per trial; return the best metric and the values that gave it.

    Each trial has a folder in `logdir`, perhaps a URL; ``best.yml`` is the config of the best one. Trials that run in
    one process are pruned when they are worse than the median of the trials before.

    Args:
        path, given: passed to :func:`read_config`.
        overrides: likewise; those whose value is a range are searched, as are the ranges under ``search:`` in the file.
        launcher: "ray" spreads the trials over a Ray cluster; each has its processes on one node.
    Raises:
        ValueError: there are no ranges or no metric to optimize, or a range is invalid.
        FileExistsError: `logdir` contains trials.
        ImportError: Optuna is not installed, or Ray if it is the launcher.
    """
    optuna = optuna_package()
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

    is_spread = launcher is not None
    on_one_node = ["launcher=null"] if is_spread and config.values.get("launcher") is not None else []

    def config_of(trial: Any) -> Config:
        chosen = [f"{key}={suggest(trial, key, text)}" for key, text in ranges.items()]
        return read_config(path, [*overrides, *on_one_node, *chosen], given)

    def objective(trial: Any) -> float:
        return train_trial(config_of(trial), trial, logdir, monitor)

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # an error in a trial ends the search and is reported by it
    sampler = optuna.samplers.TPESampler(seed=config.converted(config.values.get("seed", SEED), int, "seed") % 2**32)
    monitor = _monitor(config)
    study = optuna.create_study(direction="minimize" if monitor.minimize else "maximize", sampler=sampler)
    if not is_spread:
        study.optimize(objective, n_trials=num_trials)
    else:
        optimize_on_ray(
            study, config_of, num_trials=num_trials, logdir=logdir, monitor=monitor,
            num_processes=_num_processes(config), may_use_gpus=config.values.get("engine") not in ("cpu", "CPUEngine"),
        )  # fmt: skip
    if not study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
        raise ValueError(f"{monitor.name} is NaN in every epoch of every trial: no trial is the best")
    chosen = [f"{key}={value}" for key, value in study.best_params.items()]
    with written(logdir / BEST) as file:
        save_config(read_config(path, [*overrides, *chosen], given), file)
    return study.best_value, study.best_params


def _holds_trials(logdir: Path) -> bool:
    url = as_url(logdir)
    return holds_run(f"{url}/trial-000") if url is not None else any(logdir.glob("trial-*"))


def _num_processes(config: Config) -> int:
    """Return the number of processes of a trial.

    Raises:
        ValueError: it is not a number, or the engine has a launcher, but trials on a cluster have one node each.
    """
    engine = config.values.get("engine")
    if not isinstance(engine, dict):
        return config.converted(config.values.get("nproc"), int | None, "nproc") or 1
    if engine.get("launcher") is not None:
        raise config.refused("engine.launcher", "each trial has one node with --launcher: leave it out")
    return config.converted(engine.get("num_processes"), int | None, "engine.num_processes") or 1


def suggest(trial: Any, key: str, given: Any) -> Any:
    """Sample a value from "low..high", "low..high:log", "this,that" or a list; of integers if both ends are.

    Returns:
        A number of a range, or a choice as text, of YAML.
    Raises:
        ValueError: `given` is a range with an end that is not a number, or with other mistakes.
    """
    choices = given if isinstance(given, list) else [given]
    if len(choices) == 1 and isinstance(choices[0], str):
        given = choices[0] if _is_range(choices[0]) else given
    if not isinstance(given, str):
        return trial.suggest_categorical(key, [_in_yaml(each) for each in choices])
    if not _is_range(given):
        return trial.suggest_categorical(key, _choices(given))
    low, high, scale = _bounds(given)
    if low is None or high is None or not low < high or scale not in ("", "log"):
        raise ValueError(f"{key}={given}: expected LOW..HIGH, LOW..HIGH:log, or choices such as 16,32,64")
    if scale == "log" and low <= 0:
        raise ValueError(f"{key}={given}: a logarithmic range must start above 0, got {low}")
    whole = isinstance(low, int) and isinstance(high, int)
    return (trial.suggest_int if whole else trial.suggest_float)(key, low, high, log=scale == "log")


def _ranges(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate overrides with a range or choices from those with a value, which may be a list in brackets."""
    ranges, fixed = dict[str, str](), list[str]()
    for override in overrides:
        key, _, text = override.partition("=")
        if _is_range(text) or len(_choices(text)) > 1:
            ranges[key] = text
        else:
            fixed.append(override)
    return ranges, fixed


def _is_range(text: str) -> bool:
    """Return whether a text is meant as a range: an end of it is a number, unlike those of ../data."""
    return ".." in text and _bounds(text)[:2] != (None, None)


def _bounds(text: str) -> tuple[int | float | None, int | float | None, str]:
    """Return the ends of a range, None for one that is not a number, and its scale."""
    low, _, rest = text.partition("..")
    high, _, scale = rest.partition(":")
    return _number(low), _number(high), scale


def _choices(text: str) -> list[str]:
    """Split a text at the commas outside of brackets and quotes."""
    choices, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = quote if character != quote else ""
        elif character in "\"'" and choices[-1][-1:] in {"", "[", "{", ",", ":", " "}:  # not that of "don't"
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            choices.append("")
        else:
            choices[-1] += character
    return choices


def _in_yaml(value: Any) -> str:
    """Return a value as an override has it.

    >>> _in_yaml(None), _in_yaml([16, 32]), _in_yaml("relu"), _in_yaml("1e-3")
    ('null', '[16, 32]', 'relu', '"1e-3"')
    """
    yaml = importlib.import_module("yaml")
    style = '"' if isinstance(value, str) and _number(value) is not None else None  # of YAML 1.1, 1e-3 is a text
    options = {"default_flow_style": True, "default_style": style, "width": math.inf, "allow_unicode": True}
    return str(yaml.safe_dump([value], **options)).strip()[1:-1]


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
