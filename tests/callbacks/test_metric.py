"""A loader's metrics cover all its samples, for any batches and number of processes."""

import importlib
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, r2_score, roc_auc_score
from torch.nn.functional import l1_loss

from runnerkit.callbacks.metrics.metric import BatchMetricCallback, FunctionalBatchMetricCallback, LoaderMetricCallback
from runnerkit.torchvision_cpu import import_torchvision
from tests.callbacks.stand_ins import end_loader, evaluate, evaluate_on_ranks, make_runner, resume_on_ranks, run_loader

import_torchvision()  # torchmetrics imports it, and it may need the workaround
torchmetrics = importlib.import_module("torchmetrics")
classification = importlib.import_module("torchmetrics.classification")


def binary_batches(sizes, seed=0):
    """Make scores in [0, 1] and 0/1 targets, with both classes in each batch."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        targets = torch.randint(0, 2, (size,), generator=generator)
        targets[0], targets[-1] = 0, 1
        batches.append({"scores": torch.rand(size, generator=generator), "targets": targets, "values": targets.float()})
    return batches


def whole(batches, key):
    return torch.cat([batch[key] for batch in batches])


# Each reference is scikit-learn's value over all samples or a closed form; float32 states are exact to 1e-6.
REFERENCES = {
    "sum states": (classification.BinaryF1Score(), "targets", lambda s, t: f1_score(t, s > 0.5)),
    "list states": (classification.BinaryAUROC(), "targets", lambda s, t: roc_auc_score(t, s)),
    "full_state_update, max states": (torchmetrics.MaxMetric(), [], lambda s, t: s.max()),
    "own merging in compute": (torchmetrics.PearsonCorrCoef(), "values", lambda s, t: np.corrcoef(s, t)[0, 1]),
    "sums of squares": (torchmetrics.R2Score(), "values", lambda s, t: r2_score(t, s)),
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("shares", [[6, 2, 5], [13, 0, 0], [0, 4, 0], [2, 0, 9]], ids=str)
def test_value_over_processes_is_that_of_all_samples(kind, shares):
    """Ranks may have different numbers of batches or none, and every rank gets the same value."""
    metric, target_key, reference = REFERENCES[kind]
    per_rank = [binary_batches([4, size - 4] if size > 5 else [size] * (size > 0), seed=size) for size in shares]
    batches = list(chain.from_iterable(per_rank))
    scores, targets = whole(batches, "scores"), whole(batches, "targets")
    callback = LoaderMetricCallback(metric, "scores", target_key, metric_key="score")

    runners, _ = evaluate_on_ranks(callback, per_rank)

    expected = float(reference(scores, targets))
    assert [runner.loader_metrics["score"] for runner in runners] == pytest.approx([expected] * 3, abs=1e-6)
    assert all(type(runner.loader_metrics["score"]) is float for runner in runners)


class Total(torchmetrics.Metric):
    """A sum that makes a new tensor in each update."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values):
        self.total = self.total + values.sum()

    def compute(self):
        return self.total


class Twice(Total):
    """Another metric with the same state."""

    def compute(self):
        return 2 * self.total


def test_collection_updates_one_metric_for_all_that_share_its_state():
    """Each metric has the whole state, although a rank without data has not grouped them."""
    callback = LoaderMetricCallback(torchmetrics.MetricCollection([Total(), Twice()]), "values", [])
    batches = [{"values": torch.full((size,), 1.0)} for size in (2, 3, 4, 5)]

    runners, _ = evaluate_on_ranks(callback, [batches[:3], [], batches[3:]])

    assert [runner.loader_metrics for runner in runners] == [{"Total": 14.0, "Twice": 28.0}] * 3


def test_loader_that_no_process_saw_logs_nothing():
    """The metric of no samples is undefined, not 0."""
    callback = LoaderMetricCallback(classification.BinaryF1Score(), "scores", "targets")

    runners, _ = evaluate_on_ranks(callback, [[], []])

    assert [runner.loader_metrics for runner in (*runners, evaluate(callback, []))] == [{}, {}, {}]


def test_states_are_reduced_once():
    """torchmetrics would also reduce them by itself if torch.distributed is initialized."""

    def reduce_again(*_):
        raise AssertionError("reduced twice")

    metric = classification.BinaryF1Score(dist_sync_fn=reduce_again, distributed_available_fn=lambda: True)
    batches = binary_batches([4, 7])

    runners, _ = evaluate_on_ranks(LoaderMetricCallback(metric, "scores", "targets"), [batches[:1], batches[1:]])

    expected = f1_score(whole(batches, "targets"), whole(batches, "scores") > 0.5)
    assert [runner.loader_metrics["binary_f1_score"] for runner in runners] == pytest.approx([expected] * 2, abs=1e-6)


def test_validation_in_the_middle_leaves_the_training_metric_alone():
    """`valid_every_steps` runs the valid loader between two training batches."""
    train, valid = binary_batches([4, 4], seed=1), binary_batches([6], seed=2)
    callback = LoaderMetricCallback(classification.BinaryAUROC(), "scores", "targets", metric_key="auc")
    train_runner, valid_runner = make_runner(), make_runner(loader_key="valid", is_train_loader=False)

    run_loader(callback, train_runner, train[:1])
    run_loader(callback, valid_runner, valid)
    end_loader(callback, valid_runner)
    train_runner.batch = train[1]
    callback.on_batch_end(train_runner)
    end_loader(callback, train_runner)

    for runner, batches in ((train_runner, train), (valid_runner, valid)):
        expected = roc_auc_score(whole(batches, "targets"), whole(batches, "scores"))
        assert runner.loader_metrics["auc"] == pytest.approx(expected, abs=1e-6)


def test_batch_gets_its_own_value_and_the_loader_that_of_all_samples():
    """A loader's F1 is not the mean of its batches' F1."""
    batches = binary_batches([3, 8, 5])
    callback = BatchMetricCallback(classification.BinaryF1Score(), "scores", "targets", metric_key="f1")
    runner = make_runner()

    of_batches = []
    callback.on_loader_start(runner)
    for batch in batches:
        runner.batch, runner.batch_metrics = batch, {}
        callback.on_batch_end(runner)
        of_batches.append(float(runner.batch_metrics["f1"]))
    runner.loader_metrics = {"f1": sum(of_batches) / 3}
    end_loader(callback, runner)

    assert of_batches == pytest.approx([f1_score(b["targets"], b["scores"] > 0.5) for b in batches], abs=1e-6)
    expected = f1_score(whole(batches, "targets"), whole(batches, "scores") > 0.5)
    assert runner.loader_metrics["f1"] == pytest.approx(expected, abs=1e-6)
    assert abs(expected - sum(of_batches) / 3) > 1e-3


def test_second_epoch_starts_empty_and_the_given_metric_stays_untouched():
    """Values of an epoch do not affect the next one."""
    first, second = binary_batches([6], seed=3), binary_batches([9], seed=4)
    metric = classification.BinaryAUROC()
    callback = LoaderMetricCallback(metric, "scores", "targets")

    _, runner = evaluate(callback, first), evaluate(callback, second)

    expected = roc_auc_score(second[0]["targets"], second[0]["scores"])
    assert runner.loader_metrics["binary_auroc"] == pytest.approx(expected, abs=1e-6)
    assert not metric.update_called


def test_vectors_and_dicts_get_names():
    """Vectors get one name per class, and collections use their metrics' names."""
    batch = {"logits": torch.eye(3), "targets": torch.tensor([0, 1, 1])}
    metric, collection = classification.MulticlassF1Score(3, average=None), [torchmetrics.MeanSquaredError()]
    by_class = BatchMetricCallback(metric, "logits", "targets", prefix="a_", suffix="_z")
    collection = torchmetrics.MetricCollection(collection)
    group = LoaderMetricCallback(collection, "logits", "logits", metric_key="of", prefix="a_")

    found = evaluate(by_class, [batch]).loader_metrics | evaluate(group, [batch]).loader_metrics

    of_classes = {f"a_multiclass_f1_score_z/class_0{index}": each for index, each in enumerate([1.0, 2 / 3, 0.0])}
    assert found == pytest.approx(of_classes | {"a_of/MeanSquaredError": 0.0})
    assert (by_class.provides, group.provides) == (("a_multiclass_f1_score_z",), ("a_of/MeanSquaredError",))


@pytest.mark.parametrize(
    ("name", "expected"), [("BinaryAUROC", "binary_auroc"), ("R2Score", "r2_score"), ("IoU", "io_u"), ("MSE", "mse")]
)
def test_default_name_is_the_class_in_snake_case(name, expected):
    """Users can guess the name in the logs."""
    metric = type(name, (torchmetrics.MeanSquaredError,), {})()

    assert LoaderMetricCallback(metric, "logits", "targets").provides == (expected,)


@pytest.mark.parametrize(
    ("metric", "input_key", "error", "words"),
    [
        (classification.BinaryConfusionMatrix(), "scores", ValueError, r"'binary_confusion_matrix' .*\(2, 2\)"),
        (classification.BinaryAUROC(), "odds", KeyError, r"reads 'odds' .*\['scores', 'targets', 'values'\]"),
    ],
)
def test_matrices_and_missing_batch_keys_are_refused_by_name(metric, input_key, error, words):
    """Only numbers, vectors and dicts can be logged, of keys that the batch has."""
    with pytest.raises(error, match=words):
        evaluate(LoaderMetricCallback(metric, input_key, "targets"), binary_batches([4]))


@pytest.mark.parametrize(
    ("input_key", "target_key"),
    [("scores", "targets"), (["preds", "target"], []), ({"scores": "preds"}, {"targets": "target"})],
    ids=str,
)
def test_keys_may_be_one_several_or_renamed(input_key, target_key):
    """A string becomes a positional argument, a list keyword arguments of these names, and a dict renames them."""
    [batch] = binary_batches([8])
    batch |= {"target": batch["targets"], "preds": batch["scores"]}

    runner = evaluate(LoaderMetricCallback(classification.BinaryAUROC(), input_key, target_key), [batch])

    expected = roc_auc_score(batch["targets"], batch["scores"])
    assert runner.loader_metrics["binary_auroc"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num_resumed", [3, 2, 1])
def test_state_within_a_loader_resumes_on_any_number_of_processes(num_resumed):
    """After a checkpoint within a loader, the value still covers all of its samples."""
    per_rank = [binary_batches([size], seed=seed) for seed, size in ((5, 4), (6, 6), (7, 3))]
    rest = binary_batches([5], seed=8)
    callback = LoaderMetricCallback(torchmetrics.PearsonCorrCoef(), "scores", "values", metric_key="r")

    runners = resume_on_ranks(callback, per_rank, rest, num_resumed=num_resumed)

    batches = [*chain.from_iterable(per_rank), *rest]
    expected = np.corrcoef(whole(batches, "scores"), whole(batches, "targets"))[0, 1]
    assert [runner.loader_metrics["r"] for runner in runners] == pytest.approx([expected] * num_resumed, abs=1e-6)


class InPlace(Total):
    """A sum that is updated in place."""

    def update(self, values):
        self.total.add_(values.sum())


def test_state_is_a_copy_and_gone_after_the_loader():
    """Later updates do not change a checkpoint, and one between epochs contains neither predictions nor the engine."""
    callback, runner = LoaderMetricCallback(InPlace(), "values", []), make_runner()
    run_loader(callback, runner, [{"values": torch.ones(3)}])

    saved = callback.state_dict()
    callback.on_batch_end(runner)
    end_loader(callback, runner)

    assert saved == {"train": [{"parts": [[{"total": torch.tensor(3.0)}]]}]}
    assert runner.loader_metrics == {"in_place": 6.0}
    assert callback.state_dict() == {}
    # An engine cannot be sent back to the calling process.
    assert not any(value is runner.engine for value in vars(callback).values())


def test_loader_that_starts_anew_ignores_a_loaded_state():
    """Only the interrupted loader continues from the loaded state."""
    callback = LoaderMetricCallback(classification.BinaryF1Score(), "scores", "targets", metric_key="f1")
    batches = binary_batches([4, 6])
    run_loader(callback, make_runner(), batches[:1])
    state = callback.state_dict()
    runner = make_runner()

    callback.on_stage_start(runner)
    callback.load_state_dict(state)
    run_loader(callback, runner, batches[1:])
    end_loader(callback, runner)

    expected = f1_score(batches[1]["targets"], batches[1]["scores"] > 0.5)
    assert runner.loader_metrics["f1"] == pytest.approx(expected, abs=1e-6)


class Count:
    """A metric with update, compute and reset that is not a torchmetrics Metric."""

    def __init__(self):
        self.count = 0

    def update(self, values):
        self.count += len(values)

    def compute(self):
        return self.count

    def reset(self):
        self.count = 0


def test_any_object_serves_in_one_process_but_not_in_two():
    """Without declared states there is nothing to reduce, and a single rank's value would be wrong."""
    callback = LoaderMetricCallback(Count(), "scores", [])

    assert evaluate(callback, binary_batches([4, 3])).loader_metrics == {"count": 7.0}
    with pytest.raises(TypeError, match="Count is not a torchmetrics Metric, so its state cannot be reduced"):
        evaluate_on_ranks(LoaderMetricCallback(Count(), "scores", []), [binary_batches([4]), binary_batches([4])])


class Average(torchmetrics.Metric):
    """The mean of the last values it was given, which differs between processes."""

    def __init__(self, reduction):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, values):
        self.mean = values.mean()

    def compute(self):
        return self.mean.mean()


@pytest.mark.parametrize("shares", [[9, 1], [9, 0, 1]], ids=str)
def test_a_mean_over_ranks_is_refused(shares):
    """Nine ones on one rank and a zero on the other average to 0.9, not 0.5; every rank gets an error with a remedy."""
    per_rank = [[{"values": torch.full((size,), float(size > 1))}] * (size > 0) for size in shares]

    with pytest.raises(ValueError, match=r"'mean' of Average .* different values: \[1.0, 0.0\]; keep a sum"):
        evaluate_on_ranks(LoaderMetricCallback(Average("mean"), "values", []), per_rank)


def test_a_mean_of_equal_values_is_exact():
    """PSNR keeps its data range in such a state; the reference is the formula on all samples."""
    image = importlib.import_module("torchmetrics.image")
    batches = [{key: torch.rand(size, 1, 4, 4) for key in "xy"} for size in (5, 2)]
    callback = LoaderMetricCallback(image.PeakSignalNoiseRatio(data_range=1.0), "x", "y", metric_key="psnr")

    runners, _ = evaluate_on_ranks(callback, [batches[:1], batches[1:]])

    error = (whole(batches, "x") - whole(batches, "y")).double().square().mean()
    expected = [-10 * float(error.log10())] * 2
    assert [each.loader_metrics["psnr"] for each in runners] == pytest.approx(expected, rel=1e-6)


def product(values):
    return values.prod(dim=0)


def test_a_reduction_that_nobody_knows_is_refused_before_the_first_batch():
    """The error is raised with several processes; one process does not reduce."""
    alone = make_runner()
    callback = LoaderMetricCallback(Average(product), "values", [])
    run_loader(callback, alone, [{"values": torch.ones(3)}])
    callback.state_dict()
    end_loader(callback, alone)

    assert alone.loader_metrics == {"average": 1.0}
    with pytest.raises(ValueError, match=r"state 'mean' of Average has dist_reduce_fx=product, which may not"):
        evaluate_on_ranks(LoaderMetricCallback(Average(product), "values", []), [[], []])


def test_means_of_ranks_are_not_merged_when_fewer_processes_resume_either():
    """One process resumes from the state of two."""
    shares = [[{"values": torch.tensor([value])}] for value in (0.0, 1.0)]

    with pytest.raises(ValueError, match=r"have different values: \[0.0, 1.0\]"):
        resume_on_ranks(LoaderMetricCallback(Average("mean"), "values", []), shares, [], num_resumed=1)


def test_accumulated_predictions_keep_no_graph():
    """Predictions kept with their graphs would keep every activation of the epoch alive."""
    scores = torch.rand(4, requires_grad=True) * 2
    kept = []

    class Keeper(torchmetrics.CatMetric):
        def update(self, value):
            kept.append(value)
            super().update(value)

    callback = LoaderMetricCallback(Keeper(), "scores", [])
    run_loader(callback, make_runner(), [{"scores": scores}])

    assert [value.requires_grad for value in kept] == [False]


CROSS_ENTROPY = {
    "metric_fn": torch.nn.functional.cross_entropy, "input_key": "logits", "target_key": "targets", "metric_key": "loss"
}  # fmt: skip
ACCURACY = classification.MulticlassAccuracy(5, average="micro", validate_args=False)


@pytest.mark.parametrize(
    "callback",
    [
        FunctionalBatchMetricCallback(**CROSS_ENTROPY, log_on_batch=False),
        FunctionalBatchMetricCallback(**CROSS_ENTROPY),
        BatchMetricCallback(ACCURACY, "logits", "targets"),
        BatchMetricCallback(torchmetrics.MeanSquaredError(num_outputs=5), "logits", "logits"),
    ],
)
def test_step_reads_nothing_from_the_device(callback):
    """A host synchronization per batch would stall the GPU; reading a value from the meta device raises."""
    runner = make_runner(engine=SimpleNamespace(device=torch.device("meta"), rank=0, num_processes=1))
    batch = {"logits": torch.empty(8, 5, device="meta"), "targets": torch.empty(8, dtype=torch.int64, device="meta")}

    run_loader(callback, runner, [batch, batch])

    assert all(value.device.type == "meta" for value in runner.batch_metrics.values())


def test_functional_metric_keeps_the_graph_and_has_a_name():
    """The value may be part of the loss."""
    logits = torch.rand(4, requires_grad=True)
    keys = {"input_key": {"logits": "input"}, "target_key": {"targets": "target"}}
    callback = FunctionalBatchMetricCallback(l1_loss, **keys, metric_key="mae", prefix="a_")
    runner = make_runner()

    run_loader(callback, runner, [{"logits": logits, "targets": torch.zeros(4)}])
    end_loader(callback, runner)

    assert callback.provides == ("a_mae",)
    assert torch.equal(torch.autograd.grad(runner.batch_metrics["a_mae"], logits)[0], torch.full((4,), 0.25))
    assert runner.loader_metrics == {}  # the runner computes the mean


def test_functional_metric_off_the_batch_is_weighted_by_batch_size():
    """A short last batch counts by its samples, over all processes."""
    shares = [[{"x": torch.full((4,), 1.0)}, {"x": torch.full((1,), 5.0)}], [{"x": torch.full((3,), 2.0)}]]
    callback = FunctionalBatchMetricCallback(torch.mean, input_key="x", target_key=[], log_on_batch=False)

    runners, _ = evaluate_on_ranks(callback, shares)

    assert [runner.loader_metrics for runner in runners] == [{"mean": (4 * 1 + 5 + 3 * 2) / 8}] * 2
    assert all(runner.batch_metrics == {} for runner in runners)


class NumSamples:
    """Metric object with the key-value protocol."""

    def reset(self):
        self.count = 0

    def update(self, targets):
        self.count += len(targets)

    def update_key_value(self, targets):
        self.update(targets)
        return {"n": len(targets)}

    def compute_key_value(self):
        return {"n": self.count}


@pytest.mark.parametrize("kind", [BatchMetricCallback, LoaderMetricCallback])
def test_objects_with_the_key_value_protocol_are_metrics(kind):
    """Their names are their own, with prefix and suffix; only BatchMetricCallback logs batches by default."""
    callback, runner = kind(NumSamples(), "targets", [], prefix="my_"), make_runner()

    run_loader(callback, runner, binary_batches([4, 2]))
    of_batch = dict(runner.batch_metrics)
    end_loader(callback, runner)

    assert runner.loader_metrics == {"my_n": 6}
    assert of_batch == ({"my_n": 2} if kind is BatchMetricCallback else {})
