"""A schedule is told the number of steps that are taken, or none."""

import pytest
from torch import nn

from runnerkit import dl
from tests.faults import fuzz_run
from tests.faults.fuzz_setting import Setting
from tests.tiny import loader, mlp, sgd, train

MAP, SIZED, STREAM = (Setting(kind, (26,), 4) for kind in ("map", "sized", "stream"))
RAGGED = Setting("ragged", (3, 1, 4, 1, 5, 2), 1)
LANES = Setting("lanes", (5, 4, 6, 5), 4, lanes=(2, 2))


@pytest.mark.parametrize(
    ("setting", "options", "told", "taken"),
    [
        (MAP, {"num_samples": 40, "epoch_steps": 5}, 11, 11),  # 26 samples are seven batches
        (MAP, {"num_samples": 40, "epoch_steps": 5, "accumulation": 2}, 7, 7),
        (MAP, {"num_samples": 6, "epoch_steps": 7, "num_steps": 13}, 2, 2),
        (MAP, {"num_samples": 40, "limit": 2, "drop_last": True}, 10, 10),
        (SIZED, {"num_samples": 16, "num_steps": 8, "accumulation": 3}, 2, 2),
        (SIZED, {"num_epochs": 2, "num_steps": 80}, 14, 14),
        (LANES, {"num_samples": 33, "epoch_steps": 4, "num_epochs": 9}, 9, 9),
        (STREAM, {"num_steps": 9}, 9, 9),
        (STREAM, {"num_epochs": 1, "num_steps": 9}, None, 7),
        (STREAM, {"num_samples": 5, "num_steps": 9}, None, 2),
        (LANES, {"num_epochs": 1, "num_steps": 14, "accumulation": 3}, None, 2),
        (RAGGED, {"num_samples": 7, "num_steps": 12}, None, 3),
        (RAGGED, {"num_samples": 7, "num_epochs": 2}, None, 3),
    ],
)
def test_a_schedule_is_told_the_steps_that_are_taken(setting, options, told, taken):
    """Each limit that is set has to tell: the first one that is reached ends the run."""
    found = fuzz_run.train(Setting(**{**vars(setting), **options}))

    assert (found.told, found.num_steps) == (told, taken)


def test_a_schedule_that_needs_the_number_says_which_limit_does_not_tell():
    """A number of steps beside another limit is not enough."""
    with pytest.raises(ValueError, match=r"number of steps is not known.*: pass num_steps= to train\(\), without"):
        fuzz_run.train(Setting("stream", (26,), 4, num_epochs=1, num_steps=9), scheduler=dl.cosine_with_warmup)


class Two(dl.Runner):
    def handle_batch(self, batch):
        features, targets = batch
        for key, model in self.model.items():
            self.batch_metrics[f"loss_{key}"] = nn.functional.cross_entropy(model(features), targets)


@pytest.mark.parametrize("paces", [(2, 3), (2, 4), (3, 4)])
def test_optimizers_that_accumulate_differently_take_the_steps_of_all(paces):
    """A step is counted where at least one of them is taken."""
    models = {"one": mlp(), "two": mlp()}
    optimizers = {key: sgd(model) for key, model in models.items()}
    steppers = [
        dl.OptimizerCallback(f"loss_{key}", key, key, accumulation_steps=pace)
        for key, pace in zip(models, paces, strict=True)
    ]
    options = {"loaders": {"train": loader(22, 2)}, "callbacks": steppers, "num_epochs": 2}
    runner = train(models, runner=Two(), optimizer=optimizers, **options)

    ends = {number for pace in paces for number in range(pace, 12, pace)} | {11}
    assert runner.num_steps == runner.optimizer_step == 2 * len(ends)
