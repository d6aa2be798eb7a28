"""Tests that several processes predict the same as one: each sample once, in order, with bounded prefetching."""

import copy
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from runnerkit import dl
from runnerkit.data import BatchLimitLoaderWrapper, TensorLoader
from runnerkit.passes.prediction import Prediction, in_order, predict
from tests.alive import is_alive
from tests.fake_apex.use import stand_in
from tests.ranks import Ranks
from tests.shares import Stream
from tests.tiny import classification, loader, mlp, train, weights

LENGTHS = (0, 1, 7, 64, 65)
LIMIT_S = 10
DDP = partial(dl.DistributedDataParallelEngine, device="cpu")


class Predicts(dl.SupervisedRunner):
    """Runner that predicts a nested structure of all supported types, with the number of each sample."""

    def predict_batch(self, batch, scale=1.0):
        numbers, features = batch
        logits = self.model(features) * scale
        names = [f"sample {number}" for number in numbers.tolist()]
        return {"number": numbers, "both": (logits, [logits.argmax(1).numpy()]), "name": names, "none": None}


def numbered(num_samples, batch_size=4, **kwargs):
    features, _ = classification(num_samples).tensors
    return DataLoader(TensorDataset(torch.arange(num_samples), features), batch_size=batch_size, **kwargs)


def joined(predictions):
    return (
        [number for each in predictions for number in each["number"].tolist()],
        torch.cat([each["both"][0] for each in predictions] or [torch.zeros(0, 3)]),
        [each for batch in predictions for each in batch["both"][1][0].tolist()],
        [name for each in predictions for name in each["name"]],
    )


def assert_equal(found, expected):
    """Compare exactly, except for float32 rounding, which depends on the batch size."""
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)
    assert (found[0], found[2], found[3]) == (expected[0], expected[2], expected[3])


# -------------------------------------------------------------------------------------- the order, on simulated ranks


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 90), st.integers(1, 33), st.integers(1, 4), st.booleans(), st.booleans())
def test_each_sample_is_predicted_once_and_in_order(num_samples, batch_size, num_ranks, drop_last, own_batches):
    """Every rank gets each sample once, in order, for any length, batch size, number of ranks and drop_last."""
    data = numbered(num_samples).dataset
    batches = list(BatchSampler(range(num_samples), batch_size, drop_last=False))
    how = {"batch_sampler": batches} if own_batches else {"batch_size": batch_size, "drop_last": drop_last}
    model, ranks = mlp(), Ranks(num_ranks)

    def job(engine):
        engine.is_ddp = True
        runner = Predicts(copy.deepcopy(model), engine)
        prediction = Prediction(DataLoader(data, **how), seed=1, resume=None, arguments={}, as_rows=True)
        by_batches = prediction.check(engine)
        rounds = engine.gather_rounds(predict(runner, prediction))
        return joined(list(in_order(rounds, by_batches=by_batches)))

    for numbers, logits, _, names in ranks.call(*(partial(job, engine) for engine in ranks.engines)):
        assert numbers == list(range(num_samples))
        assert names == [f"sample {number}" for number in range(num_samples)]
        torch.testing.assert_close(logits, model(data.tensors[1]).detach(), rtol=1e-5, atol=1e-6)


class Means(dl.SupervisedRunner):
    """Runner that predicts the mean of two features instead of a row per sample, from batches that are pairs."""

    def predict_batch(self, batch):
        return batch[0].mean(0)


def pairs(num_samples=11, **kwargs):
    features = torch.arange(num_samples * 2.0).reshape(-1, 2)
    return DataLoader(TensorDataset(features, torch.zeros(num_samples)), **kwargs)


def test_a_mean_as_long_as_its_batch_has_parts_is_no_rows(tmp_path):
    """Two means are not taken for rows because a batch (features, targets) has two parts, in one process or two."""
    ranks = Ranks(2)

    def job(engine):
        engine.is_ddp = True
        prediction = Prediction(pairs(batch_size=4), seed=1, resume=None, arguments={}, as_rows=True)
        with pytest.raises(ValueError, match=r"its shape is \(2,\), the batch has 4 samples"):
            next(predict(Means(mlp(), engine), prediction))

    ranks.call(*(partial(job, engine) for engine in ranks.engines))
    for whole in (pairs(batch_size=4), pairs(batch_sampler=list(BatchSampler(range(11), 4, drop_last=False)))):
        with pytest.raises(ValueError, match=r"its shape is \(2,\), the batch has 4 samples"):
            Means(mlp()).predict_to(tmp_path / "means.csv", loader=whole, cpu=True)
    assert list(tmp_path.iterdir()) == []


class Batches(BatchSampler):
    pass


IN_ORDER = torch.utils.data.SequentialSampler(range(11))
ONE_OF_ONE = DistributedSampler(range(11), 1, 0, shuffle=False)


SHUFFLED = pairs(batch_size=3, shuffle=True)


@pytest.mark.parametrize(
    ("whole", "num_rows", "is_shuffled"),
    [
        (pairs(batch_size=3, drop_last=True), 11, False),
        (DataLoader(Stream(pairs().dataset), batch_size=3, drop_last=True), 11, False),
        (TensorLoader(*pairs().dataset.tensors, batch_size=3, drop_last=True), 11, False),
        (BatchLimitLoaderWrapper(pairs(batch_size=3, drop_last=True), 9), 11, False),
        (pairs(batch_sampler=Batches(IN_ORDER, 3, drop_last=False)), 11, False),
        (pairs(batch_size=3, sampler=ONE_OF_ONE, drop_last=True), 9, False),
        (pairs(batch_sampler=Batches(IN_ORDER, 3, drop_last=True)), 9, False),
        (SHUFFLED, 11, True),
        (pairs(batch_sampler=Batches(RandomSampler(range(11)), 3, drop_last=False)), 11, True),
        (pairs(batch_size=3, sampler=DistributedSampler(range(11), 1, 0)), 11, True),
        (BatchLimitLoaderWrapper(SHUFFLED, 9), 11, True),
        (TensorLoader(*pairs().dataset.tensors, batch_size=3, shuffle=True), 11, True),
        (list(pairs(batch_size=3)), 11, False),
    ],
    ids=[
        *("plain", "stream", "tensors", "limited", "own", "distributed", "own that drops", "shuffled"),
        *("own that shuffles", "distributed that shuffles", "limited and shuffled", "tensors shuffled", "list"),
    ],
)
def test_samples_are_left_out_or_shuffled_only_with_a_warning(whole, num_rows, is_shuffled, caplog):
    """drop_last is undone, or warned of; so is a shuffle, as the caller cannot know the order of the rows."""
    predictions = list(dl.SupervisedRunner(nn.Linear(2, 3)).predict_loader(loader=whole, cpu=True))

    assert sum(len(each["logits"]) for each in predictions) == num_rows
    words = "shuffles: predictions come in its order" if is_shuffled else "its sampler keeps drop_last=True"
    assert len(caplog.messages) == (is_shuffled or num_rows < 11)
    assert all(words in each for each in caplog.messages)


# ------------------------------------------------------------------------------------ processes started by a launcher


class Writes(dl.SupervisedRunner):
    def predict_batch(self, batch):
        return {"logits": self.model(batch[0]), "targets": batch[1]}


def every_case(folder):
    """Return the results of all cases in each of three processes, whose engines join the existing process group."""
    group = DDP(3)
    group.setup()
    runner = Predicts(mlp(dropout=0.5))

    def predicted(data, engine=DDP, **options):
        options = {"engine": engine(), **options} if engine else options
        return joined(list(runner.predict_loader(loader=data, **options)))

    sizes = [(length, batch_size) for length in LENGTHS for batch_size in (1, 4, 33)]
    found = {each: predicted(numbered(*each), scale=2.0) for each in sizes}
    found["shuffled"] = predicted(numbered(30, shuffle=True))
    found["workers"] = predicted(numbered(30, num_workers=1))
    found["amp"] = predicted(numbered(30), None, ddp=True, cpu=True, amp=True)
    found["fsdp"] = predicted(numbered(30), partial(dl.FullyShardedDataParallelEngine, device="cpu"))
    half = iter(runner.predict_loader(loader=numbered(30), engine=DDP()))
    found["half"] = joined([next(half)])
    half.close()
    found["after"] = predicted(numbered(30))
    for suffix in ("csv", "parquet"):
        path = Writes(mlp()).predict_to(f"{folder}/new/predictions.{suffix}", loader=loader(65, 4), engine=DDP())
        found[suffix] = path.stat().st_size  # every rank sees the file
    found["frame"] = Writes(mlp()).predict_frame(loader=loader(65, 4), engine=DDP(), index=range(100, 165))
    gathered = group.gather_object(found)
    group.cleanup()
    return gathered


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("predictions")


@pytest.fixture(scope="module")
def ranks(folder):
    return DDP(3).launch(partial(every_case, folder))


def in_one_process(data, **options):
    return joined(list(Predicts(mlp()).predict_loader(loader=data, cpu=True, **options)))


def test_every_rank_gets_all_predictions_in_order(ranks):
    """Every rank gets the predictions of one process with the same arguments, in order."""
    for found in ranks:
        for length in LENGTHS:
            for batch_size in (1, 4, 33):
                assert_equal(found[length, batch_size], in_one_process(numbered(length, 5), scale=2.0))


def test_other_engines_and_workers_predict_the_same(ranks):
    """FSDP2, workers, a shuffle, which depends on the seed only, and a prediction after an abandoned one."""
    one = in_one_process(numbered(30))
    shuffled = in_one_process(numbered(30, shuffle=True))

    assert sorted(shuffled[0]) == list(range(30)) != shuffled[0]
    for found in ranks:
        for case in ("workers", "fsdp", "after"):
            assert_equal(found[case], one)
        assert_equal(found["shuffled"], shuffled)
        assert found["half"][0] == list(range(12))


def test_amp_predicts_in_the_type_of_one_process(ranks):
    """Predictions with AMP are bfloat16, as in one process, and equal to its 8 bits."""
    one = in_one_process(numbered(30), amp=True)

    for found in ranks:
        assert found["amp"][1].dtype == one[1].dtype == torch.bfloat16
        torch.testing.assert_close(found["amp"][1], one[1], rtol=2**-7, atol=2**-7)


def test_files_hold_what_one_process_writes(ranks, folder, tmp_path):
    """Prediction files hold the rows of one process, once and in order, and no other files are left."""
    for suffix in ("csv", "parquet"):
        one = Writes(mlp()).predict_to(tmp_path / f"one.{suffix}", loader=loader(65, 7), cpu=True)

        written = folder / "new" / f"predictions.{suffix}"
        assert {found[suffix] for found in ranks} == {written.stat().st_size}
        theirs, ours = read(written), read(one)
        torch.testing.assert_close(theirs["logits"], ours["logits"], rtol=1e-5, atol=1e-6)
        assert torch.equal(theirs["targets"], classification(65).tensors[1])
    assert sorted(path.suffix for path in (folder / "new").iterdir()) == [".csv", ".parquet"]


def test_every_rank_gets_the_frame_of_one_process(ranks):
    """Rows are in order, so that the index labels the same ones."""
    one = Writes(mlp()).predict_frame(loader=loader(65, 7), cpu=True, index=range(100, 165))

    for found in ranks:
        pandas.testing.assert_frame_equal(found["frame"], one, rtol=1e-5, atol=1e-6)


def read(path):
    frame = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
    names = [name for name in frame if name.startswith("logits")]
    logits = np.stack([np.stack(frame[name]) for name in names], axis=-1).reshape(len(frame), -1)
    return {"logits": torch.tensor(logits, dtype=torch.float32), "targets": torch.tensor(frame["targets"].to_numpy())}


# -------------------------------------------------------------------------------------- processes started by the call


def test_plain_python_gets_the_predictions_of_spawned_processes(tmp_path):
    """Spawned processes load the checkpoint's weights into the model of get_model, and the caller gets predictions."""

    class Made(Predicts):
        def get_model(self, stage):
            return mlp(seed=7)

    model = mlp()
    train(model, logdir=tmp_path)

    found = joined(list(Made().predict_loader(loader=numbered(65), ddp=True, cpu=True, resume=tmp_path)))

    expected = joined(list(Predicts(model).predict_loader(loader=numbered(65), cpu=True)))
    assert_equal(found, expected)
    assert not torch.equal(expected[1], joined(list(Made().predict_loader(loader=numbered(65), cpu=True)))[1])


@pytest.mark.horovod
def test_horovod_predicts_the_same():
    """Horovod, started by plain Python, gives the predictions of one process."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")

    found = Predicts(mlp()).predict_loader(loader=numbered(21), engine=dl.HorovodEngine(2, device="cpu"))

    assert_equal(joined(list(found)), joined(list(Predicts(mlp()).predict_loader(loader=numbered(21), cpu=True))))


class Counts(Predicts):
    folder = ""

    def predict_batch(self, batch):
        (Path(self.folder) / f"{self.engine.rank} {int(batch[0][0])}").touch()
        return super().predict_batch(batch)


def test_a_generator_left_half_way_ends_its_processes_and_was_not_ahead(tmp_path, monkeypatch):
    """Closing the generator ends its processes and removes their files; each was at most three batches ahead."""
    (tmp_path / "marks").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner = Counts(mlp())
    runner.folder = str(tmp_path / "marks")
    data = numbered(100_000, 1, num_workers=1)
    before = set(psutil.Process().children(recursive=True))
    peak = 0

    predictions = runner.predict_loader(loader=data, ddp=True, cpu=True)
    assert set(psutil.Process().children(recursive=True)) == before  # no process has started
    for num_taken, prediction in enumerate(predictions, start=1):
        assert prediction["number"].tolist() == [2 * num_taken - 2, 2 * num_taken - 1]
        time.sleep(0.5 if num_taken in (1, 20) else 0)
        num_begun = [len(list((tmp_path / "marks").glob(f"{rank} *"))) for rank in (0, 1)]
        peak = max(peak, *(begun - num_taken for begun in num_begun))
        if num_taken == 20:
            break
    started = set(psutil.Process().children(recursive=True)) - before
    begin = time.monotonic()
    predictions.close()

    assert 2 <= peak <= 3
    assert len(started) >= 2
    assert time.monotonic() - begin < LIMIT_S
    deadline = time.monotonic() + LIMIT_S
    while (left := [each for each in started if is_alive(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert [path.name for path in tmp_path.iterdir()] == ["marks"]


class Fails(Predicts):
    how = ""

    def predict_batch(self, batch):
        if self.engine.rank == 1 and batch[0][0] > 20:
            if self.how == "silently":
                os._exit(0)
            raise ArithmeticError("planned failure of rank one")
        return super().predict_batch(batch)


@pytest.mark.parametrize("how", ["loudly", "silently"])
def test_a_rank_that_fails_ends_the_prediction_with_its_own_words(how):
    """The caller gets the rank's exception and traceback, or an error that names the rank that exited."""
    runner = Fails(mlp())
    runner.how = how
    expected = {"loudly": (ArithmeticError, "planned"), "silently": (dl.WorkerError, "rank 1 ended early")}
    predictions = runner.predict_loader(loader=numbered(10_000), ddp=True, cpu=True)

    with pytest.raises(expected[how][0], match=expected[how][1]) as caught:
        for _ in predictions:
            pass

    if how == "loudly":
        assert isinstance(caught.value.__cause__, dl.RankTraceback)
        assert caught.value.__cause__.rank == 1 and "in predict_batch" in str(caught.value.__cause__)
        assert caught.value.__notes__ == ["in batch 4 of loader 'predict', rank 1"]


# --------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("engine", [dl.CPUEngine, dl.DataParallelEngine, dl.DataParallelAMPEngine])
def test_one_process_predicts_lazily_whatever_the_predictions_are(engine):
    """In one process, predict_loader is lazy, accepts any iterable and allows one value per batch."""

    class Sums(dl.SupervisedRunner):
        def predict_batch(self, batch):
            return float(self.model(batch[0]).sum())

    taken = []
    batches = (taken.append(batch) or batch for batch in loader(12, 4))
    predictions = Sums(mlp()).predict_loader(loader=batches, engine=engine())
    assert taken == []
    first = next(predictions)

    assert isinstance(first, float) and len(taken) == 1
    assert len(list(predictions)) == 2


def test_the_model_comes_back_without_its_wrapper(monkeypatch):
    """The runner's model is unwrapped from DataParallel after a prediction, even an abandoned one."""
    # As on a machine with GPUs; without one, DataParallel passes each batch through.
    monkeypatch.setattr("runnerkit.engines.data_parallel.split_batches", lambda module, device: nn.DataParallel(module))
    model = mlp()
    runner = dl.SupervisedRunner(model)

    for count in (1, 3):
        predictions = runner.predict_loader(loader=loader(12, 4), engine=dl.DataParallelEngine("cpu"))
        for _ in range(count):
            next(predictions)
        assert isinstance(runner.model, nn.DataParallel)
        list(predictions) if count == 3 else predictions.close()
        assert runner.model is model


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("is_left", [True, False])
def test_apex_gives_the_model_back_with_the_weights_that_it_had(opt_level, is_left, monkeypatch):
    """Apex leaves the weights in float32, not rounded to half precision, after a prediction and an evaluation."""
    model = mlp()
    before = weights(model)
    with stand_in(monkeypatch):
        engine = dl.APEXEngine(opt_level=opt_level, device="cpu")
        predictions = dl.SupervisedRunner(model).predict_loader(loader=loader(8, 4), engine=engine)
        first = next(predictions)["logits"]
        predictions.close() if is_left else list(predictions)
        runner = dl.SupervisedRunner(model)
        runner.evaluate_loader(loader(8, 4), callbacks=[dl.AccuracyCallback("logits", "targets")], engine=engine)

    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert torch.equal(weights(model), before)
    torch.testing.assert_close(first.float(), model(classification(8).tensors[0][:4]), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"loader": [1, 2], "ddp": True}, TypeError, "'predict'.*DataLoader"),
        (
            {"loader": DataLoader(range(10), sampler=DistributedSampler(range(10), 2, 0)), "ddp": True},
            ValueError,
            "remove it",
        ),
        ({"loader": [], "engine": dl.CPUEngine(), "ddp": True}, ValueError, "either engine or flags"),
        ({"loader": [], "resume": "nowhere"}, FileNotFoundError, "nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, error, words):
    """Invalid arguments raise at the call, not at the first prediction."""
    with pytest.raises(error, match=words):
        dl.SupervisedRunner(mlp()).predict_loader(cpu="engine" not in arguments, **arguments)
