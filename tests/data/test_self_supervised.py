"""Two views of a sample, and the runner that trains on them, against a hand-written loop."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from tests import tiny
from tests.tiny import NUM_FEATURES, classification, loader, sgd, weights


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(NUM_FEATURES, 5), nn.Linear(5, 2)

    def forward(self, x):
        embedding = self.encoder(x).relu()
        return embedding, self.head(embedding)


def halved(x):
    return x / 2


def views(num_samples):
    views = {"transform_left": halved, "transform_right": torch.sin}
    return DataLoader(dl.SelfSupervisedDatasetWrapper(classification(num_samples), **views), batch_size=8)


def train(model, loaders, **options):
    optimizer = sgd(nn.ModuleDict(model) if isinstance(model, dict) else model)
    options |= {"criterion": nn.MSELoss(), "optimizer": optimizer, "loaders": loaders}
    return tiny.train(model, runner=dl.SelfSupervisedRunner(), **options)


def test_training_equals_a_loop_by_hand():
    """The criterion compares the projections of both views; the outputs of the sample itself are in the batch too."""
    model, by_hand = Model(), Model()
    optimizer = sgd(by_hand)
    for _, left, right, _ in views(32):
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(left)[1], by_hand(right)[1]).backward()
        optimizer.step()

    runner = train(model, {"train": views(32)})

    torch.testing.assert_close(weights(model), weights(by_hand), rtol=0, atol=1e-7)
    outputs = [f"{name}_{side}" for name in ("projection", "embedding") for side in ("left", "right", "origin")]
    assert set(runner.batch) == {"features", "augment_left", "augment_right", "target", *outputs}


@pytest.mark.parametrize("kind", [dict, nn.ModuleDict])
def test_predictions_and_several_models_have_the_models_names(kind):
    """Each model's outputs begin with its key; a criterion callback chooses."""
    models = kind({"first": Model(), "second": Model()})
    criterion = dl.CriterionCallback("first_embedding_left", "second_embedding_right", metric_key="loss")
    runner = train(models, {"train": views(16)}, callbacks=[criterion])

    predicted = next(iter(runner.predict_loader(loader=views(8))))
    assert len(predicted) == 12
    torch.testing.assert_close(predicted["second_projection_left"], models["second"](next(iter(views(8)))[1])[1])


def test_a_batch_without_views_is_explained():
    with pytest.raises(KeyError, match="augment_right"):
        train(Model(), {"train": loader(8, 4)})


def test_views_without_targets():
    """Data sets of samples alone yield three values."""
    data = dl.SelfSupervisedDatasetWrapper([1.0, 2.0], transforms=halved, transform_original=str, is_target=False)

    assert len(data) == 2 and data[1] == ("2.0", 1.0, 1.0)


@pytest.mark.parametrize("given", [{}, {"transform_left": halved}])
def test_views_need_two_transforms(given):
    with pytest.raises(ValueError, match="pass transforms, or transform_left and transform_right"):
        dl.SelfSupervisedDatasetWrapper([1.0], **given)
