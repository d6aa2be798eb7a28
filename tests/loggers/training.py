"""A short training run for the tests of services."""

from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, sgd


def train(logdir, logger, **kwargs):
    model = mlp()
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        **{
            "loaders": {"train": loader(20, 4), "valid": loader(9, 4)},
            "num_epochs": 2,
            "logdir": logdir,
            "hparams": {"lr": 0.1, "model": {"depth": 2}},
            "loggers": {"console": None, "csv": None, "tensorboard": None, logger.service: logger},
            "cpu": True,
            **kwargs,
        },
    )
