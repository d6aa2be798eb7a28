"""Checked runs of two processes, valid and broken, that return the findings."""

import threading

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from runnerkit import dl
from runnerkit.metrics.means import AdditiveMetric
from tests.tiny import classification, loader, mlp, train


class Plain(dl.SupervisedRunner):
    """A runner with the loaders of every case that does not override them."""

    spoils = None  # the fault that Breaker causes on rank one
    num_workers = 0

    def get_loaders(self, stage):
        return {"train": loader(160, 8, shuffle=True), "valid": loader(21, 4, seed=1, num_workers=self.num_workers)}


class Breaker(dl.Callback):
    """A callback that causes a fault at an event, before the check runs."""

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


class WithMetric(Plain):
    """A runner with one more metric, a function of runner and batch."""

    def __init__(self, name, value):
        super().__init__()
        self.name, self.value = name, value

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics[self.name] = self.value(self, batch)


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


class KeepsMeters(Plain):
    """A runner with all kinds of meters: a number, a list, an object that is reset, one that never is, and a lock."""

    def __init__(self):
        super().__init__()
        self.num_seen, self.sizes, self.ever = 0, [], AdditiveMetric()
        self.meters = {"own_loss": AdditiveMetric()}
        self.classes = torch.zeros(3, dtype=torch.int64)
        self.started = 0

    def on_experiment_start(self, runner):
        super().on_experiment_start(runner)
        self.lock = threading.Lock()  # cannot be copied

    def on_loader_start(self, runner):
        super().on_loader_start(runner)
        self.started += 1
        self.meters["own_loss"].reset()

    def on_batch_start(self, runner):
        super().on_batch_start(runner)
        self.half = self.batch_size / 2

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics["half"] = self.half
        self.num_seen += self.batch_size
        self.sizes.append(self.batch_size)
        self.classes += batch["targets"].bincount(minlength=3)
        self.ever.update(float(len(batch["features"])), num_samples=1)
        self.meters["own_loss"].update(self.batch_metrics.get("half", 0.0), num_samples=self.batch_size)

    def on_loader_end(self, runner):
        own = [self.num_seen, len(self.sizes), int(self.classes.sum()), self.ever.num_samples, self.started]
        self.told.append(own)
        self.loader_metrics["own"] = float(self.engine.reduce(torch.tensor(self.meters["own_loss"].num_samples)))
        super().on_loader_end(runner)


class CountsInACallback(dl.Callback):
    """A callback with state over loaders, like a user's metric callback."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Metric)
        self.num_batches = 0

    def on_batch_end(self, runner):
        self.num_batches += 1
        runner.batch_metrics["one"] = 1.0


class Stream(IterableDataset):
    """An iterable data set over the samples of a map-style data set."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([self.data[index] for index in range(len(self.data))])


class OwnLoader:
    """A loader that shards itself and does not report its samples."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def shard(self, *, key, training, rank, world_size, seed):
        return OwnLoader(self.batches[rank::world_size])


def every_kind():
    """Return evaluation loaders of every kind except a plain DataLoader, by key."""
    data = classification(21, seed=1)
    batches = [list(range(21))[start : start + 4] for start in range(0, 21, 4)]
    tensors = dl.TensorLoader(*data.tensors, batch_size=4)
    whole = dl.TensorRows(*data.tensors)
    return {
        "tensors": tensors,
        "prefetched": dl.BatchPrefetchLoaderWrapper(loader(21, 4, seed=1)),
        "limited": dl.BatchLimitLoaderWrapper(dl.BatchPrefetchLoaderWrapper(loader(21, 4, seed=1)), 2),
        "limited_tensors": dl.BatchLimitLoaderWrapper(tensors, 1),
        "own_batches": DataLoader(data, batch_sampler=batches),
        "lists": DataLoader(whole, sampler=batches, batch_size=None),
        "rows": DataLoader(_Slices(whole), batch_size=None),
        "stream": DataLoader(Stream(data), batch_size=4),
        "stream_workers": DataLoader(Stream(data), batch_size=4, num_workers=2),
        "limited_stream": dl.BatchLimitLoaderWrapper(DataLoader(Stream(data), batch_size=4), 2),
        "own": OwnLoader(list(loader(21, 4, seed=1))),
    }


class _Slices(Dataset):
    """A data set of six batches, by number."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return 6

    def __getitem__(self, number):
        return self.rows.__getitems__(list(range(21))[number::6])


class EveryKind(Plain):
    def get_loaders(self, stage):
        return {"train": loader(160, 8)} | every_kind()


def meters(make_engine, *, is_checked):
    """Return the values of own meters of a runner and a callback at each loader's end, and the findings."""
    runner, callback = KeepsMeters(), CountsInACallback()
    runner.told = []
    checks = {"check": dl.VerifyRanksCallback()} if is_checked else {}
    train(runner=runner, loaders=None, engine=make_engine(), callbacks={"count": callback, **checks})
    return runner.told, runner.epoch_metrics, callback.num_batches, checks["check"].findings if checks else []


def check(runner, make_engine, *, spoils=None, num_workers=0, num_epochs=1):
    """Train with check=True; return the findings or the error's message."""
    model = mlp(batch_norm=True)
    runner.spoils, runner.num_workers = spoils, num_workers
    callbacks = {"accuracy": dl.AccuracyCallback("logits", "targets", topk=(1,)), "breaker": Breaker()}
    options = {"engine": make_engine(), "loaders": None, "check": True, "num_epochs": num_epochs}
    try:
        train(model, runner=runner, callbacks=callbacks, **options)
    except ValueError as error:
        return str(error)
    return runner.callbacks["_verify_ranks"].findings


def ddp():
    """Make an engine for two processes that a launcher has started."""
    return dl.DistributedDataParallelEngine(2, device="cpu")


def run_all():
    """Run every case of torch's engines in processes launched once."""
    return {
        "sound": check(Plain(), ddp, num_epochs=5),
        "with workers": check(Plain(), ddp, num_workers=1),
        "sound, FSDP2": check(Plain(), lambda: dl.FullyShardedDataParallelEngine(2, device="cpu")),
        "sound, bf16": check(Plain(), lambda: dl.DistributedDataParallelAMPEngine(2, device="cpu")),
        "weighted": check(Weighted(), ddp),
        "unlike orders": check(UnlikeOrders(), ddp),
        "every rank the same": check(EveryRankTheSame(), ddp),
        "padded": check(Padded(), ddp),
        "parameter": check(Plain(), ddp, spoils="parameter"),
        "buffer": check(Plain(), ddp, spoils="buffer"),
        "rank in metric": check(WithMetric("odd", lambda runner, batch: float(runner.engine.rank)), ddp),
        "own meter": check(OwnMeter(), ddp),
        "drawn metric": check(WithMetric("noise", lambda runner, batch: torch.rand(())), ddp),
        "maximum": check(WithMetric("largest", lambda runner, batch: batch["features"].max()), ddp),
        "every kind": check(EveryKind(), ddp),
        "meters": meters(ddp, is_checked=True),
        "meters, unchecked": meters(ddp, is_checked=False),
    }


def run_horovod():
    """Run a valid case and one whose weights differ."""
    return {name: check(Plain(), dl.HorovodEngine, spoils=name) for name in ("parameter", "sound")}
