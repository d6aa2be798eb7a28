"""The full state of a run, as a checkpoint holds it."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from runnerkit.callback import ICallback, IStoppingCallback, IWeightAverageCallback, innermost
from runnerkit.checkpoints.file import is_sharded, load_checkpoint
from runnerkit.checkpoints.names import under_names_of, with_tied, without_compiled
from runnerkit.checkpoints.plain_state import as_plain, copied
from runnerkit.checkpoints.trainable import completed, frozen_parameters, hash_of, trainable_part
from runnerkit.checkpoints.weights import read_weights, weights_in
from runnerkit.resume import compatibility, matching
from runnerkit.sampling.sharding import share_of
from runnerkit.seeding.generators import rng_state
from runnerkit.support import device_move
from runnerkit.types import StateDict, as_dict
from runnerkit.version import __version__

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


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


def _exchanged_state(runner: IRunner, *, whole: bool) -> StateDict | None:
    """Return a copy of the weights for evaluation if an optimizer has others for it, else None."""
    weights = runner._stage.evaluation_weights
    if not weights:
        return None
    with weights.evaluating():
        state = model_state(runner, whole=whole)
        copy_of: StateDict = copied(state) if whole else device_move.copied(state)
        return copy_of


def _judged_state(runner: IRunner, trained: StateDict) -> StateDict:
    """Return averages, sharded or not, if a callback keeps them for evaluation; otherwise `trained`."""
    judged = [each.judged_weights() for each in _innermost(runner) if isinstance(each, IWeightAverageCallback)]
    by_key = {key: without_compiled(state) for each in judged for key, state in each.items()}
    if not by_key:
        return trained
    return {**trained, **by_key} if isinstance(runner.model, dict) else by_key[""]


def _innermost(runner: IRunner) -> Iterator[ICallback]:
    return map(innermost, runner.callbacks.values())


def modules_of(runner: IRunner) -> dict[str, nn.Module]:
    """Return the modules that hold the weights in training by key, "" for one alone; parameters may be shards."""
    return {key: runner.engine.trained_module(model) for key, model in models_of(runner).items()}


def models_of(runner: IRunner) -> dict[str, nn.Module]:
    """Return the models in training by key, as the engine prepared them if a stage is under way."""
    # Otherwise the engine cannot find the shards of each rank.
    return as_dict(runner._stage.training_model if runner._stage.training_model is not None else runner.model)


def state_of(runner: IRunner) -> StateDict:
    """Return the full state, or this process's shard of it; every rank must call: this gathers generator states.

    Raises:
        TypeError: a value, such as a deque in a callback, cannot be stored; the message has its path.
    """
    engine, whole = runner.engine, not runner.engine.sharded_checkpoints
    exchanged = _exchanged_state(runner, whole=whole)
    runner._stage.evaluation_weights.train()  # also of the optimizers' state
    trained = model_state(runner, whole=whole)
    judged = exchanged if exchanged is not None else _judged_state(runner, trained)  # it reproduces the metrics
    # Within a loader the flag ends that loader only; a resumed run must not end the stage because of it.
    stops = runner.need_early_stop and not runner.is_within_loader
    callbacks = {key: callback.state_dict() for key, callback in runner.callbacks.items()}
    identities = {key: matching.identity_of(runner.callbacks[key]) for key, state in callbacks.items() if state}
    # Converted here, not in a thread, so that each rank with a wrong value raises at the first save.
    rest = as_plain({
        "format_version": compatibility.FORMAT_VERSION,
        "runnerkit_version": __version__,
        "settings": compatibility.settings_of(runner),
        "stage_key": runner.stage_key,
        "counters": runner._loader_run.position.state_dict(runner) | {"need_early_stop": stops},
        "stopped_by": stoppers(runner),
        "within": _position(runner) if runner.is_within_loader else None,
        "streams": _streams(runner),
        "stream_orders": {key: share_of(loader).described() for key, loader in runner.loaders.items()},
        "modes": {key: each.state_dict() for key, each in runner._stage.training_modes.items()},
        "criterion_state_dict": _states(runner.criterion),
        "optimizer_state_dict": {
            key: engine.optimizer_state_dict(each, whole=whole) for key, each in as_dict(runner.optimizer).items()
        },
        "optimizer_names": matching.parameter_names(runner, models_of(runner)),
        "scheduler_state_dict": _states(runner.scheduler),
        "engine_state_dict": engine.state_dict(),
        "callbacks": callbacks,
        "callback_identities": identities,
        "runner_states": _states_of_runner(runner),
        "rng": engine.data_parallel.gather_object(rng_state()),
    })  # fmt: skip
    averaged = {"trained_model_state_dict": trained} if judged is not trained else {}
    parts = {"callbacks": rest["callbacks"], "model_state_dict": judged}  # which hold the same averages
    return {**rest, **(engine.whole_state(parts) if whole else parts), **averaged}


def _states_of_runner(runner: IRunner) -> list[StateDict]:
    """Return the runner's own state, or that of each rank if they differ; every rank must call: this gathers."""
    own, ranks = as_plain(runner.state_dict(), "runner"), runner.engine.data_parallel
    if ranks.num_processes == 1:
        return [own]
    own = copied(own)  # a tensor on another GPU does not differ
    hashes = ranks.gather_object(hashlib.sha256(pickle.dumps(own)).digest())
    return [own] if len(set(hashes)) == 1 else ranks.gather_object(own)


def load_states_of_runner(runner: IRunner, states: list[StateDict], *, source: str) -> None:
    """Load this rank's state into the runner, unless it is empty."""
    ranks = runner.engine.data_parallel
    if len(states) not in (1, ranks.num_processes) and runner.engine.is_main_process:
        logger.warning(
            "%s holds states of the runner that differ between %d processes: rank r takes that of rank r modulo %d",
            source, len(states), len(states),
        )  # fmt: skip
    if state := states[ranks.rank % len(states)]:
        runner.load_state_dict(state)


def stoppers(runner: IRunner) -> list[str]:
    """Return the keys of callbacks that have ended the stage."""
    found = {key: innermost(callback) for key, callback in runner.callbacks.items()}
    return [key for key, callback in found.items() if isinstance(callback, IStoppingCallback) and callback.has_stopped]


def _states(components: Any) -> StateDict:
    return {key: each.state_dict() for key, each in as_dict(components).items() if hasattr(each, "state_dict")}


def check_positions(runner: IRunner, *, reason: str) -> None:
    """Raise if the position within an epoch of a training loader cannot be saved.

    Args:
        reason: the argument that asks for it.
    Raises:
        TypeError: with the loader's key.
    """
    for key, loader in runner.loaders.items():
        if key.startswith("train") and not share_of(loader).has_position:
            raise TypeError(
                f"loader {key!r} cannot save its position in the middle of an epoch; leave out {reason} to save at the "
                "end of each epoch, or use a DataLoader whose sampler has a length and is not a DistributedSampler"
            )


def knows_position(loader: Any) -> bool:
    """Return whether the position of a loader under way is known: a subclass may iterate without its sampler."""
    share = share_of(loader)
    return share.has_position and share.is_used


def _position(runner: IRunner) -> StateDict:
    if not knows_position(runner.loader):
        raise TypeError(
            f"loader {runner.loader_key!r} cannot save its position in the middle of an epoch, because the __iter__ of "
            f"{type(runner.loader).__name__} does not use its batch_sampler; save at the end of each epoch"
        )
    share, run = share_of(runner.loader), runner._loader_run
    gather = runner.engine.data_parallel.gather_object
    return {
        "key": runner.loader_key,
        "order": share.described(),
        "position": share.joined(share.position_after(runner.loader_batch_step - run.num_skipped), gather),
        "loader_batch_step": runner.loader_batch_step,
        "loader_sample_step": runner.loader_sample_step,
        "is_ended": runner.need_early_stop,
        "ends_stage": run.ends_stage,
        "is_validated": run.position.is_validated(runner),
        "means": gather(run.means.state_dict()),
    }


def _streams(runner: IRunner) -> StateDict:
    """Return the positions of loaders whose pass continues from epoch to epoch, except of the one that is under way."""
    within = runner.loader_key if runner.is_within_loader else None
    gather = runner.engine.data_parallel.gather_object
    shares = {key: share_of(loader) for key, loader in runner.loaders.items() if key != within}
    return {key: share.joined(share.position, gather) for key, share in shares.items() if share.continues}


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
        has_shards = any(hasattr(each, "placements") for each in by_key[key].values())
        own = runner.engine.model_state_dict(model, whole=False) if has_shards else module.state_dict()
        whole = completed(module, by_key[key], without_compiled(own), source=source)
        named = with_tied(module, under_names_of(module, whole))
        try:
            runner.engine.load_model_state_dict(model, named)
        except RuntimeError as error:
            compatibility.check_weights(named, module.state_dict(), source)
            raise ValueError(f"{source} holds another model's weights: {error}") from error
