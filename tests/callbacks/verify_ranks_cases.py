"""Runs of two processes, sound and broken; each is checked, and what the check says comes back."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, WeightedRandomSampler

from runnerkit import dl
from tests.tiny import classification, loader, mlp, quiet, sgd


class Plain(dl.SupervisedRunner):
    """Loaders and model of every case, unless it says otherwise."""

    spoils = None  # what Breaker changes on rank one
    num_workers = 0

    def get_loaders(self, stage):
        return {"train": loader(160, 8, shuffle=True), "valid": loader(21, 4, seed=1, num_workers=self.num_workers)}


class Breaker(dl.Callback):
    """Does something wrong at an event; ordered before the check."""

    def on_batch_end(self, runner):
        if runner.is_train_loader and runner.engine.rank == 1 and runner.spoils == "parameter":
            with torch.no_grad():
                next(runner.engine.unwrap(runner.model).parameters())[0, 0] += 0.25

    def on_loader_start(self, runner):
        if runner.is_valid_loader and runner.engine.rank == 1 and runner.spoils == "buffer":
            runner.engine.unwrap(runner.model)[1].running_mean += 0.5


class Weighted(Plain):
    def get_loaders(self, stage):
        sampler = WeightedRandomSampler([1.0, 5.0] * 80, 160)
        return {"train": loader(160, 8, sampler=sampler), "valid": loader(21, 4)}


class UnlikeOrders(Plain):
    def get_loaders(self, stage):
        class Mine(Sampler):
            def __len__(self):
                return 160

            def __iter__(mine):  # noqa: N805  # `self` is the runner
                generator = torch.Generator().manual_seed(self.engine.rank)
                return iter(torch.randperm(160, generator=generator).tolist())

        return {"train": loader(160, 8, sampler=Mine())}


class EveryRankTheSame(Plain):
    def get_loaders(self, stage):
        data = classification(160)
        return {"train": DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=0))}


class Padded(Plain):
    def get_loaders(self, stage):
        data = classification(21)
        sampler = DistributedSampler(data, num_replicas=2, rank=self.engine.rank, shuffle=False)
        return {"train": loader(160, 8), "valid": DataLoader(data, batch_size=4, sampler=sampler)}


class RankInMetric(Plain):
    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics["odd"] = float(self.engine.rank)


class OwnMeter(Plain):
    def on_loader_start(self, runner):
        super().on_loader_start(runner)
        self.total = 0

    def on_batch_end(self, runner):
        super().on_batch_end(runner)
        self.total += self.batch_size

    def on_loader_end(self, runner):
        self.loader_metrics["total"] = float(self.total)
        super().on_loader_end(runner)


class DrawnMetric(Plain):
    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics["noise"] = torch.rand(())


class MaximumMetric(Plain):
    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics["largest"] = batch[0].max()


def check(runner_class, make_engine, *, spoils=None, num_workers=0, num_epochs=1):
    """Train with check=True; return the findings, or the error's message."""
    runner, model = runner_class(), mlp(batch_norm=True)
    runner.spoils, runner.num_workers = spoils, num_workers
    try:
        runner.train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            callbacks={"accuracy": dl.AccuracyCallback("logits", "targets", topk=(1,)), "breaker": Breaker()},
            engine=make_engine(),
            check=True,
            num_epochs=num_epochs,
            **quiet(),
        )
    except ValueError as error:
        return str(error)
    return runner.callbacks["_verify_ranks"].findings


def ddp():
    """Of two processes that some launcher started."""
    return dl.DistributedDataParallelEngine(2, device="cpu")


def run_all():
    """Every case of torch's engines, in processes that were started once."""
    return {
        "sound": check(Plain, ddp, num_epochs=5),
        "with workers": check(Plain, ddp, num_workers=1),
        "sound, FSDP2": check(Plain, lambda: dl.FullyShardedDataParallelEngine(2, device="cpu")),
        "sound, bf16": check(Plain, lambda: dl.DistributedDataParallelAMPEngine(2, device="cpu")),
        "weighted": check(Weighted, ddp),
        "unlike orders": check(UnlikeOrders, ddp),
        "every rank the same": check(EveryRankTheSame, ddp),
        "padded": check(Padded, ddp),
        "parameter": check(Plain, ddp, spoils="parameter"),
        "buffer": check(Plain, ddp, spoils="buffer"),
        "rank in metric": check(RankInMetric, ddp),
        "own meter": check(OwnMeter, ddp),
        "drawn metric": check(DrawnMetric, ddp),
        "maximum": check(MaximumMetric, ddp),
    }


def run_horovod():
    """A sound run, and one whose weights differ."""
    return {"sound": check(Plain, dl.HorovodEngine), "parameter": check(Plain, dl.HorovodEngine, spoils="parameter")}
