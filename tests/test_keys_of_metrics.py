"""Arguments of metric callbacks: keys of the runner by default, one order, and the former positions and names."""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss

from runnerkit import dl, metrics
from tests.tiny import loader, mlp, train

LOADERS = {"train": loader(16, 4), "valid": loader(11, 4)}


def keyless():
    """Return a function for each metric callback that makes it, with the keys or without."""
    both = {"num_classes": 3}
    return {
        "accuracy": lambda *keys: dl.AccuracyCallback(*keys, topk=(1, 2)),
        "f1": lambda *keys: dl.PrecisionRecallF1SupportCallback(*keys),
        "auc": lambda *keys: dl.AUCCallback(*keys),
        "confusion": lambda *keys: dl.ConfusionMatrixCallback(*keys, **both, log_counts=True),
        "batch": lambda *keys: dl.BatchMetricCallback(metrics.AccuracyMetric(), *keys),
        "loader": lambda *keys: dl.LoaderMetricCallback(metrics.AccuracyMetric(), *keys),
        "function": lambda *keys: dl.FunctionalBatchMetricCallback(
            cross_entropy, **dict(zip(("input_key", "target_key"), keys, strict=False))
        ),
        "catalyst": lambda *keys: dl.FunctionalMetricCallback(*(keys or (None, None)), cross_entropy, "catalyst"),
        "criterion": lambda *keys: dl.CriterionCallback(*keys, metric_key="again"),
    }


MASKS = {
    name: lambda *keys, kind=name: getattr(dl, f"{kind}Callback")(*keys)
    for name in (
        *("MultilabelAccuracy", "MultilabelPrecisionRecallF1Support", "R2Squared", "IOU", "Dice", "Tversky"),
        *("Hitrate", "MRR", "MAP", "NDCG"),
    )
}


def evaluated(callback, loader_, **keys):
    runner = dl.SupervisedRunner(nn.Sequential(mlp(), nn.Softmax(dim=1)), "cpu", **keys)
    return runner.evaluate_loader(loader_, callbacks=[callback], criterion=nn.CrossEntropyLoss())


@pytest.mark.parametrize("make", keyless().values(), ids=keyless())
def test_keys_are_those_of_the_runner(make):
    """Without keys a callback has the values that it has with the runner's keys; explicit keys take precedence."""
    names = {"output_key": "scores", "target_key": "labels"}

    by_default, explicit = make(), make("scores", "labels")

    assert evaluated(by_default, LOADERS["valid"], **names) == evaluated(explicit, LOADERS["valid"], **names)
    assert evaluated(by_default, LOADERS["valid"]) == evaluated(explicit, LOADERS["valid"], **names)  # another runner


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_keys_of_metrics_of_rows_are_those_of_the_runner(make):
    """Targets as rows of 0 and 1."""
    features = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    rows = [(part, (part[:, :3] > 0).float()) for part in features.split(4)]
    names = {"output_key": "scores", "target_key": "labels"}

    assert evaluated(make(), rows, **names) == evaluated(make("scores", "labels"), rows, **names)


def test_cmc_reads_the_runner_and_the_usual_query_key():
    """The digits of `contrib` have "is_query"."""
    features = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    batch = {"features": features, "targets": torch.arange(12) % 3, "is_query": torch.arange(12) < 6}

    found = [evaluated(each, [batch]) for each in (dl.CMCScoreCallback(), dl.CMCScoreCallback("logits", "targets"))]

    assert found[0] == found[1] and 0 <= found[0]["cmc01"] <= 1


def test_every_metric_callback_is_tested_without_keys():
    """All with keys but those of scikit-learn, which lack usual ones, and former names."""
    listed = [getattr(dl, name) for name in dl.__all__]
    kinds = [each for each in listed if inspect.isclass(each) and issubclass(each, dl.IMetricCallback)]
    takes_keys = {each for each in kinds if "_key" in str(inspect.signature(each))}
    here = {type(make("x", "y")) for make in [*keyless().values(), *MASKS.values()]} | {dl.CMCScoreCallback}

    of_sklearn = {dl.SklearnBatchCallback, dl.SklearnLoaderCallback, dl.SklearnModelCallback}
    assert takes_keys - here == {dl.MetricAggregationCallback} | of_sklearn


def test_renamed_outputs_and_targets_count():
    """An output that a dict renames has the new name; a target that a dict renames for the criterion, the batch's."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return {"out": self.inner(x)}

    def criterion(scores, target):
        return cross_entropy(scores, target)

    names = {"output_key": {"out": "scores"}, "target_key": {"targets": "target"}}
    runner = dl.SupervisedRunner(Two(), "cpu", **names)

    found = runner.evaluate_loader(
        LOADERS["valid"], criterion=criterion, callbacks=[dl.AccuracyCallback(), dl.CriterionCallback()]
    )

    hits = mlp()(LOADERS["valid"].dataset.tensors[0]).argmax(dim=1) == LOADERS["valid"].dataset.tensors[1]
    assert found["accuracy"] == hits.double().mean().item() and found["loss"] > 0


def test_a_wrapped_callback_finds_its_keys():
    """A wrapper that leaves out loaders, or a callback that is enabled late, changes nothing."""
    only_valid = dl.ControlFlowCallback(dl.AccuracyCallback(), loaders="valid")
    late = dl.CallbackWrapper(dl.FunctionalBatchMetricCallback(cross_entropy), enable_callback=False)
    later = dl.CallbackWrapper(dl.MRRCallback(), enable_callback=False)
    object_late = dl.CallbackWrapper(dl.AccuracyCallback(prefix="late_"), enable_callback=False)

    class Enable(dl.Callback):
        def on_loader_start(self, runner):
            late.enable_callback = object_late.enable_callback = runner.loader_key == "valid"

    enable = Enable(order=-1)
    runner = train(callbacks=[enable, only_valid, late, later, object_late], loaders=LOADERS)

    valid = runner.epoch_metrics["valid"]
    assert valid["accuracy"] == valid["late_accuracy"]
    assert valid["cross_entropy"] == pytest.approx(valid["loss"], rel=1e-6)
    assert not runner.epoch_metrics["train"].keys() & {"accuracy", "late_accuracy", "cross_entropy"}


class Plain(dl.Runner):
    """Not a SupervisedRunner."""

    def handle_batch(self, batch):
        self.batch = {"logits": self.model(batch[0]), "targets": batch[1]}


@pytest.mark.parametrize(
    ("callback", "runner", "words"),
    [
        (dl.AccuracyCallback, Plain, ["AccuracyCallback: pass input_key=", "Plain is not a SupervisedRunner"]),
        (dl.CriterionCallback, Plain, ["CriterionCallback: pass input_key= and target_key=", "Plain"]),
        (lambda: dl.BatchMetricCallback(metrics.AccuracyMetric(), "logits"), Plain, ["pass target_key="]),
        (lambda: dl.FunctionalBatchMetricCallback(cross_entropy), Plain, ["FunctionalBatchMetricCallback: pass input"]),
        (dl.CMCScoreCallback, Plain, ["CMCScoreCallback: pass embeddings_key="]),
        (dl.AccuracyCallback, lambda: dl.SupervisedRunner(output_key=["a", "b"]), ["pass input_key=", "['a', 'b']"]),
        (dl.AccuracyCallback, lambda: dl.SupervisedRunner(target_key=["a", "b"]), ["pass target_key=", "['a', 'b']"]),
    ],
)
def test_a_runner_without_keys_says_what_to_write(callback, runner, words):
    """The error comes before the first batch."""
    batches = []

    with pytest.raises(TypeError) as caught:
        train(runner=runner(), callbacks=[callback()], loaders={"train": map(batches.append, [1])}, num_steps=1)

    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert batches == []


def test_explicit_keys_work_in_any_runner():
    """Positionally and by name."""
    found = Plain(mlp(), "cpu").evaluate_loader(
        LOADERS["valid"],
        criterion=nn.CrossEntropyLoss(),
        callbacks=[
            dl.AccuracyCallback("logits", "targets"),
            dl.CriterionCallback(input_key="logits", target_key="targets"),
        ],
    )

    assert 0 <= found["accuracy"] <= 1 and found["loss"] > 0


# The order of arguments.


def test_both_batch_metric_callbacks_have_the_same_arguments():
    """The metric first, then the keys, the name and the rest, in the same order."""
    of_object, of_function = (
        [*inspect.signature(each).parameters][1:] for each in (dl.BatchMetricCallback, dl.FunctionalBatchMetricCallback)
    )

    assert of_object == of_function == ["input_key", "target_key", "metric_key", "log_on_batch", "prefix", "suffix"]


def test_passes_over_a_loader_take_it_first_and_the_rest_by_name():
    signatures = [
        inspect.signature(each).parameters.values()
        for each in (dl.Runner.evaluate_loader, dl.Runner.predict_loader, dl.Runner.predict_frame)
    ]
    by_position = [[each.name for each in one if each.kind is each.POSITIONAL_OR_KEYWORD] for one in signatures]
    shared = [[each.name for each in one if each.kind is each.KEYWORD_ONLY] for one in signatures[:2]]

    assert by_position == [["self", "loader"]] * 3
    assert shared[0][:3] == shared[1][:3] == ["model", "engine", "seed"]
    assert shared[0][-6:] == shared[1][-6:] == ["precision", "cpu", "fp16", "amp", "apex", "ddp"]


def test_former_positions_say_what_to_write():
    """They work as before, with one warning at the user's line."""
    model, runner = mlp(), dl.SupervisedRunner(mlp(seed=3), "cpu")
    accuracy = [dl.AccuracyCallback()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = [
            runner.evaluate_loader(LOADERS["valid"], accuracy, model, "cpu"),
            evaluated(dl.FunctionalBatchMetricCallback(l1_loss, "mae", "scores", "scores", False), LOADERS["valid"],
                      output_key="scores"),
            dl.BatchMetricCallback(metrics.AccuracyMetric(), "logits", "targets", False).log_on_batch,
        ]  # fmt: skip
    now = [
        runner.evaluate_loader(LOADERS["valid"], callbacks=accuracy, model=model, engine="cpu"),
        evaluated(
            dl.FunctionalBatchMetricCallback(
                l1_loss, input_key="scores", target_key="scores", metric_key="mae", log_on_batch=False
            ),
            LOADERS["valid"],
            output_key="scores",
        ),
        False,
    ]

    messages = [str(each.message) for each in caught]
    assert before == now
    assert {each.category for each in caught} == {FutureWarning} and {each.filename for each in caught} == {__file__}
    assert [message.split(": write ")[1] for message in messages] == [
        "callbacks=..., model=..., engine='cpu'",
        "metric_key='mae', input_key='scores', target_key='scores', log_on_batch=False",
        "log_on_batch=False",
    ]
    assert [message.split(":")[0] for message in messages] == [
        "evaluate_loader", "FunctionalBatchMetricCallback", "BatchMetricCallback"
    ]  # fmt: skip


def test_wrong_positions_raise_as_usual():
    runner = dl.SupervisedRunner(mlp(), "cpu")
    with pytest.raises(TypeError, match="takes arguments by name"):
        runner.predict_loader(LOADERS["valid"], mlp())
    with pytest.raises(TypeError, match="by name"):
        runner.evaluate_loader(LOADERS["valid"], [], callbacks=[])
    with pytest.raises(TypeError, match="positional"):
        dl.FunctionalBatchMetricCallback(l1_loss, "a", "b", "c", True, "d")


def test_a_function_gives_its_name_or_says_what_is_missing():
    assert dl.FunctionalBatchMetricCallback(l1_loss, prefix="my_").provides == ("my_l1_loss",)
    with pytest.raises(TypeError, match="FunctionalBatchMetricCallback: pass metric_key="):
        dl.FunctionalBatchMetricCallback(lambda x, y: x.mean())


# Tversky.


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, None), (0.7, 0.7), (1, 1), (0.5, None)])
def test_tversky_is_its_formula(alpha, beta):
    """Hits / (hits + beta * false alarms + alpha * misses) from counts of masks, over all batches."""
    draws = torch.Generator().manual_seed(0)
    masks, targets = (torch.rand(10, 2, 5, 5, generator=draws) for _ in range(2))
    targets = (targets > 0.6).float()

    class Masks(dl.Runner):
        def handle_batch(self, batch):
            self.batch = dict(zip(("masks", "right"), batch, strict=True))

    found = Masks(nn.Identity(), "cpu").evaluate_loader(
        [(masks[:7], targets[:7]), (masks[7:], targets[7:])],
        callbacks=[dl.TverskyCallback("masks", "right", alpha, beta, threshold=0.5)],
    )

    on, right = masks.double() > 0.5, targets > 0
    hits, alarms, misses = (each.double().sum(dim=(0, 2, 3)) for each in (on & right, on & ~right, ~on & right))
    weight = 1 - alpha if beta is None else beta
    assert found["tversky"] == pytest.approx((hits / (hits + weight * alarms + alpha * misses)).mean().item(), rel=1e-9)
    if alpha == 0.5 and beta is None:
        dice = 2 * hits / (2 * hits + alarms + misses)
        assert found["tversky"] == pytest.approx(dice.mean().item(), rel=1e-9)


def test_the_misspelt_callback_works_and_says_the_right_name():
    """It logs "trevsky" as before."""
    with pytest.warns(FutureWarning, match="TrevskyCallback is deprecated.*write TverskyCallback") as caught:
        callback = dl.TrevskyCallback("masks", "targets", alpha=0.3)

    assert [each.filename for each in caught] == [__file__]
    assert callback.provides == ("trevsky", "trevsky/_macro", "trevsky/_micro")
    assert dl.TverskyCallback().provides == ("tversky", "tversky/_macro", "tversky/_micro")
