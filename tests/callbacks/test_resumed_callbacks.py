"""A resumed run equals the uninterrupted one, bit for bit, with callbacks that change weights or batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from tests.interrupt import Interrupt
from tests.test_resume import Augmented, read_csv
from tests.tiny import NUM_CLASSES, loader, mlp, train, weights

CALLBACKS = {
    "freeze": lambda: dl.FreezeCallback("0", until_epoch=2),
    "prune": lambda: dl.PruningCallback(amount=0.3, prune_on_epoch_end=True),
    "mix": lambda: dl.MixupCallback(["features", "targets"], alpha=0.4),
    "transform": lambda: dl.BatchTransformCallback(nn.Dropout(0.2), input_key="features"),  # draws random numbers
    "ema": lambda: dl.EMACallback(0.8, use_buffers=True),
    "swa": lambda: dl.SWACallback(2),
}


class OneHot(Augmented):
    """Augmented data with targets that can be mixed."""

    def __getitem__(self, index):
        features, target = super().__getitem__(index)
        return features, nn.functional.one_hot(target, NUM_CLASSES).float()


def resumable(logdir, name, *, interrupt_at=None, **options):
    model = mlp(dropout=0.3, batch_norm=True)
    saving = {"monitor": "valid/loss", "mode": "min", "content": "runner", "every_steps": 3}
    callbacks = {
        "it": CALLBACKS[name](),
        "optimizer": dl.OptimizerCallback("loss", accumulation_steps=2),
        "checkpoint": dl.CheckpointCallback(logdir, **saving),
        "interrupt": Interrupt(interrupt_at),
    }
    loaders = {"train": DataLoader(OneHot(40), batch_size=4, shuffle=True), "valid": loader(21, 4)}
    options |= {"num_epochs": 4, "logdir": logdir, "resume": "auto", "valid_every_steps": 5}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return train(model, optimizer=optimizer, loaders=loaders, callbacks=callbacks, **options)


@pytest.fixture(scope="module", params=CALLBACKS)
def whole(request, tmp_path_factory):
    """Return the name of a callback, and the folder and the runner of an uninterrupted run with it."""
    logdir = tmp_path_factory.mktemp(request.param)
    return request.param, logdir, resumable(logdir, request.param)


@pytest.mark.parametrize("interrupt_at", [14, 20, 31])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, whole, interrupt_at):
    """Interrupted within an epoch or at its end, and resumed twice, it has the same weights, metrics and logs."""
    name, logdir, expected = whole
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path, name, interrupt_at=interrupt_at)

    for _ in range(2):
        resumed = resumable(tmp_path, name)

        assert torch.equal(weights(resumed.model), weights(expected.model))
        assert resumed.experiment_metrics == expected.experiment_metrics
        assert read_csv(tmp_path, "valid") == read_csv(logdir, "valid")
