"""Checks of the arguments of callbacks, loggers and engines; errors name the class and the argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from os import PathLike
from typing import Any, TypeVar, cast

from runnerkit.errors import did_you_mean


def check_integers(owner: object, *, least: int | None = 1, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is an integer >= `least`.

    Args:
        owner: an object of the class that the error names, or a name.

    Raises:
        TypeError, ValueError: with the owner, the argument, its value and what is accepted.

    >>> check_integers([], least=2, size=2.5)
    Traceback (most recent call last):
    TypeError: list: size must be an integer >= 2, got 2.5
    """
    bound = "" if least is None else f">= {least}"
    _check(owner, Integral, f"an integer {bound}".strip(), or_none, given)
    for name, value in given.items():
        if value is not None and least is not None and value < least:
            raise ValueError(_describe(owner, name, bound, or_none, value))


def check_numbers(
    owner: object, *, least: float = -math.inf, above: float = -math.inf, or_none: bool = False, **given: Any
) -> None:
    """Raise unless each value is a number, not NaN, >= `least` and > `above`; errors as in `check_integers`."""
    bound = f"> {above}" if above > -math.inf else f">= {least}" if least > -math.inf else ""
    _check(owner, Real, f"a number {bound}".strip(), or_none, given)
    for name, value in given.items():
        if value is not None and not (value >= least and (value > above or above == -math.inf)):
            raise ValueError(_describe(owner, name, bound or "a number", or_none, value))


def check_strings(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a str."""
    _check(owner, str, "a str", or_none, given)


def check_paths(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a str or a path."""
    _check(owner, (str, PathLike), "a path", or_none, given)


def check_flags(owner: object, **given: Any) -> None:
    """Raise unless each value is a bool, or 0 or 1: other values would count as true."""
    for name, value in given.items():
        if isinstance(value, str) or value not in (0, 1):
            raise TypeError(_describe(owner, name, "True or False", False, value))


def check_seed(owner: object, seed: Any) -> None:
    """Raise unless `seed` is an integer that torch accepts."""
    if seed is None:
        raise TypeError(_describe(owner, "seed", "an integer", False, seed) + "; random.randrange(2**32) draws one")
    check_integers(owner, least=None, seed=seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(_describe(owner, "seed", "from -2**63 to 2**64 - 1, the range of torch", False, seed))


def check_mappings(owner: object, **given: Any) -> None:
    """Raise unless each value is a dict or None; what an object holds, which may be secret, is not shown."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Mapping):
            convert = "dataclasses.asdict" if is_dataclass(value) else "vars" if hasattr(value, "__dict__") else "dict"
            shown = f"{value!r}" if isinstance(value, Real) else f"a {type(value).__name__}"
            raise TypeError(
                f"{_name_of(owner)}: {name} must be a dict or None, got {shown}; pass for example {name}={convert}(...)"
            )


def check_names(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a list of str that is not empty."""
    _check(owner, Collection, "a list of str", or_none, given)
    for name, value in given.items():
        if value is not None and (isinstance(value, str) or any(not isinstance(each, str) for each in value)):
            raise TypeError(_describe(owner, name, "a list of str", or_none, value))
        if value is not None and not len(value):
            raise ValueError(_describe(owner, name, "a list of one str or more", or_none, value))


def check_keys(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a batch key: a str, a list or dict of them, or a configuration's types of these."""
    accepted = "a str, a list of str or {batch key: name}"
    _check(owner, (str, Sequence, Mapping), accepted, or_none, given)
    for name, value in given.items():
        if value is not None and not isinstance(value, str) and any(not isinstance(each, str) for each in value):
            raise TypeError(_describe(owner, name, accepted, or_none, value))


def _check(owner: object, kind: Any, accepted: str, or_none: bool, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        is_one = isinstance(value, kind) and not (kind in (Integral, Real) and isinstance(value, bool))
        if not is_one and not (or_none and value is None):
            raise TypeError(_describe(owner, name, accepted, or_none, value))


def _describe(owner: object, name: str, accepted: str, or_none: bool, value: Any) -> str:
    return f"{_name_of(owner)}: {name} must be {accepted}{' or None' * or_none}, got {value!r}"


def _name_of(owner: object) -> str:
    return owner if isinstance(owner, str) else type(owner).__name__


Method = TypeVar("Method", bound=Callable[..., Any])


def explain_calls(**elsewhere: str) -> Callable[[Method], Method]:
    """Decorate a method so that a wrong name of an argument, or one passed by position, raises with what to write.

    Args:
        elsewhere: names of arguments in other libraries, and today's name for each.
    """

    def decorate(method: Method) -> Method:
        kinds = {name: each.kind for name, each in signature(method).parameters.items()}
        is_open = Parameter.VAR_KEYWORD in kinds.values()  # other names belong to the user
        num_by_position = sum(kind is Parameter.POSITIONAL_OR_KEYWORD for kind in kinds.values())  # with self
        named = [name for name, kind in kinds.items() if kind is not Parameter.VAR_KEYWORD][1:]
        call = f"{method.__name__}()"

        @wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if len(args) > num_by_position:
                example = f"{method.__name__}({named[num_by_position - 1]}=...)"
                raise TypeError(f"{call} takes arguments by name, such as {example}")
            for name in kwargs if not is_open else ():
                if name not in kinds:
                    meant = f"; did you mean {elsewhere[name]!r}?" if name in elsewhere else did_you_mean(name, named)
                    raise TypeError(f"{call} does not take the argument {name!r}{meant}")
            return method(*args, **kwargs)

        return cast(Method, checked)

    return decorate


_CALL = {"compute_on_call": "call update, or update_key_value for the values of the batch"}
_KEY = "pass the tensors to update"
_EPS = {"eps": "0 / 0 is 1"}
_LOGDIR = {"use_logdir_postfix": "a logger always has a folder of its own in logdir"}
_METHOD = {"method_name": "wrap the method in a module whose forward calls it"}
# Arguments of Catalyst 21.12 and 22.04 by class: today's name, or what to do instead.
RENAMED: dict[str, dict[str, str]] = {
    "AUCMetric": _CALL,
    "AccuracyMetric": _CALL,
    "CMCMetric": {"embeddings_key": _KEY, "is_query_key": _KEY, "labels_key": _KEY, **_CALL},
    "CSVLogger": _LOGDIR,
    "Callback": {"scope": "leave it out: a callback acts in the stages whose get_callbacks returns it"},
    "CheckpointCallback": {
        "load_on_stage_end": "load_best_on_end",
        "load_on_stage_start": "load_best_on_end, and return self.model in get_model",
        "metrics_filename": "the metrics of the checkpoints are in index.json",
        "min_delta": "any improvement counts",
        "resume": "resume_runner",
        "use_logdir_postfix": "checkpoints are always in a folder of their own in logdir",
        "use_runner_logdir": "logdir",
    },
    "CometLogger": {"comet_mode": "online"},
    "ConfusionMatrixCallback": {"normalized": "normalize"},
    "ConfusionMatrixMetric": {
        "normalize": "divide the counts that compute returns",
        "normalized": "divide the counts that compute returns",
        **_CALL,
    },
    "ConsoleLogger": {"log_hparams": "hyperparameters are printed at the start"},
    "ControlFlowCallback": {"use_global_epochs": "epochs count within the stage"},
    "DiceMetric": {**_EPS, **_CALL},
    "FunctionalBatchMetricCallback": {"metric": "metric_fn"},
    "FunctionalMetricCallback": {"compute_on_call": "log_on_batch"},
    "HitrateMetric": _CALL,
    "IEngine": {
        "apex_kwargs": "opt_level, or another option of the engine",
        "fp16": "precision=dl.AMP()",
        "mixed_precision": "precision=dl.AMP()",
        "num_node_workers": "start the processes of several machines with torchrun",
        "process_group_kwargs": "timeout_s",
        "scaler_kwargs": "precision=dl.AMP()",
        "workers_dist_rank": "start the processes of several machines with torchrun",
        "world_size": "num_processes",
    },
    "IOUMetric": {**_EPS, **_CALL},
    "MAPMetric": _CALL,
    "MLflowLogger": {"registry_uri": "set MLFLOW_REGISTRY_URI", "run": "run_name"},
    "MRRMetric": _CALL,
    "MultilabelAccuracyMetric": _CALL,
    "MultilabelPrecisionRecallF1SupportMetric": _CALL,
    "NDCGMetric": _CALL,
    "OnnxCallback": {
        "do_constant_folding": "the exporter decides",
        "dynamic_axes": "the first axis is always dynamic",
        "verbose": "the exporter logs by the module logging",
        **_METHOD,
    },
    "OptunaPruningCallback": {"min_delta": "any improvement counts"},
    "ProfilerCallback": {
        "epoch": "num_batches",
        "export_chrome_trace_path": "path",
        "export_stacks_kwargs": "path",
        "loader_key": "the first training loader is profiled",
        "profiler_kwargs": "num_batches",
        "tensorboard_path": "tensorboard",
    },
    "PruningCallback": {
        "prune_on_stage_end": "prune_on_epoch_end",
        "remove_reparametrization_on_stage_end": "the pruned weights always replace the masks",
    },
    "QuantizationCallback": {
        "dtype": "weights are quantized to 8 bits",
        "qconfig_spec": "all linear and convolution layers are quantized",
    },
    "TensorboardLogger": _LOGDIR,
    "TracingCallback": _METHOD,
    "TrevskyMetric": {**_EPS, **_CALL},
    "TverskyMetric": {**_EPS, **_CALL},
}


def explain_renamed(kind: type) -> None:
    """Let the ``__init__`` of a class of runnerkit explain the arguments in :data:`RENAMED`."""
    renamed = RENAMED.get(kind.__name__)
    if renamed is None or not kind.__module__.startswith("runnerkit."):
        return
    init: Any = kind.__init__  # type: ignore[misc]

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        refuse_renamed(kind, renamed, given)
        init(self, *args, **given)

    kind.__init__ = checked  # type: ignore[misc]


def refuse_renamed(kind: type, renamed: Mapping[str, str], given: Iterable[str]) -> None:
    """Raise if a `given` argument of a class has another name today.

    Raises:
        TypeError: with that name, or what to do instead.
    """
    for name in given:
        if name in renamed:
            today = renamed[name]
            raise TypeError(
                f"{kind.__name__} does not take {name!r}: " + (f"use {today!r}" if today.isidentifier() else today)
            )
