"""A job of one process: it trains, is stopped, resumes, evaluates, predicts and is reported, in the current folder."""

import contextlib
import io
import json
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.__main__ import main as command_line
from tests.tiny import classification, mlp, sgd

LOGDIR = "logs/café"
FILES = ["rows.csv", *(f"{LOGDIR}/{file}" for file in ("csv/valid.csv", "metrics.jsonl", "hparams.yml"))]


class InterruptedOnce(dl.Callback):
    """Ctrl-C in the second epoch of the first run that has two."""

    def __init__(self):
        super().__init__(dl.CallbackOrder.External)

    def on_batch_end(self, runner):
        if runner.is_train_loader and runner.epoch_step == 2 and not Path("stopped").exists():
            Path("stopped").touch()
            signal.raise_signal(signal.SIGINT)


class Runner(dl.SupervisedRunner):
    def predict_batch(self, batch, **kwargs):
        features, targets = batch
        return {"scores": self.model(features), "target": targets}


def train(num_epochs, num_workers):
    model = mlp(dropout=0.1)
    workers = {"num_workers": num_workers, "multiprocessing_context": "spawn"} if num_workers else {}
    return Runner().train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={
            "train": DataLoader(classification(40), batch_size=8, shuffle=True, **workers),
            "valid": DataLoader(classification(20, seed=1), batch_size=8),
        },
        callbacks=[
            dl.AccuracyCallback("logits", "targets"),
            dl.CheckpointCallback(LOGDIR, monitor="valid/loss", mode="min", content="runner", keep_best=1),
            dl.EarlyStoppingCallback(5, monitor="valid/loss", mode="min"),
            InterruptedOnce(),
        ],
        loggers={"jsonl": dl.JSONLLogger(LOGDIR)},
        hparams={"name": "naïve"},
        num_epochs=num_epochs,
        logdir=LOGDIR,
        resume="auto",
    )


def main(num_workers):
    """Return what must be the same on any system."""
    train(1, num_workers)
    exit_code = None
    try:
        train(2, num_workers)
    except SystemExit as error:
        exit_code = error.code
    runner = train(2, num_workers)
    loader = DataLoader(classification(20, seed=1), batch_size=8)
    scores = runner.evaluate_loader(loader)
    runner.predict_to("rows.csv", loader=loader)
    runner.predict_to("rows.csv", loader=loader)  # over the first one
    (report, _), (metrics, _), (doctor, findings) = (command(name, LOGDIR) for name in ("report", "metrics", "doctor"))
    assert "all is good" in findings, findings
    return {
        "exit codes": [exit_code, report, metrics, doctor],
        "epochs": list(runner.experiment_metrics),
        "loss": scores["loss"],
        "scores": torch.cat([each["scores"] for each in runner.predict_loader(loader=loader)]).tolist(),
        "weights": [parameter.tolist() for parameter in runner.model.parameters()],
        "files": {file: Path(file).read_bytes().decode() for file in FILES},
    }


def command(*arguments):
    """Run the command line; return its exit code and output."""
    sys.argv = ["runnerkit", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = command_line()
    return code, text.getvalue()


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(json.dumps(main(num_workers=int(sys.argv[1]))))
