"""WandbLogger, offline: wandb's files contain every logged value exactly once."""

import json
import struct
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from runnerkit import dl
from tests.interrupt import Interrupt
from tests.loggers.training import log_everything, log_numbers, train, train_saving


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Keep wandb offline and independent of the user's settings, and end its process after the test."""
    for name in ("DATA", "CACHE", "CONFIG", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb_home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    if "wandb" in sys.modules and sys.modules["wandb"] is not None:
        sys.modules["wandb"].teardown()


def records(logdir):
    """Return the messages that wandb stores to send later, in the framing of LevelDB's log."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # wandb's process still writes after finish() returns
    block_bytes = 32_768
    for path in sorted(logdir.glob("wandb/offline-run-*/*.wandb")):
        data, place, message = path.read_bytes(), 7, b""  # after the file's own header
        while place < len(data):
            left = block_bytes - place % block_bytes
            if left < 7:
                place += left  # padding
                continue
            _, size, kind = struct.unpack_from("<IHB", data, place)
            message += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(message)
                message = b""


def rows(logdir):
    """Return the logged rows in order, as wandb will show them."""
    found = []
    for record in records(logdir):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def curve(logdir, name, x):
    return [(row[x], row[name]) for row in rows(logdir) if name in row]


def test_a_run_is_read_back_from_wandbs_files(tmp_path):
    """They contain config, checkpoint, exit code, and each metric once, with epoch and step, from rank zero."""
    logger = dl.WandbLogger(tmp_path, project="digits", name="mine", log_batch_metrics=True, log_checkpoint=True)

    runner = train(tmp_path, logger, log_every=1, num_processes=2)

    for key in ("train", "valid"):
        expected = [(epoch, runner.experiment_metrics[epoch][key]["loss"]) for epoch in (1, 2)]
        assert curve(tmp_path, f"{key}/loss", "epoch") == expected
    assert [step for step, _ in curve(tmp_path, "train/batch/loss", "step")] == list(range(1, runner.batch_step + 1))
    found = defaultdict(list)
    for record in records(tmp_path):
        kind = record.WhichOneof("record_type")
        found[kind].append(getattr(record, kind))
    assert [(run.project, run.display_name) for run in found["run"]] == [("digits", "mine")]
    config = {each.key: json.loads(each.value_json) for record in found["config"] for each in record.update}
    assert (config["lr"], config["model"]) == (0.1, {"depth": 2})
    assert config["environment"]["engine"]["num_processes"] == runner.engine.num_processes
    x_axes = {metric.name: metric.step_metric for metric in found["metric"]}
    assert (x_axes["valid/loss"], x_axes["train/batch/loss"]) == ("epoch", "step")
    assert [(each.type, len(each.manifest.contents)) for each in artifacts(tmp_path)] == [("model", 1)]
    assert [each.exit_code for each in found["exit"]] == [0]


def artifacts(logdir):
    """Return the logged artifacts."""
    for record in records(logdir):
        if record.WhichOneof("record_type") == "artifact":
            yield record.artifact


def test_a_resumed_run_is_the_same_run_and_repeats_nothing(tmp_path):
    """Interrupted in step 8 and resumed from the checkpoint of step 6, a run has the points of an unkilled one."""

    def run(logdir, *others, **options):
        train_saving(logdir, dl.WandbLogger(logdir, log_batch_metrics=True), *others, **options)

    run(tmp_path / "unkilled")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", Interrupt(8, "on_step_end"))
    run(tmp_path / "killed", resume="auto")

    assert len(list((tmp_path / "killed").glob("wandb/offline-run-*"))) == 2
    for name, x in (("train/loss", "epoch"), ("valid/loss", "epoch"), ("train/batch/loss", "step")):
        assert curve(tmp_path / "killed", name, x) == curve(tmp_path / "unkilled", name, x)
    numbers = [row["_step"] for row in rows(tmp_path / "killed")]
    assert numbers == list(range(len(numbers)))  # the rows belong to one run, so no row may replace another
    starts = [record.run for record in records(tmp_path / "killed") if record.WhichOneof("record_type") == "run"]
    assert len({start.run_id for start in starts}) == 1
    exits = [record.exit.exit_code for record in records(tmp_path / "killed") if record.HasField("exit")]
    assert exits == [1, 0]


def test_a_run_that_the_script_has_begun_is_used_and_left_open(tmp_path):
    """This happens in a sweep, for example."""
    import wandb

    logdir = tmp_path / "log"
    logdir.mkdir()
    begun = wandb.init(dir=logdir, id="theirs01")
    logger = dl.WandbLogger(tmp_path / "ours")

    train(tmp_path / "ours", logger)
    begun.log({"mine": 1.0})
    begun.finish()

    assert logger.run_id == "theirs01"
    assert [epoch for epoch, _ in curve(logdir, "valid/loss", "epoch")] == [1, 2]
    assert rows(logdir)[-1]["mine"] == 1.0


def test_pictures_texts_distributions_and_files_are_wandbs_own_kinds(tmp_path):
    """Each is logged once, under the kind that wandb's page displays."""
    from PIL import Image

    logger = dl.WandbLogger(tmp_path / "log")

    image = log_everything(logger, tmp_path)

    sample, remark, weights, pr, classes = rows(tmp_path / "log")
    assert {(row["epoch"], row["step"]) for row in (sample, remark, weights, pr, classes)} == {(3, 12)}
    [files] = (tmp_path / "log").glob("wandb/offline-run-*/files")
    np.testing.assert_array_equal(np.asarray(Image.open(files / sample["valid/sample/path"])), image)
    assert json.loads((files / remark["valid/remark/path"]).read_text())["data"] == [["good"]]
    assert (weights["valid/batch/weights/values"], weights["valid/batch/weights/bins"]) == ([1, 2], [-1.0, -0.5, 4.5])
    table = json.loads((files / pr["valid/pr_table/path"]).read_text())
    assert table["columns"][:2] == ["recall", "precision"]
    assert [row[:2] for row in table["data"]] == [[1.0, 0.5], [0.25, 1.0]]
    table = json.loads((files / classes["valid/classes/path"]).read_text())
    assert (table["columns"], table["data"]) == (["class", "f1"], [["a", 0.5], ["b", 1.0]])
    notes, _ = (each for each in artifacts(tmp_path / "log") if each.type == "file")
    assert notes.name == f"{logger.run_id}-notes"
    [content] = notes.manifest.contents
    assert (content.path, Path(content.local_path).read_text()) == ("more/a.txt", "in a folder")


def test_any_number_arrives(tmp_path):
    """All bits of a float are kept, also NaN and infinities."""
    values = log_numbers(dl.WandbLogger(tmp_path))

    [row] = rows(tmp_path)
    np.testing.assert_array_equal([row[f"train/{name}"] for name in values], list(values.values()))
