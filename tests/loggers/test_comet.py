"""CometLogger, offline: the archives that `comet upload` sends contain every logged value exactly once."""

import io
import json
import os
import subprocess
import sys
import threading
from zipfile import ZipFile

import numpy as np
import pytest

from runnerkit import dl
from runnerkit.logger import Step
from tests.interrupt import Interrupt
from tests.loggers.training import log_everything, log_numbers, train, train_saving


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Keep Comet offline; check that nothing of it, on disk or in the process, outlives the test."""
    for name in [name for name in os.environ if name.startswith("COMET_")]:
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)  # read again
    monkeypatch.setenv("COMET_ERROR_TRACKING_ENABLE", "false")
    for name in ("CODE", "ENV_DETAILS", "GIT_METADATA", "GIT_PATCH", "CLI_ARGUMENTS"):
        monkeypatch.setenv(f"COMET_AUTO_LOG_{name}", "false")
    monkeypatch.setenv("COMET_AUTO_LOG_OUTPUT_LOGGER", "")
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
    monkeypatch.setenv("COMET_URL_OVERRIDE", "http://127.0.0.1:9/clientlib/")  # no server listens there
    with monkeypatch.context() as importing:  # which test is the first to import it depends on the order of the tests
        importing.setattr(sys, "excepthook", sys.excepthook)  # Comet sets its own
        importing.setenv("COMET_DISABLE_AUTO_LOGGING", "1")
        import comet_ml  # noqa: F401
    hook, finders, threads = sys.excepthook, list(sys.meta_path), set(threading.enumerate())
    yield
    assert sys.excepthook is hook
    assert [each for each in sys.meta_path if each not in finders and "comet" in type(each).__module__] == []
    assert [each for each in threading.enumerate() if each not in threads and "comet" in type(each).__module__] == []
    assert [path for path in (tmp_path / "tmp").iterdir() if any(path.glob("messages.json"))] == []


def archives(logdir):
    """List the archives in the order in which they were started."""
    found = [ZipFile(path) for path in (logdir / "comet").glob("*.zip")]
    return sorted(found, key=lambda archive: about(archive)["start_time"])


def about(archive):
    return json.loads(archive.read("experiment.json"))


def messages(logdir, kind):
    """Return all messages of a kind that Comet stores to send later."""
    for archive in archives(logdir):
        for message in map(json.loads, archive.read("messages.json").splitlines()):
            if message["type"] == kind:
                yield message["payload"]


def metrics(logdir):
    """Return {name: [(epoch, step, value), ...]} without Comet's own metrics."""
    found = {}
    for each in messages(logdir, "metric_msg"):
        metric = each["metric"]
        found.setdefault(metric["metricName"], []).append((metric["epoch"], metric["step"], metric["metricValue"]))
    found.pop("process duration", None)
    return found


def parameters(logdir):
    found = [each.get("param") or each["params"] for each in messages(logdir, "parameter_msg")]
    return {each["paramName"]: each["paramValue"] for each in found if each["source"] == "manual"}


def uploads(logdir):
    """Yield the kind, the description and the bytes of each file in an archive."""
    for archive in archives(logdir):
        for message in map(json.loads, archive.read("messages.json").splitlines()):
            if message["type"] == "file_upload":
                each = message["payload"]
                described = {**each["additional_params"], **each["metadata"]}
                yield each["upload_type"], described, archive.read(each["file_path"])


def test_a_run_is_read_back_from_its_archive(tmp_path):
    """It contains parameters, checkpoint, and each metric once, with epoch and step, from rank zero."""
    options = {"project_name": "digits", "workspace": "us", "tags": ["first"], "log_checkpoint": True}
    logger = dl.CometLogger(tmp_path, online=False, log_batch_metrics=True, **options)

    runner = train(tmp_path, logger, log_every=1, num_processes=2)

    [archive] = archives(tmp_path)
    told = about(archive)
    [run_id, *_] = map(json.loads, (tmp_path / "comet" / "ledger.jsonl").read_text().splitlines())
    assert (told["offline_id"], told["project_name"], told["workspace"]) == (run_id["run_id"], "digits", "us")
    assert told["tags"] == ["first"]
    found = metrics(tmp_path)
    per_epoch = runner.batch_step // 2
    for key in ("train", "valid"):
        expected = [(epoch, epoch * per_epoch, runner.experiment_metrics[epoch][key]["loss"]) for epoch in (1, 2)]
        assert found[f"{key}/loss"] == expected
    assert [step for _, step, _ in found["train/batch/loss"]] == list(range(1, runner.batch_step + 1))
    assert parameters(tmp_path) == {"lr": 0.1, "model.depth": 2}
    sent = {about.get("groupingName") or about["fileName"]: content for _, about, content in uploads(tmp_path)}
    assert json.loads(sent.pop("environment.json"))["engine"]["num_processes"] == runner.engine.num_processes
    assert sent == {"checkpoint": (tmp_path / "checkpoints" / "last.pth").read_bytes()}
    assert [each for each in messages(tmp_path, "log_other") if each["key"] == "error"] == []


def test_a_resumed_run_is_the_same_experiment_and_repeats_nothing(tmp_path):
    """Interrupted in step 8 and resumed from the checkpoint of step 6, a run has the points of an unkilled one."""

    def run(logdir, *others, **options):
        train_saving(logdir, dl.CometLogger(logdir, online=False, log_batch_metrics=True), *others, **options)

    run(tmp_path / "unkilled")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", Interrupt(8, "on_step_end"))
    run(tmp_path / "killed", resume="auto")

    assert metrics(tmp_path / "killed") == metrics(tmp_path / "unkilled")
    first, second = map(about, archives(tmp_path / "killed"))  # the seed gives both the same random numbers
    assert first["offline_id"] == second["offline_id"]
    assert {first["resume_strategy"], second["resume_strategy"]} == {"get_or_create"}
    errors = [each["value"] for each in messages(tmp_path / "killed", "log_other") if each["key"] == "error"]
    assert errors == ["KeyboardInterrupt()"]


def test_what_no_archive_holds_is_not_noted_as_sent(tmp_path):
    """A run that is killed before its archive is written has sent nothing, so the resumed run sends it."""
    step = Step("train", "train", 1, 3)
    killed = dl.CometLogger(tmp_path, online=False)
    killed.setup()
    killed.log_scalars({"loss": 0.5}, step=step, scope="loader")
    killed.flush()
    noted = (tmp_path / "comet" / "ledger.jsonl").read_text()

    killed.close()

    assert "train/loss" not in noted
    assert "train/loss" in (tmp_path / "comet" / "ledger.jsonl").read_text()
    assert metrics(tmp_path) == {"train/loss": [(1, 3, 0.5)]}


def test_an_experiment_that_the_script_has_begun_is_used_and_left_open(tmp_path):
    """The experiment keeps the settings of the script."""
    import comet_ml

    config = comet_ml.ExperimentConfig(offline_directory=str(tmp_path / "comet"))
    begun = comet_ml.start(online=False, experiment_config=config)
    logger = dl.CometLogger(tmp_path / "ours", online=False)

    train(tmp_path / "ours", logger)
    begun.log_metric("mine", 1.0, step=1, epoch=1)
    begun.end()

    assert logger.run_id == begun.get_key()
    found = metrics(tmp_path)
    assert [epoch for epoch, _, _ in found["valid/loss"]] == [1, 2]
    assert found["mine"] == [(1, 1, 1.0)]


def test_pictures_texts_distributions_and_files_are_comets_own_kinds(tmp_path):
    """Each is logged once, with its epoch and step, under the kind that Comet's page displays."""
    import comet_ml
    from PIL import Image

    image = log_everything(dl.CometLogger(tmp_path / "log", online=False), tmp_path)

    sent = list(uploads(tmp_path / "log"))
    assert {(each["epoch"], each["step"]) for _, each, _ in sent[:4]} == {(3, 12)}
    (_, sample, picture), (_, remark, text), (_, weights, counts), (_, pr, points), (_, classes, cells), *files = sent
    kinds = ["visualization", "text-sample", "histogram3d", "curve", "asset", "asset", "asset"]
    assert [kind for kind, _, _ in sent] == kinds
    names = [sample["figName"], remark["name"], weights["fileName"], pr["fileName"]]
    assert names == ["valid/sample", "valid/remark", "valid/batch/weights", "valid/pr"]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture))), image)
    assert text == b"good"
    bins = comet_ml.Histogram.from_json(json.loads(counts), verbose=False)
    middles = [(bins.values[i], bins.values[i + 1], int(bins.counts[i])) for i in np.flatnonzero(bins.counts)]
    (low, high, one), (above, below, two) = middles
    assert (one, two) == (1, 2) and low <= -0.75 <= high and above <= 2 <= below
    assert json.loads(points) == {"x": [1.0, 0.25], "y": [0.5, 1.0], "name": "valid/pr"}
    assert (classes["fileName"], cells.split()) == ("valid/classes.csv", [b"class,f1", b"a,0.5", b"b,1.0"])
    contents = {each["fileName"]: content for _, each, content in files}
    assert contents == {"notes/more/a.txt": b"in a folder", "file/b.txt": b"a file"}


def test_any_number_arrives(tmp_path):
    """All bits of a float are kept, also NaN and infinities, which JSON cannot represent as numbers."""
    values = log_numbers(dl.CometLogger(tmp_path, online=False))

    found = metrics(tmp_path)
    arrived = [float(value) for name in values for _, _, value in found[f"train/{name}"]]
    np.testing.assert_array_equal(arrived, list(values.values()))


def test_the_import_leaves_the_process_alone(tmp_path):
    """Its random draws, sys.excepthook, import hooks and warnings about earlier imports do not affect the process."""
    script = f"""
import os, random, sys
import six, torch  # botocore, which Comet imports if it is installed, imports six, which adds a finder
random.seed(0)
hook, finders, state = sys.excepthook, list(sys.meta_path), random.getstate()
from runnerkit import dl
logger = dl.CometLogger({str(tmp_path)!r}, online=False)
logger.setup()
logger.close()
assert random.getstate() == state
assert sys.excepthook is hook and sys.meta_path == finders
assert "COMET_DISABLE_AUTO_LOGGING" not in os.environ
"""
    environ = {**os.environ, "COMET_LOGGING_CONSOLE": "WARNING", "COMET_START_EXPERIMENT_NAME": "named"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env=environ, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_experiment_that_comet_refuses_is_said(tmp_path, monkeypatch):
    """Comet itself continues silently, and no value would be sent."""
    monkeypatch.setenv("COMET_AUTO_LOG_DISABLE", "true")

    with pytest.raises(RuntimeError, match=r"Comet started no live experiment: .* check COMET_AUTO_LOG_DIS"):
        dl.CometLogger(tmp_path, online=False).setup()
