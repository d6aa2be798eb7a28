"""Weights of batches: every kind of loader, sums, metrics, several optimizers, and what is refused."""

import copy
import logging
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from runnerkit import dl
from runnerkit.metrics.means import LoaderMeans
from tests.engines.together import together
from tests.interrupt import at
from tests.tiny import NUM_CLASSES, NUM_FEATURES, classification, loader, mlp, sgd, train, train_by_hand, weights

NUM_SAMPLES = 23
EXACT = {"rtol": 0, "atol": 1e-12}


def data(num_samples=NUM_SAMPLES):
    features, targets = classification(NUM_SAMPLES).tensors
    return TensorDataset(features[:num_samples].double(), targets[:num_samples])


class Stream(IterableDataset):
    def __init__(self, num_samples=NUM_SAMPLES):
        self.samples = data(num_samples)

    def __iter__(self):
        return iter(self.samples)


class Batches(Stream):
    """Whole batches of 1 to 5 samples, as a stream or by index."""

    def __iter__(self):
        return iter([self[number] for number in range(len(self))])

    def __len__(self):
        return 8

    def __getitem__(self, number):
        starts = [0, 1, 6, 8, 11, 15, 16, 20, NUM_SAMPLES]
        return self.samples[starts[number] : starts[number + 1]]


def by_hand(batches, *, reduction="mean", clip=None):
    """Take one step for each tuple (features, targets), in float64; return the weights and the mean loss."""
    model, total, num_samples = mlp().double(), 0.0, 0
    optimizer = sgd(model)
    for features, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), targets, reduction=reduction)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        total, num_samples = total + loss.item() * len(targets), num_samples + len(targets)
    return weights(model), total / num_samples


def fit(batches, *, num_processes=2, model=None, **options):
    model = model or mlp().double()
    runner = train(model, num_processes=num_processes, loaders={"train": batches}, **options)
    return weights(model), runner.epoch_metrics["train"], runner.sample_step


def steps(size, *, of=NUM_SAMPLES):
    whole = data()
    return [whole[start : min(start + size, of)] for start in range(0, of, size)]


def joined(numbers):
    """Return steps of the whole batches with these numbers."""
    whole = Batches()
    return [tuple(map(torch.cat, zip(*(whole[each] for each in step), strict=True))) for step in numbers]


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
LOADERS = {
    "by samples": (lambda: DataLoader(data(), batch_size=4), lambda: steps(8)),
    "tensor loader": (lambda: dl.TensorLoader(*data().tensors, batch_size=4), lambda: steps(8)),
    "prefetched": (lambda: dl.BatchPrefetchLoaderWrapper(DataLoader(data(), batch_size=4)), lambda: steps(8)),
    "a stream": (lambda: DataLoader(Stream(), batch_size=4), lambda: steps(8)),
    "a stream with workers": (lambda: DataLoader(Stream(), batch_size=4, num_workers=2), lambda: steps(8)),
    "a stream that ends with one sample": (lambda: DataLoader(Stream(17), batch_size=4), lambda: steps(8, of=17)),
    "whole batches of a stream": (lambda: DataLoader(Batches(), batch_size=None), lambda: joined(PAIRS)),
    "batches by index": (
        lambda: DataLoader([Batches()[number] for number in range(8)], batch_size=None), lambda: joined(PAIRS),
    ),
    "batches of a batch sampler": (
        lambda: DataLoader(data(), batch_sampler=[[0], [1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11, 12]]),
        lambda: [data()[:4], data()[4:11], data()[11:13]],
    ),
    "accumulated": (lambda: DataLoader(data(), batch_size=2), lambda: steps(12)),
}  # fmt: skip


def run_loaders():
    found = {}
    for name, (make, _) in LOADERS.items():
        found[name] = fit(make(), accumulation_steps=3 if name == "accumulated" else 1)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train everything that takes two processes in one launch."""
    folder = tmp_path_factory.mktemp("weights")
    return together(
        lambda: {
            "loaders": run_loaders(),
            "metrics": count_metrics(),
            "sums": fit_sums(2),
            "validated": validate_between_steps(),
            "own": fit(DataLoader(data(17), batch_size=4), runner=Own()),
            "resumed": train_resumed(folder),
            "two optimizers": train_two_optimizers(),
            "clipped": train_clipped(),
            "weightless": take_a_weightless_step(),
            "warned": warn_and_step(),
        }
    )


@pytest.mark.parametrize("name", LOADERS)
def test_two_processes_take_the_steps_of_one(trained, name):
    """However samples are shared, an uneven step has the gradient of all of them, and the logged loss is their mean."""
    found, metrics, num_samples = trained["loaders"][name]
    batches = LOADERS[name][1]()
    expected, loss = by_hand(batches)

    torch.testing.assert_close(found, expected, **EXACT)
    assert num_samples == sum(len(targets) for _, targets in batches)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-12)


class Sums(dl.SupervisedRunner):
    """Accuracy by its own callback and a metric of the batch; both ignore repeated samples."""

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics["size"] = float(len(batch["targets"]))


def count_metrics(batch_size=4, num_processes=2):
    accuracy = [dl.AccuracyCallback("logits", "targets")]
    return fit(DataLoader(data(17), batch_size), num_processes=num_processes, runner=Sums(), callbacks=accuracy)


def test_a_process_without_a_sample_adds_nothing_to_the_metrics(trained):
    """The last of 17 samples is one process's; the other's repeated batch is in no metric."""
    _, metrics, num_samples = trained["metrics"]
    _, alone, _ = count_metrics(8, num_processes=1)

    assert num_samples == 17
    assert metrics["accuracy"] == alone["accuracy"]
    assert metrics["size"] == pytest.approx((16 * 4 + 1) / 17)


def fit_sums(num_processes):
    options = {"accumulation_steps": 2, "loss_reduction": "sum", "gradient_clip": 0.5, "num_processes": num_processes}
    return fit(DataLoader(data(), 4 // num_processes), criterion=nn.CrossEntropyLoss(reduction="sum"), **options)


def test_a_sum_is_the_sum_of_the_global_batch(trained):
    """Also over accumulated batches, with tails, and clipped."""
    expected, _ = by_hand(steps(8), reduction="sum", clip=0.5)

    for found, _, _ in (fit_sums(1), trained["sums"]):
        torch.testing.assert_close(found, expected, **EXACT)


def validate_between_steps():
    model, criterion = mlp().double(), nn.CrossEntropyLoss(reduction="sum")
    loaders = {"train": DataLoader(data(16), batch_size=2), "valid": DataLoader(data(8), batch_size=2)}
    options = {"loss_reduction": "sum", "valid_every_steps": 1, "num_processes": 2}
    train(model, loaders=loaders, criterion=criterion, **options)
    return weights(model)


def test_a_validation_within_a_training_loader_leaves_the_weights_of_its_steps(trained):
    """Sums stay sums: the pass around the validation keeps the factor of its losses."""
    torch.testing.assert_close(trained["validated"], by_hand(steps(4, of=16), reduction="sum")[0], **EXACT)


class Own(dl.SupervisedRunner):
    """Steps by itself; the shares of processes count, as they are known in advance."""

    def handle_batch(self, batch):
        super().handle_batch(batch)
        loss = self.criterion(self.batch["logits"], self.batch["targets"])
        self.optimizer.zero_grad()
        self.engine.backward(loss)
        self.engine.step(self.optimizer)
        self.batch_metrics["loss"] = loss

    def get_callbacks(self, stage):
        return {}


def test_an_own_backward_pass_is_weighted_too(trained):
    found, _, num_samples = trained["own"]

    torch.testing.assert_close(found, by_hand(steps(8, of=17))[0], **EXACT)
    assert num_samples == 17


def weighing(weigh):
    """Return a runner that weighs each batch by `weigh(runner)`, or leaves it alone for None."""

    class Weighing(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            weight = weigh(self)
            if weight is not None:
                self.batch_weight = weight

    return Weighing()


def with_graph(runner):
    """Depend on the model's parameters, through which no gradient flows."""
    return runner.batch["logits"].square().sum() * 0 + len(runner.batch["targets"])


@pytest.mark.parametrize("case", [(Stream(), None), (data(), weighing(with_graph))], ids=["stream", "own weights"])
def test_a_short_batch_is_weighted_in_one_process(case):
    found, _, _ = fit(DataLoader(case[0], batch_size=4), num_processes=1, runner=case[1], accumulation_steps=2)

    torch.testing.assert_close(found, by_hand(steps(8))[0], **EXACT)


class TwoLosses(dl.SupervisedRunner):
    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics["loss"] = self.criterion(self.batch["logits"], batch["targets"])
        self.batch_metrics["size"] = self.model(batch["features"]).square().mean()


@pytest.mark.parametrize("stepped", ["loss", "another"])
def test_all_losses_of_an_optimizer_are_weighted(stepped):
    """Also one that no OptimizerCallback names."""
    callbacks = [dl.BackwardCallback("loss"), dl.BackwardCallback("size")]
    callbacks.append(dl.OptimizerCallback(stepped, accumulation_steps=2))
    found, _, _ = fit(DataLoader(data(), 4), num_processes=1, runner=TwoLosses(), callbacks=callbacks)

    model = mlp().double()
    optimizer = sgd(model)
    for features, targets in steps(8):
        optimizer.zero_grad()
        logits = model(features)
        (nn.functional.cross_entropy(logits, targets) + logits.square().mean()).backward()
        optimizer.step()
    torch.testing.assert_close(found, weights(model), **EXACT)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_weight_in_some_batches_of_a_step_is_refused(num_processes):
    runner = weighing(lambda runner: 3 if runner.batch_step % 2 else None)
    loaders = DataLoader(data(), batch_size=2)
    job = partial(fit, loaders, num_processes=num_processes, runner=runner, accumulation_steps=2)

    with pytest.raises(ValueError, match=r"batch_weight was set in 1 of the 2 batches of a step: set it in every"):
        job() if num_processes == 1 else together(job)


class Tokens(dl.SupervisedRunner):
    """Weights each batch by a number in its targets, as a number or as a tensor."""

    kind = "tensor"

    def handle_batch(self, batch):
        super().handle_batch(batch)
        number = num_tokens(batch["targets"])
        self.batch_weight = int(number) if self.kind == "number" else number
        self.batch_metrics["loss"] = self.criterion(self.batch["logits"], batch["targets"])


def num_tokens(targets):
    return targets.sum() + 1


def tokens_by_hand(parts, *, weigh=num_tokens, clip=None):
    """Take a step for each list of batches in a hand-written loop; return the weights and the weighted mean loss."""
    model = mlp().double()
    optimizer, total, sum_of_weights = sgd(model), 0.0, 0.0
    for batches in parts:
        optimizer.zero_grad()
        losses = [weigh(targets) * nn.functional.cross_entropy(model(x), targets) for x, targets in batches]
        step_weights = sum(weigh(targets) for _, targets in batches)
        (sum(losses) / step_weights).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        total, sum_of_weights = total + sum(losses).item(), sum_of_weights + float(step_weights)
    return weights(model), total / sum_of_weights


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_accumulated_batches_of_one_process_are_weighted(kind):
    runner = Tokens()
    runner.kind = kind
    found, metrics, _ = fit(DataLoader(data(), batch_size=4), num_processes=1, runner=runner, accumulation_steps=3)

    expected, loss = tokens_by_hand([steps(4)[:3], steps(4)[3:]])
    torch.testing.assert_close(found, expected, **EXACT)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-12)


def train_resumed(folder):
    options = {"runner": Tokens(), "accumulation_steps": 2, "num_epochs": 3}
    batches = partial(DataLoader, data(), batch_size=2, shuffle=True)
    whole = fit(batches(), logdir=folder / "whole", **copy.copy(options))
    first = fit(batches(), logdir=folder / "log", **{**options, "num_epochs": 1})
    rest = fit(batches(), logdir=folder / "log", resume="auto", **options)
    return whole, first, rest


def test_a_resumed_run_weights_alike(trained):
    """The unit of the weights is in the checkpoint, so that no digit differs."""
    whole, _, rest = trained["resumed"]

    assert torch.equal(whole[0], rest[0])
    assert whole[1:] == rest[1:]


def train_two_optimizers():
    """Two optimizers step on the same loss, one of them with clipping in the backward pass."""
    model = mlp().double()
    halves = {"head": sgd(model[0]), "rest": sgd(model[3])}
    callbacks = [
        dl.BackwardCallback("loss"),
        *(dl.OptimizerCallback("loss", optimizer_key=key, accumulation_steps=2) for key in halves),
    ]
    return fit(DataLoader(data(), batch_size=2), runner=Tokens(), model=model, optimizer=halves, callbacks=callbacks)


def test_two_optimizers_step_on_one_weighted_loss(trained):
    found, _, _ = trained["two optimizers"]

    parts = []
    for start in range(0, NUM_SAMPLES, 8):
        micro = [data()[at : min(at + 4, NUM_SAMPLES)] for at in range(start, min(start + 8, NUM_SAMPLES), 4)]
        # Rank zero takes the last three samples, so that no process has only one.
        takers = [(batch, 1 if len(batch[1]) == 3 else 2) for batch in micro]
        parts.append(
            [tuple(each[rank::number] for each in batch) for batch, number in takers for rank in range(number)]
        )
    expected, _ = tokens_by_hand(parts)
    torch.testing.assert_close(found, expected, **EXACT)


def train_clipped():
    backward = dl.BackwardCallback("loss", grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 0.05})
    return fit(DataLoader(data(), 4), callbacks=[backward], runner=Tokens())[0]


def test_clipping_in_the_backward_pass_sees_the_weighted_mean(trained):
    halves = [[(features[rank::2], targets[rank::2]) for rank in range(2)] for features, targets in steps(8)]
    expected, _ = tokens_by_hand(halves, clip=0.05)
    torch.testing.assert_close(trained["clipped"], expected, **EXACT)


def take_a_weightless_step():
    model, runner = mlp().double(), weighing(lambda runner: torch.tensor(0 if runner.batch_step == 2 else 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return fit(DataLoader(data(16), 4), runner=runner, model=model, optimizer=optimizer)[0]


def test_a_step_that_weighs_nothing_changes_nothing(trained):
    """Its gradients are zero, and the weights stay finite."""
    reference = mlp().double()
    train_by_hand(reference, torch.optim.SGD(reference.parameters(), 0.1), [data(16)[:8]])
    torch.testing.assert_close(trained["weightless"], weights(reference), **EXACT)


def test_learning_rates_of_all_groups_are_logged(tmp_path):
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.02}]
    log = dl.JSONLLogger(tmp_path, log_batch_metrics=True)
    runner = train(model, optimizer=torch.optim.SGD(groups), log_every=2, loggers={"jsonl": log})

    assert (runner.epoch_metrics["train"]["lr"], runner.epoch_metrics["train"]["lr/1"]) == (0.1, 0.02)
    assert (tmp_path / "metrics.jsonl").read_text().count('"lr/1"') == 3  # two steps and the epoch


class ModelOutput(dict):
    def to_tuple(self):
        return tuple(self.values())


class WithLoss(nn.Linear):
    def forward(self, features, targets):
        logits = super().forward(features)
        return ModelOutput(loss=nn.functional.cross_entropy(logits, targets), logits=logits)


def test_a_model_output_with_a_loss_needs_no_criterion():
    """Its other outputs keep their names, so that callbacks read them."""
    runner = dl.SupervisedRunner(input_key={"features": "features", "targets": "targets"})
    options = {"loaders": {"train": loader(64, 8)}, "num_epochs": 3}
    accuracy = [dl.AccuracyCallback("logits", "targets")]
    train(WithLoss(NUM_FEATURES, NUM_CLASSES), runner=runner, criterion=None, callbacks=accuracy, **options)

    losses = [epoch["train"]["loss"] for epoch in runner.experiment_metrics.values()]
    assert losses == sorted(losses, reverse=True) and np.isfinite(losses).all()
    assert runner.epoch_metrics["train"]["accuracy"] > 0.4


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)])
def test_precision_in_one_word(precision, dtype):
    seen = set()

    train(precision=precision, callbacks=[at("on_batch_end", lambda runner: seen.add(runner.batch["logits"].dtype))])

    assert seen == {dtype or torch.float32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp4"}, "precision must be one of fp32, amp, fp16, bf16, fp8, got 'fp4'"),
        ({"precision": "bf16", "amp": True}, "^amp=True, precision='bf16': choose one precision"),
        ({"precision": "bf16", "engine": dl.CPUEngine()}, "engine=CPUEngine and precision='bf16' contradict"),
    ],
)
def test_contradictory_precisions_are_refused(arguments, message):
    model = mlp()

    with pytest.raises(ValueError, match=message):
        dl.SupervisedRunner().train(model=model, optimizer=sgd(model), loaders={"train": [1]}, **arguments)


WRONG_WEIGHTS = {
    "text": ("16", TypeError, "batch_weight must be a number or a tensor of one, got str"),
    "flag": (True, TypeError, "batch_weight must be a number or a tensor of one, got bool"),
    "many": (torch.ones(3), ValueError, r"batch_weight must be a number or a tensor of one, got shape \(3,\)"),
    "negative": (-1, ValueError, "batch_weight must be finite and >= 0, got -1"),
    "not a number": (float("nan"), ValueError, "batch_weight must be finite and >= 0, got nan"),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_a_wrong_weight_is_named(name):
    weight, error, message = WRONG_WEIGHTS[name]

    with pytest.raises(error, match=message):
        train(runner=weighing(lambda _: weight), accumulation_steps=2)


def without_threes(samples):
    """Drop the samples of class 2, as a collate_fn drops images that cannot be read."""
    kept = [sample for sample in samples if int(sample[1]) != 2] or samples[:1]
    return torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])


def by_size(runner):
    return runner.batch_size


def train_without_threes(num_processes, weigh=None):
    model, (features, targets) = mlp().double(), classification(24).tensors
    batches = DataLoader(TensorDataset(features.double(), targets), 4, collate_fn=without_threes)
    options = {"num_processes": num_processes, "accumulation_steps": 2 // num_processes}
    return fit(batches, model=model, runner=weigh and weighing(weigh), **options)[0]


@pytest.mark.parametrize("weigh", [None, by_size])
def test_accumulated_batches_weigh_what_a_collate_fn_left_of_them(weigh):
    """As the logged mean does."""
    found = train_without_threes(1, weigh)

    samples = [(x.double(), y) for x, y in zip(*classification(24).tensors, strict=True)]
    batches = [without_threes(samples[begin : begin + 4]) for begin in range(0, 24, 4)]
    expected, _ = tokens_by_hand([batches[:2], batches[2:4], batches[4:]], weigh=len)
    torch.testing.assert_close(found, expected, **EXACT)


def warn_and_step():
    """Return what rank zero warned of with batches that shrink, and without, and the learning rates of both ranks."""
    heard, handler = [], logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("runnerkit.steps.gradient_step").addHandler(handler)
    train_without_threes(2)
    warned = list(heard)
    train_without_threes(2, by_size)
    model = mlp()
    optimizer = sgd(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
    rates, last = [], {"order": dl.CallbackOrder.External}
    callbacks = [
        dl.SchedulerCallback(interval="step"),
        at("on_step_end", lambda runner: rates.append(runner.optimizer.param_groups[0]["lr"]), **last),
        at("on_stage_end", lambda runner: setattr(runner, "rates", runner.engine.gather_object(rates)), **last),
    ]
    options = {
        "optimizer": optimizer,
        "scheduler": plateau,
        "callbacks": callbacks,
        "loaders": {"train": loader(48, 4)},
    }
    runner = train(model, num_processes=2, **options)
    return warned, heard, runner.rates


def test_processes_warn_of_dropped_samples_and_step_schedulers_alike(trained):
    warned, after, (first, second) = trained["warned"]

    assert len(warned) == 1 and "If collate_fn drops samples, set self.batch_weight = self.batch_size" in warned[0]
    assert after == warned
    assert first == second and first[-1] < first[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.float32])
def test_weights_of_any_dtype_are_summed_in_float64(dtype):
    means = LoaderMeans()
    weight = torch.tensor(101, dtype=dtype)
    for _ in range(5000):
        means.update({"one": torch.ones(()), "number": 1.0}, 1, weight=weight)

    assert means.totals() == {"one": (505_000.0, 505_000.0), "number": (505_000.0, 505_000.0)}


def test_numbers_as_weights_keep_their_digits():
    """The mean of a tensor is that of the same number."""
    means = LoaderMeans()
    for value, weight in ((1.0, 0.1), (2.0, 0.7)):
        means.update({"tensor": torch.tensor(value), "number": value}, 1, weight=weight)

    assert means.totals() == dict.fromkeys(("tensor", "number"), (0.1 + 2 * 0.7, 0.1 + 0.7))


def test_an_epoch_that_weighs_nothing_ends_like_any_other():
    """The mean of its loss is not a number, but nothing diverged."""
    model = mlp()
    runner = train(model, runner=weighing(lambda _: 0), accumulation_steps=2)

    assert np.isnan(runner.epoch_metrics["train"]["loss"])
    assert torch.equal(weights(model), weights(mlp()))


@pytest.mark.parametrize("knob", [{"gradient_clip": 1.0}, {"accumulation_steps": 2}])
def test_knobs_of_an_optimizer_callback_need_one(knob):
    class Own(dl.Runner):
        def handle_batch(self, batch):
            loss = self.model(batch[0]).square().mean()
            self.engine.backward(loss)
            self.engine.step(self.optimizer)

    with pytest.raises(ValueError, match=f"{next(iter(knob))} acts on an OptimizerCallback, and the run has none"):
        train(runner=Own(), loaders={"train": loader(8, 4)}, **knob)
