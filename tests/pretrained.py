"""A small model with tied weights, and checks of folders of pretrained models."""

import torch
from huggingface_hub import load_torch_model
from torch import nn

from runnerkit import dl
from tests import tiny
from tests.tiny import NUM_CLASSES, NUM_FEATURES, sgd

WIDTH = 8
CONFIG = {"width": WIDTH}
SMALL = 400  # bytes of a file, for several files


class Tied(nn.Module):
    """A model whose last layer is its first one, with a batch norm's buffers and integers."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False)
            self.body = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            self.back = nn.Linear(WIDTH, NUM_FEATURES)
            self.a_head = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False)
            self.a_head.weight = self.embed.weight
            self.classes = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x):
        return self.classes(self.a_head(self.back(self.body(self.embed(x)))))


def train(model, engine=None, *, folder=None, **options):
    options = {"optimizer": sgd(model, lr=0.0), "engine": engine or dl.CPUEngine()} | options
    if folder is not None:
        options.setdefault("callbacks", [dl.CheckpointCallback(folder, content="runner")])
    return tiny.train(model, **options)


def read_by_hugging_face(folder):
    """Return a model with the weights that huggingface_hub finds in the folder."""
    model = Tied(seed=9)
    found = load_torch_model(model, folder)
    assert set(found.missing_keys) <= {"a_head.weight"} and not found.unexpected_keys
    return model


def assert_same(mine, theirs):
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def files_of(folder):
    return sorted(each.name for each in folder.iterdir())


class Config:
    def to_dict(self):
        return CONFIG


class Configured(Tied):
    config = Config()
