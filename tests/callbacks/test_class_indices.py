"""Invalid class indices are refused on every device: at the loader's end where reading them would synchronize."""

from functools import partial

import pytest
import torch

from runnerkit import dl
from runnerkit.metrics import class_indices
from tests.callbacks.stand_ins import end_loader, evaluate, make_runner, run_loader
from tests.ranks import Ranks

LOGITS = torch.eye(3).repeat(2, 1)
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
MAKE = {
    "f1": lambda: dl.PrecisionRecallF1SupportCallback("x", "y", num_classes=3, compute_per_class_metrics=True),
    "confusion": lambda: dl.ConfusionMatrixCallback("x", "y", num_classes=3, log_counts=True),
}


@pytest.fixture
def reading_costs(monkeypatch):
    """Treat the CPU as a device where reading a value synchronizes, like a GPU."""
    monkeypatch.setattr(class_indices, "_FREE_TO_READ", frozenset())


def changed(indices, place, value):
    return torch.cat([indices[:place], torch.tensor([value]), indices[place + 1 :]])


@pytest.mark.usefixtures("reading_costs")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (LOGITS, changed(CLASSES, 4, -100), r"loader .train.: 1 targets are outside of \[0, 3\); remove rows"),
        (LOGITS, changed(CLASSES, 1, 255), r"loader .train.: 1 targets are outside"),
        (changed(CLASSES, 0, 3), CLASSES, r"loader .train.: 1 outputs are outside"),
        (changed(CLASSES, 5, -1), CLASSES, r"loader .train.: 1 outputs are outside"),
        (changed(CLASSES, 5, 3), changed(CLASSES, 5, 3), r"loader .train.: 1 targets are outside"),
    ],
    ids=["ignore_index", "void", "predicted too large", "predicted negative", "both, and alike"],
)
def test_what_is_no_class_is_refused_at_the_end_on_all_ranks(name, outputs, targets, message):
    """The error is raised on all ranks, even on those whose own indices are valid."""
    batches = [{"x": outputs, "y": targets}], [{"x": outputs[1:4], "y": CLASSES[1:4]}]
    ranks = Ranks(2)
    pairs = [(MAKE[name](), make_runner(engine=engine, loggers={})) for engine in ranks.engines]
    for (callback, runner), share in zip(pairs, batches, strict=True):
        run_loader(callback, runner, share)

    def end(callback, runner):
        with pytest.raises(ValueError, match=message):
            end_loader(callback, runner)
        return "refused"

    assert ranks.call(*(partial(end, *pair) for pair in pairs)) == ["refused"] * 2


@pytest.mark.usefixtures("reading_costs")
@pytest.mark.parametrize("name", MAKE)
def test_values_are_the_same_where_nothing_is_looked_at(name, monkeypatch):
    """The extra bin for invalid indices does not appear in averages or in the confusion matrix."""
    found = []
    for free in (frozenset({"cpu"}), frozenset()):
        monkeypatch.setattr(class_indices, "_FREE_TO_READ", free)
        found.append(evaluate(MAKE[name](), [{"x": LOGITS, "y": CLASSES.flip(0)}]).loader_metrics)

    assert found[0] == found[1]
    assert len(found[0]) in (9, 9 + 4 * 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MAKE)
def test_a_gpu_survives_what_is_no_class(name):
    """torch's own check is a device-side assert, after which the process cannot use the GPU."""
    with pytest.raises(ValueError, match="1 targets are outside"):
        evaluate(MAKE[name](), [{"x": LOGITS.cuda(), "y": changed(CLASSES, 4, -100).cuda()}])
    assert float(torch.ones((), device="cuda")) == 1


def test_the_area_under_the_curve_needs_classes_too():
    """AUC checks the targets at the loader's end, when it has all of them."""
    with pytest.raises(ValueError, match=r"targets must be class indices in \[0, 3\), got -100 to 2"):
        evaluate(dl.AUCCallback("x", "y"), [{"x": LOGITS, "y": changed(CLASSES, 4, -100)}])
