"""Names that users type: engines and precisions by name, `gradient_clip`, and the list of `dl`."""

import importlib
import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runnerkit import dl
from runnerkit.commands.config import read_config
from runnerkit.commands.configured_run import make_run
from runnerkit.support.stub_names import imports_of_stub
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights

MAX_NORM = 0.05
LOADERS = {"train": loader(16, 4), "valid": loader(11, 4)}


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


class ByName(dl.SupervisedRunner):
    """A runner whose hook names its engine."""

    def get_engine(self):
        return "cpu"


# Engines and precisions.


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "cpu", "precision": "bf16"},
        {"engine": "CPUEngine", "precision": "bf16"},
        {"engine": dl.CPUEngine(precision="bf16")},
        {"engine": dl.DeviceEngine("cpu", precision="bf16")},
    ],
)
def test_a_name_trains_like_the_hand_written_loop(options):
    """The weights are those of autocast around the forward pass, bit for bit."""
    reference = mlp()
    train_by_hand(reference, sgd(reference), LOADERS["train"], autocast=autocast)

    runner = train(**options, loaders={"train": LOADERS["train"]})

    assert isinstance(runner.engine, dl.DeviceEngine)
    assert torch.equal(weights(runner.model), weights(reference))


def test_processes_start_by_name():
    """`engine="ddp"` is `ddp=True`: two processes without GPUs."""
    runner = train(engine="ddp", loaders={"train": LOADERS["train"]})

    assert type(runner.engine) is dl.DistributedDataParallelEngine
    assert runner.engine.num_processes == dl.get_available_engine(ddp=True).num_processes


@pytest.mark.parametrize("runner", [dl.SupervisedRunner(engine="cpu"), dl.SupervisedRunner(None, "CPUEngine")])
def test_a_runner_is_made_with_a_name(runner):
    """The name counts for training, evaluation and prediction."""
    model = mlp()

    runner.train(model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders=LOADERS)

    assert type(runner.engine) is dl.CPUEngine
    assert runner.evaluate_loader(LOADERS["valid"])["loss"] > 0
    assert len(list(runner.predict_loader(LOADERS["valid"]))) == 3


def test_a_precision_may_follow_the_name_of_a_runner():
    """As it may follow `engine=` of `train`."""
    runner = train(runner=dl.SupervisedRunner(engine="cpu"), engine=None, precision="bf16")

    assert type(runner.engine) is dl.CPUEngine and runner.engine.precision.dtype == torch.bfloat16


class Own(dl.IRunner):
    """A runner with all its hooks."""

    def get_engine(self):
        return "cpu"

    def get_loaders(self, stage):
        return {"train": LOADERS["train"]}

    def handle_batch(self, batch):
        self.batch_metrics["loss"] = cross_entropy(self.model(batch[0]), batch[1])


def test_the_hook_returns_a_name():
    """`get_engine` may return one, for a run and for an evaluation."""
    assert type(Own(mlp()).run().engine) is dl.CPUEngine
    runner = ByName(mlp())
    assert runner.evaluate_loader(LOADERS["valid"], criterion=nn.CrossEntropyLoss())["loss"] > 0
    assert type(train(runner=ByName(), engine=None).engine) is dl.CPUEngine


@pytest.mark.parametrize("options", [{"engine": "cpu"}, {"engine": "dp", "precision": "bf16"}, {"precision": "bf16"}])
def test_evaluation_and_prediction_take_names(options):
    """They compute what plain torch does."""
    model = mlp().eval()
    context = autocast() if "precision" in options else torch.no_grad()
    with torch.no_grad(), context:
        logits = [model(features) for features, _ in LOADERS["valid"]]
    runner = dl.SupervisedRunner(model)

    if "engine" in options or not torch.cuda.is_available():
        predicted = [batch["logits"] for batch in runner.predict_loader(LOADERS["valid"], **options)]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(predicted, logits, strict=True))
    found = runner.evaluate_loader(LOADERS["valid"], callbacks=[dl.AccuracyCallback()], **options)
    hits = torch.cat([each.argmax(dim=1) for each in logits]) == LOADERS["valid"].dataset.tensors[1]
    assert found["accuracy"] == hits.double().mean().item()


def test_predict_to_takes_names(tmp_path):
    """All three passes have the same arguments for the engine."""
    path = dl.SupervisedRunner(mlp()).predict_to(
        tmp_path / "out.csv", loader=LOADERS["valid"], engine="cpu", precision="bf16"
    )

    assert len(path.read_text().splitlines()) == 12


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: train(engine="ddpp"), ValueError, ["unknown engine 'ddpp'", "did you mean 'ddp'?"]),
        (lambda: train(engine=""), ValueError, ["unknown engine ''"]),
        (lambda: dl.SupervisedRunner(engine="CPUEngin"), ValueError, ["did you mean 'CPUEngine'?"]),
        (lambda: train(engine=3), TypeError, ["engine=3", "'ddp'"]),
        (lambda: train(engine="cpu", precision="bfloat16"), ValueError, ["did you mean 'bf16'?"]),
        (lambda: dl.CPUEngine(precision="bf16-mixed"), ValueError, ["did you mean 'bf16'?"]),
        (lambda: dl.CPUEngine(precision=torch.bfloat16), TypeError, ["CPUEngine", "did you mean 'bf16'?"]),
        (lambda: dl.DistributedDataParallelEngine(precision=dl.AMP), TypeError, ["DistributedData", "dl.AMP()"]),
        (lambda: train(engine="AMPEngine", precision="bf16"), ValueError, ["AMPEngine", "fixed precision"]),
        (lambda: train(engine="ddp", ddp=True), ValueError, ["engine='ddp'", "ddp=True", "contradict"]),
        (lambda: train(engine="cpu", amp=True, precision="bf16"), ValueError, ["amp=True", "precision='bf16'"]),
        (lambda: train(engine=dl.CPUEngine(), precision="bf16"), ValueError, ["dl.CPUEngine(precision='bf16')"]),
        (lambda: dl.SupervisedRunner(mlp()).evaluate_loader([], engine="cpu", cpu=True), ValueError, ["contradict"]),
        (lambda: dl.SupervisedRunner(mlp()).predict_loader([], engine="cpuu"), ValueError, ["did you mean 'cpu'?"]),
    ],
)
def test_a_wrong_name_says_what_to_write(call, error, words):
    """Flags beside a name contradict it as they do an engine object."""
    with pytest.raises(error) as caught:
        call()

    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("name", ["fp32", "amp", "fp16", "bf16", "fp8"])
@pytest.mark.parametrize("kind", [dl.CPUEngine, dl.DataParallelEngine, dl.DistributedDataParallelEngine])
def test_constructors_take_each_name_of_a_precision(kind, name):
    """They are the names of `train` and of the command line."""
    precision = kind(precision=name).precision

    assert type(precision) is {"fp32": dl.FP32, "fp8": dl.Float8}.get(name, dl.AMP)
    if name in ("fp16", "bf16"):
        assert precision.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[name]


CONFIG = """
runner: {_target_: runnerkit.dl.SupervisedRunner, engine: cpu}
model: {_target_: torch.nn.Linear, in_features: 6, out_features: 3}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loaders:
  train: {_target_: tests.tiny.loader, num_samples: 16, batch_size: 4}
engine: {_target_: runnerkit.dl.CPUEngine, precision: bf16}
callbacks: [{_target_: runnerkit.dl.OptimizerCallback, gradient_clip: 0.5}, {_target_: runnerkit.dl.AccuracyCallback}]
gradient_clip: 0.05
"""


def test_a_config_has_the_same_names(tmp_path):
    """Components of a YAML file take the names of engines and precisions, `gradient_clip`, and no keys."""
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")

    runner, arguments = make_run(read_config(tmp_path / "run.yaml"))

    assert arguments["gradient_clip"] == MAX_NORM
    assert arguments["engine"].precision.dtype == torch.bfloat16
    assert arguments["callbacks"][0].grad_clip_params == {"max_norm": 0.5}
    assert "accuracy" in runner.train(**arguments | {"loggers": {"console": None}}).epoch_metrics["train"]


# Clipping.


class Learns(dl.SupervisedRunner):
    """A runner that makes its own steps, with the arguments of `learn` in its class."""

    steps_itself = True
    how: dict = {"gradient_clip": MAX_NORM}

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.learn(cross_entropy(self.batch["logits"], self.batch["targets"]), **self.how)


class LearnsAsBefore(Learns):
    how = {"clip": MAX_NORM}


class LearnsFreely(Learns):
    how = {"clip": lambda parameters: nn.utils.clip_grad_norm_(parameters, MAX_NORM)}


CLIPPED = {
    "train": lambda: {"gradient_clip": MAX_NORM},
    "optimizer": lambda: {"callbacks": [dl.OptimizerCallback(gradient_clip=MAX_NORM)]},
    "backward": lambda: {"callbacks": [dl.BackwardCallback(gradient_clip=MAX_NORM)]},
    "learn": lambda: {"runner": Learns(), "criterion": None},
    "learn with a function": lambda: {"runner": LearnsFreely(), "criterion": None},
}
CLIPPED_AS_BEFORE = {
    "optimizer": (lambda: {"callbacks": [dl.OptimizerCallback(grad_clip_norm=MAX_NORM)]}, "gradient_clip=0.05"),
    "optimizer by position": (
        lambda: {"callbacks": [dl.OptimizerCallback("loss", None, None, 1, None, None, MAX_NORM)]}, "gradient_clip=0.05"
    ),
    "learn": (lambda: {"runner": LearnsAsBefore(), "criterion": None}, "gradient_clip=0.05"),
}  # fmt: skip


def clipped_by_hand():
    model = mlp()
    train_by_hand(model, sgd(model), LOADERS["train"], max_norm=MAX_NORM)
    return weights(model)


@pytest.mark.parametrize("options", CLIPPED.values(), ids=CLIPPED)
def test_gradient_clip_is_the_norm_everywhere(options):
    """Each way gives the weights of the hand-written loop, bit for bit."""
    runner = train(**options(), loaders={"train": LOADERS["train"]})

    assert torch.equal(weights(runner.model), clipped_by_hand())


@pytest.mark.parametrize(("options", "words"), CLIPPED_AS_BEFORE.values(), ids=CLIPPED_AS_BEFORE)
def test_former_names_of_the_norm_say_the_new_one(options, words):
    """They clip as before, with a warning at the user's line."""
    with pytest.warns(FutureWarning, match=re.escape(words)) as caught:
        runner = train(**options(), loaders={"train": LOADERS["train"]})

    assert {each.filename for each in caught} == {__file__}
    assert torch.equal(weights(runner.model), clipped_by_hand())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dl.OptimizerCallback(gradient_clip=1.0, grad_clip_value=1.0), ValueError, "pass one of gradient_clip"),
        (lambda: dl.BackwardCallback(gradient_clip=1.0, grad_clip_fn=abs), ValueError, "pass one of gradient_clip"),
        (lambda: dl.BackwardCallback(gradient_clip=1.0, grad_clip_params={"a": 1}), ValueError, "grad_clip_params"),
        (lambda: dl.OptimizerCallback(gradient_clip=1.0, grad_clip_params={"a": 1}), ValueError, "grad_clip_params"),
        (lambda: dl.OptimizerCallback(gradient_clip=0), ValueError, "gradient_clip must be > 0"),
        (lambda: dl.BackwardCallback(gradient_clip="1"), TypeError, "gradient_clip must be a number > 0"),
        (lambda: train(max_grad_norm=1.0), TypeError, "did you mean 'gradient_clip'?"),
        (lambda: train(grad_clip_norm=1.0), TypeError, "did you mean 'gradient_clip'?"),
    ],
)
def test_wrong_clipping_says_what_to_write(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_learn_takes_one_way_to_clip():
    class Both(Learns):
        how = {"gradient_clip": 1.0, "clip": abs}

    with pytest.raises(ValueError, match="gradient_clip and clip: pass one"):
        train(runner=Both(), criterion=None)


# What `dl` lists.


def test_dl_lists_what_users_type():
    """Interfaces, wrappers and engines with a precision in their names are left out."""
    found = set(dir(dl))

    assert found == set(dl.__all__)
    assert {"CPUEngine", "DistributedDataParallelEngine", "AccuracyCallback", "Callback", "IRunner", "Runner"} <= found
    assert [name for name in found if re.search(r"^I[A-Z][a-z]|Wrapper$|A(MP|PEX)Engine$", name)] == ["IRunner"]


def test_names_that_dl_does_not_list_are_found_without_a_warning():
    """Old scripts read them as attributes or import them; their packages list them."""
    importable = dict(imports_of_stub("runnerkit.dl"))
    unlisted = importable.keys() - set(dl.__all__)
    packages = ("callbacks", "data", "engines", "loggers")
    listed = {name for package in packages for name in importlib.import_module(f"runnerkit.{package}").__all__}
    scope = {}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(f"from runnerkit.dl import {', '.join(unlisted)}", scope)

    assert {"ICallback", "IEngine", "ILogger", "AMPEngine", "CallbackWrapper", "BatchLimitLoaderWrapper"} <= unlisted
    assert unlisted - listed == {"Precision"}
    assert all(scope[name] is getattr(dl, name) for name in unlisted)


def test_the_list_is_the_one_that_the_script_writes():
    """`make format` writes it, so that a new part is listed without another line."""
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("public_names", root / "scripts" / "public_names.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    assert (root / script.DL).read_text(encoding="utf-8") == script.dl_stub()
