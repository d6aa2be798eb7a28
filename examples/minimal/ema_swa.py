"""Averages of the weights: of a walk that never settles, the mean is nearer to the goal than the last step."""

import torch
from torch import nn

from runnerkit import dl


def train(callbacks, **where):
    """Train by a learning rate so large that the weights keep dancing; return the valid loss over the best possible."""
    torch.manual_seed(0)
    features = torch.randn(1500, 20)
    targets = features @ torch.randn(20, 1) + torch.randn(1500, 1)
    model = nn.Linear(20, 1)
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loaders={"train": dl.TensorLoader(features[:1000], targets[:1000], batch_size=10, shuffle=True)},
        callbacks=callbacks,
        num_epochs=10,
        loggers={"console": None},
        **where,
    )
    valid = dl.TensorLoader(features[1000:], targets[1000:], batch_size=500)
    exact = torch.linalg.lstsq(features[:1000], targets[:1000]).solution
    best = (features[1000:] @ exact - targets[1000:]).square().mean().item()
    return runner.evaluate_loader(valid, callbacks=[], engine=dl.CPUEngine())["loss"] - best


def main(**where):
    """Train three times, alike but for the average; the model that a stage ends with is the averaged one."""
    return {
        "last": train([], **where),
        "ema": train([dl.EMACallback(decay=0.99)], **where),
        "swa": train([dl.SWACallback(start_epoch=4)], **where),
    }


if __name__ == "__main__":
    learned = main()
    print("loss over the best: last weights {last:.4f}, EMA {ema:.4f}, SWA {swa:.4f}".format(**learned))
