"""Tests that the active metric callbacks are reduced at a loader's end, with the same keys on all ranks."""

import pytest
import torch

from runnerkit import dl
from runnerkit.metrics.reduction import PartialSums
from tests.callbacks.stand_ins import make_runner
from tests.ranks import Ranks
from tests.tiny import loader, train


class WrongSamples(dl.IMetricCallback):
    """Metric like that of docs/metrics.md, which creates its state only in on_loader_start."""

    def on_loader_start(self, runner):
        self.count = torch.zeros((), dtype=torch.int64)

    def on_batch_end(self, runner):
        self.count += (runner.batch["logits"].argmax(dim=1) != runner.batch["targets"]).sum()

    def share(self, runner):
        return PartialSums({"count": self.count})

    def take_total(self, runner, total):
        runner.loader_metrics["wrong"] = int(total.sums["count"])


def evaluate(callback):
    """Evaluate the loaders "other" and "valid", in this order, in one epoch."""
    loaders = {"other": loader(5, 4, seed=3), "valid": loader(21, 4)}
    return train(loaders=loaders, callbacks={"wrong": callback}, optimizer=None).epoch_metrics


@pytest.mark.parametrize(
    "wrap",
    [
        lambda each: dl.ControlFlowCallback(each, ignore_loaders="other"),
        lambda each: dl.ControlFlowCallback(each, filter_fn=lambda stage, epoch, loader: loader == "valid"),
        lambda each: dl.CallbackWrapper(dl.ControlFlowCallback(each, loaders=["valid"])),
        lambda each: dl.ControlFlowCallback(dl.CallbackWrapper(each), loaders={"valid": 1}),
    ],
    ids=["ignored", "filtered", "wrapped once more", "wraps a wrapper"],
)
def test_a_wrapper_rules_over_what_is_reduced_too(wrap):
    """A loader that a wrapper excludes gets no metric, also not another loader's; a disabled wrapper logs nothing."""
    expected = evaluate(WrongSamples())["valid"]["wrong"]

    metrics = evaluate(wrap(WrongSamples()))

    assert metrics["valid"]["wrong"] == expected > 0
    assert "wrong" not in metrics["other"]
    assert "wrong" not in evaluate(dl.CallbackWrapper(wrap(WrongSamples()), enable_callback=False))["valid"]


@pytest.mark.parametrize(
    ("node", "seen_by", "wrong"),
    [(dl.CallbackNode.All, [0, 1, 2], 6), (dl.CallbackNode.Master, [0], 1), (dl.CallbackNode.Worker, [1, 2], 5)],
)
def test_a_node_rules_too_and_ranks_agree(node, seen_by, wrong):
    """A rank without the callback takes part in the reduction but neither adds to its sums nor gets its metric."""
    ranks = Ranks(3)
    runners = []
    for engine in ranks.engines:
        callback = WrongSamples(node=node)
        runner = make_runner(engine=engine, callbacks={"wrong": callback})
        runner.loader_pass.means.update({"loss": float(engine.rank)}, batch_size=2)
        if engine.rank in seen_by:
            callback.on_loader_start(runner)
            targets = torch.ones(engine.rank + 1, dtype=torch.int64)
            runner.batch = {"logits": torch.eye(2)[:1].expand(len(targets), 2), "targets": targets}
            callback.on_batch_end(runner)
        runners.append(runner)

    assert ranks.call(*(lambda r=runner: r.loader_pass.metrics.reduce(r) for runner in runners)) == [6, 6, 6]

    for runner in runners:
        expected = {"loss": 1.0} | ({"wrong": wrong} if runner.engine.rank in seen_by else {})
        assert runner.loader_metrics == expected


def test_the_state_of_a_callback_of_one_node_waits_for_nobody():
    """state_dict of a metric that runs on the main process only does not wait for other ranks, whose state is empty."""
    ranks = Ranks(2)
    callbacks = [dl.AccuracyCallback("logits", "targets") for _ in ranks.engines]
    for each in callbacks:
        each.node = dl.CallbackNode.Master
    runner = make_runner(engine=ranks.engines[0])
    callbacks[0].on_loader_start(runner)
    runner.batch = {"logits": torch.eye(2), "targets": torch.tensor([0, 0])}
    callbacks[0].on_batch_end(runner)

    states = [each.state_dict() for each in callbacks]

    assert states == [{"train": [{"accuracy01": torch.tensor(1), "num": torch.tensor(2)}]}, {}]
