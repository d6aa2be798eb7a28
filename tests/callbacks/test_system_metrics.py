"""SystemMetricsCallback: its values match the clock, cover the whole job, and cost a step almost nothing."""

import resource
import time
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from benchmarks.calls import calls_per_step
from runnerkit import dl
from runnerkit.callbacks.monitor import system_metrics
from tests.callbacks.recording import Kept
from tests.callbacks.stand_ins import Clock, end_loader, make_runner
from tests.interrupt import Interrupt
from tests.ranks import Ranks
from tests.schedules import Learns, Steps
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, train, weights

# tests.tiny.mlp: the forward pass, the weights' gradients of both layers, and the second layer's input gradient.
FLOPS_PER_SAMPLE = 2 * (2 * NUM_FEATURES * 16 + 3 * 16 * NUM_CLASSES)
CLOCK_METRICS = ("samples_per_s", "step_s", "data_wait_share")


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(system_metrics, "time", clock := Clock())
    return clock


class Paced:
    """A loader that waits a given time for each batch."""

    def __init__(self, batches, waits, pause):
        self.batches, self.waits, self.pause = batches, waits, pause

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch, seconds in zip(self.batches, self.waits, strict=True):
            self.pause(seconds)
            yield batch


class Work(dl.Callback):
    """A callback that pauses at the end of each batch and between batches."""

    def __init__(self, pause, *, working, between=0.0):
        super().__init__(order=dl.CallbackOrder.Internal)
        self.pause, self.working, self.between = pause, working, between

    def on_batch_end(self, runner):
        self.pause(self.working)

    def on_step_end(self, runner):
        self.pause(self.between)


def monitored(*callbacks, **options):
    return train(callbacks=list(callbacks), **options)


def paced(clock, waits, *, working=0.1, between=0.0, **options):
    """Train on batches of 4, for each of which a loader waits so many seconds."""
    loaders = {key: Paced(batches(len(each), 4), each, clock.pause) for key, each in waits.items()}
    work = Work(clock.pause, working=working, between=between)
    return monitored(dl.SystemMetricsCallback(), work, loaders=loaders, **options)


def system(metrics):
    return {key.removeprefix("_system/"): value for key, value in metrics.items() if key.startswith("_system/")}


def on_clock(metrics):
    return {name: system(metrics)[name] for name in CLOCK_METRICS}


def batches(num_batches, batch_size):
    return list(loader(num_batches * batch_size, batch_size))


def test_a_loader_has_its_samples_by_its_time_and_its_wait_by_that_time(clock):
    """Batches of 4 take 0.3 s to load and 0.1 s to train; a checkpoint of 7 s between batches does not count."""
    runner = paced(clock, {"train": [0.3] * 5, "valid": [0.0] * 3}, between=7.0)

    expected = {"samples_per_s": 4 / 0.4, "step_s": 0.4, "data_wait_share": 0.75}
    assert on_clock(runner.epoch_metrics["train"]) == pytest.approx(expected)
    expected = {"samples_per_s": 4 / 0.1, "step_s": 0.1, "data_wait_share": 0.0}
    assert on_clock(runner.epoch_metrics["valid"]) == pytest.approx(expected)


def test_every_so_many_steps_there_are_the_numbers_since_the_last(clock):
    """Steps 1 and 2 are summed up, then 3 and 4; the loader's values cover all five and are not a mean of these."""
    log = Kept()

    runner = paced(clock, {"train": [0.1, 0.1, 0.3, 0.3, 0.7]}, loggers={"log": log}, log_every=2)

    [(first, early), (second, late)] = log.steps
    slow = {"samples_per_s": 10.0, "step_s": 0.4, "data_wait_share": 0.75}
    assert (first, second) == (2, 4)
    assert on_clock(early) == pytest.approx({"samples_per_s": 20.0, "step_s": 0.2, "data_wait_share": 0.5})
    assert on_clock(late) == pytest.approx(slow)
    assert on_clock(runner.epoch_metrics["train"]) == pytest.approx(slow)


def test_with_accumulation_the_logged_steps_have_the_numbers_of_all_their_batches(clock):
    """Steps of two batches end at batches 2, 3, 5 and 6: the second and the fourth are logged, each with three."""
    log = Kept()

    waits = {"train": [0.1, 0.2, 0.3]}
    paced(clock, waits, loggers={"log": log}, log_every=2, accumulation_steps=2, num_epochs=2)

    expected = {"samples_per_s": 12 / 0.9, "step_s": 0.3, "data_wait_share": 2 / 3}
    assert [number for number, _ in log.steps] == [3, 6]
    assert all(on_clock(metrics) == pytest.approx(expected) for _, metrics in log.steps)


class OwnSteps(dl.SupervisedRunner):
    """A runner that makes two steps in each batch with `learn`."""

    steps_itself, steps_per_batch = True, 2

    def handle_batch(self, batch):
        for _ in range(2):
            self.learn(nn.functional.cross_entropy(self.model(batch["features"]), batch["targets"]))


class StepsByHand(OwnSteps):
    """A runner that makes one step in each batch without `learn`."""

    steps_per_batch = 1

    def handle_batch(self, batch):
        if self.is_train_loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(batch["features"]), batch["targets"]).backward()
            self.optimizer.step()


@pytest.mark.parametrize(("kind", "logged"), [(OwnSteps, [2, 3, 5]), (StepsByHand, [3])])
def test_logged_steps_that_handle_batch_makes_have_the_numbers(kind, logged):
    """Five batches make ten steps with `learn`, and five without; every third is logged."""
    log = Kept()

    monitored(
        dl.SystemMetricsCallback(),
        runner=kind(),
        criterion=None,
        loaders={"train": batches(5, 4)},
        loggers={"log": log},
        log_every=3,
    )

    assert [number for number, _ in log.steps] == logged
    assert all(system(metrics).keys() >= {*CLOCK_METRICS} for _, metrics in log.steps)


def test_a_validation_within_the_epoch_has_its_own_numbers(clock):
    """A validation does not count as training time, nor as waiting for training data."""
    runner = paced(clock, {"train": [0.1] * 4, "valid": [0.9] * 2}, valid_every_steps=2)

    assert on_clock(runner.epoch_metrics["train"])["data_wait_share"] == pytest.approx(0.5)
    assert on_clock(runner.epoch_metrics["valid"])["data_wait_share"] == pytest.approx(0.9)


def test_a_run_timed_by_hand_agrees():
    """By the real clock, sleeping in the loader counts as waiting, and the steps fit into the run's duration."""
    begin = time.perf_counter()
    loaders = {"train": Paced(batches(10, 4), [0.01] * 10, time.sleep)}
    runner = monitored(dl.SystemMetricsCallback(), loaders=loaders)
    took_s = time.perf_counter() - begin

    metrics = on_clock(runner.epoch_metrics["train"])
    waited_s = metrics["data_wait_share"] * 10 * metrics["step_s"]
    assert 10 * 0.01 <= waited_s < 10 * metrics["step_s"] <= took_s  # sleep() never returns early
    assert metrics["samples_per_s"] == pytest.approx(4 / metrics["step_s"])


def seen(callback, runner, clock, *, waiting, working, num_batches=2):
    callback.on_loader_start(runner)
    for _ in range(num_batches):
        clock.now += waiting
        callback.on_batch_start(runner)
        clock.now += working
        callback.on_batch_end(runner)


def test_the_numbers_are_those_of_the_whole_job(clock, monkeypatch):
    """Samples add up, times are means over processes, memory is the largest process's; all in one reduction."""
    ranks = Ranks(2)
    callbacks = [dl.SystemMetricsCallback(peak_flops=1000.0, flops_per_sample=30.0) for _ in range(2)]
    sizes = (6, 2)
    runners = [
        make_runner(engine=engine, batch_size=size, batch_step=1, optimizer_step=0, log_every=10)
        for engine, size in zip(ranks.engines, sizes, strict=True)
    ]
    seen(callbacks[0], runners[0], clock, waiting=0.5, working=0.5)
    seen(callbacks[1], runners[1], clock, waiting=1.5, working=1.5)
    peaks = iter([3.0, 5.0])
    monkeypatch.setattr(system_metrics, "_peak_memory_gib", lambda device: next(peaks))

    ranks.call(*(partial(end_loader, *pair) for pair in zip(callbacks, runners, strict=True)))

    expected = {
        "samples_per_s": 16 / 4,  # 12 + 4 samples; 2 s and 6 s
        "step_s": 2.0,
        "data_wait_share": 0.5,
        "memory_gib": 5.0,
        "mfu": 16 * 30 / (8 * 1000),
    }
    assert [system(runner.loader_metrics) for runner in runners] == [pytest.approx(expected)] * 2
    assert ranks.num_collectives == 1


def test_two_real_processes_count_the_samples_of_both():
    """Throughput times step time is the number of samples per step of the whole job, whatever the clock's speed."""
    runner = monitored(
        dl.SystemMetricsCallback(peak_flops=1e6),
        loaders={"train": loader(40, 4)},
        num_processes=2,
    )

    metrics = system(runner.epoch_metrics["train"])
    assert metrics["samples_per_s"] * metrics["step_s"] == pytest.approx(8)
    assert metrics["mfu"] == pytest.approx(metrics["samples_per_s"] * FLOPS_PER_SAMPLE / 2e6)


def test_single_steps_of_two_processes_count_the_samples_of_both(clock):
    """Rank zero logs them without communication."""
    ranks = Ranks(2)
    runner = make_runner(engine=ranks.engines[0], batch_size=4, batch_step=10, optimizer_step=9, log_every=10)

    seen(dl.SystemMetricsCallback(), runner, clock, waiting=0.25, working=0.25, num_batches=1)

    expected = {"samples_per_s": 16.0, "step_s": 0.5, "data_wait_share": 0.5}
    assert on_clock(runner.batch_metrics) == pytest.approx(expected)
    assert ranks.num_collectives == 0


def test_a_resumed_loader_goes_on_with_its_sums(clock, tmp_path):
    """Two batches of 1 s before the checkpoint and three of 2 s after it give the values of five batches."""

    def run(*others, seconds, **kwargs):
        checkpoint = dl.CheckpointCallback(tmp_path, content="runner", every_steps=2)
        work = Work(clock.pause, working=seconds)
        loaders = {"train": loader(20, 4)}
        return monitored(dl.SystemMetricsCallback(), work, checkpoint, *others, loaders=loaders, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        run(Interrupt(3, "on_step_end"), seconds=1.0, logdir=tmp_path)
    runner = run(seconds=2.0, logdir=tmp_path, resume="auto")

    expected = {"samples_per_s": 20 / 8, "step_s": 8 / 5, "data_wait_share": 0.0}
    assert on_clock(runner.epoch_metrics["train"]) == pytest.approx(expected)


def test_memory_is_the_peak_that_the_system_knows():
    """Peak memory only grows, so it lies between the peaks before and after the run."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    runner = monitored(dl.SystemMetricsCallback(), loaders={"train": loader(8, 4)})

    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert before <= system(runner.epoch_metrics["train"])["memory_gib"] <= after


@pytest.fixture
def gpu_runner(monkeypatch):
    """Return a runner on a GPU that reports 3 GiB and a utilization of 40, then 80 percent."""
    percents = iter([40, 80])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(percents))
    engine = SimpleNamespace(device=SimpleNamespace(type="cuda"), num_processes=1, rank=0, compile_arguments=None)
    engine.data_parallel = engine
    return make_runner(engine=engine, batch_size=4, batch_step=10, optimizer_step=9, log_every=10)


def test_a_gpu_has_its_memory_and_utilisation(gpu_runner, clock):
    """The log point has the latest sample, and the loader has the mean."""
    callback = dl.SystemMetricsCallback()

    seen(callback, gpu_runner, clock, waiting=0.5, working=0.5, num_batches=1)
    end_loader(callback, gpu_runner)

    of_step, of_loader = system(gpu_runner.batch_metrics), system(gpu_runner.loader_metrics)
    assert (of_step["gpu_memory_gib"], of_step["gpu_utilization"]) == (3.0, 0.4)
    assert (of_loader["gpu_memory_gib"], of_loader["gpu_utilization"]) == (3.0, pytest.approx(0.6))
    assert "memory_gib" not in of_loader


def test_a_gpu_that_does_not_tell_its_utilisation_is_warned_of_once(gpu_runner, clock, monkeypatch, caplog):
    """If NVML is missing or the GPU is partitioned, the other values are logged nevertheless."""

    def utilization(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    callback = dl.SystemMetricsCallback()

    for _ in range(2):
        seen(callback, gpu_runner, clock, waiting=0.5, working=0.5, num_batches=2)
        end_loader(callback, gpu_runner)

    [record] = caplog.records
    assert "gpu_utilization is not available: nvidia-ml-py does not seem to be installed" in record.getMessage()
    assert system(gpu_runner.loader_metrics).keys() == {*CLOCK_METRICS, "gpu_memory_gib"}


def test_flops_are_counted_once_and_are_those_of_the_layers(clock):
    """A linear layer takes 2 m n FLOPs forward, as many for its weights' gradient and for its input's, if needed."""
    callback = dl.SystemMetricsCallback(peak_flops=1e6)

    loaders = {"train": loader(20, 4), "valid": loader(8, 4)}
    runner = monitored(callback, Work(clock.pause, working=0.5), loaders=loaders, num_epochs=2)

    assert callback.flops_per_sample == FLOPS_PER_SAMPLE
    assert system(runner.epoch_metrics["train"])["mfu"] == pytest.approx(20 * FLOPS_PER_SAMPLE / (5 * 0.5) / 1e6)
    assert "mfu" not in system(runner.epoch_metrics["valid"])


def test_counting_leaves_the_weights_as_they_would_be():
    """The weights are equal bit for bit."""
    with_count, without = (
        monitored(callback, loaders={"train": loader(20, 4)}).model
        for callback in (dl.SystemMetricsCallback(peak_flops=1e12), dl.TimerCallback())
    )

    assert weights(with_count).equal(weights(without))


def test_an_exception_while_flops_are_counted_ends_the_count():
    """Later computations are neither counted nor slowed down."""

    class Fail(dl.Callback):
        def on_batch_end(self, runner):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        monitored(dl.SystemMetricsCallback(peak_flops=1e12), Fail(0), loaders={"train": loader(8, 4)})

    assert _len_torch_dispatch_stack() == 0


def test_a_step_costs_a_few_calls():
    """Four calls and three looks at the clock, and nothing without the callback."""

    def run(num_steps, *callbacks):
        monitored(dl.Callback(), *callbacks, loaders={"train": batches(num_steps, 4)}, log_every=1000)

    assert calls_per_step(lambda num_steps: run(num_steps, dl.SystemMetricsCallback())) <= calls_per_step(run) + 10


def test_flops_that_cannot_be_counted_are_asked_for():
    """An error replaces invented numbers if torch.compile hides the operations or none of them can be counted."""
    with pytest.raises(ValueError, match=r"with torch\.compile, or DataParallel on GPUs, pass flops_per_sample="):
        monitored(dl.SystemMetricsCallback(peak_flops=1.0), engine=dl.CPUEngine(compile={"backend": "eager"}))

    class NoProducts(dl.Runner):
        def handle_batch(self, batch):
            self.batch_metrics["loss"] = batch[0].sum()

    with pytest.raises(ValueError, match="torch counts only matrix products, convolutions and attention"):
        monitored(dl.SystemMetricsCallback(peak_flops=1.0), runner=NoProducts(), optimizer=None)


@pytest.mark.parametrize("kind", [Steps, Learns])
def test_steps_that_handle_batch_makes_are_logged_when_they_are_due(tmp_path, kind):
    """Each row of steps has the measurements since the one before."""
    train(
        runner=kind(),
        criterion=None,
        callbacks=[dl.SystemMetricsCallback()],
        loaders={"train": loader(24, 4)},
        log_every=3,
        logdir=tmp_path,
    )

    rows = pd.read_csv(tmp_path / "csv" / "train.batch.csv")
    assert rows["step"].tolist() == [3, 6] and (rows["_system/samples_per_s"] > 0).all()
