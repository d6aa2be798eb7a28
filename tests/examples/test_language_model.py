"""examples/language_model: every step has the loss of the hand-written loop, in one process and in two."""

import importlib

import pytest
import torch

from runnerkit import dl, read_metrics
from tests.examples.start import ROOT, start

FOLDER = ROOT / "examples" / "language_model"


@pytest.fixture
def example(monkeypatch):
    """Import the example's modules, which import their neighbors."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return tuple(importlib.import_module(name) for name in ("small_gpt", "train_gpt", "by_hand"))


class Losses(dl.Callback):
    """Collects the loss of each step, a mean over the tokens of all processes."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.External)
        self.parts, self.losses = [], []

    def on_batch_end(self, runner):
        if runner.is_train_loader:
            self.parts.append((float(runner.batch_metrics["loss"].detach()), int(runner.batch_weight)))

    def on_step_end(self, runner):
        parts = [part for theirs in runner.engine.gather_object(self.parts) for part in theirs]
        self.losses.append(sum(loss * size for loss, size in parts) / sum(size for _, size in parts))
        self.parts = []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "precision", "num_steps", "tolerance"),
    [(2, "fp32", 40, 1e-5), (1, "bf16", 12, 1e-3)],  # bf16 rounds the halves of two processes differently
)
def test_every_step_has_the_loss_of_the_hand_written_loop(example, num_processes, precision, num_steps, tolerance):
    """With token weights, ragged batches, accumulation, a short last step of the epoch, warm-up and clipping."""
    gpt, train_gpt, by_hand = example
    sizes = {"width": 16, "depth": 1, "batch_size": 32}  # an epoch has 34 steps
    options = gpt.Options(num_steps=num_steps, warmup_steps=5, **sizes)
    expected = by_hand.train(options, dtype=torch.bfloat16 if precision == "bf16" else None)

    losses = Losses()
    train_gpt.train(
        options, num_processes=num_processes, ddp=num_processes > 1, precision=precision, callbacks=[losses], cpu=True,
        loggers={"console": None},
    )  # fmt: skip

    assert losses.losses == pytest.approx(expected, abs=tolerance)
    assert expected[-1] < expected[0] - (1.5 if num_steps == 40 else 0)


@pytest.mark.slow
def test_one_command_trains_and_logs(tmp_path):
    """It learns more than the frequencies of the bytes, and logs samples of text, speed and utilization."""
    command = "python examples/language_model/train_gpt.py --steps 60 --precision fp32 --peak-flops 1e11"
    done = start(command, tmp_path, "--logdir", tmp_path)

    table = read_metrics(tmp_path)
    loss = table[(table.loader == "valid") & (table.metric == "loss")].value
    assert loss.iloc[-1] < 3.2, done
    assert "sample: The " in done or "sample:\nThe " in done
    assert (table[table.metric == "tokens_per_s"].value > 0).all()
    assert table[table.metric == "_system/mfu"].value.between(0, 1).all()
