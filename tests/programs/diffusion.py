"""Diffusion: a network predicts the noise in its input, with a warm-up, clipping, and an average of the weights."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runnerkit import dl
from tests.programs import draws
from tests.programs.common import loader, network, points


def loss_of(model, values, time, noise):
    """Return the error of the noise that `model` finds in `values` at times (N, 1) from 0, data, to 1, noise."""
    noisy = (1 - time).sqrt() * values + time.sqrt() * noise
    return F.mse_loss(model(torch.cat([noisy, time], dim=1)), noise)


def loop(batch_size):
    model, losses = network(3, 8, 2), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LinearLR(optimizer, 0.1, total_iters=5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for _ in range(2):
        for values, _ in loader(points(30), batch_size):
            optimizer.zero_grad()
            loss = loss_of(model, values, draws.rand(len(values), 1), draws.randn(len(values), 2))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            losses.append(loss.detach())
    return average.module, losses


class Program(dl.Runner):
    steps_itself = True

    def handle_batch(self, batch):
        values = batch[0]
        loss = loss_of(self.model, values, torch.rand(len(values), 1), torch.randn(len(values), 2))
        self.learn(loss, gradient_clip=0.5)
        self.batch_metrics["loss"] = loss


def train(batch_size, *, callbacks=(), **options):
    return Program().train(
        model=network(3, 8, 2),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        scheduler=lambda optimizer, _: LinearLR(optimizer, 0.1, total_iters=5),
        loaders={"train": loader(points(30), batch_size)},
        callbacks=[dl.EMACallback(0.8), dl.SchedulerCallback(interval="step"), *callbacks],
        num_epochs=2,
        **options,
    )
