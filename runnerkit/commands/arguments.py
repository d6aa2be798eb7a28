"""Arguments and options that several commands have, and how a command prints a path or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Logdir = Annotated[Path, typer.Argument(help="folder or URL of the run", metavar="LOGDIR", show_default=False)]
Logdirs = Annotated[
    list[Path], typer.Argument(help="folders or URLs of runs, at any depth", metavar="LOGDIR", show_default=False)
]
Metrics = Annotated[list[str] | None, typer.Option("--metric", help="show only this metric; repeatable")]
Loaders = Annotated[list[str] | None, typer.Option("--loader", help="show only this loader; repeatable")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="overrides of the file's values", metavar="[KEY=VALUE]...", show_default=False),
]
Engine = Annotated[str | None, typer.Option(help="cpu, gpu, dp, ddp, fsdp, horovod, or the name of an engine class")]
Nproc = Annotated[int | None, typer.Option(help="number of processes of a distributed engine")]
Launcher = Annotated[Literal["ray"] | None, typer.Option(help="starts the processes elsewhere: on a Ray cluster")]
Precision = Annotated[str | None, typer.Option(help="fp32, fp16, bf16, or amp, which chooses by device")]
AsJson = Annotated[bool, typer.Option("--json", help="print one line of JSON; see runnerkit schema")]
NewLogdir = Annotated[
    Path | None, typer.Option(help="folder or URL for logs and checkpoints; by default a new folder in logs/")
]
Which = Annotated[Literal["best", "last"], typer.Option(help="checkpoint to export from a logdir")]


def print_path(path: Path, as_json: bool = False) -> None:
    """Print a path or the URL that it stands for, as JSON if wanted."""
    if as_json:
        print_json({"path": shown(path)})
    else:
        typer.echo(shown(path))


def shown(path: Path) -> str:
    """Return the URL that a path stands for, or else the path."""
    from runnerkit.storage.remote.urls import as_url

    return as_url(path) or str(path)


def print_json(value: object) -> None:
    """Print a value as one line of JSON in ASCII, without NaN and infinities.

    A reader may split lines at other characters than the newline, and the output may have another encoding than UTF-8.
    """
    from runnerkit.support.strict_json import strict_json

    typer.echo(strict_json(value, indent=None, ensure_ascii=True))
