"""Collectives at the end of a loader, as torch's dispatcher sees them in real processes."""

import json

from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from runnerkit import dl
from tests.tiny import train

NUM_COPIES = 3  # of each callback, under different names


class PassOn(dl.Runner):
    """A runner without computation, so that callbacks read the batch unchanged."""

    def handle_batch(self, batch):
        self.batch = batch
        self.batch_metrics["loss"] = batch["logits"].square().mean()
        self.batch_metrics["number"] = 1.0


class CountCollectives(dl.Callback):
    """A callback that counts from the end of a loader's last batch to the next loader or the epoch's end."""

    def __init__(self, folder):
        super().__init__(order=10_000)
        self.folder = folder
        self.counts, self.loader_key, self.profiler = {}, "", None

    def on_batch_end(self, runner):
        if runner.loader_batch_step == runner.loader_batch_len:
            self.loader_key, self.profiler = runner.loader_key, profile(activities=[ProfilerActivity.CPU])
            self.profiler.__enter__()

    def close(self):
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            names = {each.key: each.count for each in self.profiler.key_averages() if each.key.startswith("c10d::")}
            self.counts[self.loader_key], self.profiler = names, None

    def on_loader_start(self, runner):
        self.close()

    def on_epoch_end(self, runner):
        self.close()
        (self.folder / f"{runner.engine.rank}.json").write_text(json.dumps(self.counts))


def rows(samples):
    return [{key: each[index] for key, each in samples.items()} for index in range(len(samples["classes"]))]


def test_a_loader_end_is_one_collective(tmp_path):
    """One collective covers the loader's means and all callbacks with additive state, several of each kind.

    This includes the training loader, whose callbacks keep no samples here. In "one_more", callbacks that keep samples
    share one more gather.
    """
    from tests.callbacks.exact_metrics import CASES, make_samples  # imports scikit-learn, which takes a second

    add_up = [name for name in CASES if "auc" not in name and name != "cmc"]
    callbacks = {f"{name} {copy}": CASES[name][0]() for name in add_up for copy in range(NUM_COPIES)}
    samples = [name for name in CASES if name not in add_up]
    callbacks |= {name: dl.ControlFlowCallback(CASES[name][0](), loaders="one_more") for name in samples}

    keys = ("train", "valid", "one_more")
    data = {key: DataLoader(rows(make_samples(29, seed=seed)), batch_size=4) for seed, key in enumerate(keys)}
    callbacks["count"] = CountCollectives(tmp_path)
    train(nn.Linear(1, 1), runner=PassOn(), num_processes=2, loaders=data, callbacks=callbacks, optimizer=None)

    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [each["train"] for each in counts] == [{"c10d::allreduce_": 1}] * 2
    assert [each["valid"] for each in counts] == [{"c10d::allreduce_": 1}] * 2
    for each in counts:
        assert each["one_more"].pop("c10d::allreduce_") == 1
        assert sum(each["one_more"].values()) == 2, "sizes, then objects"
