"""Train a small GPT on Python's `help()` topics, by tokens: weights, accumulation, warm-up and cosine, bf16, clipping.

python examples/language_model/train_gpt.py, with --ddp in several processes, or under torchrun with --ddp
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from runnerkit import dl

from small_gpt import LONGEST, Options, loss_of, make_model, padded, paragraphs


class LanguageModel(dl.Runner):
    """Predicts the next token; a batch weighs as many tokens as it has."""

    def handle_batch(self, batch: Tensor) -> None:
        loss, num_tokens = loss_of(self.model, batch)
        self.batch_weight = num_tokens
        self.batch_metrics["loss"] = loss


class TokensPerSecond(dl.Callback):
    """Adds the tokens of all processes in a second of training to each line of the step log."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)  # behind the optimizer step, which the log follows
        self.began, self.num_tokens = time.perf_counter(), torch.zeros(())
        self.paused, self.logged_step = 0.0, 0

    def on_loader_start(self, runner: dl.IRunner) -> None:
        self.paused = time.perf_counter()
        if runner.is_train_loader:
            self.began, self.num_tokens = self.paused, torch.zeros((), device=runner.engine.device)

    def on_validation_end(self, runner: dl.IRunner) -> None:
        self.began += time.perf_counter() - self.paused

    def on_batch_end(self, runner: dl.IRunner) -> None:
        if not runner.is_train_loader:
            return
        self.num_tokens += runner.batch_weight
        if runner.optimizer_step % runner.log_every == 0 and runner.optimizer_step != self.logged_step:
            now = time.perf_counter()
            runner.batch_metrics["tokens_per_s"] = self.num_tokens * runner.engine.num_processes / (now - self.began)
            self.began, self.num_tokens = now, torch.zeros_like(self.num_tokens)
            self.logged_step = runner.optimizer_step


class Writer(dl.Callback):
    """Logs a text that the model continues after each evaluation, on rank zero."""

    def __init__(self, prompt: str = "The ", num_tokens: int = 80) -> None:
        super().__init__(node=dl.CallbackNode.Master)
        self.prompt, self.num_tokens = prompt, num_tokens

    def on_validation_end(self, runner: dl.IRunner) -> None:
        model = runner.engine.unwrap(runner.model)
        runner.log_text("sample", continued(model, self.prompt, self.num_tokens, device=runner.engine.device))


@torch.no_grad()
def continued(model: nn.Module, prompt: str, num_tokens: int, *, device: torch.device) -> str:
    """Return `prompt` with sampled tokens behind it."""
    tokens = torch.tensor([list(prompt.encode())], device=device)
    generator = torch.Generator(device).manual_seed(0)  # not the training's
    for _ in range(num_tokens):
        shares = model(tokens[:, -LONGEST:])[0, -1].float().softmax(dim=0)
        tokens = torch.cat([tokens, shares.multinomial(1, generator=generator)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def train(
    options: Options,
    *,
    num_processes: int = 1,
    logdir: Path | None = None,
    callbacks: Sequence[dl.Callback] = (),
    peak_flops: float | None = None,
    **where: Any,
) -> LanguageModel:
    """Train with one call.

    Args:
        num_processes: among which a batch is divided.
        peak_flops: of one device, for the model FLOPs utilization.
        where: further arguments of `train`, such as ddp=True or precision="bf16".
    """
    load = partial(DataLoader, batch_size=options.batch_size // num_processes, collate_fn=padded)
    return LanguageModel().train(
        model=make_model(options),
        optimizer=partial(torch.optim.AdamW, lr=options.max_lr, weight_decay=0.1),
        scheduler=partial(dl.cosine_with_warmup, warmup_steps=options.warmup_steps),
        loaders={"train": load(paragraphs(train=True)), "valid": load(paragraphs(train=False))},
        callbacks=[
            dl.BackwardCallback("loss"),
            dl.OptimizerCallback("loss"),
            dl.SchedulerCallback(interval="step"),
            TokensPerSecond(),
            Writer(),
            dl.SystemMetricsCallback(peak_flops=peak_flops),
            *callbacks,
        ],
        num_steps=options.num_steps,
        accumulation_steps=options.accumulation_steps,
        gradient_clip=options.max_norm,
        valid_every_steps=max(1, options.num_steps // 3),
        logdir=logdir,
        **where,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print what was learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Options().num_steps)
    parser.add_argument("--logdir", type=Path, default=Path("logs/language_model"))
    parser.add_argument("--ddp", action="store_true", help="one process per GPU, or 2 on a CPU")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--peak-flops", type=float, help="of one device in this precision, for the utilization")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    asked = parser.parse_args(arguments)
    num_processes = dl.get_available_engine(ddp=True).num_processes if asked.ddp else 1
    runner = train(
        Options(num_steps=asked.steps), num_processes=num_processes, logdir=asked.logdir, ddp=asked.ddp,
        peak_flops=asked.peak_flops, precision=asked.precision,
    )  # fmt: skip
    if runner.engine.is_main_process:
        print(
            f"{runner.epoch_metrics['valid']['loss']:.2f} nats per unseen byte; see tensorboard --logdir {asked.logdir}"
        )


if __name__ == "__main__":
    main()
