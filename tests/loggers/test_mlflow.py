"""MLflowLogger: MLflow's client reads every logged value exactly once, even if the run was killed and resumed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from runnerkit import dl
from runnerkit.logger import Step
from runnerkit.loggers.services import mlflow as mlflow_logger
from tests.interrupt import Interrupt
from tests.loggers.training import log_everything, train, train_saving


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Disable telemetry, and allow a folder as the store, which MLflow requires to be requested."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def uri(tmp_path):
    return (tmp_path / "store").as_uri()


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def read(uri, run_id):
    """Return all points of all metrics: {name: [(x, value)]}."""
    store = client(uri)
    points = {name: store.get_metric_history(run_id, name) for name in store.get_run(run_id).data.metrics}
    return {name: [(point.step, point.value) for point in each] for name, each in points.items()}


def runs(uri, experiment="Default"):
    found = client(uri).get_experiment_by_name(experiment)
    return client(uri).search_runs([found.experiment_id])


def test_a_run_is_read_back_by_mlflows_client(tmp_path, uri):
    """It has parameters, status and each metric once, from rank zero: loaders' metrics by epoch, steps' by step."""
    options = {"experiment": "digits", "run_name": "mine", "tags": {"who": "me"}, "log_checkpoint": True}
    logger = dl.MLflowLogger(tmp_path / "log", tracking_uri=uri, log_batch_metrics=True, **options)

    runner = train(tmp_path / "log", logger, log_every=1, num_processes=2)

    [run] = runs(uri, "digits")
    points = read(uri, run.info.run_id)
    for key in ("train", "valid"):
        assert points[f"{key}/loss"] == [(epoch, runner.experiment_metrics[epoch][key]["loss"]) for epoch in (1, 2)]
    assert [x for x, _ in points["train/batch/loss"]] == list(range(1, runner.batch_step + 1))
    assert run.data.params == {"lr": "0.1", "model.depth": "2"}
    assert (run.info.run_name, run.info.status, run.data.tags["who"]) == ("mine", "FINISHED", "me")
    environment = json.loads((artifacts(uri, run, tmp_path) / "environment.json").read_text())
    assert environment["engine"]["num_processes"] == runner.engine.num_processes
    sent = artifacts(uri, run, tmp_path) / "checkpoint" / "last.pth"
    assert sent.read_bytes() == (tmp_path / "log" / "checkpoints" / "last.pth").read_bytes()


def artifacts(uri, run, folder):
    (folder / "fetched").mkdir(exist_ok=True)
    return Path(client(uri).download_artifacts(run.info.run_id, "", str(folder / "fetched")))


def test_a_resumed_run_is_the_same_run_and_repeats_nothing(tmp_path, uri, caplog):
    """Interrupted in step 8 and resumed from the checkpoint of step 6, a run has the points of an unkilled one."""

    def run(name, *others, **options):
        logger = dl.MLflowLogger(tmp_path / name, experiment=name, tracking_uri=uri, log_batch_metrics=True)
        return train_saving(tmp_path / name, logger, *others, **options)

    run("unkilled")
    with pytest.raises(KeyboardInterrupt):
        run("killed", Interrupt(8, "on_step_end"))
    assert [each.info.status for each in runs(uri, "killed")] == ["KILLED"]
    run("killed", resume="auto")

    [unkilled], [resumed] = runs(uri, "unkilled"), runs(uri, "killed")
    assert read(uri, resumed.info.run_id) == read(uri, unkilled.info.run_id)
    assert resumed.info.status == "FINISHED"
    assert f"run {resumed.info.run_id} already holds values up to epoch 2, step 8" in caplog.text


def test_parameters_that_changed_stay_and_are_warned_of(tmp_path, uri, caplog):
    """MLflow does not allow changed parameters, which must not end a resumed run; new ones are added."""
    train(tmp_path, dl.MLflowLogger(tmp_path, tracking_uri=uri))

    options = {"resume": "auto", "num_epochs": 3, "hparams": {"lr": 0.2, "seed": 1}}
    train(tmp_path, dl.MLflowLogger(tmp_path, tracking_uri=uri), **options)

    [run] = runs(uri)
    assert run.data.params == {"lr": "0.1", "model.depth": "2", "seed": "1"}
    assert "MLflow parameters cannot change; these keep their old values: lr" in caplog.text
    assert [x for x, _ in read(uri, run.info.run_id)["valid/loss"]] == [1, 2, 3]


def test_a_failed_run_is_failed_there(tmp_path, uri):
    """The exception is raised unchanged."""

    class Fail(dl.Callback):
        def on_epoch_end(self, runner):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path, dl.MLflowLogger(tmp_path, tracking_uri=uri), callbacks=[Fail()])

    assert [run.info.status for run in runs(uri)] == ["FAILED"]


def logged(tmp_path, uri, **kwargs):
    """Set up a logger; the caller closes it."""
    logger = dl.MLflowLogger(tmp_path / "log", tracking_uri=uri, **kwargs)
    logger.setup()
    return logger


def test_whole_loaders_may_go_by_steps(tmp_path, uri):
    """With x_axis="step", each validation within an epoch has its own point."""
    logger = logged(tmp_path, uri, x_axis="step")
    for batch in (50, 100):
        logger.log_scalars({"loss": 0.5}, step=Step("train", "valid", 1, batch), scope="loader")
    logger.flush()
    logger.close()

    assert read(uri, logger.run_id) == {"valid/loss": [(50, 0.5), (100, 0.5)]}


def test_single_steps_are_sent_together_and_every_few_seconds(tmp_path, uri, monkeypatch):
    """A call takes as long as many steps, so values are sent together, at the latest when the logs are flushed."""
    now = [100.0]
    monkeypatch.setattr(mlflow_logger.time, "monotonic", lambda: now[0])
    logger = logged(tmp_path, uri)

    def log(batch):
        logger.log_scalars({"loss": 0.5}, step=Step("train", "train", 1, batch), scope="batch")
        return [x for x, _ in read(uri, logger.run_id).get("train/batch/loss", [])]

    assert log(1) == log(2) == []
    now[0] += 5.0
    assert log(3) == log(4) == [1, 2, 3]
    logger.flush()
    assert log(5) == [1, 2, 3, 4]
    logger.log_end(None)
    logger.close()
    assert [x for x, _ in read(uri, logger.run_id)["train/batch/loss"]] == [1, 2, 3, 4, 5]


def test_what_a_kill_kept_from_being_sent_is_sent_by_the_resumed_run(tmp_path, uri):
    """The ledger does not list values that were logged but not sent."""
    step = Step("train", "train", 1, 1)
    killed = logged(tmp_path, uri)
    killed.log_scalars({"loss": 0.5}, step=step, scope="batch")  # and no flush

    resumed = dl.MLflowLogger(tmp_path / "log", tracking_uri=uri)
    resumed.setup(resumed_at=Step("train", "", 0, 0))
    resumed.log_scalars({"loss": 0.5}, step=step, scope="batch")
    resumed.log_end(None)
    resumed.close()

    assert resumed.run_id == killed.run_id
    assert read(uri, resumed.run_id) == {"train/batch/loss": [(1, 0.5)]}
    killed.close()


def test_any_name_and_any_number_arrive(tmp_path, uri):
    """NaN, infinities, names with characters that MLflow rejects, and more values than one call accepts are logged."""
    scalars = {"nan": math.nan, "inf": -math.inf, "a,b|c": 1.0, "größe": 2.0}
    scalars |= {f"m{i}": float(i) for i in range(1050)}
    logger = logged(tmp_path, uri)
    logger.log_scalars(scalars, step=Step("train", "train", 1, 1), scope="loader")
    logger.log_hparams({f"p{i}": i for i in range(250)}, environment={})
    logger.flush()
    logger.close()

    data = client(uri).get_run(logger.run_id).data
    assert (len(data.metrics), len(data.params)) == (1054, 250)
    found = [data.metrics[f"train/{name}"] for name in ("nan", "inf", "a_b_c", "größe")]
    np.testing.assert_array_equal(found, [math.nan, -math.inf, 1.0, 2.0])


def test_pictures_texts_distributions_and_files_are_artifacts(tmp_path, uri):
    """Images are stored where MLflow's page shows them by step, texts as text files, and numeric data as JSON."""
    from PIL import Image

    logger = dl.MLflowLogger(tmp_path / "log", tracking_uri=uri)

    image = log_everything(logger, tmp_path)

    folder = artifacts(uri, client(uri).get_run(logger.run_id), tmp_path)
    [png] = folder.glob("images/*.png")
    assert png.name.startswith("valid~sample+step+3+")  # MLflow's page uses it to find the image
    np.testing.assert_array_equal(np.asarray(Image.open(png)), image)
    assert (folder / "texts/valid/remark/3.txt").read_text() == "good"
    histogram = json.loads((folder / "histograms/valid/batch/weights/12.json").read_text())
    assert histogram == {"counts": [1, 2], "edges": [-1.0, -0.5, 4.5]}
    assert json.loads((folder / "pr_curves/valid/pr/3.json").read_text())["recall"] == [1.0, 0.25]
    table = json.loads((folder / "tables/valid/classes/3.json").read_text())
    assert table == {"columns": ["class", "f1"], "data": [["a", 0.5], ["b", 1.0]]}
    assert (folder / "notes/more/a.txt").read_text() == "in a folder"
