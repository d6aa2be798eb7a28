"""examples/tensor_loader.py learns from augmented digits in memory."""

import runpy
from pathlib import Path

import torch

from runnerkit import read_metrics
from runnerkit.contrib import Digits

ROOT = Path(__file__).parents[2]


def test_the_example_reads_digits_and_predicts_from_bytes(tmp_path, capsys):
    """95 % of unseen digits are right after 8 epochs, and predict_loader's accuracy equals the evaluated one."""
    example = runpy.run_path(str(ROOT / "examples" / "tensor_loader.py"))

    runner = example["main"](["--cpu", "--logdir", str(tmp_path)])

    metrics = read_metrics(tmp_path)
    valid = metrics[(metrics.loader == "valid") & (metrics.metric == "accuracy")].value
    assert len(valid) == 8 and valid.iloc[-1] > 0.95
    assert f"accuracy on unseen images: {valid.iloc[-1]:.1%}" in capsys.readouterr().out
    loader = example["digits_loader"](train=False, batch_size=64, device=None)
    predicted = torch.cat([batch["logits"].argmax(1) for batch in runner.predict_loader(loader=loader, cpu=True)])
    assert (predicted == Digits(train=False).targets).double().mean().item() == valid.iloc[-1]
