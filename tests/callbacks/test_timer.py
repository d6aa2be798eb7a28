"""Times match the clock, per loader."""

import pytest

from runnerkit.callbacks.monitor import timer
from runnerkit.callbacks.monitor.timer import TimerCallback
from tests.callbacks.stand_ins import Clock, make_runner


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timer, "time", clock := Clock())
    return clock


def run_batch(callback, runner, clock, *, waiting, working):
    runner.batch_metrics = {}
    clock.now += waiting
    callback.on_batch_start(runner)
    clock.now += working
    callback.on_batch_end(runner)
    return {name.removeprefix("_timer/"): value for name, value in runner.batch_metrics.items()}


def test_times_of_a_batch_are_its_waiting_and_its_working(clock):
    """data_time + model_time = batch_time, and _fps is this process's samples per second of batch_time."""
    callback, runner = TimerCallback(), make_runner(batch_size=8)

    callback.on_loader_start(runner)
    first = run_batch(callback, runner, clock, waiting=1.0, working=3.0)
    second = run_batch(callback, runner, clock, waiting=0.5, working=0.25)

    assert first == pytest.approx({"data_time": 1.0, "model_time": 3.0, "batch_time": 4.0, "_fps": 2.0})
    assert second == pytest.approx({"data_time": 0.5, "model_time": 0.25, "batch_time": 0.75, "_fps": 8 / 0.75})
    assert all(type(value) is float for value in runner.batch_metrics.values())
    assert tuple(runner.batch_metrics) == callback.provides


def test_validation_and_checkpoint_are_no_waiting_for_data(clock):
    """The first training batch after them has the times of any other."""
    callback = TimerCallback()
    train, valid = make_runner(batch_size=8), make_runner(loader_key="valid", batch_size=2)

    callback.on_loader_start(train)
    run_batch(callback, train, clock, waiting=1.0, working=1.0)
    callback.on_loader_start(valid)
    of_valid = run_batch(callback, valid, clock, waiting=10.0, working=20.0)
    clock.now += 5.0  # a checkpoint
    callback.on_step_end(train)
    after = run_batch(callback, train, clock, waiting=1.0, working=1.0)

    assert of_valid["data_time"] == pytest.approx(10.0)
    assert after == pytest.approx({"data_time": 1.0, "model_time": 1.0, "batch_time": 2.0, "_fps": 4.0})
