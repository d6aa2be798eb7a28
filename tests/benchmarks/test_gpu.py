"""The GPU benchmark: figures computed from a trace, and equal work by both candidates, tested on the CPU."""

import json

import pytest

from benchmarks import gpu


def run(monkeypatch, capsys, who, *more):
    monkeypatch.setattr("sys.argv", ["gpu", who, "--device", "cpu", "--num-batches", "2", "--batch-size", "2", *more])
    gpu.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_idle_is_the_time_that_nothing_covers():
    """Spans may contain each other, overlap, and come in any order."""
    assert gpu.idle_share([(0, 4), (3, 5), (9, 10)]) == pytest.approx(0.4)
    assert gpu.idle_share([(2, 3), (0, 10)]) == 0
    assert gpu.idle_share([(8, 10), (0, 1), (4, 5)]) == pytest.approx(0.6)


@pytest.mark.slow
def test_both_train_alike(monkeypatch, capsys):
    """Both candidates report the same mean loss in the second pass, and every figure."""
    by_hand, ours = (run(monkeypatch, capsys, who) for who in ("raw", "ours"))
    assert ours["same"]["loss"] == pytest.approx(by_hand["same"]["loss"], rel=1e-3)
    for report in (by_hand, ours):
        assert report["step_us"] > 0 and report["syncs"] == 0 and 0 <= report["idle_percent"] < 100
