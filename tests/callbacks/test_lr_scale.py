"""The learning rate of several processes is scaled by the rule in every step, and only if requested."""

import re

import pytest
import torch

from runnerkit import dl
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights

NUM_STEPS, BATCH_SIZE = 10, 8


def train_on_two(model, optimizer, **options):
    loaders = {"train": loader(NUM_STEPS * 2 * BATCH_SIZE, BATCH_SIZE)}
    return train(model, optimizer=optimizer, loaders=loaders, num_processes=2, **options)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5), (None, 1.0)])
def test_two_processes_step_as_far_as_the_rule_says(rule, factor):
    """Two processes match one with the joined batch and the scaled rate to 1e-6 (float sums); that rate is logged."""
    mine, theirs = mlp(), mlp()

    runner = train_on_two(mine, sgd(mine, lr=0.05), lr_scale=rule)
    train_by_hand(theirs, sgd(theirs, lr=0.05 * factor), loader(NUM_STEPS * 2 * BATCH_SIZE, 2 * BATCH_SIZE))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert runner.epoch_metrics["train"]["lr"] == pytest.approx(0.05 * factor, rel=1e-12)


def test_the_same_callback_warms_up_again_in_the_next_run():
    """The warm-up count restarts with each stage."""
    callback = dl.LRScaleCallback("linear", warmup_steps=100)
    for _ in range(2):
        train(callbacks=[callback])

        assert callback.num_steps == {"": 4}


def test_warmup_goes_with_any_scheduler():
    """Each step's rate is the scheduler's times that step's factor; checkpoints contain the scheduler's rate."""
    mine, theirs, warmup = mlp(), mlp(), 4
    optimizer, reference = sgd(mine, lr=0.05), sgd(theirs, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    callbacks = [dl.LRScaleCallback("linear", warmup_steps=warmup), dl.SchedulerCallback(interval="step")]

    runner = train_on_two(mine, optimizer, scheduler=scheduler, callbacks=callbacks)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(reference, NUM_STEPS)
    for step, batch in enumerate(loader(NUM_STEPS * 2 * BATCH_SIZE, 2 * BATCH_SIZE)):
        (group,) = reference.param_groups
        unscaled, group["lr"] = group["lr"], group["lr"] * (1 + min(1, step / warmup))
        train_by_hand(theirs, reference, [batch])
        group["lr"] = unscaled
        schedule.step()

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)


class OfThree(dl.LRScaleCallback):
    """Scales as if the run had three processes."""

    def factor(self, *, world_size, step):
        return super().factor(world_size=3, step=step)


def test_the_scaled_rates_of_all_groups_are_logged(tmp_path):
    """In the logs of steps as in those of epochs."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.02}]
    log = dl.JSONLLogger(tmp_path, log_batch_metrics=True)
    train(model, optimizer=torch.optim.SGD(groups), log_every=2, loggers={"jsonl": log}, callbacks=[OfThree()])

    logged = (tmp_path / "metrics.jsonl").read_text()
    for name, rate in {"lr": 0.3, "lr/1": 0.06}.items():
        rates = re.findall(rf'"{name}": ?([0-9.e-]+)', logged)
        assert list(map(float, rates)) == pytest.approx([rate] * 3)  # two steps and the epoch


class TwoSteps(dl.Runner):
    """Make two steps a batch, on its halves."""

    steps_itself = True
    steps_per_batch = 2

    def handle_batch(self, batch):
        features, targets = batch
        for half in range(2):
            self.learn(self.criterion(self.model(features[half::2]), targets[half::2]))


@pytest.mark.parametrize("is_closed_form", [False, True])
def test_a_schedule_between_the_steps_of_a_batch_sees_the_true_rate(is_closed_form):
    """Each of two steps a batch has its scheduled rate times the factor, from which the schedule does not continue."""
    model = mlp()
    optimizer = sgd(model, lr=1.0)
    taken = []
    if is_closed_form:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    else:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    class Watch(dl.Callback):
        def on_batch_start(self, runner):
            if not taken:  # after the hooks of others
                optimizer.register_step_pre_hook(lambda *_: taken.append(optimizer.param_groups[0]["lr"]))

    train(
        model, runner=TwoSteps(), optimizer=optimizer, scheduler=scheduler, scheduler_interval="step",
        loaders={"train": loader(8, 4)}, callbacks=[OfThree("linear", warmup_steps=2), Watch(1000)],
    )  # fmt: skip

    assert taken == [1.0, 0.5 * 2, 0.25 * 3, 0.125 * 3]
    assert optimizer.param_groups[0]["lr"] == 0.5**4


def test_the_count_of_the_warmup_is_resumed(tmp_path):
    """An interrupted warm-up continues from its last step."""
    callbacks = [dl.LRScaleCallback("linear", warmup_steps=100) for _ in range(2)]

    for num_epochs, callback in enumerate(callbacks, start=1):
        train(callbacks=[callback], logdir=tmp_path, resume="auto", num_epochs=num_epochs)

    assert [callback.num_steps for callback in callbacks] == [{"": 4}, {"": 8}]
