"""Tests of metrics that are NaN or infinite: they are kept, or an error names the first place."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.loop.loader_metrics import reduce_metrics
from runnerkit.metrics.first_non_finite import FirstNonFinite
from runnerkit.metrics.means import LoaderMeans
from tests.callbacks.stand_ins import make_runner
from tests.ranks import Ranks
from tests.tiny import loader, mlp, quiet

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
            reduce_metrics(runner)
        messages.append(str(caught.value))

    several.call(*(lambda e=e, b=b: end(e, b) for e, b in zip(several.engines, ranks, strict=True)))

    assert len(messages) == len(ranks) and len(set(messages)) == 1


def test_finite_metrics_cost_no_further_collective():
    """The number of non-finite batches is reduced together with the sums."""
    ranks = Ranks(2)
    runners = [
        make_runner(engine=each, means=means_of_batches([{"loss": torch.tensor(0.5)}]), callbacks={})
        for each in ranks.engines
    ]

    counts = ranks.call(*(lambda r=runner: reduce_metrics(r) for runner in runners))

    assert counts == [4, 4] and ranks.num_collectives == 1
    assert runners[0].loader_metrics == {"loss": 0.5}


def test_looking_reads_nothing_from_the_device():
    """The search does not synchronize, which would raise on the meta device."""
    means_of_batches([{"a": torch.empty((), device="meta"), "b": torch.empty((), device="meta")}] * 2)


def test_the_place_is_known_after_a_resume():
    """A non-finite value before the checkpoint is named after a resume."""
    state = means_of_batches([{"a": torch.tensor(1.0)}, {"a": torch.tensor(NAN)}, {"n": INF}]).state_dict()
    resumed = LoaderMeans(FirstNonFinite())

    resumed.load_state_dicts([state, means_of_batches([{"n": NAN}]).state_dict()], device=torch.device("cpu"))
    resumed.update({"a": torch.tensor(NAN)}, 2, batch_step=4)

    assert resumed.first_non_finite.find(rank=3) == (1, 3, "n")


class Bad(dl.Runner):
    """Runner whose loss is NaN in one batch of one rank."""

    def handle_batch(self, batch):
        features, _ = batch
        loss = self.model(features).mean()
        is_bad = self.loader_key == "valid" and self.loader_batch_step == 2 and self.engine.rank == 1
        self.batch_metrics["loss"] = loss.detach() * (NAN if is_bad else 1.0)


def test_a_job_of_two_processes_ends_with_the_place():
    """non_finite="raise" ends the run with the place; by default the run continues and the mean is NaN."""
    arguments = {
        "model": mlp(),
        "loaders": {"train": loader(8, 4), "valid": loader(24, 4)},
        "engine": dl.DistributedDataParallelEngine(num_processes=2, device="cpu"),
        **quiet(),
    }

    with pytest.raises(FloatingPointError, match=r"'loss'.*batch 2 of loader 'valid', epoch 1, rank 1"):
        Bad().train(non_finite="raise", **arguments)
    runner = Bad().train(**arguments)

    assert runner.epoch_metrics["valid"]["loss"] != runner.epoch_metrics["valid"]["loss"]


def test_an_unknown_policy_is_refused():
    """An unknown value of `non_finite` raises a ValueError."""
    with pytest.raises(ValueError, match='non_finite must be "raise", "locate" or "keep", got \'warn\''):
        Bad().train(model=nn.Linear(1, 1), loaders={"train": DataLoader([1])}, non_finite="warn", **quiet())
