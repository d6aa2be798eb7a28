"""Curves of a run, or of several, in the terminal, redrawn while they train."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from runnerkit.commands.braille import draw_curves, limits
from runnerkit.commands.status_stream import STORE_EVERY_S
from runnerkit.history.best_values import compare_runs, settings_of, without_missing
from runnerkit.history.chosen_metrics import changing_metrics, default_metrics, monitored_metrics
from runnerkit.history.frame import Logdirs, find_runs, folders_of, read_metrics, select
from runnerkit.history.plot import x_axis
from runnerkit.history.run_states import states_of
from runnerkit.storage.remote.urls import as_url, plain_path
from runnerkit.storage.status_file import describe, read_status

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, RenderableType
    from rich.text import Text

_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")  # of loaders, or of runs
_MAX_RUNS = 12  # in the table
_MIN_WIDTH, _MIN_HEIGHT, _MAX_HEIGHT = 38, 9, 16  # characters per metric


def watch(
    logdir: Logdirs,
    *,
    metrics: Sequence[str] | None = None,
    loaders: Sequence[str] | None = None,
    once: bool = False,
    every_s: float = 2.0,
    console: Console | None = None,
) -> None:
    """Draw the curves of runs in the terminal and update them until Ctrl-C; without a terminal, draw once.

    Several runs are drawn over one another, by one loader, above a table of what differs between them.

    Args:
        logdir: see ``read_metrics``; the runs may be on another machine if it shares the file system.
        metrics: names to draw; None draws as many metrics as fit, the losses and monitored ones first.
        loaders: names to draw; None draws all, and of several runs "valid" or else the first that logged the metric.
        once: draw once.
        every_s: seconds between two updates.
        console: target; None is the standard output.
    Raises:
        FileNotFoundError: `logdir` is not the logdir of a run.
        KeyError: when drawing once, a metric or loader was not logged.
    """
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError as error:
        raise ImportError("watch needs rich: pip install runnerkit[rich]") from error
    console = console or Console()
    if once or not console.is_terminal:
        console.print(_picture(logdir, metrics, loaders, console))
        return
    _picture(logdir, None, None, console)  # raises if this is not a logdir
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                picture = _picture(logdir, metrics, loaders, console)
            except KeyError as error:
                picture = Text(error.args[0])  # it may be logged later
            live.update(picture, refresh=True)
            time.sleep(max(every_s, STORE_EVERY_S) if any(map(as_url, folders_of(logdir))) else every_s)


def _picture(
    logdir: Logdirs, metrics: Sequence[str] | None, loaders: Sequence[str] | None, console: Console
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    folders = folders_of(logdir)
    try:
        runs = find_runs(logdir)
        table = read_metrics(logdir)
    except FileNotFoundError:
        has_begun = len(folders) == 1 and as_url(folders[0]) is None and (plain_path(folders[0]) / "csv").is_dir()
        if not has_begun:
            raise
        status = read_status(plain_path(folders[0]))
        is_over = status is not None and status["state"] != "running"
        return Text(f"{folders[0]}: nothing is logged{f', {describe(status)}' if status and is_over else ' yet'}")
    several, logged_runs = len(runs) > 1, set(table["run"])
    if several and loaders is None:
        loaders = _usual_loaders(select(table, metrics=metrics), metrics)
    table = select(table, metrics=metrics, loaders=loaders)
    names = list(metrics) if metrics is not None else _in_order(table, monitored_metrics(runs.values()))
    is_asked, width, height = metrics is not None, console.width, console.height
    if not several:
        run = next(iter(runs))
        status = read_status(runs[run])
        state = describe(status) if status is not None else ""
        options: dict[str, Any] = {"is_asked": is_asked, "width": width, "height": height}
        return _dashboard(run, table, names, by="loader", state=state, **options)
    logged = set(table.loc[table["metric"] == names[0], "loader"])
    compared = next(each for each in loaders or () if each in logged)
    notes = [f"{run}: {state}" for run, state in states_of(logdir, runs, logged=logged_runs).items()]
    below = Group(
        _table(compare_runs(logdir, metric=names[0], loader=compared), table),
        *(Text(note, "dim", no_wrap=True, overflow="ellipsis") for note in notes[:_MAX_RUNS]),
    )
    height -= min(len(runs), _MAX_RUNS) + 3 + min(len(notes), _MAX_RUNS)  # of the table and the notes
    title = f"{len(runs)} runs, {' and '.join(loaders or ())}"
    return _dashboard(title, table, names, by="run", is_asked=is_asked, width=width, height=height, below=below)


def _usual_loaders(table: pd.DataFrame, metrics: Sequence[str] | None) -> list[str]:
    """Return "valid", or else the first loader, of those that logged each metric."""
    parts = [table] if metrics is None else [table[table["metric"] == each] for each in metrics]
    logged = [list(part["loader"].unique()) for part in parts]
    return list(dict.fromkeys("valid" if "valid" in each else each[0] for each in logged))


def _in_order(table: pd.DataFrame, monitored: set[str]) -> list[str]:
    """Return the metrics to draw as far as there is room: those of plots, others that change, constant ones."""
    order = [*default_metrics(table, monitored), *changing_metrics(table), *table["metric"].unique()]
    return list(dict.fromkeys(order))


def _table(comparison: pd.DataFrame, table: pd.DataFrame) -> RenderableType:
    """Return the best runs with what differs between them, each in the color of its curve."""
    from rich.table import Table
    from rich.text import Text

    colors, logged = _colors(table, "run"), comparison.dropna(subset=["metric"])
    settings = settings_of(comparison)
    values = ["best", "best_epoch", "last"] if logged["better"].ne("").any() else ["last"]
    listing = Table(box=None, pad_edge=False)
    titles = {"best": f"best {logged['metric'].iloc[0]}", "best_epoch": "epoch", "last": "last"}
    for name in ("run", *settings, *(titles[each] for each in values)):
        listing.add_column(Text(name, "dim"), no_wrap=name == "run", overflow="fold")
    for row in without_missing(comparison.head(_MAX_RUNS)).to_dict("records"):
        cells = ["" if row[name] is None else row[name] for name in (*settings, *values)]
        words = [f"{each:.4g}" if isinstance(each, float) else str(each) for each in cells]
        listing.add_row(Text(row["run"], colors.get(row["run"], "")), *map(Text, words))
    return listing


def _colors(table: pd.DataFrame, column: str) -> dict[str, str]:
    return {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(table[column].unique())}


def _dashboard(
    title: str,
    table: pd.DataFrame,
    known: list[str],
    *,
    by: str,
    is_asked: bool,
    width: int,
    height: int,
    state: str = "",
    below: RenderableType | None = None,
) -> RenderableType:
    """Draw the metrics in a grid.

    Args:
        by: column whose values have a color each: "loader", or "run", whose names are below.
        is_asked: draw all of the metrics, not as many as fit.
        state: of the run, from its status file.
    """
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    num_columns = max(1, min(len(known), width // _MIN_WIDTH))
    room = num_columns * max(1, (height - 3) // _MIN_HEIGHT)
    shown = known if is_asked else known[:room]
    part_width = width // num_columns - 2
    part_height = min(max((height - 3) // math.ceil(len(shown) / num_columns), _MIN_HEIGHT), _MAX_HEIGHT)
    draw = partial(
        _part, by=by, x_name=x_axis(table), colors=_colors(table, by), width=part_width, height=part_height - 3
    )
    parts = [draw(metric, table[table["metric"] == metric]) for metric in shown]
    grid = Table.grid(*(Column(width=part_width, no_wrap=True) for _ in range(num_columns)), padding=(0, 1))
    for first in range(0, len(parts), num_columns):
        grid.add_row(*parts[first : first + num_columns])
    head = Text.assemble((title, "bold"), f"  epoch {table['epoch'].max()}, step {table['step'].max():,}")
    if state:
        head.append(f"  {state}", "" if state == "running" else "bold")
    rest = known[len(shown) :]
    others = [Text(f"also logged: {', '.join(rest)}", "dim")] if rest else []
    return Group(head, grid, *([] if below is None else [below]), *others)


def _part(
    metric: str, table: pd.DataFrame, *, by: str, x_name: str, colors: dict[str, str], width: int, height: int
) -> Text:
    """Draw the curves of one metric: one line with names and last values, `height` lines, one line with epochs."""
    from rich.text import Text

    curves = [curve for _, curve in table.groupby(["run", "loader"], sort=False)]
    owners_of = [curve[by].iloc[0] for curve in curves]
    points = [curve[[x_name, "value"]].to_numpy(dtype=float) for curve in curves]
    text = Text.assemble((metric, "bold"))
    for owner, curve in zip(owners_of, curves, strict=True):
        if by == "loader":
            text.append(f"  {owner} {curve['value'].iloc[-1]:.4g}", colors[owner])
    (x_min, y_min), (x_max, y_max) = limits(points)
    if math.isnan(y_min):
        return text.append("\nno finite number to draw")
    labels = {0: f"{y_max:.4g}", height - 1: f"{y_min:.4g}"}
    margin = max(map(len, labels.values()))
    curve_width = max(width - margin - 1, 1)
    characters, owners = draw_curves(points, width=curve_width, height=height)
    styles = [colors[owner] for owner in owners_of]
    for number, (line, line_owners) in enumerate(zip(characters, owners, strict=True)):
        text.append(f"\n{labels.get(number, ''):>{margin}} ", "dim")
        for character, owner in zip(line, line_owners, strict=True):
            text.append(character, styles[owner] if owner >= 0 else None)
    first, last = f"{x_min:.0f}", f"{x_name} {x_max:.0f}"
    return text.append(f"\n{'':{margin}} {first}{last:>{max(curve_width - len(first), 0)}}\n", "dim")
