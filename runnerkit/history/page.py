"""Parts of the HTML pages about one run and about several: template, curves, settings, code."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerkit.history.plot import draw_metric, svg_of
from runnerkit.support.plain_values import flat

if TYPE_CHECKING:
    import pandas as pd

MAX_CURVES = 24  # further metrics are named only


def render(template: str, **values: Any) -> str:
    """Render a template of this folder; values are escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(Path(__file__).parent))
    return environment.get_template(template).render(**values)


def pictures(
    table: pd.DataFrame,
    metrics: Sequence[str],
    *,
    styles: dict[tuple[str, str], dict[str, Any]],
    has_legend: bool,
) -> list[tuple[str, str]]:
    """Return (metric, URI of its curves as SVG) for at most `MAX_CURVES` metrics."""
    drawn = []
    for metric in metrics[:MAX_CURVES]:
        svg = svg_of(draw_metric(table, metric, styles=styles, has_legend=has_legend))
        drawn.append((metric, f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"))
    return drawn


def facts_of(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of environment.json by dotted names, without recorded settings and the diff."""
    facts = {name: value for name, value in environment.items() if name != "settings"}
    return {name: value for name, value in flat(facts) if name != "git.diff"}


def settings_of(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded settings by dotted names."""
    return dict(flat(environment.get("settings", {})))


def diff_of(environment: dict[str, Any]) -> str:
    """Return the uncommitted changes of the run's code; empty if there were none, or none are known."""
    return str(environment.get("git", {}).get("diff", ""))
