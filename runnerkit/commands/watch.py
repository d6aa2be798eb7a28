"""Curves of a run in the terminal, redrawn while it trains."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runnerkit.commands.braille import draw_curves, limits
from runnerkit.history.frame import find_run, read_metrics, select
from runnerkit.history.plot import x_axis
from runnerkit.storage.remote.urls import as_url
from runnerkit.storage.status_file import describe, read_status

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, RenderableType
    from rich.text import Text

_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")  # of loaders
_STORE_EVERY_S = 10.0  # a run uploads its logs less often than that
_MIN_WIDTH, _MIN_HEIGHT, _MAX_HEIGHT = 38, 9, 16  # characters per metric


def watch(
    logdir: str | os.PathLike[str],
    *,
    metrics: Sequence[str] | None = None,
    loaders: Sequence[str] | None = None,
    once: bool = False,
    every_s: float = 2.0,
    console: Console | None = None,
) -> None:
    """Draw the curves of a run in the terminal and update them until Ctrl-C; without a terminal, draw once.

    Args:
        logdir: folder of one run; the run may be on another machine if it shares the file system.
        metrics: names to draw; None draws as many metrics as fit.
        loaders: names to draw; None draws all.
        once: draw once.
        every_s: seconds between two updates.
        console: target; None is the standard output.
    Raises:
        FileNotFoundError: `logdir` is not the logdir of a run.
        ValueError: `logdir` contains several runs.
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
            time.sleep(every_s if as_url(logdir) is None else max(every_s, _STORE_EVERY_S))


def _picture(
    logdir: str | os.PathLike[str], metrics: Sequence[str] | None, loaders: Sequence[str] | None, console: Console
) -> RenderableType:
    from rich.text import Text

    try:
        run, folder = find_run(logdir)
        table = read_metrics(folder)
    except FileNotFoundError:
        if as_url(logdir) is not None or not (Path(logdir) / "csv").is_dir():  # created when a run starts
            raise
        return Text(f"{logdir}: nothing is logged yet")
    table = select(table, metrics=metrics, loaders=loaders)
    status = read_status(folder)
    state = describe(status) if status is not None else ""
    return _dashboard(run, table, state=state, metrics=metrics, width=console.width, height=console.height)


def _dashboard(
    run: str, table: pd.DataFrame, *, state: str, metrics: Sequence[str] | None, width: int, height: int
) -> RenderableType:
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    known = list(table["metric"].unique()) if metrics is None else list(metrics)
    num_columns = max(1, min(len(known), width // _MIN_WIDTH))
    room = num_columns * max(1, (height - 3) // _MIN_HEIGHT)
    shown = known[:room] if metrics is None else known
    part_width = width // num_columns - 2
    part_height = min(max((height - 3) // math.ceil(len(shown) / num_columns), _MIN_HEIGHT), _MAX_HEIGHT)
    colors = {loader: _COLORS[number % len(_COLORS)] for number, loader in enumerate(table["loader"].unique())}
    draw = partial(_part, x_name=x_axis(table), colors=colors, width=part_width, height=part_height - 3)
    parts = [draw(metric, table[table["metric"] == metric]) for metric in shown]
    grid = Table.grid(*(Column(width=part_width, no_wrap=True) for _ in range(num_columns)), padding=(0, 1))
    for first in range(0, len(parts), num_columns):
        grid.add_row(*parts[first : first + num_columns])
    place = f"  epoch {table['epoch'].max()}, step {table['step'].max():,}"
    title = Text.assemble((run, "bold"), place, (f"  {state}", "" if state == "running" else "bold"))
    title.rstrip()
    rest = known[len(shown) :]
    return Group(title, grid, *([Text(f"also logged: {', '.join(rest)}", "dim")] if rest else []))


def _part(metric: str, table: pd.DataFrame, *, x_name: str, colors: dict[str, str], width: int, height: int) -> Text:
    """Draw the curves of one metric: one line with names and last values, `height` lines, one line with epochs."""
    from rich.text import Text

    curves = {loader: table[table["loader"] == loader] for loader in table["loader"].unique()}
    points = [curve[[x_name, "value"]].to_numpy(dtype=float) for curve in curves.values()]
    text = Text.assemble((metric, "bold"))
    for loader, curve in curves.items():
        text.append(f"  {loader} {curve['value'].iloc[-1]:.4g}", colors[loader])
    (x_min, y_min), (x_max, y_max) = limits(points)
    if math.isnan(y_min):
        return text.append("\nno finite number to draw")
    labels = {0: f"{y_max:.4g}", height - 1: f"{y_min:.4g}"}
    margin = max(map(len, labels.values()))
    curve_width = max(width - margin - 1, 1)
    characters, owners = draw_curves(points, width=curve_width, height=height)
    styles = [colors[loader] for loader in curves]
    for number, (line, line_owners) in enumerate(zip(characters, owners, strict=True)):
        text.append(f"\n{labels.get(number, ''):>{margin}} ", "dim")
        for character, owner in zip(line, line_owners, strict=True):
            text.append(character, styles[owner] if owner >= 0 else None)
    first, last = f"{x_min:.0f}", f"{x_name} {x_max:.0f}"
    return text.append(f"\n{'':{margin}} {first}{last:>{max(curve_width - len(first), 0)}}\n", "dim")
