"""The page that compares several runs: what differs, curves over one another, code and environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runnerkit.history import page
from runnerkit.history.best_values import best_metrics, compare_runs, without_missing
from runnerkit.history.chosen_metrics import changing_metrics, default_metrics, monitored_metrics
from runnerkit.history.frame import Logdirs, find_runs, read_metrics
from runnerkit.history.hyperparameters import Settings, differing_settings, environment_of, hparams_of
from runnerkit.history.plot import LINES, curve_styles
from runnerkit.history.run_states import states_of

if TYPE_CHECKING:
    import pandas as pd

_NO_FACTS = {"git.commit", "git.branch", "git.has_changes", "command"}  # shown with the code


def comparison_page(logdir: Logdirs) -> str:
    """Return the HTML of the page.

    Args:
        logdir: see ``read_metrics``.
    """
    runs, table, rows = find_runs(logdir), read_metrics(logdir), compare_runs(logdir)
    environments = {run: environment_of(path) for run, path in runs.items()}
    settings = differing_settings(runs)
    logged = rows.dropna(subset=["metric"]).iloc[0]
    chosen = default_metrics(table, monitored_metrics(runs.values()))
    others = [name for name in changing_metrics(table) if name not in chosen]
    styles = curve_styles(table)
    facts = {run: page.facts_of(each) for run, each in environments.items()}
    hparams = {run: hparams_of(path) for run, path in runs.items()}
    recorded = {run: page.settings_of(each) for run, each in environments.items()}
    names, cells = _cells(rows, settings, best_metrics(logdir), chosen, loader=logged["loader"])
    return page.render(
        "comparison.html",
        title=f"{len(runs)} runs",
        extent=f"{table['epoch'].max()} epochs, {table['step'].max():,} training steps at most",
        compared=f"{logged['metric']} of {logged['loader']}",
        better=logged["better"],
        columns=names,
        rows=cells,
        colors=_colors(styles),
        lines=_lines(table),
        states=states_of(logdir, runs, logged=set(table["run"])),
        curves=page.pictures(table, chosen, styles=styles, has_legend=False),
        more_curves=page.pictures(table, others, styles=styles, has_legend=False),
        same=_same({run: {**recorded[run], **hparams[run]} for run in runs}),
        environment=_same({run: _without(each, _NO_FACTS) for run, each in facts.items()}),
        facts=_differing({run: _without(each, _NO_FACTS) for run, each in facts.items()}),
        code=_code(environments),
        commands={run: " ".join(map(str, each.get("command", []))) for run, each in environments.items()},
        runs=list(runs),
    )


def _cells(
    rows: pd.DataFrame, settings: Mapping[str, Settings], summary: pd.DataFrame, metrics: list[str], *, loader: str
) -> tuple[list[str], list[tuple[str, list[Any]]]]:
    """Return the names of the columns after the run's, and the run and the cells of each row, the best first."""
    names = list(next(iter(settings.values())))
    stages = ["stage"] if rows["stage"].nunique() > 1 else []
    values = (
        ["best", "best_epoch", "last"] if rows["better"].fillna("").ne("").any() else ["last", "smallest", "largest"]
    )
    lasts: dict[Any, Any] = summary.set_index(["run", "stage", "metric", "loader"])["last"].to_dict()
    compared = (rows["metric"].dropna().iloc[0], loader)
    logged = {(metric, of) for _, _, metric, of in lasts} - {compared}
    others = [(metric, of) for metric in metrics for of in summary["loader"].unique() if (metric, of) in logged]
    cells = []
    for row in without_missing(rows).to_dict("records"):
        more = [lasts.get((row["run"], row["stage"], metric, of)) for metric, of in others]
        own = [row[name] for name in (*stages, *values)]
        cells.append((row["run"], [*(settings[row["run"]][name] for name in names), *own, *more]))
    titles = [each.replace("_", " ") for each in values]
    return [*names, *stages, *titles, *(f"{metric} ({of})" for metric, of in others)], cells


def _colors(styles: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, str]:
    from matplotlib.colors import to_hex

    return {run: to_hex(style["color"]) for (run, _), style in styles.items()}


def _lines(table: pd.DataFrame) -> str:
    loaders, names = list(table["loader"].unique()), {"--": "dashed", "-": "solid", ":": "dotted", "-.": "dash-dotted"}
    if len(loaders) == 1:
        return ""
    words = [f"{loader} {names[LINES[number % len(LINES)]]}" for number, loader in enumerate(loaders)]
    return f"Each run has the color of its row; lines: {', '.join(words)}."


def _same(facts: Mapping[str, Settings]) -> Settings:
    """Return the facts that all runs share."""
    first, *others = facts.values()
    return {name: value for name, value in first.items() if all(_has(each, name, value) for each in others)}


def _differing(facts: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """Return by name the values of the runs, of facts that they do not share."""
    names, same = dict.fromkeys(name for each in facts.values() for name in each), _same(facts)
    return {name: {run: each.get(name) for run, each in facts.items()} for name in names if name not in same}


def _has(facts: Settings, name: str, value: Any) -> bool:
    return name in facts and facts[name] == value


def _without(facts: Settings, names: set[str]) -> Settings:
    return {name: value for name, value in facts.items() if name not in names}


def _code(environments: Mapping[str, dict[str, Any]]) -> list[tuple[list[str], dict[str, Any], str]]:
    """Return (runs, commit, diff) for each state of the code."""
    states: dict[tuple[Any, ...], tuple[list[str], dict[str, Any], str]] = {}
    for run, environment in environments.items():
        commit, diff = environment.get("git", {}), page.diff_of(environment)
        state = (commit.get("commit"), commit.get("has_changes"), diff)
        states.setdefault(state, ([], commit, diff))[0].append(run)
    return list(states.values())
