"""Short training runs for the tests of services, and one value of every kind that can be logged."""

import numpy as np

from runnerkit import dl
from runnerkit.logger import Histogram, PRCurve, Step
from tests import tiny


def train(logdir, logger, **options):
    options = {"num_epochs": 2, "hparams": {"lr": 0.1, "model": {"depth": 2}}, **options}
    loggers = {"csv": None, "tensorboard": None, logger.service: logger}
    loaders = {"train": tiny.loader(20, 4), "valid": tiny.loader(9, 4)}
    return tiny.train(loaders=loaders, logdir=logdir, loggers=loggers, **options)


def train_saving(logdir, logger, *others, **options):
    """Log each step, and save a checkpoint at every third."""
    checkpoint = dl.CheckpointCallback(logdir, content="runner", every_steps=3)
    return train(logdir, logger, callbacks=[checkpoint, *others], log_every=1, **options)


def log_numbers(logger):
    """Log floats of which some are not finite; return {name: value}."""
    values = {"third": -1 / 3, "small": 1e-300, "nan": float("nan"), "inf": float("inf")}
    logger.setup()
    logger.log_scalars(values, step=Step("train", "train", 1, 1), scope="loader")
    logger.close()
    return values


def log_everything(logger, folder):
    """Log one of each kind in epoch 3 and step 12, and again, which must be ignored; return the image."""
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    curve = PRCurve(*(np.arange(2) for _ in range(5)), precision=np.array([0.5, 1.0]), recall=np.array([1.0, 0.25]))
    (folder / "notes" / "more").mkdir(parents=True)
    (folder / "notes" / "more" / "a.txt").write_text("in a folder")
    (folder / "b.txt").write_text("a file")
    logger.setup()
    place = {"step": Step("train", "valid", 3, 12), "scope": "loader"}
    for _ in range(2):
        logger.log_image("sample", image, **place)
        logger.log_text("remark", "good", **place)
        histogram = Histogram(np.array([1, 2]), np.array([-1.0, -0.5, 4.5]))
        logger.log_histogram("weights", histogram, **{**place, "scope": "batch"})
        logger.log_pr_curve("pr", curve, **place)
        logger.log_table("classes", {"class": ["a", "b"], "f1": [0.5, 1.0]}, **place)
        logger.log_artifact("notes", folder / "notes", **place)
        logger.log_artifact("file", folder / "b.txt", **place)
    logger.close()
    return image
