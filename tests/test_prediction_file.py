"""Tests of prediction files: column types, complete files or none, and constant memory."""

import gc
import tracemalloc

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerkit import dl
from runnerkit.storage import prediction_file
from runnerkit.storage.prediction_file import check_path
from runnerkit.storage.prediction_file import prediction_file as opened
from tests.tiny import loader, mlp

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path, *predictions):
    with opened(path) as append:
        for prediction in predictions:
            append(prediction)
    return path


def batches(num_rows, *, seed=0, sizes=(3, 5)):
    """Return batches with every type of value that a table supports."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "float": torch.randn(size, generator=generator),
            "double": torch.randn(size, 2, generator=generator, dtype=torch.float64),
            "half": torch.randn(size, 2, 3, generator=generator).half(),
            "nested": [torch.randint(-5, 5, (size,), generator=generator), {"flag": torch.arange(size) % 2 == 0}],
            "brain": torch.randn(size, generator=generator).bfloat16(),
            "array": np.arange(size, dtype=np.int16),
            "absent": None,
        }
        for size in sizes
    ]


def test_csv_has_numbered_columns_that_read_back_exactly(tmp_path):
    """CSV columns are numbered and have enough digits to be read back exactly."""
    first, second = batches(8)

    path = write(tmp_path / "a.csv", {**first, "name": ["a", "b,c", 'd"']}, {**second, "name": ["é"] * 5})

    frame = pandas.read_csv(path)
    names = [f"half_{row}_{column}" for row in (0, 1) for column in (0, 1, 2)]
    expected = ["float", "double_0", "double_1", *names, "nested.0", "nested.1.flag", "brain", "array", "name"]
    assert list(frame) == expected
    whole = torch.cat([first["float"], second["float"]])
    assert torch.equal(torch.tensor(frame["float"].to_numpy(np.float32)), whole)
    double = torch.cat([first["double"], second["double"]])
    assert torch.equal(torch.tensor(frame[["double_0", "double_1"]].to_numpy()), double)
    half = torch.cat([first["half"], second["half"]])
    assert torch.equal(torch.tensor(frame[names].to_numpy(np.float16)).view(8, 2, 3), half)
    assert frame["name"].tolist() == ["a", "b,c", 'd"', *["é"] * 5]
    assert frame["nested.1.flag"].tolist() == [True, False, True, True, False, True, False, True]


def test_parquet_has_typed_columns_and_lists_for_vectors(tmp_path):
    """Parquet columns are typed, vectors are lists of any length, and a few batches form one row group."""
    first, second = batches(8)

    ragged = [{"tokens": torch.ones(3, 4, dtype=torch.int32)}, {"tokens": torch.zeros(5, 2, dtype=torch.int32)}]
    named = [{"name": ["a", "b", "c"], "no": torch.zeros(3, 0)}, {"name": ["d", None, *"fgh"], "no": torch.zeros(5, 0)}]
    path = write(tmp_path / "a.parquet", {**first, **ragged[0], **named[0]}, {**second, **ragged[1], **named[1]})

    table = parquet.read_table(path)
    assert {name: str(table.schema.field(name).type) for name in table.column_names} == {
        "float": "float", "double": "list<element: double>", "half": "list<element: list<element: halffloat>>",
        "nested.0": "int64", "nested.1.flag": "bool", "brain": "float", "array": "int16",
        "tokens": "list<element: int32>", "name": "string", "no": "list<element: float>",
    }  # fmt: skip
    columns = table.to_pydict()
    assert columns["half"] == torch.cat([first["half"], second["half"]]).tolist()
    assert columns["brain"] == torch.cat([first["brain"], second["brain"]]).tolist()
    assert columns["tokens"] == [[1] * 4] * 3 + [[0] * 2] * 5
    assert columns["name"] == ["a", "b", "c", "d", None, "f", "g", "h"] and columns["no"] == [[]] * 8
    assert parquet.ParquetFile(path).num_row_groups == 1


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), suffix=st.sampled_from(["csv", "parquet"]))
def test_each_row_is_there_once_and_in_order(sizes, suffix, tmp_path_factory):
    """Each row is written once and in order for any batch sizes, if the prediction is a single tensor."""
    rows = torch.arange(sum(sizes))
    path = write(tmp_path_factory.mktemp("rows") / f"a.{suffix}", *rows.split(sizes))

    frame = pandas.read_csv(path) if suffix == "csv" else pandas.read_parquet(path)
    assert frame["prediction"].tolist() == rows.tolist()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_memory_does_not_grow_with_the_file(suffix, tmp_path, monkeypatch):
    """Four times as many batches do not increase the peak memory of Python, NumPy and Arrow."""
    monkeypatch.setattr(prediction_file, "_ROW_GROUP_BYTES", 2**12)
    batch = torch.zeros(16, 8)

    def peak(num_batches):
        gc.collect()
        before, largest = pyarrow.total_allocated_bytes(), 0
        tracemalloc.start()
        with opened(tmp_path / f"a.{suffix}") as append:
            for _ in range(num_batches):
                append(batch)
                largest = max(largest, pyarrow.total_allocated_bytes())
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return python + largest - before

    peak(1)  # imports
    few, many = peak(40), peak(160)

    assert many < 1.1 * few + 2**15


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(suffix, tmp_path):
    """After an error, which an empty loader is too, the old file is unchanged and no other file is left."""
    path = tmp_path / f"a.{suffix}"
    path.write_text("old")

    with pytest.raises(ValueError, match="not those"):
        write(path, torch.zeros(3, 2), {"another": torch.zeros(3)} if suffix == "parquet" else torch.zeros(3, 4))
    with pytest.raises(ValueError, match="the loader gave no batch"):
        dl.SupervisedRunner(mlp()).predict_to(path, loader=loader(0, 4), cpu=True)

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("suffix", "predictions", "error", "words"),
    [
        ("csv", [torch.zeros(2, 3), torch.zeros(2, 2)], ValueError, "not those of the first batch.*pad.*parquet"),
        ("csv", [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], ValueError, "not those of the first batch"),
        ("csv", [{"a": {"b": torch.zeros(2)}, "a.b": torch.zeros(2)}], ValueError, "would be column 'a.b'; rename"),
        ("csv", [{"a_0": torch.ones(2), "a": torch.zeros(2, 1)}], ValueError, "would be column 'a_0' of a"),
        ("csv", [{"a": torch.zeros(2, 1), "a_0": ["x", "y"]}], ValueError, "would be column 'a_0' of a .csv.*parquet"),
        ("csv", [torch.zeros(2, dtype=torch.complex64)], TypeError, r"complex64.*torch\.save\(list\(runner"),
        ("parquet", [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], ValueError, "'b': 'float'.* not those of the"),
        ("parquet", [{"a": ["x", "y"]}, {"a": [1, 2]}], ValueError, "'a': 'int64'.* not those of the first batch"),
    ],
)
def test_what_a_file_cannot_hold_is_named(suffix, predictions, error, words, tmp_path):
    """Predictions that a file format cannot hold raise an error, and no file is left."""
    with pytest.raises(error, match=words):
        write(tmp_path / f"a.{suffix}", *predictions)

    assert list(tmp_path.iterdir()) == []


def test_another_suffix_and_a_missing_package_are_refused_at_once(tmp_path, monkeypatch):
    """An unknown suffix and a missing package raise an error before any process starts."""
    runner = dl.SupervisedRunner(mlp())

    with pytest.raises(ValueError, match=r"\.parquet or \.csv, got .*a\.pt.*torch\.save\(list\(runner\.predict_loader"):
        runner.predict_to(tmp_path / "a.pt", loader=loader(4, 4), ddp=True)
    monkeypatch.setattr(prediction_file, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'runnerkit\[parquet\]'; or write .csv"):
        runner.predict_to(tmp_path / "a.parquet", loader=loader(4, 4), ddp=True)
    check_path(tmp_path / "a.csv")
