"""Hyperparameters and recorded settings of past runs, and those that differ between them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runnerkit.support.plain_values import flat
from runnerkit.support.redaction import redacted, redacted_command

log = logging.getLogger(__name__)

Settings = dict[str, Any]  # values by dotted names

# Of environment.json, beside the settings; versions and hardware are not settings.
_RUN_FACTS = ("engine", "seed")
_COLUMNS = {"run", "stage", "loader", "epoch", "step", "metric", "value"}  # of the tables of metrics


def hparams_of(logdir: Path) -> Settings:
    """Return the hyperparameters that a run was given, with dotted names; empty without any.

    Raises:
        ValueError: hparams.yml cannot be read.
    """
    return dict(flat(_read(logdir / "hparams.yml")))


def environment_of(logdir: Path) -> dict[str, Any]:
    """Return the content of a run's environment.json, nested; empty if there is none.

    Raises:
        ValueError: it cannot be read.
    """
    return _read(logdir / "environment.json")


def differing_settings(runs: Mapping[str, Path], *, reserved: frozenset[str] = frozenset()) -> dict[str, Settings]:
    """Return by run the hyperparameters and recorded settings in which runs differ; empty dicts for fewer than two.

    A hyperparameter differs too if only some runs have it. A recorded setting is compared among the runs that have it,
    as earlier versions recorded fewer, and left out if a hyperparameter with the same values tells the same.

    Args:
        reserved: names that get the prefix "hparams.", beside the columns of `read_metrics`.
    """
    if len(runs) < 2:
        return {run: {} for run in runs}
    given = {run: _readable(hparams_of, path) for run, path in runs.items()}
    recorded = {run: _recorded(_readable(environment_of, path)) for run, path in runs.items()}
    chosen = {
        name: [each.get(name) for each in given.values()]
        for name in _names(given)
        if len({_key(each.get(name)) if name in each else None for each in given.values()}) > 1
    }
    for name in _names(recorded):
        values = [each.get(name) for each in recorded.values()]
        known = {_key(each[name]) for each in recorded.values() if name in each}
        if len(known) > 1 and name not in chosen and not _is_told(values, chosen):
            chosen[name] = values
    taken = _COLUMNS | reserved
    return {
        run: {f"hparams.{name}" if name in taken else name: values[place] for name, values in chosen.items()}
        for place, run in enumerate(runs)
    }


def _readable(read: Callable[[Path], dict[str, Any]], logdir: Path) -> dict[str, Any]:
    """Read the facts of one of several runs; none, with a warning, if its file is damaged."""
    try:
        return read(logdir)
    except ValueError as error:
        log.warning("the runs are compared without these settings: %s", error)
        return {}


def _recorded(environment: dict[str, Any]) -> Settings:
    facts = {**environment.get("settings", {}), **{name: environment.get(name) for name in _RUN_FACTS}}
    return {name: value for name, value in flat(facts) if value is not None}


def _is_told(values: list[Any], chosen: Mapping[str, list[Any]]) -> bool:
    """Return whether another name has the same values: lr of the user and optimizer.lr."""
    return any([*map(_key, values)] == [*map(_key, others)] for others in chosen.values())


def _names(settings: Mapping[str, Settings]) -> list[str]:
    return list(dict.fromkeys(name for each in settings.values() for name in each))


def _key(value: Any) -> str:
    """Return a text that equal values share, also 1 and 1.0."""
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def _read(path: Path) -> dict[str, Any]:
    """Read YAML or JSON, without credentials, which files of earlier versions may contain."""
    if not path.is_file():
        return {}
    import yaml

    text = path.read_text(encoding="utf-8")
    try:
        facts = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if facts is not None and not isinstance(facts, dict):
        raise ValueError(f"{path} cannot be read: it holds a {type(facts).__name__}, not names and values")
    known: dict[str, Any] = redacted(facts or {})
    if "command" in known:
        known["command"] = redacted_command(known["command"])
    return known
