"""examples/predict_to_file.py writes one file under any launcher."""

import numpy as np
import pandas
import pytest

from runnerkit.contrib import Digits
from tests.examples.start import TORCHRUN, start


@pytest.mark.slow
def test_the_example_writes_every_digit_once_under_any_launcher(tmp_path):
    """Rows are in order, more than 80 % are right, and plain python's Parquet equals torchrun's CSV."""
    plain = start("python examples/predict_to_file.py --out plain.parquet", tmp_path)
    launched = start(f"{TORCHRUN} examples/predict_to_file.py --out launched.csv", tmp_path)

    targets = Digits(train=False).targets.tolist()
    assert f"{len(targets)} rows in plain.parquet" in plain
    assert launched.count(f"{len(targets)} rows in launched.csv") == 1
    rows, table = pandas.read_csv(tmp_path / "launched.csv"), pandas.read_parquet(tmp_path / "plain.parquet")
    assert rows["target"].tolist() == table["target"].tolist() == targets
    assert rows["predicted"].tolist() == table["predicted"].tolist()
    probabilities = rows[[f"probability_{digit}" for digit in range(10)]].to_numpy()
    np.testing.assert_allclose(probabilities, np.stack(table["probability"]), rtol=1e-4, atol=1e-6)
    assert (rows["target"] == rows["predicted"]).mean() > 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launched.csv", "plain.parquet"]
