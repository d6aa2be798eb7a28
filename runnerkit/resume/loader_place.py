"""The place within a loader where a checkpoint was saved, which the run that resumes enters again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from runnerkit.sampling.orders import Order
from runnerkit.sampling.sharding import count_batches, share_of
from runnerkit.sampling.share import PassPosition
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


@dataclass(kw_only=True)
class LoaderPlace:
    """The place within a loader; a checkpoint holds a dict of these fields, and before 0.2 those without a default."""

    key: str  # of the loader
    order: Order | None = None  # of its samples, which the run that resumes must have as well; None if it has none
    fingerprint: int | None = None  # of the order before the place; None if unknown
    position: PassPosition  # of the next batch, as the loader's share describes it for all processes
    loader_batch_step: int
    loader_sample_step: int
    is_ended: bool = False  # a callback has ended the pass
    ends_stage: bool = False  # the stage ends after the pass
    is_validated: bool | None = None  # the evaluation loaders have run since the last step; None if unknown
    means: list[StateDict]  # sums of the metrics so far, of each process

    @classmethod
    def of(cls, runner: IRunner) -> Self:
        """Return the place in the loader under way; every rank must call: this gathers.

        Raises:
            TypeError: the loader does not know its position.
        """
        if not knows_position(runner.loader):
            raise TypeError(
                f"loader {runner.loader_key!r} cannot save its position in the middle of an epoch, because the "
                f"__iter__ of {type(runner.loader).__name__} does not use its batch_sampler; save at the end of each "
                "epoch"
            )
        share, current = share_of(runner.loader), runner.loader_pass
        gather = runner.engine.data_parallel.gather_object
        position = share.joined(share.position_after(runner.loader_batch_step - current.num_skipped), gather)
        return cls(
            key=runner.loader_key,
            order=share.described(),
            fingerprint=share.fingerprint(position),
            position=position,
            loader_batch_step=runner.loader_batch_step,
            loader_sample_step=runner.loader_sample_step,
            is_ended=runner.need_early_stop,
            ends_stage=current.ends_stage,
            is_validated=runner.current_run.position.is_validated(runner),
            means=gather(current.means.state_dict()),
        )

    @classmethod
    def from_state(cls, state: StateDict) -> Self:
        """Return the place that a checkpoint holds."""
        return cls(**{each.name: state[each.name] for each in fields(cls) if each.name in state})

    def state_dict(self) -> StateDict:
        return dict(vars(self))

    def enter(self, runner: IRunner, *, num_processes: int) -> int:
        """Move a pass that is about to start to this place; every rank must call: this gathers.

        Args:
            num_processes: that shared the data when it was saved.
        Returns:
            The number of batches skipped.
        Raises:
            TypeError: the loader does not have a position.
            ValueError: some processes have fewer batches left than others, or `epoch_steps` is missing now.
        """
        share = share_of(runner.loader)
        if not share.has_position:
            raise TypeError(
                f"the run was interrupted within loader {runner.loader_key!r}, which does not have a position now: "
                "resume from a checkpoint of an epoch's end, or pass a DataLoader"
            )
        if isinstance(self.position, dict) and "pass" in self.position and not share.continues:
            raise ValueError(
                f"loader {runner.loader_key!r}: the run was interrupted in an epoch with epoch_steps and cannot resume "
                "within it without: pass epoch_steps, or resume from an epoch's end"
            )
        share.skip(self.position)
        share.expect(self.fingerprint)
        if runner.is_train_loader:
            self._check_rest(runner, num_processes)
        runner.loader_batch_step, runner.loader_sample_step = self.loader_batch_step, self.loader_sample_step
        runner.need_early_stop, runner.loader_pass.ends_stage = self.is_ended, self.ends_stage
        if self.is_validated:
            runner.current_run.position.note_validation(runner)
        # Sums add up over ranks: with fewer processes than before, a process takes over the sums of several.
        ranks = runner.engine.data_parallel
        parts = self.means[ranks.rank :: ranks.num_processes]
        runner.loader_pass.means.load_state_dicts(parts, device=runner.engine.device)
        return self.loader_batch_step

    def _check_rest(self, runner: IRunner, num_before: int) -> None:
        # With too few samples, some ranks would hang in a step that others skip.
        num_left = runner.engine.gather_object(count_batches(runner.loader))
        if len(set(num_left)) > 1:
            raise ValueError(
                f"loader {runner.loader_key!r} was interrupted after batch {self.loader_batch_step} and has fewer "
                f"samples left than the {runner.engine.num_processes} processes that are to train on them: {num_left} "
                f"batches on the ranks; resume with {num_before} as before, or from an epoch's start"
            )


def knows_position(loader: Any) -> bool:
    """Return whether the position of a loader under way is known: a subclass may iterate without its sampler."""
    share = share_of(loader)
    return share.has_position and share.is_used


def check_positions(loaders: Mapping[str, Any], *, reason: str) -> None:
    """Raise if the position within an epoch of a training loader cannot be saved.

    Args:
        reason: the argument that asks for it.
    Raises:
        TypeError: with the loader's key.
    """
    for key, loader in loaders.items():
        if key.startswith("train") and not share_of(loader).has_position:
            raise TypeError(
                f"loader {key!r} cannot save its position in the middle of an epoch; leave out {reason} to save at the "
                "end of each epoch, or use a DataLoader whose sampler has a length and is not a DistributedSampler"
            )
