"""Tests of runner.log_image and similar methods, failing loggers, several loggers and the logs of a failed run."""

import csv
import logging

import numpy as np
import pytest
import torch
import yaml

from runnerkit import dl
from runnerkit.logger import Step
from tests.interrupt import at
from tests.tiny import loader, train


class Keep(dl.ILogger):
    def __init__(self, *, log_batch_metrics=False):
        self.log_batch_metrics = log_batch_metrics
        self.calls = []

    def log_scalars(self, scalars, *, step, scope):
        self._note("log_scalars", dict(scalars), step, scope)

    def log_hparams(self, hparams, *, environment):
        self._note("log_hparams", dict(hparams))

    def _note(self, *call):
        self.calls.append(call)

    def of(self, method):
        return [call[1:] for call in self.calls if call[0] == method]


def noted(method):
    return lambda self, *arguments, **options: self._note(method, *arguments, *options.values())


MEDIA = ["log_text", "log_image", "log_histogram", "log_pr_curve", "log_table", "log_artifact"]
for _name in ["setup", *MEDIA, "log_end", "flush", "close"]:
    setattr(Keep, _name, noted(_name))


class Fails(Keep):
    def __init__(self, method, error, **options):
        super().__init__(**options)
        self.method, self.error = method, error

    def _note(self, *call):
        super()._note(*call)
        if call[0] == self.method:
            raise self.error


class Scalars(dl.ILogger):
    def log_scalars(self, scalars, *, step, scope):
        pass


def fit(loggers, *, runner=dl.SupervisedRunner, **options):
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    return train(runner=runner(), loaders=loaders, loggers=loggers, **options)


def fail(runner):
    raise LookupError("mine")


# Methods that users call.


def test_each_kind_reaches_the_logger_as_the_contract_says(tmp_path):
    """Each logger method gets the converted value, the tag, the step and the scope."""
    (tmp_path / "notes.txt").write_text("x")

    def log(runner):
        runner.log_image("image", torch.full((3, 2, 4), 0.5))
        runner.log_text("text", "words")
        runner.log_histogram("weights", runner.model[0].weight)
        runner.log_pr_curve("curve", scores=torch.tensor([0.1, 0.9]), targets=torch.tensor([0, 1]))
        runner.log_table("rows", {"class": ["a", "b"], "recall": torch.tensor([0.5, 1.0])})
        runner.log_artifact("file", tmp_path / "notes.txt")

    keep = Keep()
    fit({"keep": keep}, callbacks=[at("on_loader_end", log)], num_epochs=2)

    place = (Step("train", "valid", 2, 8), "loader")
    tag, image, *where = keep.of("log_image")[-1]
    assert (tag, image.shape, image.dtype, image.max(), *where) == ("image", (2, 4, 3), np.uint8, 128, *place)
    assert keep.of("log_text")[-1] == ("text", "words", *place)
    assert keep.of("log_histogram")[-1][1].counts.sum() == 6 * 16
    assert keep.of("log_pr_curve")[-1][1].true_positives[0] == 1
    assert keep.of("log_artifact")[-1] == ("file", tmp_path / "notes.txt", *place)
    assert keep.of("log_table")[-1] == ("rows", {"class": ["a", "b"], "recall": [0.5, 1.0]}, *place)
    assert [len(keep.of(method)) for method in MEDIA] == [4] * len(MEDIA)


def test_a_figure_is_logged_as_its_picture():
    """A Matplotlib figure, created without pyplot, is logged as an image."""
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(3, 2), dpi=50)
    keep = Keep()

    fit({"keep": keep}, callbacks=[at("on_epoch_end", lambda runner: runner.log_figure("figure", figure))])

    [(tag, image, step, _)] = keep.of("log_image")
    assert (tag, image.shape, step.epoch) == ("figure", (100, 150, 3), 1)


def test_what_a_training_step_logs_has_the_scope_of_steps():
    """Values logged in a training step have scope "batch", those in evaluation and between loaders "loader"."""

    class Talks(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.log_text("said", self.loader_key)

    keep = Keep(log_batch_metrics=True)
    end = at("on_epoch_end", lambda runner: runner.log_text("end", "x"))
    fit({"keep": keep}, runner=Talks, callbacks=[end], log_every=2)

    said = [(text, step.batch, scope) for tag, text, step, scope in keep.of("log_text") if tag == "said"]
    assert said == [*(("train", step, "batch") for step in (1, 2, 3, 4)), *[("valid", 4, "loader")] * 2]
    assert keep.of("log_text")[-1][-1] == "loader"
    places = [call[-2] for call in keep.calls if call[0] in ("log_scalars", "log_text")]
    assert [step.batch for step in places] == sorted(step.batch for step in places)  # queued steps come first


def test_where_nobody_takes_it_nothing_is_looked_at():
    """Values that no logger accepts are not even validated, so that they cost nothing."""

    class Logs(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.log_image("image", None)
            self.log_figure("figure", None)
            self.log_text("text", None)
            self.log_histogram("values", None)
            self.log_pr_curve("curve", scores=None, targets=None)
            self.log_artifact("file", None)

    fit({}, runner=Logs)
    fit({"scalars": Scalars()}, runner=Logs)


@pytest.mark.parametrize("engine", [dl.DistributedDataParallelEngine, dl.FullyShardedDataParallelEngine])
def test_rank_zero_alone_logs_and_waits_for_nobody(tmp_path, engine):
    """All ranks may call; only rank zero logs, with its own shard of sharded weights, and does not wait for others."""

    class Count(Scalars):
        def log_histogram(self, tag, histogram, *, step, scope):
            with (tmp_path / "tags").open("a") as file:
                file.write(f"{tag} {histogram.counts.sum()}\n")

    def log(runner):
        runner.log_histogram(f"rank {runner.engine.rank}", runner.model[0].weight)

    fit({"count": Count()}, callbacks=[at("on_epoch_end", log)], engine=engine(2, device="cpu"))

    num_weights = 6 * 16 // (2 if engine is dl.FullyShardedDataParallelEngine else 1)
    assert (tmp_path / "tags").read_text() == f"rank 0 {num_weights}\n"


def test_after_the_run_nothing_is_logged(tmp_path):
    """After a run, whose loggers are closed, calls log nothing."""
    runner = fit({}, logdir=tmp_path)
    before = sorted(tmp_path.rglob("*"))

    runner.log_text("late", "x")
    runner.log_hparams({"late": 1})

    assert runner.loggers == {} and sorted(tmp_path.rglob("*")) == before


def test_what_is_logged_before_the_loggers_are_open_is_kept_for_them():
    """Values logged before the loggers open are kept until then; the trial batch before training logs nothing."""

    class Early(dl.SupervisedRunner):
        def on_stage_start(self, runner):
            super().on_stage_start(runner)
            self.log_text("model", str(self.model))
            self.log_hparams({"size": 7})

        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.batch_metrics["mine"] = self.batch["logits"].mean()
            self.log_text("batch", "x")

    keep = Keep()
    stop = dl.EarlyStoppingCallback(1, monitor="valid/mine", mode="min")  # causes a trial batch before training
    fit({"keep": keep}, runner=Early, callbacks=[stop], hparams={"lr": 0.1})

    assert keep.of("log_hparams") == [({"lr": 0.1, "size": 7},)]
    tags = [tag for tag, *_ in keep.of("log_text")]
    assert tags == ["model"] + ["batch"] * 6
    assert keep.of("log_text")[0][2] == Step("train", "", 0, 0)


def test_hparams_may_come_later():
    """Later hyperparameters are logged together with the earlier ones."""
    keep = Keep()

    fit({"keep": keep}, callbacks=[at("on_epoch_end", lambda runner: runner.log_hparams({"b": 2}))], hparams={"a": 1})

    assert keep.of("log_hparams") == [({"a": 1},), ({"a": 1, "b": 2},)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda runner: runner.log_image(torch.zeros(4, 4), "x"), TypeError, "a tag is a name such as 'samples'"),
        (lambda runner: runner.log_text("", "x"), TypeError, "a tag is a name"),
        (lambda runner: runner.log_text("x", 3), TypeError, "text must be a str, got int"),
        (lambda runner: runner.log_artifact("x", "nowhere.txt"), FileNotFoundError, "no file or folder .*nowhere.txt"),
        (lambda runner: runner.log_image("x", torch.zeros(4)), ValueError, r"got \(4,\)"),
    ],
)
def test_a_wrong_use_is_an_error_of_the_caller_and_not_of_the_logger(call, error, words):
    """Wrong arguments raise an error at the call and do not disable the logger."""
    with pytest.raises(error, match=words):
        fit({"keep": Keep()}, callbacks=[at("on_epoch_end", call)])


# Failing loggers.

METHODS = ["setup", "log_hparams", "log_scalars", "log_text", "flush", "log_end", "close"]


def log_text(runner):
    runner.log_text("x", "y")


@pytest.mark.parametrize("method", METHODS)
def test_a_logger_that_fails_is_warned_of_once_and_left_out(caplog, method):
    """A logger that fails in any method causes one warning and is removed; training and other loggers continue."""
    keep = Keep(log_batch_metrics=True)
    bad = Fails(method, ConnectionError("the service is away"), log_batch_metrics=True)

    with caplog.at_level(logging.WARNING):
        fit({"bad": bad, "keep": keep}, callbacks=[at("on_epoch_end", log_text)], num_epochs=3, log_every=1)

    [record] = caplog.records
    assert "logger 'bad' (Fails) failed" in record.getMessage()
    assert "ConnectionError('the service is away')" in record.getMessage()
    assert bad.calls[-1] == ("close",) and len(bad.of(method)) == 1
    assert len(keep.of("log_scalars")) == 3 * (4 + 2) and len(keep.of("close")) == 1


@pytest.mark.parametrize("method", METHODS)
def test_an_essential_logger_that_fails_ends_the_run(method):
    """A failing essential logger ends the run with its error, and the other loggers are closed."""
    keep, bad = Keep(log_batch_metrics=True), Fails(method, ConnectionError("the disk is away"), log_batch_metrics=True)
    bad.is_essential = True

    with pytest.raises(ConnectionError, match="the disk is away"):
        fit({"bad": bad, "keep": keep}, callbacks=[at("on_epoch_end", log_text)])

    assert len(keep.of("close")) == 1


class Broken:
    def write(self, text):
        raise BrokenPipeError("nobody reads")

    flush = write


def test_a_console_that_is_gone_does_not_end_the_run(caplog):
    """A console logger without a terminal causes a warning, and the run continues."""
    runner = fit({"console": dl.ConsoleLogger(file=Broken())}, num_epochs=2)

    assert runner.epoch_step == 2
    [record] = caplog.records
    assert "logger 'console' (ConsoleLogger) failed; the run continues without it" in record.getMessage()


def test_a_full_disk_ends_the_run_that_logs_to_it(tmp_path, monkeypatch):
    """A full disk ends the run, unless the user sets `is_essential = False`."""
    for logger in (dl.CSVLogger, dl.JSONLLogger, dl.TensorboardLogger):
        monkeypatch.setattr(logger, "log_scalars", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    spare = dl.CSVLogger(tmp_path / "spare")
    spare.is_essential = False

    for logger in (dl.CSVLogger, dl.JSONLLogger, dl.TensorboardLogger):
        with pytest.raises(OSError, match="No space left"):
            fit({"file": logger(tmp_path / logger.__name__)})
    assert fit({"spare": spare}).epoch_step == 1


@pytest.mark.parametrize(
    "error", [ValueError("no such project"), TypeError("x"), KeyError("x"), ImportError("x"), FileExistsError("x")]
)
def test_a_logger_used_wrongly_is_refused_before_training(error):
    """Errors of a logger's setup that the user can fix, such as a missing package, are raised before training."""
    steps = []

    with pytest.raises(type(error)):
        fit({"bad": Fails("setup", error)}, callbacks=[at("on_batch_end", lambda runner: steps.append(1))])

    assert steps == []


def test_how_the_run_ended_is_told_before_the_logger_closes():
    """log_end gets None or the error of the run, and then the logger closes."""
    keep, other = Keep(), Keep()

    fit({"keep": keep})
    with pytest.raises(LookupError):
        fit({"other": other}, callbacks=[at("on_epoch_end", fail)])

    assert keep.calls[-2:] == [("log_end", None), ("close",)]
    assert isinstance(other.of("log_end")[0][0], LookupError) and other.calls[-1] == ("close",)


# Several loggers.


def test_several_loggers_of_a_kind_write_side_by_side(tmp_path):
    """Passed loggers are added to the default ones, also of the same class."""
    more = {"mine": dl.CSVLogger(tmp_path / "mine"), "jsonl": dl.JSONLLogger(tmp_path / "log")}

    fit(more, logdir=tmp_path / "log", num_epochs=2)

    tables = [(tmp_path / folder / "csv" / "valid.csv").read_text() for folder in ("log", "mine")]
    assert tables[0] == tables[1] and len(tables[0].splitlines()) == 3
    assert (tmp_path / "log" / "metrics.jsonl").exists() and (tmp_path / "log" / "tensorboard" / "valid").is_dir()


@pytest.mark.parametrize(
    ("loggers", "error", "words"),
    [
        ([dl.ConsoleLogger()], TypeError, r"loggers must be a dict such as \{'mine': MyLogger\(\)\}, got list"),
        ({"mine": "wandb"}, TypeError, r"'mine' is a str; .* loggers=\{'wandb': dl.WandbLogger\(logdir\)\}"),
        ({"mine": dl.CSVLogger}, TypeError, "logger 'mine' is the class CSVLogger; pass an instance of it: CSVLogger"),
    ],
)
def test_what_is_no_logger_is_refused(loggers, error, words):
    """Values that are not loggers raise an error with their key before any process starts."""
    with pytest.raises(error, match=words):
        dl.SupervisedRunner().train(loaders={"train": loader(4, 4)}, loggers=loggers)


def test_two_loggers_that_would_write_the_same_files_are_refused(tmp_path):
    """Two loggers of the library with the same files, for example one beside the default, are refused."""
    with pytest.raises(ValueError, match=r"loggers 'csv' and 'mine' would overwrite .*replace the other"):
        fit({"mine": dl.CSVLogger(tmp_path)}, logdir=tmp_path)

    assert list(tmp_path.iterdir()) == []
    mine, other = Keep(), Keep()  # the files of custom loggers are unknown
    mine.logdir = other.logdir = tmp_path
    fit({"mine": mine, "other": other})
    assert mine.calls and other.calls


class Early(dl.SupervisedRunner):
    def on_stage_start(self, runner):
        super().on_stage_start(runner)
        self.log_text("model", "words")


def test_a_resumed_run_does_not_log_again_what_came_before_its_first_epoch(tmp_path):
    """A resumed run does not repeat logs from before its first epoch."""
    for num_epochs in (1, 2):
        keep = Keep()
        fit({"keep": keep}, runner=Early, logdir=tmp_path, resume="auto", num_epochs=num_epochs)
        assert len(keep.of("log_text")) == (1 if num_epochs == 1 else 0)
    with (tmp_path / "csv" / "train.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]


def test_a_run_that_is_resumed_in_another_logdir_logs_there_what_came_before_its_first_epoch(tmp_path):
    """The new logdir does not have the logs of the interrupted run."""
    fit({}, runner=Early, logdir=tmp_path / "a")
    keep = Keep()

    fit({"keep": keep}, runner=Early, logdir=tmp_path / "b", resume=tmp_path / "a", num_epochs=2)

    assert [text for _, text, *_ in keep.of("log_text")] == ["words"]


@pytest.mark.parametrize("logdir", ["a", "b"])
def test_hyperparameters_that_an_interrupted_run_added_stay(tmp_path, logdir):
    """A resumed run lists them too, in each logdir; what it adds itself under a name is newer."""

    def add(size):
        def log(runner):
            if runner.epoch_step == 1:
                runner.log_hparams({"late": {"size": size}, "api_key": "hidden"})

        return at("on_epoch_start", log)

    def fit_in(name, *callbacks, **options):
        fit({}, callbacks=list(callbacks), logdir=tmp_path / name, hparams={"lr": 0.1}, **options)
        return yaml.safe_load((tmp_path / name / "hparams.yml").read_text())

    assert fit_in("a", add(7)) == {"lr": 0.1, "late": {"size": 7}, "api_key": "***"}

    resumed = fit_in(logdir, resume=tmp_path / "a", num_epochs=2)
    newer = at("on_stage_start", lambda runner: runner.log_hparams({"late": {"size": 8}}))
    again = fit_in(logdir, newer, resume=tmp_path / logdir, num_epochs=3)

    assert resumed == {"lr": 0.1, "late": {"size": 7}, "api_key": "***"}
    assert again == {"lr": 0.1, "late": {"size": 8}, "api_key": "***"}
    assert b"hidden" not in b"".join(each.read_bytes() for each in (tmp_path / "a" / "checkpoints").iterdir())


# The end of a failing run.


@pytest.mark.parametrize("error", [LookupError("mine"), KeyboardInterrupt()])
def test_the_steps_before_a_failure_are_logged(error):
    """Queued step metrics are logged when a run fails."""
    keep = Keep(log_batch_metrics=True)

    def fail_later(runner):
        if runner.batch_step == 4:
            raise error

    with pytest.raises(type(error)):
        fit({"keep": keep}, callbacks=[at("on_batch_start", fail_later)], log_every=2)

    assert [step.batch for _, step, scope in keep.of("log_scalars") if scope == "batch"] == [2]
    assert [call[0] for call in keep.calls[-2:]] == ["log_end", "close"]


def test_a_step_that_cannot_be_read_any_more_does_not_hide_the_failure(monkeypatch):
    """If queued metrics cannot be read after a failure, the loggers are closed and the error gets a note."""
    keep = Keep(log_batch_metrics=True)

    def take(queue):
        raise OSError("device lost")

    def fail_reading(runner):
        monkeypatch.setattr(type(runner.current_run.logs.queue), "take", take)
        fail(runner)

    with pytest.raises(LookupError, match="mine") as caught:
        fit({"keep": keep}, callbacks=[at("on_step_end", fail_reading)], log_every=1)

    assert "the last steps were not logged: OSError('device lost')" in caught.value.__notes__
    assert keep.calls[-1] == ("close",)


def test_a_gpu_among_several_processes_is_not_waited_for_after_a_failure():
    """After a failure, queued GPU metrics are not read, because they may depend on a collective that never ends."""
    keep = Keep(log_batch_metrics=True)

    def fail_beside(runner):
        runner.engine.num_processes, runner.engine.device = 2, torch.device("cuda")
        fail(runner)

    with pytest.raises(LookupError, match="mine"):
        fit({"keep": keep}, callbacks=[at("on_step_end", fail_beside)], log_every=1)

    assert not keep.of("log_scalars")


def test_an_array_that_changes_in_place_is_logged_as_it_was():
    """A NumPy array that is later modified in place is logged with its value at the time, like a tensor."""
    keep, total = Keep(log_batch_metrics=True), np.zeros(())

    class Sums(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            if self.is_train_loader:
                self.batch_metrics["total"] = np.add(total, 1, out=total)

    fit({"keep": keep}, runner=Sums, log_every=1)

    assert [scalars["total"] for scalars, _, scope in keep.of("log_scalars") if scope == "batch"] == [1, 2, 3, 4]
