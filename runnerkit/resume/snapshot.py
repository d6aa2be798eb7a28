"""The content of a checkpoint: its keys, how they are collected from a run, and how a run restores them."""

from __future__ import annotations

import hashlib
import logging
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

import torch

from runnerkit.callback import ICallback, IStoppingCallback, innermost
from runnerkit.checkpoints.plain_state import as_plain, copied
from runnerkit.engine import IEngine
from runnerkit.logger import Step
from runnerkit.metrics.reduction import Processes
from runnerkit.resume import compatibility, matching, overrides
from runnerkit.resume.loader_place import LoaderPlace
from runnerkit.resume.run_weights import RunWeights
from runnerkit.resume.scored_weights import are_equal
from runnerkit.sampling.orders import EndedOrder, Order
from runnerkit.sampling.sharding import share_of
from runnerkit.sampling.share import PassPosition
from runnerkit.seeding.generators import rng_state, set_rng_state
from runnerkit.storage.claims import bring
from runnerkit.storage.remote.urls import shown
from runnerkit.support.component_members import StateMembers
from runnerkit.support.plain_values import plain
from runnerkit.support.redaction import redacted
from runnerkit.types import StateDict, as_dict
from runnerkit.version import __version__

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


class Content(TypedDict, total=False):
    """The keys of a checkpoint of kind "runner"; one of kind "model" is the value of `model_state_dict` alone.

    Dicts are by the keys of loaders, models, optimizers, ... as the user named them; a single one has the key "".
    A file of an earlier version lacks the keys marked "0.2".
    """

    format_version: int  # of this list; the versions that can be read are in compatibility.py
    runnerkit_version: str
    settings: dict[str, Any]  # 0.2: hyperparameters, seed, precision, options of optimizers: a resume warns of changes
    more_hparams: dict[str, Any]  # 0.2: those of `runner.log_hparams`
    stage_key: str
    counters: StateDict  # steps, samples, metrics of the epoch and of all epochs (loop/position.py); `need_early_stop`
    stopped_by: list[str]  # 0.2: keys of the callbacks that have ended the stage
    within: StateDict | None  # the fields of LoaderPlace (loader_place.py); None at the end of an epoch
    streams: dict[str, PassPosition]  # 0.2: places of other loaders whose pass continues from epoch to epoch
    stream_orders: dict[str, Order | None]  # 0.2: length, unit, sampler and seed of each loader's order
    ended_orders: dict[str, EndedOrder]  # 0.2: the orders of samplers that may keep a state of their own
    modes: dict[str, StateDict]  # 0.2: the modules that the user has put into eval(), of each model
    criterion_state_dict: dict[str, StateDict]  # of those with a state
    optimizer_state_dict: dict[str, StateDict]
    optimizer_names: dict[str, matching.Names]  # 0.2: names of the parameters in the groups of each optimizer
    scheduler_state_dict: dict[str, StateDict]
    engine_state_dict: StateDict  # of its precision: a gradient scaler
    callbacks: dict[str, StateDict]
    callback_identities: dict[str, list[str]]  # 0.2: class and metrics of each callback that has a state
    callback_settings: dict[str, str]  # 0.2: digests of their arguments
    runner_states: list[StateDict]  # 0.2: runner.state_dict(), or that of each process if they differ
    rng: list[StateDict]  # generators of each process among which data is divided
    model_state_dict: StateDict  # weights used for evaluation: averages, or those that were scored; by key if several
    trained_model_state_dict: StateDict  # weights in training, if they are others: a resumed run continues with them
    cut_at: str | None  # 0.2: of a run that a limit ended within the epoch: the checkpoint there, "" if it has none
    shards: StateDict  # of a sharded checkpoint: which tensors lie in which of its files (checkpoints/sharded.py)


@dataclass
class Snapshot:
    """The state of a run: collected to be saved, or found in a checkpoint to be restored.

    Attributes:
        state: keys as in :class:`Content`, the weights alone of kind "model"; after it was restored, without tensors.
        source: path of the checkpoint; empty if the state was collected.
        kind: of the checkpoint.
        whole: whether it holds whole tensors, not this process's shards.
        within: place in the interrupted loader; None at the start of an epoch, and once the loader is entered.
        rng: generator states, to be set after that loader's iterator is made.
    """

    state: StateDict
    source: str = ""
    kind: Literal["model", "runner"] = "runner"
    whole: bool = True
    is_restored: bool = field(default=False, init=False)
    within: LoaderPlace | None = field(default=None, init=False)
    rng: StateDict | None = field(default=None, init=False)

    @classmethod
    def of(cls, runner: IRunner, *, kind: Literal["model", "runner"] = "runner", cut_at: str | None = None) -> Self:
        """Collect the state, or this process's shard of it; every rank must call: this gathers.

        Raises:
            TypeError: a value, such as a deque in a callback, cannot be stored; the message has its path.
        """
        engine, weights = runner.engine, RunWeights(runner)
        if kind == "model":
            whole = not engine.never_whole
            return cls(weights.evaluated(whole=whole), kind=kind, whole=whole)
        whole = not engine.sharded_checkpoints
        evaluated, trained = weights.evaluated_and_trained(whole=whole)
        # Within a loader the flag ends that loader only; a resumed run must not end the stage because of it.
        stops = runner.need_early_stop and not runner.is_within_loader
        loaders = {**runner.loaders, **runner.current_run.stage.left_out_loaders}
        callbacks = {key: callback.state_dict() for key, callback in runner.callbacks.items()}
        with_state = [key for key, state in callbacks.items() if state]
        content: Content = {
            "format_version": compatibility.FORMAT_VERSION,
            "runnerkit_version": __version__,
            "settings": compatibility.resume_settings(runner),
            "more_hparams": plain(redacted(runner.current_run.logs.more_hparams)),
            "stage_key": runner.stage_key,
            "counters": runner.current_run.position.state_dict(runner) | {"need_early_stop": stops},
            "stopped_by": _stoppers(runner.callbacks),
            "within": LoaderPlace.of(runner).state_dict() if runner.is_within_loader else None,
            "streams": _streams(loaders, runner.loader_key if runner.is_within_loader else None, engine),
            "stream_orders": {key: share_of(loader).described() for key, loader in loaders.items()},
            "ended_orders": {} if runner.is_within_loader else _ended_orders(runner.loaders),
            "modes": {key: each.state_dict() for key, each in runner.current_run.stage.training_modes.items()},
            "criterion_state_dict": _states(runner.criterion),
            "optimizer_state_dict": {
                key: engine.optimizer_state_dict(each, whole=whole) for key, each in as_dict(runner.optimizer).items()
            },
            "optimizer_names": matching.parameter_names(runner.optimizer, weights.named_parameters()),
            "scheduler_state_dict": _states(runner.scheduler),
            "engine_state_dict": engine.state_dict(),
            "callbacks": callbacks,
            "callback_identities": {key: matching.identity_of(runner.callbacks[key]) for key in with_state},
            "callback_settings": {key: matching.settings_of(runner.callbacks[key]) for key in with_state},
            "runner_states": _of_processes(as_plain(runner.state_dict(), "runner"), engine.data_parallel),
            "rng": engine.data_parallel.gather_object(rng_state()),
        }  # fmt: skip
        # Converted here, not in a thread, so that each rank with a wrong value raises at the first save.
        state = as_plain(content)
        parts = {"callbacks": state["callbacks"], "model_state_dict": evaluated}  # which hold the same averages
        state |= engine.whole_state(parts) if whole else parts
        if evaluated is not trained:
            state["trained_model_state_dict"] = trained
        return cls({**state, "cut_at": cut_at}, whole=whole)

    def use_scored(self, runner: IRunner, scored: StateDict | None) -> None:
        """Take the weights that an evaluation scored for those of evaluation, if they have changed since.

        The present weights become `trained_model_state_dict`. Every rank must call: this gathers.

        Args:
            scored: of :class:`~runnerkit.resume.scored_weights.ScoredWeights`; None takes the present weights.
        """
        present = RunWeights(runner)
        differs = scored is not None and not are_equal(scored, present.evaluated(whole=False))
        if not any(runner.engine.gather_object(differs)):
            return
        weights = scored if scored is not None else present.evaluated(whole=False)
        weights = runner.engine.whole_state(weights) if self.whole else weights
        if self.kind == "model":
            self.state = weights
        else:
            trained = self.state["model_state_dict"]
            self.state = {"trained_model_state_dict": trained, **self.state, "model_state_dict": weights}

    def leave_out_frozen(self, runner: IRunner, hashes: dict[tuple[str, ...], str]) -> None:
        """Replace frozen parameters by a hash.

        Args:
            hashes: those that are known, as in :meth:`RunWeights.without_frozen`.
        """
        weights = RunWeights(runner)
        if self.kind == "model":
            self.state = weights.without_frozen(self.state, hashes)
            return
        for name in ("model_state_dict", "trained_model_state_dict"):
            if name in self.state:
                self.state[name] = weights.without_frozen(self.state[name], hashes)

    @property
    def step(self) -> Step:
        """The last step of the interrupted run."""
        counters = self.state["counters"]
        within = self.state["within"] or {}
        return Step(self.state["stage_key"], within.get("key", ""), counters["epoch_step"], counters["batch_step"])

    @property
    def place(self) -> tuple[int, float]:
        """Epoch, and step within it; infinite at its end."""
        step = self.step
        return step.epoch, step.batch if self.state["within"] is not None else math.inf

    def apply(self, runner: IRunner) -> None:
        """Restore the state into components that exist and callbacks that have started; every rank must call.

        An interrupted loader enters its place when it begins, and then calls :meth:`restore_rng`.

        Raises:
            ValueError: the run cannot continue from it: :mod:`runnerkit.resume.compatibility`.
        """
        state, source, engine = self.state, self.source, runner.engine
        compatibility.check_loader(state["within"], runner.loaders, source)
        compatibility.check_orders(state, runner.loaders, source)
        for key, ended in state.get("ended_orders", {}).items():  # absent before 0.2
            share_of(runner.loaders.get(key)).repeat_order(ended)
        passed = compatibility.resume_settings(runner)
        if "shards" in state:
            # Every rank must enter: rank zero broadcasts the place, and each reads what it needs.
            state = engine.load_shards(state, bring(*engine.broadcast_object((source, shown(source)))))
        # If evaluation uses other weights, the trained ones are stored separately.
        weights = "trained_model_state_dict" if "trained_model_state_dict" in state else "model_state_dict"
        RunWeights(runner).load(state[weights], source=source)
        self._restore_optimizers(runner, state)
        for key, criterion in as_dict(runner.criterion).items():
            if key in state["criterion_state_dict"]:
                criterion.load_state_dict(state["criterion_state_dict"][key])
        self._restore_schedulers(runner, state)  # after optimizers, whose rates it may set
        for key, modes in runner.current_run.stage.training_modes.items():
            modes.load_state_dict(state.get("modes", {}).get(key, {}))
        engine.load_state_dict(state["engine_state_dict"])
        self._restore_callbacks(runner, state)
        self._restore_runner(runner, state.get("runner_states", [{}]))
        if "settings" in state and engine.is_main_process:
            now, takes_passed = compatibility.resume_settings(runner), runner.resume_options == "arguments"
            compatibility.warn_of_changes(state["settings"], passed, now, source, takes_passed=takes_passed)
        logs = runner.current_run.logs
        logs.more_hparams = {**state.get("more_hparams", {}), **logs.more_hparams}
        runner.current_run.position.load_state_dict(runner, state["counters"])
        if runner.current_run.stage.budget.is_epoch_left(runner):
            next_epoch, num_epochs = runner.stage_epoch_step + 1, runner.stage_epoch_len
            compatibility.check_one_cycle(
                runner.scheduler, passed, source, next_epoch=next_epoch, num_epochs=num_epochs
            )
        runner.need_early_stop = state["counters"]["need_early_stop"] and self._stays_stopped(runner, state)
        self.within = LoaderPlace.from_state(state["within"]) if state["within"] is not None else None
        for key, position in state.get("streams", {}).items():
            if (share := share_of(runner.loaders.get(key))).continues:
                share.skip(position)
        rng, ranks = state["rng"], engine.data_parallel
        if len(rng) == ranks.num_processes:
            self.rng = rng[ranks.rank]
        else:
            logger.warning(
                "%s was saved by %d processes: dropout differs, and augmentation on the device", source, len(rng)
            )
        if self.within is None:
            self.restore_rng(runner)
        self.state = {name: state[name] for name in ("stage_key", "counters", "within", "rng")}  # not the weights
        self.is_restored = True

    def _restore_optimizers(self, runner: IRunner, state: StateDict) -> None:
        saved, saved_names = state["optimizer_state_dict"], state.get("optimizer_names", {})
        names = matching.parameter_names(runner.optimizer, RunWeights(runner).named_parameters())
        for key, optimizer in as_dict(runner.optimizer).items():
            if key not in saved:
                continue
            own = saved[key]
            was = state.get("settings", {}).get(f"optimizer {key}".strip())
            compatibility.check_optimizer_state(own, optimizer, self.source, was=was)
            if key in saved_names:
                own = matching.in_order(own, saved_names[key], names[key], self.source)
            options = overrides.options_of(optimizer)
            runner.engine.load_optimizer_state_dict(optimizer, own)
            if runner.resume_options == "arguments":
                overrides.put_options(optimizer, options)

    def _restore_schedulers(self, runner: IRunner, state: StateDict) -> None:
        saved, unit = state["scheduler_state_dict"], runner.scheduler_interval
        was = state.get("settings", {}).get("scheduler_interval", unit)
        counter = {"step": "stage_optimizer_step", "epoch": "stage_epoch_step"}.get(unit or "")
        num_steps = state["counters"].get(counter) if counter is not None and unit != was else None
        for key, scheduler in as_dict(runner.scheduler).items():
            if key in saved and runner.resume_options == "arguments":
                overrides.advance(scheduler, saved[key], num_steps=num_steps)
            elif key in saved:
                scheduler.load_state_dict(saved[key])

    def _restore_callbacks(self, runner: IRunner, state: StateDict) -> None:
        states: dict[str, StateDict] = state["callbacks"]
        identities, settings = state.get("callback_identities", {}), state.get("callback_settings", {})
        found = matching.callback_states(runner.callbacks, states, identities, settings)
        for key, each in found.items():
            runner.callbacks[key].load_state_dict(each)
        taken = {id(each) for each in found.values()}
        ownerless = sorted(key for key, each in states.items() if each and id(each) not in taken)
        if ownerless:
            theirs = [" ".join((key, *identities.get(key, ())[1:])) for key in ownerless]
            own = [" ".join((key, *matching.identity_of(each)[1:])) for key, each in sorted(runner.callbacks.items())]
            logger.warning(
                "%s holds the state of callbacks that the run does not have: %s; it has %s (in a dict they have keys "
                "that do not depend on their order)", self.source, theirs, own,
            )  # fmt: skip

    def _restore_runner(self, runner: IRunner, states: list[StateDict]) -> None:
        ranks = runner.engine.data_parallel
        if len(states) not in (1, ranks.num_processes) and runner.engine.is_main_process:
            logger.warning(
                "%s holds states of the runner that differ between %d processes: rank r takes that of rank r modulo %d",
                self.source, len(states), len(states),
            )  # fmt: skip
        if state := states[ranks.rank % len(states)]:
            runner.load_state_dict(state)

    def _stays_stopped(self, runner: IRunner, state: StateDict) -> bool:
        """Return whether a stage that was stopped early stays stopped: its callback may be gone or more patient now."""
        by = state.get("stopped_by", [])  # empty: stopped by a callback without a reason to check, so the stop stays
        stops = not by or not set(by).isdisjoint(_stoppers(runner.callbacks))
        if runner.engine.is_main_process:
            who = f" by {', '.join(map(repr, by))}" if by else ""
            ways = "raise the patience, remove that callback, or " if by else ""
            left = f"nothing is left to do in it; to train on, {ways}resume from an earlier checkpoint"
            logger.warning(
                "stage %r was stopped early%s after epoch %d: %s", runner.stage_key, who, runner.epoch_step,
                left if stops else "its condition no longer holds, so training continues",
            )  # fmt: skip
        return stops

    def restore_rng(self, runner: IRunner) -> None:
        """Set the generators to the interrupted run's states, once."""
        if self.rng is None:
            return
        rng, self.rng = self.rng, None
        set_rng_state(rng)
        num_before, num_now = len(rng["cuda"]), torch.cuda.device_count()
        if num_before != num_now and runner.engine.device.type == "cuda" and runner.engine.is_main_process:
            logger.warning(
                "%s was saved where a process saw %d GPUs, and %d are visible now: the generators of the first %d are "
                "restored, the others start from new states (dropout, augmentation on the device); to resume exactly, "
                "set CUDA_VISIBLE_DEVICES to the same number of GPUs",
                self.source, num_before, num_now, min(num_before, num_now),
            )  # fmt: skip


def _stoppers(callbacks: Mapping[str, ICallback]) -> list[str]:
    """Return the keys of callbacks that have ended the stage."""
    found = {key: innermost(callback) for key, callback in callbacks.items()}
    return [key for key, callback in found.items() if isinstance(callback, IStoppingCallback) and callback.has_stopped]


def _states(components: Any) -> dict[str, StateDict]:
    methods = {key: StateMembers(each).state_dict for key, each in as_dict(components).items()}
    return {key: method() for key, method in methods.items() if method is not None}


def _ended_orders(loaders: Mapping[str, Any]) -> dict[str, EndedOrder]:
    found = {key: share_of(each).ended_order() for key, each in loaders.items() if key.startswith("train")}
    return {key: ended for key, ended in found.items() if ended is not None}


def _streams(loaders: Mapping[str, Any], within: str | None, engine: IEngine) -> dict[str, PassPosition]:
    """Return the positions of loaders whose pass continues from epoch to epoch, except of the one that is under way."""
    gather = engine.data_parallel.gather_object
    shares = {key: share_of(loader) for key, loader in loaders.items() if key != within}
    return {key: share.joined(share.position, gather) for key, share in shares.items() if share.continues}


def _of_processes(own: StateDict, ranks: Processes) -> list[StateDict]:
    """Return this process's state, or that of each rank if they differ; every rank must call: this gathers."""
    if ranks.num_processes == 1:
        return [own]
    own = copied(own)  # a tensor on another GPU does not differ
    hashes = ranks.gather_object(hashlib.sha256(pickle.dumps(own)).digest())
    return [own] if len(set(hashes)) == 1 else ranks.gather_object(own)
