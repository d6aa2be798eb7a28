"""A short training that logs to a service, and what ends it half-way."""

from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, sgd


class Interrupt(dl.Callback):
    """Ends the run as a kill would."""

    def __init__(self, batch_step):
        super().__init__(order=dl.CallbackOrder.External)
        self.batch_step = batch_step

    def on_step_end(self, runner):
        if runner.batch_step == self.batch_step:
            raise KeyboardInterrupt


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
