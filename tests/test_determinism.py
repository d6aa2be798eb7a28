"""Tests of `deterministic=True` and of its warnings about what may still differ."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.loop.determinism import WORKSPACE_VARIABLE, what_may_differ
from tests.tiny import loader, mlp, quiet, sgd


class Note(dl.Callback):
    """Records torch's deterministic mode during the run; raises `error` if given."""

    def __init__(self, error=None):
        super().__init__(order=0)
        self.modes, self.error = [], error

    def on_batch_start(self, runner):
        self.modes.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))
        if self.error is not None:
            raise self.error


def train(*callbacks, model=None, **options):
    model = model or mlp()
    dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": loader(8, 4)},
        callbacks=callbacks, **{"engine": dl.CPUEngine(), **quiet(), **options},
    )  # fmt: skip


def test_the_mode_is_on_for_the_run_only():
    """The mode is on during a run with `deterministic=True` and is reset afterwards, even after an exception."""
    note, failing, without = Note(), Note(LookupError("enough")), Note()

    train(note, deterministic=True)
    with pytest.raises(LookupError):
        train(failing, deterministic=True)
    after = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
    train(without)

    assert note.modes == [(True, True)] * 2 and failing.modes == [(True, True)]
    assert after == (False, False) and without.modes == [(False, False)] * 2


def test_an_operation_that_has_no_such_algorithm_is_refused():
    """torch raises an error that names the operation, with a note of the batch, loader, epoch and rank."""

    class Puts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, features):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
            return self.linear(features)

    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation") as caught:
        train(model=Puts(), deterministic=True)

    assert caught.value.__notes__[0].startswith("in batch 1 of loader 'train', epoch 1, rank 0")


def engine_on(device, **attributes):
    engine = dl.CPUEngine(**attributes)
    engine.device = torch.device(device)
    return engine


@pytest.mark.parametrize(
    ("workspace", "words"),
    [
        (None, "is None, so matrix products"),
        (":0:0", "is ':0:0', so matrix products"),
        (":4096:8", None),
        (":16:8", None),
    ],
)
def test_a_workspace_that_cublas_needs_is_asked_for(monkeypatch, workspace, words):
    """On GPUs, an unsuitable cuBLAS workspace variable is reported; cuBLAS reads it before a run could set it."""
    if workspace is None:
        monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(WORKSPACE_VARIABLE, workspace)

    found = what_may_differ(engine_on("cuda"))

    assert what_may_differ(engine_on("cpu")) == []
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_what_torch_does_not_know_of_is_warned_about(caplog):
    """Autotuned kernels and devices without a deterministic mode cause warnings."""
    [autotuned] = what_may_differ(dl.CPUEngine(compile={"mode": "max-autotune"}))
    [device] = what_may_differ(engine_on("mps"))
    train(deterministic=True, engine=dl.CPUEngine())

    assert "selects the fastest kernels" in autotuned and "use cpu=True" in device
    assert "deterministic" not in caplog.text
