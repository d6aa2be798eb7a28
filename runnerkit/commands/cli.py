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

from runnerkit.commands.arguments import (
    AsJson,
    Engine,
    Launcher,
    Loaders,
    Logdir,
    Logdirs,
    Metrics,
    NewLogdir,
    Nproc,
    Overrides,
    Precision,
    Which,
    print_json,
    print_path,
    shown,
)
from runnerkit.commands.config import TrainingError, read_config
from runnerkit.errors import UnknownKeyError
from runnerkit.version import __version__

app = typer.Typer(
    help="Train models and inspect their runs.",
    no_args_is_help=True,
    rich_markup_mode=None,  # help and errors as plain text
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    launcher: Launcher = None,
    logdir: NewLogdir = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in the logdir, if there is one")] = False,
    as_json: AsJson = False,
) -> None:
    """Train from a config or a script.

    A config is saved as LOGDIR/config.yml, which reproduces the run. A script receives the arguments after `--`.
    """
    from runnerkit.commands.configured_run import FILE, choose_logdir, make_run, save_config, train
    from runnerkit.commands.script import run_script
    from runnerkit.engines.launch.ray_launcher import disconnect
    from runnerkit.engines.process_environment import get_rank

    words = overrides or []
    if file.suffix == ".py":
        if logdir is not None or resume:
            raise ValueError(f"{file} is a script, which sets its own logdir; pass the script's arguments after --")
        if as_json:
            raise ValueError(f"{file} is a script, which prints its own output: pass a config, or read status.json")
        run_script(file, words, name=engine, num_processes=nproc, precision=precision, launcher=launcher)
    given = {
        "engine": engine, "nproc": nproc, "precision": precision, "launcher": launcher,
        "logdir": logdir and str(logdir),
    }  # fmt: skip
    config = read_config(file, words, given)
    folder = choose_logdir(config, resume=resume)
    runner, arguments = make_run(config)
    if get_rank() == 0:
        save_config(config, folder / FILE)
    train(config, runner, {**arguments, "logdir": folder, "resume": "auto" if resume else None})
    disconnect()
    if get_rank() == 0 and as_json:
        print_json({"logdir": shown(folder), "metrics": runner.epoch_metrics})
    elif get_rank() == 0:
        print_path(folder)


@app.command(epilog="Example: runnerkit tune config.yaml --trials 20 optimizer.lr=1e-4..0.1:log hparams.width=32,64")
def tune(
    file: Annotated[Path, typer.Argument(help="a config", metavar="FILE", show_default=False)],
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(help="number of trials", min=1)] = 20,
    engine: Engine = None,
    nproc: Nproc = None,
    precision: Precision = None,
    launcher: Launcher = None,
    logdir: NewLogdir = None,
    as_json: AsJson = False,
) -> None:
    """Search for the hyperparameters with the best metric, the `monitor`, with Optuna.

    Give ranges under search: in the config, or as KEY=LOW..HIGH, KEY=LOW..HIGH:log, KEY=THIS,THAT. Pass the resulting
    LOGDIR/best.yml to `runnerkit run`.
    """
    from runnerkit.commands.search import BEST, search

    given = {"engine": engine, "nproc": nproc, "precision": precision}
    folder = logdir or Path("logs", f"{file.stem}-tune")
    score, values = search(file, overrides or [], given, num_trials=trials, logdir=folder, launcher=launcher)
    if as_json:
        print_json({"best": score, "values": values, "config": shown(folder / BEST)})
        return
    typer.echo("\n".join([f"best: {score:.6g}", *(f"{key}={value}" for key, value in values.items())]))
    typer.echo(f"runnerkit run {shown(folder / BEST)}")


@app.command(
    epilog="Example: runnerkit export logs/digits digits.onnx --to onnx; runnerkit export logs/bert bert --to hf"
)
def export(
    source: Annotated[
        Path, typer.Argument(help="a logdir or a checkpoint in one", metavar="LOGDIR|CHECKPOINT", show_default=False)
    ],
    to: Annotated[
        Literal["onnx", "torch-export", "safetensors", "hf"],
        typer.Option("--to", "--format", help="the format", show_default=False),
    ],
    out: Annotated[Path | None, typer.Argument(help="the same as --output", metavar="OUT", show_default=False)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="path of the file, or folder for hf; by default model.SUFFIX or hf in the logdir"
        ),
    ] = None,
    which: Which = "best",
    config: Annotated[
        Path | None, typer.Option(help="config.json of the model for hf; by default from the model in the config")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="largest size of a file of weights for hf, such as 5GB, the default")
    ] = None,
    key: Annotated[str | None, typer.Option(help="key of the model for hf, if the run has several")] = None,
    as_json: AsJson = False,
) -> None:
    """Export a trained model to a file that does not need its code, or to a folder for from_pretrained (hf)."""
    from runnerkit.checkpoints.weights import export_safetensors
    from runnerkit.commands.configured_run import FILE
    from runnerkit.commands.export import SUFFIXES, export_configured, export_hf
    from runnerkit.storage.remote.copies import local_copy, logdir_of, name_of
    from runnerkit.storage.remote.urls import as_url

    source = name_of(source)
    logdir = logdir_of(source)
    config_file = local_copy(logdir, logs_only=True) / FILE
    if as_url(source) is None and not source.exists():
        raise FileNotFoundError(f"{source}: no such logdir or checkpoint")
    if out is not None and output is not None:
        raise ValueError(f"pass either OUT or --output, got {out} and {output}")
    out = name_of(out or output or logdir / (f"model{SUFFIXES[to]}" if to in SUFFIXES else to))
    given = {"config": config, "max_shard_size": max_shard_size, "key": key}
    given = {name: value for name, value in given.items() if value is not None}
    if given and to != "hf":
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} is an option of --to hf, got --to {to}")
    if out.is_dir() and to != "hf":
        raise IsADirectoryError(f"cannot write {out}: it is a folder; pass the path of a file")
    if to in ("onnx", "torch-export") and not config_file.is_file():
        raise FileNotFoundError(
            f"{logdir} lacks {FILE}, since a script trained the run, and --to {to} needs the code of the model: call "
            "utils.onnx_export or utils.trace_model in the script, or export the weights alone with --to safetensors"
        )
    if to == "hf":
        export_hf(config_file, source, out, which=which, **given)
    elif to == "safetensors":
        export_safetensors(source, out, which=which)
    else:
        export_configured(read_config(config_file), source, out, to=to, which=which)
    print_path(out, as_json)


@app.command(epilog="Example: runnerkit new digits && cd digits && python -m pytest; runnerkit new train.py")
def new(
    path: Annotated[Path, typer.Argument(help="the folder of a project, or a script", metavar="NAME")] = Path(
        "train.py"
    ),
    as_json: AsJson = False,
) -> None:
    """Write a project with a config, a script and a test as a starting point, or a script only (NAME.py)."""
    from runnerkit.commands.starter import write_starter

    files = write_starter(path)
    if as_json:
        print_json({"path": str(path), "files": list(map(str, files))})
    else:
        typer.echo("\n".join(map(str, files)))


@app.command(epilog="Example: runnerkit env > environment.json")
def env(as_json: AsJson = False) -> None:
    """Print versions, hardware and launcher as JSON for a bug report, with --json in one line."""
    from runnerkit.engines.process_environment import describe_launcher
    from runnerkit.loop.environment import describe_environment

    facts = {**describe_environment(), "launcher": describe_launcher()}
    if as_json:
        print_json(facts)
    else:
        typer.echo(json.dumps(facts, indent=2))


@app.command(epilog="Example: runnerkit metrics logs/digits; runnerkit metrics logs --metric accuracy --csv")
def metrics(
    logdirs: Logdirs,
    metric: Annotated[str | None, typer.Option(help="show only this one; several runs are compared by it")] = None,
    loader: Annotated[str | None, typer.Option(help="show only this one; several runs are compared by it")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print CSV with all digits")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the metrics of a run, one row per epoch and loader, and its best epochs, or compare several runs."""
    from runnerkit.commands.metrics_text import metrics_text

    if csv and as_json:
        raise ValueError("pass either --csv or --json")
    if as_json:
        from runnerkit.commands.metrics_json import metrics_json

        print_json(metrics_json(logdirs, metric=metric, loader=loader))
        return
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
    every: Annotated[bool, typer.Option("--all", help="draw each metric that is not constant")] = False,
    as_json: AsJson = False,
) -> None:
    """Plot the curves of one run, or of several runs in the same axes: the losses and the monitored metrics."""
    from runnerkit.history.plot import plot_metrics

    if every and metric:
        raise ValueError("pass either --all or --metric")
    metrics = "all" if every else metric or None
    path = plot_metrics(logdirs, path=output, metrics=metrics, loaders=loader or None, log_scale=log or ())
    print_path(path, as_json)


@app.command(epilog="Example: runnerkit watch logs/digits --metric loss --metric accuracy")
def watch(
    logdirs: Logdirs,
    metric: Metrics = None,
    loader: Loaders = None,
    once: Annotated[bool, typer.Option("--once", help="draw once and exit, the default without a terminal")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the status as a line of JSON at each change until the run ends")
    ] = False,
) -> None:
    """Draw the curves of one run or several in the terminal while they train, until Ctrl-C."""
    if as_json:
        from runnerkit.commands.status_stream import statuses

        if len(logdirs) > 1:
            raise ValueError(f"--json prints the status of one run, got {len(logdirs)}")
        for status in statuses(logdirs[0], once=once):
            print_json(status)
        return
    from runnerkit.commands.watch import watch as watch_curves

    watch_curves(logdirs, metrics=metric or None, loaders=loader or None, once=once)


@app.command(epilog="Example: runnerkit report logs/digits -o digits.html; runnerkit report logs")
def report(
    logdirs: Logdirs,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="path of the page; by default LOGDIR/report.html")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained HTML page: curves, best values and settings of a run, or a comparison of several runs."""
    from runnerkit.history.report import write_report

    print_path(write_report(logdirs, path=output), as_json)


@app.command(epilog="Example: runnerkit fetch s3://bucket/run logs/run && tensorboard --logdir logs/run")
def fetch(
    url: Annotated[Path, typer.Argument(help="URL of a run, or of a part of one", metavar="URL", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="the new local folder", metavar="FOLDER", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Copy a run from a store to a local folder, with the files and names that it would have there."""
    from runnerkit.storage.remote.copies import copy_into
    from runnerkit.storage.remote.urls import as_url, plain_path

    folder = plain_path(folder)
    source = as_url(url)
    if source is None:
        raise ValueError(f"{url} is not the URL of a store, such as s3://bucket/run")
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose a new folder")
    copy_into(folder, source)
    print_path(folder, as_json)


@app.command(epilog="Example: runnerkit doctor logs/digits")
def doctor(logdir: Logdir, as_json: AsJson = False) -> None:
    """Check the checkpoints and logs of a run; exit with 1 if something is broken."""
    from runnerkit.commands.doctor import examine

    report = examine(logdir)
    if as_json:
        print_json(report.as_dict())
    else:
        typer.echo(report)
    raise typer.Exit(1 if report.num_broken else 0)


@app.command(epilog="Example: runnerkit docs checkpoints; runnerkit docs reference/callbacks")
def docs(
    topic: Annotated[
        str | None, typer.Argument(help="page to print; without it, all topics", metavar="[TOPIC]", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a page of the documentation of this version as Markdown, or the list of its topics."""
    from runnerkit.commands.docs_pages import page_text, pages

    if topic is not None and as_json:
        print_json({"topic": topic, "text": page_text(topic)})
    elif topic is not None:
        typer.echo(page_text(topic))
    elif as_json:
        print_json(
            {"topics": [{"topic": each.topic, "title": each.title, "summary": each.summary} for each in pages()]}
        )
    else:
        typer.echo("\n".join(f"{each.topic:<24}{each.title}" for each in pages()))


@app.command(epilog="Example: runnerkit schema metrics")
def schema(
    name: Annotated[
        str | None, typer.Argument(help="a command, or status", metavar="[COMMAND]", show_default=False)
    ] = None,
) -> None:
    """Print the JSON schema of what a command prints with --json, or of status.json."""
    from runnerkit.commands.schema import schema_of

    typer.echo(json.dumps(schema_of(name), indent=2))
