"""The weights of a run: those in training and those for evaluation, read and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from runnerkit.callback import IWeightAverageCallback, innermost
from runnerkit.checkpoints.file import is_sharded, load_checkpoint
from runnerkit.checkpoints.names import under_adapters, under_names_of, with_tied, without_compiled
from runnerkit.checkpoints.plain_state import as_plain, copied
from runnerkit.checkpoints.trainable import completed, frozen_parameters, hash_of, trainable_part
from runnerkit.checkpoints.weights import read_weights, weights_in
from runnerkit.models.finite import non_finite_part
from runnerkit.resume import compatibility
from runnerkit.support import device_move
from runnerkit.support.torch_internals import is_dtensor
from runnerkit.types import StateDict, as_dict, like

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


class RunWeights:
    """The weights of a run at this moment, for training and for evaluation: made for a few calls, and not kept.

    Attributes:
        models: the models in training by key, as the engine prepared them if a stage is under way.
    """

    def __init__(self, runner: IRunner) -> None:
        self._model, self._criterion, self._callbacks = runner.model, runner.criterion, runner.callbacks
        self._engine, self._evaluation_weights = runner.engine, runner.current_run.stage.evaluation_weights
        # Without the prepared ones, the engine cannot find the shards of each rank.
        prepared = runner.current_run.stage.training_model
        self.models: dict[str, nn.Module] = as_dict(prepared if prepared is not None else runner.model)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that hold the weights in training by key, "" for one alone; parameters may be shards."""
        return {key: self._engine.trained_module(model) for key, model in self.models.items()}

    def spoiled_part(self) -> str | None:
        """Describe the first tensor of this process that training has spoiled; None if there is none."""
        criteria = {key: each for key, each in as_dict(self._criterion).items() if isinstance(each, nn.Module)}
        for kind, modules in (("model", self.modules), ("criterion", criteria)):
            if name := non_finite_part(modules):
                return f"{name!r} of the {kind}"
        return None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters in training with their names, a tied one under each of them."""
        for key, model in self.models.items():
            for name, parameter in self._engine.trained_parameters(model):
                yield f"{key}.{name}" if key else name, parameter
        for key, criterion in as_dict(self._criterion).items():
            if isinstance(criterion, nn.Module):
                yield from criterion.named_parameters(f"criterion {key}", remove_duplicate=False)

    def trained(self, *, whole: bool = True) -> StateDict:
        """Return the weights of the user's module, or of each by key; every rank must call.

        Raises:
            TypeError: a module's extra state cannot be stored in a checkpoint.
        """
        states = {
            key: as_plain(
                without_compiled(self._engine.model_state_dict(model, whole=whole)),
                f"model_state_dict[{key!r}]" if key else "model_state_dict",
            )
            for key, model in self.models.items()
        }
        weights: StateDict = like(self._model, states)
        return weights

    def evaluated(self, *, whole: bool) -> StateDict:
        """Return the weights used for evaluation, or this process's shard of them; every rank must call."""
        own = self._exchanged(whole=whole)
        judged = own if own is not None else self._judged(self.trained(whole=whole))
        weights: StateDict = self._engine.whole_state(judged) if whole else judged
        return weights

    def evaluated_and_trained(self, *, whole: bool) -> tuple[StateDict, StateDict]:
        """Return the weights used for evaluation and those in training; every rank must call.

        They are one object if evaluation uses those in training. Afterwards optimizers have the state of training.
        """
        exchanged = self._exchanged(whole=whole)
        self._evaluation_weights.train()  # also of the optimizers' state
        trained = self.trained(whole=whole)
        return exchanged if exchanged is not None else self._judged(trained), trained

    def _exchanged(self, *, whole: bool) -> StateDict | None:
        """Return a copy of the weights for evaluation if an optimizer has others for it, else None."""
        if not self._evaluation_weights:
            return None
        with self._evaluation_weights.evaluating():
            state = self.trained(whole=whole)
            copy_of: StateDict = copied(state) if whole else device_move.copied(state)
            return copy_of

    def _judged(self, trained: StateDict) -> StateDict:
        """Return averages, sharded or not, if a callback keeps them for evaluation; otherwise `trained`."""
        callbacks = map(innermost, self._callbacks.values())
        judged = [each.judged_weights() for each in callbacks if isinstance(each, IWeightAverageCallback)]
        by_key = {key: without_compiled(state) for each in judged for key, state in each.items()}
        if not by_key:
            return trained
        return {**trained, **by_key} if isinstance(self._model, dict) else by_key[""]

    def without_frozen(self, weights: StateDict, hashes: dict[tuple[str, ...], str]) -> StateDict:
        """Return weights of the user's module, or of each by key, without frozen parameters, but with their hash.

        Args:
            hashes: those that are known, by the names of the parameters; filled on rank zero, and on every rank if none
                holds the parameters.
        """
        by_key = self._by_key(weights)
        parts: dict[str, StateDict] = {}
        for key, model in self.models.items():
            module = self._engine.unwrap(model)
            frozen = frozen_parameters(module)
            names = (key, *frozen)
            if frozen and names not in hashes and self._engine.never_whole:
                shards = without_compiled(dict(self._engine.trained_parameters(model)))
                values = {name: shards[name] for name in frozen}
                hashes[names] = hash_of(values, whole=self._engine.whole_state)  # every rank must enter
            elif frozen and names not in hashes and self._engine.is_main_process:
                hashes[names] = hash_of({**frozen, **self._engine.precision.unrounded(frozen)})
            parts[key] = trainable_part(module, by_key[key], hashes.get(names, "")) if frozen else by_key[key]
        rest: StateDict = like(self._model, parts)
        return rest

    def load_from(self, path: Path) -> None:
        """Load a checkpoint's or a file's weights; every rank must call, and reads no more than it keeps.

        Raises:
            ValueError: they belong to another model.
        """
        engine = self._engine
        if engine.never_whole and path.is_dir():
            state = engine.load_shards(
                load_checkpoint(path, whole=False) if is_sharded(path) else None, path, only_weights=True
            )
            self.load(weights_in(state, path), source=str(path))
        else:
            self.load(read_weights(path, mapped=engine.never_whole), source=str(path))

    def load(self, state: StateDict, *, source: str) -> None:
        """Load weights into the user's module, or into each by key.

        Raises:
            ValueError: they belong to another model.
        """
        by_key, engine = self._by_key(state), self._engine
        compatibility.check_model_keys(by_key, self.models, source)
        for key, model in self.models.items():
            module = engine.unwrap(model)
            has_shards = engine.never_whole or any(map(is_dtensor, by_key[key].values()))
            own = engine.model_state_dict(model, whole=False) if has_shards else module.state_dict()
            own = {**without_compiled(own), **engine.precision.unrounded(frozen_parameters(module))}
            weights = under_adapters(module, by_key[key], own)
            weights = completed(module, weights, own, source=source, whole=engine.whole_state)
            named = with_tied(module, under_names_of(module, weights))
            try:
                engine.load_model_state_dict(model, named)
            except RuntimeError as error:
                compatibility.check_weights(named, module.state_dict(), source)
                raise ValueError(f"{source} holds another model's weights: {error}") from error

    def _by_key(self, weights: StateDict) -> StateDict:
        return weights if isinstance(self._model, dict) else {"": weights}
