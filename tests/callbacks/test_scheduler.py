"""SchedulerCallback hides torch's warning about scheduler order, and no warnings of the user."""

import warnings

import torch

from runnerkit import dl
from runnerkit.support import pickling
from tests.tiny import loader, mlp, sgd, train


class Warns(dl.SupervisedRunner):
    def handle_batch(self, batch):
        warnings.warn("the user's own", UserWarning, stacklevel=1)
        super().handle_batch(batch)


def run(runner, *, send=False):
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)
    if send:
        model, optimizer, scheduler = pickling.loads(pickling.dumps((model, optimizer, scheduler)))
    train(model, runner=runner, optimizer=optimizer, scheduler=scheduler, loaders={"train": loader(32, 4)})


def test_a_warning_that_python_shows_once_is_shown_once():
    """A scheduler steps after each batch, and the filter for torch's warning is removed afterwards."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")

        run(Warns())

        assert not any("Seems like" in str(each[1]) for each in warnings.filters)
    assert [str(each.message) for each in shown] == ["the user's own"]


def test_torchs_warning_of_an_optimizer_from_another_process_stays_silent():
    """The mark that torch looks for on `optimizer.step` is not pickled; a warning would fail this test."""
    run(dl.SupervisedRunner(), send=True)
