"""The weights of a run: those in training and those for evaluation, read and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from runnerkit.callback import IWeightAverageCallback, innermost
from runnerkit.checkpoints.file import is_sharded, load_checkpoint
from runnerkit.checkpoints.names import under_names_of, with_tied, without_compiled
from runnerkit.checkpoints.plain_state import as_plain, copied
from runnerkit.checkpoints.trainable import completed, frozen_parameters, hash_of, trainable_part
from runnerkit.checkpoints.weights import read_weights, weights_in
from runnerkit.resume import compatibility
from runnerkit.support import device_move
from runnerkit.support.torch_internals import is_dtensor
from runnerkit.types import StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


def model_state(runner: IRunner, *, whole: bool = True) -> StateDict:
    """Return the weights of the user's module, or of each by key; every rank must call.

    Raises:
        TypeError: a module's extra state cannot be stored in a checkpoint.
    """
    states = {
        key: as_plain(
            without_compiled(runner.engine.model_state_dict(model, whole=whole)),
            f"model_state_dict[{key!r}]" if key else "model_state_dict",
        )
        for key, model in models_of(runner).items()
    }
    return states if isinstance(runner.model, dict) else states[""]


def without_frozen(runner: IRunner, weights: StateDict, hashes: dict[tuple[str, ...], str]) -> StateDict:
    """Return the weights of the user's module, or of each by key, without frozen parameters, but with their hash.

    Args:
        hashes: those that are known, by the names of the parameters; filled on rank zero.
    """
    by_key = weights if isinstance(runner.model, dict) else {"": weights}
    parts: StateDict = {}
    for key, model in models_of(runner).items():
        module = runner.engine.unwrap(model)
        frozen = frozen_parameters(module)
        names = (key, *frozen)
        if frozen and runner.engine.is_main_process and names not in hashes:
            hashes[names] = hash_of(frozen)
        parts[key] = trainable_part(module, by_key[key], hashes.get(names, "")) if frozen else by_key[key]
    return parts if isinstance(runner.model, dict) else parts[""]


def weights_to_save(runner: IRunner, *, whole: bool) -> StateDict:
    """Return the weights used for evaluation, or this process's shard of them; every rank must call."""
    own = _exchanged_state(runner, whole=whole)
    judged = own if own is not None else _judged_state(runner, model_state(runner, whole=whole))
    weights: StateDict = runner.engine.whole_state(judged) if whole else judged
    return weights


def evaluated_and_trained(runner: IRunner, *, whole: bool) -> tuple[StateDict, StateDict]:
    """Return the weights used for evaluation and those in training; every rank must call.

    They are one object if evaluation uses those in training. Afterwards optimizers have the state of training.
    """
    exchanged = _exchanged_state(runner, whole=whole)
    runner.current_run.stage.evaluation_weights.train()  # also of the optimizers' state
    trained = model_state(runner, whole=whole)
    return exchanged if exchanged is not None else _judged_state(runner, trained), trained


def _exchanged_state(runner: IRunner, *, whole: bool) -> StateDict | None:
    """Return a copy of the weights for evaluation if an optimizer has others for it, else None."""
    weights = runner.current_run.stage.evaluation_weights
    if not weights:
        return None
    with weights.evaluating():
        state = model_state(runner, whole=whole)
        copy_of: StateDict = copied(state) if whole else device_move.copied(state)
        return copy_of


def _judged_state(runner: IRunner, trained: StateDict) -> StateDict:
    """Return averages, sharded or not, if a callback keeps them for evaluation; otherwise `trained`."""
    callbacks = map(innermost, runner.callbacks.values())
    judged = [each.judged_weights() for each in callbacks if isinstance(each, IWeightAverageCallback)]
    by_key = {key: without_compiled(state) for each in judged for key, state in each.items()}
    if not by_key:
        return trained
    return {**trained, **by_key} if isinstance(runner.model, dict) else by_key[""]


def modules_of(runner: IRunner) -> dict[str, nn.Module]:
    """Return the modules that hold the weights in training by key, "" for one alone; parameters may be shards."""
    return {key: runner.engine.trained_module(model) for key, model in models_of(runner).items()}


def models_of(runner: IRunner) -> dict[str, nn.Module]:
    """Return the models in training by key, as the engine prepared them if a stage is under way."""
    # Otherwise the engine cannot find the shards of each rank.
    prepared = runner.current_run.stage.training_model
    return as_dict(prepared if prepared is not None else runner.model)


def load_weights_from(runner: IRunner, path: Path) -> None:
    """Load a checkpoint's or a file's weights, of which a process reads no more than it keeps; every rank must call.

    Raises:
        ValueError: they belong to another model.
    """
    engine = runner.engine
    if engine.never_whole and path.is_dir():
        state = engine.load_shards(
            load_checkpoint(path, whole=False) if is_sharded(path) else None, path, only_weights=True
        )
        load_model_state(runner, weights_in(state, path), source=str(path))
    else:
        load_model_state(runner, read_weights(path, mapped=engine.never_whole), source=str(path))


def load_model_state(runner: IRunner, state: StateDict, *, source: str) -> None:
    """Load weights into the user's module, or into each by key.

    Raises:
        ValueError: they belong to another model.
    """
    by_key = state if isinstance(runner.model, dict) else {"": state}
    models = models_of(runner)
    compatibility.check_model_keys(by_key, models, source)
    for key, model in models.items():
        module = runner.engine.unwrap(model)
        has_shards = any(map(is_dtensor, by_key[key].values()))
        own = runner.engine.model_state_dict(model, whole=False) if has_shards else module.state_dict()
        whole = completed(module, by_key[key], without_compiled(own), source=source)
        named = with_tied(module, under_names_of(module, whole))
        try:
            runner.engine.load_model_state_dict(model, named)
        except RuntimeError as error:
            compatibility.check_weights(named, module.state_dict(), source)
            raise ValueError(f"{source} holds another model's weights: {error}") from error
