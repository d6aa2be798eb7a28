"""The command `runnerkit`: train, search, export; look at what a run has left.

A command imports what it needs when it runs: shells ask for completions at each press of a key, without torch.
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
from runnerkit.unknown_key import UnknownKeyError
from runnerkit.version import __version__

app = typer.Typer(
    help="Train, and read what training has left.",
    no_args_is_help=True,
    rich_markup_mode=None,  # help and errors as plain text, which can be searched and pasted
    context_settings={"help_option_names": ["-h", "--help"]},
)

Logdir = Annotated[Path, typer.Argument(help="folder of the run", metavar="LOGDIR", show_default=False)]
Logdirs = Annotated[
    list[Path], typer.Argument(help="folders of runs, at any depth", metavar="LOGDIR", show_default=False)
]
Metrics = Annotated[list[str] | None, typer.Option("--metric", help="only this one; may be given again")]
Loaders = Annotated[list[str] | None, typer.Option("--loader", help="only this one; may be given again")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="values in place of the file's", metavar="[KEY=VALUE]...", show_default=False)
]
Engine = Annotated[str | None, typer.Option(help="cpu, gpu, dp, ddp, fsdp, horovod, or an engine's class")]
Nproc = Annotated[int | None, typer.Option(help="number of processes, of engines that have several")]
Precision = Annotated[str | None, typer.Option(help="fp32, fp16, bf16, or amp: what suits the device")]
NewLogdir = Annotated[Path | None, typer.Option(help="folder for logs and checkpoints; by default one below logs/")]
Which = Annotated[Literal["best", "last"], typer.Option(help="of the checkpoints of a logdir")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 1 if it found something broken or training raised, 2 for a wrong use."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # Not app(), which puts its own hook in the way of tracebacks.
        get_command(app).main(list(arguments), prog_name="runnerkit")
    except (OSError, ValueError, ImportError, UnknownKeyError) as error:
        command = next((word for word in arguments if not word.startswith("-")), "")
        sys.stderr.write(f"runnerkit {command}: {error}\n")
        return 2
    except TrainingError as error:  # no wrong use: whoever reads it wants to know where
        traceback.print_exception(error.__cause__)
        return 1
    except SystemExit as end:  # how typer ends, whatever came of it
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
    file: Annotated[Path, typer.Argument(help="a config, .yaml, or a script, .py", metavar="FILE", show_default=False)],
    overrides: Overrides = None,
    engine: Engine = None,
    nproc: Nproc = None,
    precision: Precision = None,
    logdir: NewLogdir = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in the logdir, if there is one")] = False,
) -> None:
    """Train what a config or a script says; of a config, LOGDIR/config.yml is left, to be run again.

    A script gets what follows `--` as its arguments.
    """
    from runnerkit.commands.configured_run import FILE, choose_logdir, make_run, save_config, train
    from runnerkit.commands.script import run_script
    from runnerkit.engines.process_environment import get_rank

    words = overrides or []
    if file.suffix == ".py":
        if logdir is not None or resume:
            raise ValueError(f"{file} has a logdir of its own; hand it, after --, the arguments that it takes")
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
    trials: Annotated[int, typer.Option(help="how many times to train", min=1)] = 20,
    engine: Engine = None,
    nproc: Nproc = None,
    precision: Precision = None,
    logdir: NewLogdir = None,
) -> None:
    """Search the values that make valid_metric best, by Optuna: of keys under search: in the config, or as
    KEY=LOW..HIGH, KEY=LOW..HIGH:log, KEY=THIS,THAT. LOGDIR/best.yml is what `runnerkit run` takes.
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
        Path, typer.Argument(help="a logdir, or a checkpoint in one", metavar="LOGDIR|CHECKPOINT", show_default=False)
    ],
    to: Annotated[Literal["onnx", "torch-export", "safetensors"], typer.Option(help="the format", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="the file; by default model.SUFFIX in the logdir")
    ] = None,
    which: Which = "best",
) -> None:
    """Write a trained model as a file that needs no code of it; the config in its logdir says what it is."""
    from runnerkit.commands.configured_run import FILE
    from runnerkit.commands.export import SUFFIXES, export_configured
    from runnerkit.storage.weights import export_safetensors

    if not source.exists():
        raise FileNotFoundError(f"{source}: no such logdir or checkpoint")
    logdir = source if source.is_dir() else source.parent.parent  # LOGDIR/checkpoints/model.0003.pth
    out = output or logdir / f"model{SUFFIXES[to]}"
    if out.is_dir():
        raise IsADirectoryError(f"cannot write {out}: it is a folder; name a file in it")
    if to == "safetensors":
        typer.echo(export_safetensors(source, out, which=which))
        return
    typer.echo(export_configured(read_config(logdir / FILE), source, out, to=to, which=which))


@app.command(epilog="Example: runnerkit new train.py && python train.py")
def new(path: Annotated[Path, typer.Argument(help="the script to write")] = Path("train.py")) -> None:
    """Write a script that trains, to be changed line by line."""
    from runnerkit.commands.starter import write_starter

    typer.echo(write_starter(path))


@app.command(epilog="Example: runnerkit env > environment.json")
def env() -> None:
    """Print versions, hardware and launcher, ready for a bug report."""
    from runnerkit.engines.process_environment import describe_launcher
    from runnerkit.environment import describe_environment

    typer.echo(json.dumps({**describe_environment(), "launcher": describe_launcher()}, indent=2))


@app.command(epilog="Example: runnerkit metrics logs/digits; runnerkit metrics logs --metric accuracy --csv")
def metrics(
    logdirs: Logdirs,
    metric: Annotated[
        str | None, typer.Option(help="only this one; of several runs, what they are compared by")
    ] = None,
    loader: Annotated[
        str | None, typer.Option(help="only this one; of several runs, what they are compared by")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print CSV with all digits")] = False,
) -> None:
    """Print the metrics of a run, one row an epoch and loader, and its best epochs; compare several runs."""
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
    """Draw the curves of a run, or of several over one another."""
    from runnerkit.curves.plot import plot_metrics

    typer.echo(plot_metrics(logdirs, path=output, metrics=metric or None, loaders=loader or None, log_scale=log or ()))


@app.command(epilog="Example: runnerkit watch logs/digits --metric loss --metric accuracy")
def watch(
    logdir: Logdir,
    metric: Metrics = None,
    loader: Loaders = None,
    once: Annotated[bool, typer.Option("--once", help="draw once, as where the output is no terminal")] = False,
) -> None:
    """Draw the curves of a run in the terminal while it goes on, until Ctrl-C."""
    from runnerkit.commands.watch import watch as watch_curves

    watch_curves(logdir, metrics=metric or None, loaders=loader or None, once=once)


@app.command(epilog="Example: runnerkit report logs/digits -o digits.html")
def report(
    logdir: Logdir,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="path of the page; by default LOGDIR/report.html")
    ] = None,
) -> None:
    """Write a run on one page of HTML, which opens without network: curves, best values, checkpoints, settings."""
    from runnerkit.curves.report import write_report

    typer.echo(write_report(logdir, path=output))


@app.command(epilog="Example: runnerkit doctor logs/digits")
def doctor(logdir: Logdir) -> None:
    """Verify the checkpoints and logs of a run; exit with 1 if something is broken."""
    from runnerkit.commands.doctor import examine

    report = examine(logdir)
    typer.echo(report)
    raise typer.Exit(1 if report.num_broken else 0)
