"""The `runnerkit` command line: training, search, export and inspection of runs.

Each command imports its modules when it runs: shell completion starts this module often and does not need torch.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.main import get_command

from runnerkit.commands.config import TrainingError, read_config
from runnerkit.errors import UnknownKeyError
from runnerkit.version import __version__

app = typer.Typer(
    help="Train models and inspect their runs.",
    no_args_is_help=True,
    rich_markup_mode=None,  # help and errors as plain text
    context_settings={"help_option_names": ["-h", "--help"]},
)

Logdir = Annotated[Path, typer.Argument(help="folder of the run", metavar="LOGDIR", show_default=False)]
Logdirs = Annotated[
    list[Path], typer.Argument(help="folders of runs, at any depth", metavar="LOGDIR", show_default=False)
]
Metrics = Annotated[list[str] | None, typer.Option("--metric", help="show only this metric; repeatable")]
Loaders = Annotated[list[str] | None, typer.Option("--loader", help="show only this loader; repeatable")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="overrides of the file's values", metavar="[KEY=VALUE]...", show_default=False),
]
Engine = Annotated[str | None, typer.Option(help="cpu, gpu, dp, ddp, fsdp, horovod, or the name of an engine class")]
Nproc = Annotated[int | None, typer.Option(help="number of processes of a distributed engine")]
Precision = Annotated[str | None, typer.Option(help="fp32, fp16, bf16, or amp, which chooses by device")]
NewLogdir = Annotated[Path | None, typer.Option(help="folder for logs and checkpoints; by default a new one in logs/")]
Which = Annotated[Literal["best", "last"], typer.Option(help="checkpoint to export from a logdir")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 1 if files are broken or training raised, 2 for incorrect usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # Not app(), which installs its own exception hook.
        get_command(app).main(list(arguments), prog_name="runnerkit")
    except (OSError, ValueError, ImportError, UnknownKeyError) as error:
        command = next((word for word in arguments if not word.startswith("-")), "")
        sys.stderr.write(f"runnerkit {command}: {error}\n")
        return 2
    except TrainingError as error:  # an error in the user's code needs its traceback
        traceback.print_exception(error.__cause__)
        return 1
    except SystemExit as end:  # typer always ends with one
        return end.code if isinstance(end.code, int) else 0
    raise AssertionError("a command ends in SystemExit")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"runnerkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Example: runnerkit run examples/configs/fashion_mnist.yaml --engine ddp --nproc 2 optimizer.lr=0.01"
)
def run(
    file: Annotated[Path, typer.Argument(help="a .yaml config or a .py script", metavar="FILE", show_default=False)],
    overrides: Overrides = None,
    engine: Engine = None,
    nproc: Nproc = None,
    precision: Precision = None,
    logdir: NewLogdir = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in the logdir, if there is one")] = False,
) -> None:
    """Train from a config or a script.

    A config is saved as LOGDIR/config.yml, which reproduces the run. A script receives the arguments after `--`.
    """
    from runnerkit.commands.configured_run import FILE, choose_logdir, make_run, save_config, train
    from runnerkit.commands.script import run_script
    from runnerkit.engines.process_environment import get_rank

    words = overrides or []
    if file.suffix == ".py":
        if logdir is not None or resume:
            raise ValueError(f"{file} is a script, which sets its own logdir; pass the script's arguments after --")
        run_script(file, words, name=engine, num_processes=nproc, precision=precision)
    given = {"engine": engine, "nproc": nproc, "precision": precision, "logdir": logdir and str(logdir)}
    config = read_config(file, words, given)
    folder = choose_logdir(config, resume=resume)
    runner, arguments = make_run(config)
    if get_rank() == 0:
        save_config(config, folder / FILE)
    train(config, runner, {**arguments, "logdir": folder, "resume": "auto" if resume else None})
    if get_rank() == 0:
        typer.echo(folder)


@app.command(epilog="Example: runnerkit tune config.yaml --trials 20 optimizer.lr=1e-4..0.1:log hparams.width=32,64")
def tune(
    file: Annotated[Path, typer.Argument(help="a config", metavar="FILE", show_default=False)],
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(help="number of trials", min=1)] = 20,
    engine: Engine = None,
    nproc: Nproc = None,
    precision: Precision = None,
    logdir: NewLogdir = None,
) -> None:
    """Search for the hyperparameters with the best valid_metric, with Optuna.

    Give ranges under search: in the config, or as KEY=LOW..HIGH, KEY=LOW..HIGH:log, KEY=THIS,THAT. Pass the resulting
    LOGDIR/best.yml to `runnerkit run`.
    """
    from runnerkit.commands.search import BEST, search

    given = {"engine": engine, "nproc": nproc, "precision": precision}
    folder = logdir or Path("logs", f"{file.stem}-tune")
    score, values = search(file, overrides or [], given, num_trials=trials, logdir=folder)
    typer.echo("\n".join([f"best: {score:.6g}", *(f"{key}={value}" for key, value in values.items())]))
    typer.echo(f"runnerkit run {folder / BEST}")


@app.command(epilog="Example: runnerkit export logs/digits --to onnx -o digits.onnx")
def export(
    source: Annotated[
        Path, typer.Argument(help="a logdir or a checkpoint in one", metavar="LOGDIR|CHECKPOINT", show_default=False)
    ],
    to: Annotated[Literal["onnx", "torch-export", "safetensors"], typer.Option(help="the format", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="path of the file; by default model.SUFFIX in the logdir")
    ] = None,
    which: Which = "best",
) -> None:
    """Export a trained model to a file that does not need its code, using the config in the logdir."""
    from runnerkit.checkpoints.weights import export_safetensors
    from runnerkit.commands.configured_run import FILE
    from runnerkit.commands.export import SUFFIXES, export_configured

    if not source.exists():
        raise FileNotFoundError(f"{source}: no such logdir or checkpoint")
    logdir = source if source.is_dir() else source.parent.parent  # LOGDIR/checkpoints/model.0003.pth
    out = output or logdir / f"model{SUFFIXES[to]}"
    if out.is_dir():
        raise IsADirectoryError(f"cannot write {out}: it is a folder; pass the path of a file")
    if to == "safetensors":
        typer.echo(export_safetensors(source, out, which=which))
        return
    typer.echo(export_configured(read_config(logdir / FILE), source, out, to=to, which=which))


@app.command(epilog="Example: runnerkit new train.py && python train.py")
def new(path: Annotated[Path, typer.Argument(help="the script to write")] = Path("train.py")) -> None:
    """Write a training script as a starting point."""
    from runnerkit.commands.starter import write_starter

    typer.echo(write_starter(path))


@app.command(epilog="Example: runnerkit env > environment.json")
def env() -> None:
    """Print versions, hardware and launcher for a bug report."""
    from runnerkit.engines.process_environment import describe_launcher
    from runnerkit.loop.environment import describe_environment

    typer.echo(json.dumps({**describe_environment(), "launcher": describe_launcher()}, indent=2))


@app.command(epilog="Example: runnerkit metrics logs/digits; runnerkit metrics logs --metric accuracy --csv")
def metrics(
    logdirs: Logdirs,
    metric: Annotated[str | None, typer.Option(help="show only this one; several runs are compared by it")] = None,
    loader: Annotated[str | None, typer.Option(help="show only this one; several runs are compared by it")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print CSV with all digits")] = False,
) -> None:
    """Print the metrics of a run, one row per epoch and loader, and its best epochs, or compare several runs."""
    from runnerkit.commands.metrics_text import metrics_text

    typer.echo(metrics_text(logdirs, metric=metric, loader=loader, as_csv=csv), nl=False)


@app.command(epilog="Example: runnerkit plot logs/digits logs/other -o curves.png --metric loss --log loss")
def plot(
    logdirs: Logdirs,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="path of the PNG; by default LOGDIR/metrics.png")
    ] = None,
    metric: Metrics = None,
    loader: Loaders = None,
    log: Annotated[list[str] | None, typer.Option("--log", help="metric on a logarithmic axis")] = None,
) -> None:
    """Plot the curves of one run, or of several runs in the same axes."""
    from runnerkit.history.plot import plot_metrics

    typer.echo(plot_metrics(logdirs, path=output, metrics=metric or None, loaders=loader or None, log_scale=log or ()))


@app.command(epilog="Example: runnerkit watch logs/digits --metric loss --metric accuracy")
def watch(
    logdir: Logdir,
    metric: Metrics = None,
    loader: Loaders = None,
    once: Annotated[bool, typer.Option("--once", help="draw once and exit, the default without a terminal")] = False,
) -> None:
    """Draw the curves of a run in the terminal while it trains, until Ctrl-C."""
    from runnerkit.commands.watch import watch as watch_curves

    watch_curves(logdir, metrics=metric or None, loaders=loader or None, once=once)


@app.command(epilog="Example: runnerkit report logs/digits -o digits.html")
def report(
    logdir: Logdir,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="path of the page; by default LOGDIR/report.html")
    ] = None,
) -> None:
    """Write a self-contained HTML report of a run: curves, best values, checkpoints, settings."""
    from runnerkit.history.report import write_report

    typer.echo(write_report(logdir, path=output))


@app.command(epilog="Example: runnerkit doctor logs/digits")
def doctor(logdir: Logdir) -> None:
    """Check the checkpoints and logs of a run; exit with 1 if something is broken."""
    from runnerkit.commands.doctor import examine

    report = examine(logdir)
    typer.echo(report)
    raise typer.Exit(1 if report.num_broken else 0)
