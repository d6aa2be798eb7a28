"""Lazy modules, which know the shapes of their parameters after the first batch: trained as they are, or refused."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.engines.data_parallel import split_batches
from tests.tiny import NUM_FEATURES, loader, train, train_by_hand, weights


def lazy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


def shaped():
    model = lazy()
    with torch.no_grad():
        model(next(iter(loader(8, 4)))[0])
    return model


def trained(model, *, others=(), **options):
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    options["optimizer"] = lambda parameters: torch.optim.SGD([*parameters, *others], lr=0.1)
    return weights(train(model, loaders=loaders, num_epochs=2, **options).model)


def test_one_process_trains_them_as_a_loop_does(tmp_path):
    """Also in a run that is resumed."""
    trained(lazy(), logdir=tmp_path, num_steps=3)

    found = trained(lazy(), logdir=tmp_path, resume="auto")

    model = lazy()
    train_by_hand(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(16, 4), num_epochs=2)
    torch.testing.assert_close(found, weights(model))


NAMED = r" needs .*'1\.weight', '1\.bias', .* get_model"


@pytest.mark.parametrize("callback", [dl.EMACallback(), dl.SWACallback(start_epoch=1), dl.PruningCallback()])
def test_callbacks_that_need_shapes_name_the_parameters_and_say_what_to_write(callback):
    """Instead of torch's error, or of a pruning that leaves lazy layers out."""
    with pytest.raises(ValueError, match=type(callback).__name__ + NAMED):
        trained(lazy(), callbacks=[callback])


ENGINES = {
    "DistributedDataParallelEngine": lambda: dl.DistributedDataParallelEngine(2, device="cpu"),
    "FullyShardedDataParallelEngine": lambda: dl.FullyShardedDataParallelEngine(2, device="cpu"),
    "HorovodEngine": lambda: dl.HorovodEngine(2),
    "channels_last=True": lambda: dl.CPUEngine(channels_last=True),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_that_need_shapes_do_so_too(engine):
    """Training, evaluation and prediction call this first; a batch through the model suffices."""
    with pytest.raises(ValueError, match=engine + NAMED):
        ENGINES[engine]().prepare_model(lazy())

    assert ENGINES[engine]().prepare_model(shaped()) is not None


def test_a_model_split_over_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    with pytest.raises(ValueError, match="DataParallel" + NAMED):
        split_batches(lazy(), torch.device("cuda", 0))


def test_lazy_parameters_outside_the_model_are_counted_without_a_shape():
    with pytest.raises(ValueError, match=r"belong to no model.*: 2, of shape unknown, unknown"):
        trained(shaped(), others=nn.LazyLinear(3).parameters())
