"""Tests that public signatures are complete, typed and documented, without arguments hidden in **kwargs."""

import inspect
import typing

import pytest

import runnerkit
from runnerkit import contrib, data, dl, engines, utils
from runnerkit.engine import EngineOptions
from runnerkit.engines.ddp import DistributedDataParallelOptions
from runnerkit.engines.fsdp import FullyShardedDataParallelOptions
from runnerkit.engines.horovod import HorovodOptions
from runnerkit.engines.launch.process_group_engine import ProcessGroupOptions

TRAIN = inspect.signature(dl.SupervisedRunner.train).parameters
# Functions whose **kwargs have names from the user: arguments of `predict_batch`, a model, a pruning function or a
# class or function of scikit-learn, keys of loaders, or arguments of `wandb.init` and Comet's `ExperimentConfig`.
OPEN = {"predict_batch", "predict_loader", "predict_to", "predict_frame", "trace_model", "onnx_export", "prune_model"}
OPEN |= {"BatchOverfitCallback", "PeriodicLoaderCallback", "SklearnModelCallback", "CometLogger", "WandbLogger"}
OPEN |= {"SklearnBatchCallback", "SklearnLoaderCallback", "SupervisedRunner.forward", "SelfSupervisedRunner.forward"}


def public_functions():
    """Yield the functions, constructors and methods that users call."""
    public = [
        getattr(module, name) for module in (runnerkit, contrib, data, dl, engines, utils) for name in module.__all__
    ]
    for value in public:
        members = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else [(value, value)]
        yield from (each for name, each in members if name == "__init__" or not str(name).startswith("_"))


FUNCTIONS = {
    each for each in public_functions() if inspect.isfunction(each) and each.__module__.startswith("runnerkit.")
}


def test_train_names_and_types_each_argument():
    """train() has keyword-only arguments without **kwargs, and all annotations resolve."""
    hints = typing.get_type_hints(dl.SupervisedRunner.train)

    assert {each.kind for name, each in TRAIN.items() if name != "self"} == {inspect.Parameter.KEYWORD_ONLY}
    assert TRAIN.keys() - {"self"} == hints.keys() - {"return"}


def test_no_public_function_hides_names():
    """**kwargs are typed by a TypedDict, which editors complete, unless their names come from the user."""
    hiding = [
        f"{function.__qualname__}(**{name})"
        for function in FUNCTIONS
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is inspect.Parameter.VAR_KEYWORD and not str(each.annotation).startswith("Unpack[")
    ]

    assert [each for each in hiding if not any(name in each for name in OPEN)] == []


def test_every_argument_of_a_public_function_has_a_type():
    """Every argument and return value of a public function has a type."""
    untyped = [
        f"{function.__qualname__}({name})"
        for function in FUNCTIONS
        for name in [*inspect.signature(function).parameters, "return"]
        if name not in {"self", "cls", *function.__annotations__}
    ]

    assert untyped == []


@pytest.mark.parametrize(
    ("engine", "options", "base"),
    [
        (dl.DistributedDataParallelEngine, DistributedDataParallelOptions, ProcessGroupOptions),
        (dl.FullyShardedDataParallelEngine, FullyShardedDataParallelOptions, ProcessGroupOptions),
        (dl.HorovodEngine, HorovodOptions, EngineOptions),
    ],
)
def test_options_of_an_engine_are_its_arguments(engine, options, base):
    """The TypedDict of an engine's options has the names and types of the engine's arguments."""
    hints = typing.get_type_hints(engine.__init__)
    own = {
        name: hints[name]
        for name, each in inspect.signature(engine).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }

    assert {**own, **typing.get_type_hints(base)} == typing.get_type_hints(options)
