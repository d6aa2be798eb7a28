"""Tests of predictions as a frame: the columns of a .csv file, and the index of the caller's rows."""

import sys

import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from runnerkit import dl
from runnerkit.storage.prediction_frame import prediction_frame
from tests.tiny import classification, mlp

TABLE = pandas.DataFrame(classification(11).tensors[0].numpy(), index=[f"row {number}" for number in range(11)])
ROWS = TensorDataset(torch.tensor(TABLE.to_numpy()), torch.arange(11))


class Predicts(dl.SupervisedRunner):
    def predict_batch(self, batch, scale=1.0):
        features, numbers = batch
        names = [f"sample {number}" for number in numbers.tolist()]
        return {"logits": self.model(features) * scale, "number": numbers, "name": names, "none": None}


class Means(dl.SupervisedRunner):
    def predict_batch(self, batch):
        return self.model(batch[0]).mean()


class Changing(dl.SupervisedRunner):
    def predict_batch(self, batch):
        return {f"in batches of {len(batch[0])}": batch[1]}


def frame_of(loader, runner=Predicts, **options):
    return runner(mlp()).predict_frame(loader=loader, cpu=True, **options)


def test_a_frame_has_the_index_of_its_rows_and_equals_the_file(tmp_path):
    """Columns, types and values are those that pandas reads from a .csv file; the model's are those of plain torch."""
    loader = DataLoader(ROWS, batch_size=4)

    found = frame_of(loader, index=TABLE.index, scale=2.0)

    path = Predicts(mlp()).predict_to(tmp_path / "a.csv", loader=loader, cpu=True, scale=2.0)
    expected = pandas.read_csv(path).astype(found.dtypes).set_index(TABLE.index)
    pandas.testing.assert_frame_equal(found, expected)
    assert list(found) == ["logits_0", "logits_1", "logits_2", "number", "name"]
    with torch.no_grad():
        logits = 2.0 * mlp()(ROWS.tensors[0])
    torch.testing.assert_close(torch.tensor(found.filter(like="logits").to_numpy()), logits, rtol=1e-5, atol=1e-6)
    assert list(found.loc["row 7", ["number", "name"]]) == [7, "sample 7"]


def test_rows_are_numbered_without_an_index():
    found = frame_of(DataLoader(ROWS, batch_size=4))

    assert found.index.tolist() == found["number"].tolist() == list(range(11))


def test_an_index_of_several_levels_is_kept():
    """The names of the levels too."""
    index = pandas.MultiIndex.from_product([["a"], range(11)], names=["letter", "number"])

    found = frame_of(DataLoader(ROWS, batch_size=4), index=index)

    assert found.index.equals(index) and found.index.names == ["letter", "number"]


def test_one_tensor_is_a_column_of_its_own():
    assert prediction_frame([torch.ones(2), torch.zeros(1)])["prediction"].tolist() == [1.0, 1.0, 0.0]


SHUFFLED = [
    DataLoader(ROWS, batch_size=4, shuffle=True),
    DataLoader(ROWS, batch_size=4, sampler=WeightedRandomSampler(torch.ones(11), 11)),
    DataLoader(ROWS, batch_size=4, sampler=SubsetRandomSampler(range(11))),
    dl.TensorLoader(*ROWS.tensors, batch_size=4, shuffle=True),
]


@pytest.mark.parametrize("loader", SHUFFLED, ids=["shuffle", "weighted", "subset", "tensors"])
def test_an_index_of_shuffled_rows_is_refused(loader):
    """The labels would be those of other rows."""
    with pytest.raises(ValueError, match=r"shuffles.* shuffle=False"):
        frame_of(loader, index=TABLE.index)


@pytest.mark.parametrize("loader", SHUFFLED, ids=["shuffle", "weighted", "subset", "tensors"])
def test_shuffled_rows_are_warned_of_without_an_index(loader, caplog):
    assert len(frame_of(loader)) == 11

    assert ["shuffles: predictions come in its order" in each for each in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"index": range(10)}, ValueError, "10 labels.* 11 predictions"),
        ({"index": TABLE}, TypeError, r"index=frame\.index"),
        ({"index": 11}, TypeError, "sequence of labels.* int"),
        ({"runner": Means}, ValueError, "a row for each sample"),
        ({"runner": Changing}, ValueError, "in batches of 3.*not those of the first batch.*same form"),
        ({"loader": DataLoader(TensorDataset(torch.zeros(0, 6), torch.zeros(0)))}, ValueError, "gave no batch"),
    ],
    ids=["length", "frame", "number", "mean", "columns", "empty"],
)
def test_what_cannot_be_a_frame_is_named(options, error, words):
    with pytest.raises(error, match=words):
        frame_of(**{"loader": DataLoader(ROWS, batch_size=4)} | options)


def test_missing_pandas_is_named_before_anything_runs(monkeypatch):
    """pandas is optional."""
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(ImportError, match=r"pip install 'runnerkit\[metrics\]'.*predict_to"):
        frame_of(DataLoader(ROWS, batch_size=4), runner=lambda model: Predicts(nn.Identity()))
