"""A run's length in epochs, optimizer steps, samples or hours: the first limit ends it, also after a resume."""

import itertools
import math
from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from runnerkit import dl
from runnerkit.loop.stop_signals import Preempted
from tests import tiny
from tests.engines.together import together
from tests.interrupt import Interrupt, at
from tests.tiny import classification, loader, mlp, sgd, weights

NUM_SAMPLES, BATCH = 26, 4  # seven batches in an epoch, the last of two samples


def train(*, model=None, **options):
    loaders = {"train": loader(NUM_SAMPLES, BATCH, shuffle=True), "valid": loader(6, 3)}
    runner = tiny.train(model or mlp(dropout=0.2), **{"loaders": loaders, **options})
    return runner, weights(runner.model)


def counts(runner):
    return runner.epoch_step, runner.batch_step, runner.optimizer_step, runner.sample_step


class Stream(IterableDataset):
    def __init__(self, num_samples=NUM_SAMPLES):
        self.num_samples = num_samples

    def __iter__(self):
        return iter(classification(self.num_samples))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (1, 7, 7, 26)),
        ({"num_steps": 10}, (2, 10, 10, 38)),
        ({"num_steps": 7}, (1, 7, 7, 26)),
        ({"num_steps": 5, "accumulation_steps": 3}, (2, 13, 5, 50)),  # steps of 3, 3 and 1 batches in an epoch
        ({"num_samples": 33}, (2, 9, 9, 33)),
        ({"num_samples": 26}, (1, 7, 7, 26)),
        ({"num_samples": 30, "accumulation_steps": 3}, (2, 8, 4, 30)),
        ({"num_epochs": 2, "num_steps": 100}, (2, 14, 14, 52)),
        ({"num_epochs": 9, "num_steps": 8, "num_samples": 31}, (2, 8, 8, 30)),
        ({"num_epochs": 9, "num_steps": 9, "num_samples": 31}, (2, 9, 9, 31)),
        ({"num_samples": 31, "loaders": {"train": DataLoader(Stream(), BATCH)}}, (2, 9, 9, 34)),
    ],
)
def test_the_first_limit_ends_the_run(limits, expected):
    """Samples are exact if the loader is shared by samples; a stream ends with the step that reaches the limit."""
    runner, _ = train(**limits)

    assert counts(runner) == expected
    if "loaders" not in limits:
        assert set(runner.epoch_metrics) == {"train", "valid"}, "an epoch that ends early is evaluated"
        assert runner.num_steps == expected[2]


def test_a_cut_step_is_the_gradient_of_its_samples():
    """33 samples are an epoch and 7 more, as in a hand-written loop over the same batches."""
    runner, found = train(model=mlp(), loaders={"train": loader(NUM_SAMPLES, 8)}, num_samples=33)

    reference = mlp()
    optimizer = sgd(reference)
    features, targets = classification(NUM_SAMPLES).tensors
    for start, stop in ((0, 8), (8, 16), (16, 24), (24, 26), (0, 7)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(features[start:stop]), targets[start:stop]).backward()
        optimizer.step()
    assert torch.equal(found, weights(reference))
    assert counts(runner) == (2, 5, 5, 33)


LIMITS = [{"num_steps": 17}, {"num_samples": 61}, {"num_steps": 8, "accumulation_steps": 3}]


def assert_same_logs(folder):
    """The runs "whole" and "log" have the same rows."""
    for name in ("train", "valid"):
        one, other = (pd.read_csv(folder / each / "csv" / f"{name}.csv") for each in ("whole", "log"))
        pd.testing.assert_frame_equal(one, other)


@pytest.mark.parametrize(
    ("limits", "moment"),
    [
        *itertools.product([*LIMITS, {"num_epochs": 3, "accumulation_steps": 2}], [(3,), (7,), (8,), (13,)]),
        *itertools.product([{"num_steps": 5}, {"num_samples": 18}], [(5, "on_loader_end")]),  # nothing is left
    ],
    ids=str,
)
def test_a_resumed_run_counts_what_was_done(tmp_path, limits, moment):
    """Interrupted within a step, at a step's end or an epoch's, it ends with the same weights, counters and logs."""
    options = {"valid_every_steps": 2, "log_every": 1, **limits}
    whole, expected = train(logdir=tmp_path / "whole", **options)
    save = partial(dl.CheckpointCallback, tmp_path / "log", content="runner", every_steps=1)

    with pytest.raises(KeyboardInterrupt):
        train(logdir=tmp_path / "log", callbacks=[save(), Interrupt(*moment)], **options)
    resumed, found = train(logdir=tmp_path / "log", callbacks=[save()], resume="auto", **options)

    assert torch.equal(found, expected)
    assert counts(resumed) == counts(whole)
    assert_same_logs(tmp_path)


def test_a_finished_run_says_what_to_raise(tmp_path, caplog):
    train(num_steps=3, logdir=tmp_path)

    train(num_steps=3, logdir=tmp_path, resume="auto")

    assert "3 of 3 steps are done; raise num_steps to continue" in caplog.text


@pytest.mark.parametrize(
    ("limits", "more"),
    [
        ({"num_steps": 5}, {"num_steps": 17}),
        ({"num_steps": 7}, {"num_steps": 12}),  # an epoch's end
        ({"num_steps": 4, "num_epochs": 1}, {"num_epochs": 2}),
        ({"num_steps": 4, "accumulation_steps": 3}, {"num_steps": 8, "accumulation_steps": 3}),
        ({"num_samples": 34}, {"num_samples": 61}),
        ({"num_samples": 26}, {"num_samples": 52}),
        ({"num_samples": 34}, {"num_epochs": 3}),
    ],
    ids=str,
)
def test_a_run_that_ended_within_an_epoch_continues_there(tmp_path, limits, more):
    """With a higher limit it trains the weights and writes the logs of a run that had it from the start."""
    whole, expected = train(logdir=tmp_path / "whole", log_every=1, **more)
    train(logdir=tmp_path / "log", log_every=1, **limits)

    resumed, found = train(logdir=tmp_path / "log", log_every=1, resume="auto", **more)

    assert torch.equal(found, expected)
    assert counts(resumed) == counts(whole)
    assert_same_logs(tmp_path)


def test_without_the_checkpoint_of_the_last_step_a_run_continues_with_the_next_epoch(tmp_path, caplog):
    train(logdir=tmp_path, num_steps=5)
    next(tmp_path.glob("checkpoints/model.0001.*.pth")).write_bytes(b"torn")

    runner, _ = train(logdir=tmp_path, num_steps=8, resume="auto")

    assert "the run ended within an epoch, and continues with the next one: " in caplog.text
    assert counts(runner) == (2, 8, 8, 32)


def test_hours_save_and_end_the_process(tmp_path):
    """The run exits with code 75, as after SIGTERM, and resumes to the weights of an uninterrupted one."""
    _, expected = train(num_epochs=2, logdir=tmp_path / "whole")

    with pytest.raises(Preempted) as ended:
        train(num_epochs=2, logdir=tmp_path / "log", max_hours=1e-9)
    resumed, found = train(num_epochs=2, logdir=tmp_path / "log", resume="auto", max_hours=1)

    assert ended.value.code == 75
    assert torch.equal(found, expected)
    assert counts(resumed) == (2, 14, 14, 52)


def test_hours_end_all_processes(tmp_path):
    """Rank zero's clock decides; both ranks save after the same step. A limit in samples ends at the same one."""

    def job():
        found = counts(train(num_samples=33, num_processes=2)[0])
        try:
            train(num_epochs=1000, logdir=tmp_path, max_hours=1e-9, num_processes=2)
        except Preempted as error:
            return found, error.code

    assert together(job) == ((2, 5, 5, 33), 75)  # steps of 8, 8, 8 and 2 samples, and one of 7: what is left, shared
    assert (tmp_path / "checkpoints" / "last.pth").exists()


class Told:
    """Makes a scheduler, and remembers how many steps it is for."""

    def __init__(self, make):
        self.make, self.num_steps = make, None

    def __call__(self, optimizer, num_steps):
        self.num_steps = num_steps
        return self.make(optimizer, num_steps)


@pytest.mark.parametrize(
    ("limits", "num_steps"),
    [
        ({"num_epochs": 3}, 21),
        ({"num_epochs": 3, "accumulation_steps": 2}, 12),
        ({"num_epochs": 3, "callbacks": [dl.OptimizerCallback(accumulation_steps=2)]}, 12),
        ({"num_epochs": 3, "num_steps": 8}, 8),
        ({"num_samples": 40}, 11),
        ({"num_samples": 40, "accumulation_steps": 2}, 6),
        ({"num_steps": 9, "loaders": {"train": DataLoader(Stream(), BATCH)}}, 9),
        ({"num_epochs": 2, "epoch_steps": 5}, 10),
        ({"num_samples": 40, "loaders": {"train": dl.BatchLimitLoaderWrapper(loader(NUM_SAMPLES, BATCH), 3)}}, 10),
    ],
)
def test_a_scheduler_is_told_the_number_of_steps(limits, num_steps):
    """It is stepped after each of them, so that a one-cycle schedule ends where it has to."""
    scheduler = Told(lambda optimizer, steps: OneCycleLR(optimizer, 0.4, total_steps=steps + 1))

    runner, _ = train(scheduler=scheduler, **limits)

    assert scheduler.num_steps == num_steps == runner.optimizer_step
    assert runner.scheduler.last_epoch == num_steps


def test_a_stream_without_a_limit_has_no_number_of_steps():
    scheduler = Told(lambda optimizer, steps: ReduceLROnPlateau(optimizer))

    train(scheduler=scheduler, loaders={"train": DataLoader(Stream(), BATCH)})

    assert scheduler.num_steps is None
    with pytest.raises(ValueError, match=r"number of steps is not known.*: pass num_steps= to train\(\)"):
        train(scheduler=dl.cosine_with_warmup, loaders={"train": DataLoader(Stream(), BATCH)})


@pytest.mark.parametrize("num_processes", [1, 2])
def test_functions_make_what_objects_would_be(num_processes):
    """Made in the processes that train, they give the weights of those that are passed, and the caller gets them."""
    model = mlp()
    optimizer = sgd(model)
    made = {"optimizer": optimizer, "scheduler": CosineAnnealingLR(optimizer, 3), "num_epochs": 2}
    _, expected = train(model=model, loaders={"train": loader(48, 8)}, **made)

    runner, found = train(
        model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), num_epochs=2,
        scheduler=lambda each, _: CosineAnnealingLR(each, 3), callbacks=[dl.SchedulerCallback(interval="epoch")],
        loaders={"train": loader(48, 8 // num_processes)}, num_processes=num_processes,
    )  # fmt: skip

    torch.testing.assert_close(found, expected, rtol=0, atol=0 if num_processes == 1 else 1e-6)
    assert isinstance(runner.scheduler, CosineAnnealingLR)
    assert runner.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_schedule_is_made_for_what_the_callbacks_accumulate(accumulation_steps):
    """The hook makes it before the callbacks are known, and again if they take another number of steps."""
    rates = []

    class Own(dl.SupervisedRunner):
        def get_scheduler(self, stage, optimizer):
            return OneCycleLR(optimizer, 0.1, total_steps=self.num_steps + 1)

        def get_callbacks(self, stage):
            return {**super().get_callbacks(stage), "_optimizer": dl.OptimizerCallback("loss", accumulation_steps=2)}

    note = at("on_batch_start", lambda runner: rates.append(runner.optimizer.param_groups[0]["lr"]))
    runner = tiny.train(runner=Own(), accumulation_steps=accumulation_steps, callbacks=[note])

    optimizer = torch.optim.SGD(tiny.mlp().parameters(), lr=0.1)
    by_hand, expected = OneCycleLR(optimizer, 0.1, total_steps=3), []
    for _ in range(2):
        expected += [optimizer.param_groups[0]["lr"]] * 2
        optimizer.step()
        by_hand.step()
    assert runner.scheduler.total_steps == 3 and runner.optimizer_step == 2
    assert rates == expected and runner.scheduler.get_last_lr() == by_hand.get_last_lr()


def test_to_read_the_number_of_steps_changes_nothing():
    """A run whose schedule does not depend on it trains as if nobody had read it."""

    class Own(dl.SupervisedRunner):
        steps_itself = True

        def get_model(self, stage):
            assert self.num_steps == 4
            return super().get_model(stage)

        def handle_batch(self, batch):
            for _ in range(1 + self.num_steps % 3):
                self.learn(torch.nn.functional.cross_entropy(self.model(batch["features"]), batch["targets"]))

    model = tiny.mlp()
    optimizer = tiny.sgd(model)
    runner = tiny.train(
        model, runner=Own(), optimizer=optimizer, scheduler=CosineAnnealingLR(optimizer, 1), criterion=None
    )

    assert runner.optimizer_step == 8


def test_intervals_count_optimizer_steps(tmp_path):
    """`valid_every_steps`, `every_steps` and step events are per optimizer step, not per batch."""
    told = []
    steps = at("on_step_end", lambda runner: told.append((runner.batch_step, runner.optimizer_step)))
    validations = at("on_validation_end", lambda _: told.append("valid"))
    loaders = {"train": loader(28, 4), "valid": loader(4, 4)}

    train(accumulation_steps=3, valid_every_steps=2, callbacks=[steps, validations], loaders=loaders)

    assert told == [(3, 1), "valid", (6, 2), (7, 3)]


def test_a_stage_needs_a_limit():
    with pytest.raises(ValueError, match="would never end: pass one of them"):
        dl.Budget()


def test_stages_have_budgets_too():
    """Each counts from its own start."""

    class Staged(dl.SupervisedRunner):
        stages = ("train_head", "train_all")

        def get_stage_len(self, stage):
            return dl.Budget(num_steps=3) if stage == "train_head" else 2

    runner = tiny.train(runner=Staged())

    assert runner.optimizer_step == 3 + 2 * 4 and runner.stage_optimizer_step == 8
    assert math.isfinite(runner.epoch_metrics["train"]["loss"])


@pytest.mark.parametrize("num_samples", [26, 22, 24])
def test_the_end_of_a_stream_is_known_to_an_accumulated_step(num_samples):
    """A last step of fewer batches is taken in its last batch, with its events, as for a loader with a length."""

    def ends_of(data):
        ends = []

        def note(runner):
            ends.append((runner.batch_step, runner.optimizer_step, runner.loader_batch_len))

        runner, found = train(
            scheduler=lambda optimizer, _: CosineAnnealingLR(optimizer, 6), accumulation_steps=3, num_epochs=2,
            loaders={"train": DataLoader(data, BATCH), "valid": loader(6, 3)}, valid_every_steps=2,
            callbacks=[at("on_step_end", note), dl.SchedulerCallback(interval="step")],
        )  # fmt: skip
        assert ends[-1][2] == -(-num_samples // BATCH)
        return [each[:2] for each in ends], found.tolist(), runner.optimizer.param_groups[0]["lr"]

    assert ends_of(Stream(num_samples)) == ends_of(classification(num_samples))


def test_a_run_continues_with_the_training_loader_that_was_left(tmp_path):
    """The limit was reached at the end of the first one."""

    def run(logdir, **limits):
        loaders = {"train_a": loader(12, 4, seed=1), "train_b": loader(12, 4, seed=2)}
        return train(loaders=loaders, logdir=logdir, **limits)

    _, expected = run(tmp_path / "whole", num_steps=6)
    run(tmp_path / "log", num_steps=3)

    assert torch.equal(run(tmp_path / "log", num_steps=6, resume="auto")[1], expected)


def test_a_loader_without_a_position_cannot_continue_within_an_epoch(tmp_path, caplog):
    loaders = {"train": [tuple(each[:4] for each in classification(8).tensors)] * 3}
    train(loaders=loaders, logdir=tmp_path, num_steps=1)

    runner, _ = train(loaders=loaders, logdir=tmp_path, num_steps=3, resume="auto")

    assert "continues with the next one: the position of its loader cannot be saved" in caplog.text
    assert runner.epoch_step == 2


class TimmLike:
    """A scheduler that is told the epoch after each epoch, as timm's are."""

    def __init__(self, optimizer, rates):
        self.optimizer, self.rates, self.updates = optimizer, rates, []
        self.step(0)

    def step(self, epoch, metric=None):
        self.optimizer.param_groups[0]["lr"] = self.rates[epoch]

    def step_update(self, num_updates, metric=None):
        self.updates.append(num_updates)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_scheduler_that_is_told_the_epoch_steps_after_each_epoch(is_made):
    """It may be passed as an object or as a function."""
    model, rates, made = mlp(), [], []
    optimizer = sgd(model)
    look = at("on_batch_start", lambda runner: rates.append(runner.optimizer.param_groups[0]["lr"]))

    def make(optimizer, num_steps=None):
        made.append(TimmLike(optimizer, [0.1, 0.05, 0.01]))
        return made[-1]

    options = {"optimizer": optimizer, "scheduler": make if is_made else make(optimizer), "callbacks": [look]}
    train(model=model, loaders={"train": loader(12, 4)}, num_epochs=2, **options)

    assert rates == [0.1] * 3 + [0.05] * 3
    assert made[-1].updates == [1, 2, 3, 4, 5, 6]
