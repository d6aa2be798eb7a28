"""examples/finetune_hf.py learns, resumes from its adapters, and exports a model that from_pretrained reads."""

import runpy
from pathlib import Path

import pytest
import torch

from runnerkit import read_metrics
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.torchvision_cpu import import_torchvision

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # transformers and peft take 10 s to import
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft 0.21
def test_the_example_learns_resumes_and_exports(tmp_path, capsys):
    """95 % of unseen reviews are right; an interrupted run continues bit for bit from a checkpoint of adapters."""
    import_torchvision()  # transformers imports torchvision, which may need the workaround
    example = runpy.run_path(str(ROOT / "examples" / "finetune_hf.py"))

    whole = example["main"](["--cpu", "--epochs", "3", "--logdir", str(tmp_path / "whole")])
    example["main"](["--cpu", "--epochs", "1", "--logdir", str(tmp_path / "parts")])
    resumed = example["main"](["--cpu", "--epochs", "3", "--logdir", str(tmp_path / "parts")])

    assert whole.epoch_metrics["valid"]["accuracy"] > 0.95
    assert resumed.experiment_metrics == whole.experiment_metrics
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert len(read_metrics(tmp_path / "whole")) == len(read_metrics(tmp_path / "parts"))
    saved = load_checkpoint(tmp_path / "whole" / "checkpoints" / "last.pth")["model_state_dict"]
    assert all(".lora_" in name or ".modules_to_save." in name or "position_ids" in name for name in saved), list(saved)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"accuracy on unseen reviews: {resumed.epoch_metrics['valid']['accuracy']:.1%}"
    assert (tmp_path / "whole" / "hf" / "tokenizer.json").is_file()
