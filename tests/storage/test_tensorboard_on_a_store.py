"""TensorBoard's own reader finds a run's series at its URL."""

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from tests.tiny import loader, train

URL = "memory://runs/for-tensorboard"


def test_tensorboard_reads_the_store():
    """Fails if event files were not in the store under their names, or not whole."""
    loaders = {"train": loader(8, 4), "valid": loader(8, 4)}
    runner = train(num_epochs=2, logdir=URL, loaders=loaders)

    runs = EventMultiplexer().AddRunsFromDirectory(URL).Reload()

    for key in ("train", "valid"):
        logged = [each.value for each in runs.Scalars(f"tensorboard/{key}", "loss")]
        assert logged == pytest.approx([epoch[key]["loss"] for epoch in runner.experiment_metrics.values()])
