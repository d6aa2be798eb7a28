"""Tests of metrics that are NaN or infinite: they are kept, or an error names the first place."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.metrics.first_non_finite import FirstNonFinite
from runnerkit.metrics.means import LoaderMeans
from tests.callbacks.stand_ins import make_runner
from tests.ranks import Ranks
from tests.tiny import loader, train

NAN, INF = float("nan"), float("inf")


def means_of_batches(batches):
    means = LoaderMeans(FirstNonFinite())
    for step, metrics in enumerate(batches, start=1):
        means.update(metrics, 2, batch_step=step)
    return means


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        ([[{"loss": 1.0}, {"loss": NAN}], [{"loss": 1.0}, {"loss": 1.0}]], "loss.*batch 2 .*epoch 1, rank 0"),
        ([[{"loss": 1.0}, {"loss": INF}], [{"loss": -INF}]], "loss.*batch 1 .*epoch 1, rank 1"),
        ([[], [{"a": torch.tensor(1.0), "b": torch.tensor(NAN)}]], "'b'.*batch 1 .*rank 1"),
        ([[{"a": torch.tensor(INF)}, {"b": NAN, "a": torch.tensor(1.0)}], []], "'a'.*batch 1 .*rank 0"),
        ([[{"a": torch.tensor(1.0)}] * 3 + [{"a": torch.tensor(NAN)}] * 2], "'a'.*batch 4 .*rank 0"),
    ],
)
def test_every_rank_names_the_first_place(ranks, place):
    """Every rank names the smallest batch, then the smallest rank, even if its own metrics are finite or absent."""
    several = Ranks(len(ranks))
    messages = []

    def end(engine, batches):
        runner = make_runner(engine=engine, means=means_of_batches(batches), callbacks={})
        with pytest.raises(FloatingPointError, match=place) as caught:
            runner.loader_pass.metrics.reduce(runner)
        messages.append(str(caught.value))

    several.call(*(lambda e=e, b=b: end(e, b) for e, b in zip(several.engines, ranks, strict=True)))

    assert len(messages) == len(ranks) and len(set(messages)) == 1


def test_the_place_is_known_after_a_resume():
    """A non-finite value before the checkpoint is named after a resume."""
    state = means_of_batches([{"a": torch.tensor(1.0)}, {"a": torch.tensor(NAN)}, {"n": INF}]).state_dict()
    resumed = LoaderMeans(FirstNonFinite())

    resumed.load_state_dicts([state, means_of_batches([{"n": NAN}]).state_dict()], device=torch.device("cpu"))
    resumed.update({"a": torch.tensor(NAN)}, 2, batch_step=4)

    assert resumed.first_non_finite.find(rank=3) == (1, 3, "n")


class Bad(dl.Runner):
    def handle_batch(self, batch):
        features, _ = batch
        loss = self.model(features).mean()
        is_bad = self.loader_key == "valid" and self.loader_batch_step == 2 and self.engine.rank == 1
        self.batch_metrics["loss"] = loss.detach() * (NAN if is_bad else 1.0)


def test_a_job_of_two_processes_ends_with_the_place():
    """non_finite="raise" ends the run with the place; by default the run continues and the mean is NaN."""
    options = {"loaders": {"train": loader(8, 4), "valid": loader(24, 4)}, "num_processes": 2, "optimizer": None}

    with pytest.raises(FloatingPointError, match=r"'loss'.*batch 2 of loader 'valid', epoch 1, rank 1"):
        train(runner=Bad(), non_finite="raise", **options)
    runner = train(runner=Bad(), **options)

    assert runner.epoch_metrics["valid"]["loss"] != runner.epoch_metrics["valid"]["loss"]


def test_an_unknown_policy_is_refused():
    """An unknown value of `non_finite` raises a ValueError."""
    with pytest.raises(ValueError, match='non_finite must be "raise", "locate" or "keep", got \'warn\''):
        train(non_finite="warn")


@pytest.mark.parametrize("factor", [1.0, INF])
def test_a_sparse_gradient_is_checked_too(factor):
    """Of an embedding with sparse=True, by NonFiniteCallback."""

    class Words(dl.Runner):
        def handle_batch(self, batch):
            loss = (self.model(batch[1]) * factor).sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    model = nn.Embedding(3, 2, sparse=True)
    options = {"runner": Words(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    if factor == INF:
        with pytest.raises(FloatingPointError, match=r"the gradient of 'weight' is not finite"):
            train(model, callbacks=[dl.NonFiniteCallback()], **options)
    else:
        train(model, callbacks=[dl.NonFiniteCallback()], **options)
