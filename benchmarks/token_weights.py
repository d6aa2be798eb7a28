"""Weights after steps on ragged batches of tokens, in runnerkit and other frameworks, beside the closed form.

python -m benchmarks.token_weights --peers .venv-peers/bin/python

A loss is the mean over the tokens of a batch, and a step accumulates two batches, in one process and in two. The closed
form takes the gradient of the mean over all tokens of a step. Each framework is used as its documentation shows for
accumulation. `--write` writes the table to RESULTS.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, NUM_STEPS, BATCH_SIZE, ACCUMULATED, LR = 11, 8, 4, 2, 0.5
NO_TARGET = -100


def samples(num_processes: int) -> list[dict[str, Tensor]]:
    """Return sequences of 2 to 20 tokens, for `NUM_STEPS` steps."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 21, (NUM_STEPS * ACCUMULATED * BATCH_SIZE * num_processes,), generator=generator)
    return [{"input_ids": torch.randint(VOCABULARY, (int(length),), generator=generator)} for length in lengths]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate to inputs and the next tokens (N, length of the longest - 1)."""
    texts = [row["input_ids"] for row in rows]
    padded_texts = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=NO_TARGET)
    return {"input_ids": padded_texts[:, :-1].clamp(min=0), "labels": padded_texts[:, 1:]}


class Bigrams(nn.Module):
    """A model with the interface of transformers' language models; their loss is a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        logits, targets = self.table(input_ids).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, targets, ignore_index=NO_TARGET)}
        total = nn.functional.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
        return {"loss": total / num_items_in_batch}


def loader(num_processes: int) -> Any:
    return DataLoader(samples(num_processes), batch_size=BATCH_SIZE, collate_fn=padded)  # type: ignore[arg-type]


def closed_form(num_processes: int) -> Tensor:
    """Step on the mean over the tokens of all samples of each step."""
    model = Bigrams()
    rows, size = samples(num_processes), ACCUMULATED * BATCH_SIZE * num_processes
    for start in range(0, len(rows), size):
        model.zero_grad()
        model(**padded(rows[start : start + size]))["loss"].backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
    return model.table.weight.detach()


def runnerkit(num_processes: int) -> nn.Module:
    """Set `batch_weight` to the number of tokens."""
    from runnerkit import dl

    class LanguageModel(dl.Runner):
        def handle_batch(self, batch: Any) -> None:
            self.batch_weight = (batch["labels"] != NO_TARGET).sum()
            self.batch_metrics["loss"] = self.model(**batch)["loss"]

    model = Bigrams()
    LanguageModel().train(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), loaders={"train": loader(num_processes)},
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")], accumulation_steps=ACCUMULATED,
        ddp=num_processes > 1, cpu=True, loggers={"console": None},
    )  # fmt: skip
    return model


def accelerate(num_processes: int) -> nn.Module:
    """Use `accelerator.accumulate`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    own = Bigrams()
    model, optimizer, batches = accelerator.prepare(
        own, torch.optim.SGD(own.parameters(), lr=LR), loader(num_processes)
    )
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return own


def transformers(num_processes: int) -> nn.Module:
    """Use `gradient_accumulation_steps` of the Trainer, which passes the number of tokens to the model."""
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = Bigrams()
    arguments = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=BATCH_SIZE, num_train_epochs=1, max_grad_norm=0,
        gradient_accumulation_steps=ACCUMULATED, lr_scheduler_type="constant", report_to=[], disable_tqdm=True,
        save_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    optimizers = (torch.optim.SGD(model.parameters(), lr=LR), None)
    InOrder(
        model=model, args=arguments, train_dataset=samples(num_processes), data_collator=padded, optimizers=optimizers
    ).train()  # type: ignore[arg-type]
    return model


def lightning(num_processes: int) -> nn.Module:
    """Use `accumulate_grad_batches` of the Trainer."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Bigrams()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LR)

    module = Module()
    pl.Trainer(
        accelerator="cpu", devices=num_processes, strategy="ddp" if num_processes > 1 else "auto", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=ACCUMULATED,
    ).fit(module, loader(num_processes))  # fmt: skip
    return module.model


CONTENDERS = {
    "runnerkit, `batch_weight`": (runnerkit, False),
    "transformers' Trainer": (transformers, True),
    "Accelerate, `accumulate`": (accelerate, True),
    "Lightning, `accumulate_grad_batches`": (lightning, True),
}


def error(name: str, python: str, num_processes: int) -> str:
    """Train a contender, under torchrun if in several processes; return its largest difference from the closed form."""
    with tempfile.TemporaryDirectory() as folder:
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
        command = [python, *(several if num_processes > 1 else []), __file__, "--contender", name, "--path"]
        path = Path(folder, "weights.pth")
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=300)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            return "failed"
        return f"{(torch.load(path) - closed_form(num_processes)).abs().max().item():.0e}"


def main() -> None:
    """Train every contender, or in a process of theirs, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with the other frameworks")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        model: Any = CONTENDERS[options.contender][0](int(os.environ.get("WORLD_SIZE", "1")))
        if os.environ.get("RANK", "0") == "0":
            torch.save(model.table.weight.detach(), options.path)
        return
    lines = ["| largest difference of a weight | 1 process | 2 processes |", "|---|---:|---:|"]
    for name, (_, is_peer) in CONTENDERS.items():
        python = options.peers if is_peer else sys.executable
        if python:
            lines.append(f"| {name} | {error(name, python, 1)} | {error(name, python, 2)} |")
            print(lines[-1], flush=True)
    if options.write:
        from benchmarks.results import versions, write_section

        names = ("torch", "transformers", "accelerate", "lightning")
        text = "\n".join([
            "Eight steps of two accumulated batches whose numbers of tokens differ, with a loss that is a mean over "
            "tokens, beside steps on the mean over all tokens of each step, in float32. transformers' Trainer passes "
            "the number of tokens of a step to models that take it, as this one does.\n",
            *(f"{versions(options.peers, names)}.\n" for _ in range(bool(options.peers))),
            *lines,
        ])  # fmt: skip
        title = "Accumulated batches with different numbers of tokens"
        write_section("token weights", text, command="python -m benchmarks.token_weights --write", title=title)


if __name__ == "__main__":
    main()
