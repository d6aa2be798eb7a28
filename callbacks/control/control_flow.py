"""Wrappers that disable a callback or restrict it to some epochs or loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, TypeAlias

from runnerkit.callback import Callback, ICallback
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["CallbackWrapper", "ControlFlowCallback", "ControlFlowCallbackWrapper"]

Epochs: TypeAlias = int | float | Iterable[int]
LoaderKeys: TypeAlias = str | Iterable[str] | Mapping[str, int | Iterable[int]]


class CallbackWrapper(Callback):
    """A wrapper that forwards events to `base_callback`, with its order, node, names and state.

    Attributes:
        callback: the wrapped callback; use it in ``isinstance`` checks.
        enable_callback: whether events are forwarded; may be changed at any time.

    >>> CallbackWrapper(Callback(order=20)).order
    20
    """

    callback: ICallback

    def __init__(self, base_callback: ICallback, enable_callback: bool = True) -> None:
        if not isinstance(base_callback, ICallback):
            raise TypeError(f"{type(self).__name__}: base_callback must be a runnerkit Callback, got {base_callback!r}")
        super().__init__(order=base_callback.order, node=base_callback.node)
        self.callback = base_callback
        self.enable_callback = enable_callback
        self.provides = base_callback.provides
        self.requires = base_callback.requires

    def listens_to(self, event: str) -> bool:
        return self.callback.listens_to(event)

    def acts_in_loader(self, runner: IRunner) -> bool:
        return self.enable_callback and self._passes_loader(runner) and self.callback.acts_in_loader(runner)

    def _passes_epoch(self, runner: IRunner) -> bool:
        return True

    def _passes_loader(self, runner: IRunner) -> bool:
        return True

    def on_experiment_start(self, runner: IRunner) -> None:
        if self.enable_callback:
            self.callback.on_experiment_start(runner)

    def on_stage_start(self, runner: IRunner) -> None:
        if self.enable_callback:
            self.callback.on_stage_start(runner)

    def on_epoch_start(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_epoch(runner):
            self.callback.on_epoch_start(runner)

    def on_loader_start(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_loader(runner):
            self.callback.on_loader_start(runner)

    def on_batch_start(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_loader(runner):
            self.callback.on_batch_start(runner)

    def on_batch_end(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_loader(runner):
            self.callback.on_batch_end(runner)

    def on_step_end(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_loader(runner):
            self.callback.on_step_end(runner)

    def on_loader_end(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_loader(runner):
            self.callback.on_loader_end(runner)

    def on_validation_end(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_epoch(runner):
            self.callback.on_validation_end(runner)

    def on_epoch_end(self, runner: IRunner) -> None:
        if self.enable_callback and self._passes_epoch(runner):
            self.callback.on_epoch_end(runner)

    def on_stage_end(self, runner: IRunner) -> None:
        if self.enable_callback:
            self.callback.on_stage_end(runner)

    def on_experiment_end(self, runner: IRunner) -> None:
        if self.enable_callback:
            self.callback.on_experiment_end(runner)

    def on_exception(self, runner: IRunner) -> None:
        if self.enable_callback:
            self.callback.on_exception(runner)

    def state_dict(self) -> StateDict:
        return self.callback.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self.callback.load_state_dict(state)


class ControlFlowCallback(CallbackWrapper):
    """A wrapper that limits a callback to some epochs or loaders. Pass exactly one condition; epochs are counted per
    stage.

    Events of the experiment and the stage are always forwarded. Events of an epoch, during which no loader runs, are
    forwarded unless the condition excludes the whole epoch; `filter_fn` is not called for them.

    Args:
        base_callback: the callback to limit.
        epochs: a number N for every N-th epoch, or a list of epochs.
        ignore_epochs: the same, for the epochs to skip.
        loaders: loader keys, or {loader key: epoch or epochs}.
        ignore_loaders: the same, for the loaders to skip.
        filter_fn: called with stage, epoch and loader key, or with the last two if it takes two arguments; returns
            whether the callback acts.

    >>> flow = ControlFlowCallback(Callback(), ignore_loaders="valid")
    """

    def __init__(
        self,
        base_callback: ICallback,
        epochs: Epochs | None = None,
        ignore_epochs: Epochs | None = None,
        loaders: LoaderKeys | None = None,
        ignore_loaders: LoaderKeys | None = None,
        filter_fn: Callable[[str, int, str], bool] | Callable[[int, str], bool] | None = None,
    ) -> None:
        super().__init__(base_callback)
        conditions = {
            "epochs": epochs, "ignore_epochs": ignore_epochs, "loaders": loaders, "ignore_loaders": ignore_loaders,
            "filter_fn": filter_fn,
        }  # fmt: skip
        given = [name for name, value in conditions.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"{type(self).__name__}: pass exactly one of {', '.join(conditions)}; got {', '.join(given) or 'none'}"
            )
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(
                f"{type(self).__name__}: filter_fn must be a function of stage, epoch and loader, got {filter_fn!r}"
            )
        self._filter_fn: Callable[..., bool] | None = filter_fn
        self._takes_stage = filter_fn is None or _takes_stage(filter_fn)
        self._inverted = given[0].startswith("ignore")
        self._epochs = _Epochs(given[0], epochs if epochs is not None else ignore_epochs)
        self._loaders = _by_loader(given[0], loaders if loaders is not None else ignore_loaders)

    def _passes_epoch(self, runner: IRunner) -> bool:
        epoch = runner.stage_epoch_step
        if self._loaders is not None:
            return self._inverted or any(epoch in epochs for epochs in self._loaders.values())
        return (epoch in self._epochs) != self._inverted

    def _passes_loader(self, runner: IRunner) -> bool:
        stage, epoch, loader = runner.stage_key, runner.stage_epoch_step, runner.loader_key
        if self._filter_fn is not None:
            return self._filter_fn(stage, epoch, loader) if self._takes_stage else self._filter_fn(epoch, loader)
        if self._loaders is not None:
            return (loader in self._loaders and epoch in self._loaders[loader]) != self._inverted
        return (epoch in self._epochs) != self._inverted


ControlFlowCallbackWrapper = ControlFlowCallback  # the name in Catalyst 22.04


def _takes_stage(filter_fn: Callable[..., bool]) -> bool:
    """Check if `filter_fn` takes stage, epoch and loader, and not only the last two.

    Raises:
        TypeError: it takes neither.
    """
    try:
        parameters = signature(filter_fn)
    except ValueError:  # a built-in function that does not tell
        return True
    for count in (3, 2):
        with suppress(TypeError):
            parameters.bind(*[None] * count)
            return count == 3
    raise TypeError(
        f"ControlFlowCallback: filter_fn is a function {parameters}, but is called with stage, epoch and loader, or "
        "with epoch and loader"
    )


class _Epochs:
    """A set of epochs: every N-th, those listed, or all (None)."""

    def __init__(self, name: str, epochs: Epochs | None) -> None:
        self._period, self._listed = 1, None
        if isinstance(epochs, int | float):
            self._period = int(epochs)
        elif isinstance(epochs, Iterable) and not isinstance(epochs, str):
            self._listed = frozenset(int(epoch) for epoch in epochs)
        elif epochs is not None:
            raise TypeError(f"ControlFlowCallback: {name} must be a number or a list of epochs, got {epochs!r}")
        if self._period < 1:
            raise ValueError(
                f"ControlFlowCallback: {name}=N stands for every N-th epoch and must be >= 1, got {epochs}"
            )

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._listed if self._listed is not None else epoch % self._period == 0


def _by_loader(name: str, loaders: LoaderKeys | None) -> dict[str, _Epochs] | None:
    if loaders is None:
        return None
    if isinstance(loaders, str):
        return {loaders: _Epochs(name, None)}
    if isinstance(loaders, Mapping):
        return {key: _Epochs(name, [epochs] if isinstance(epochs, int) else epochs) for key, epochs in loaders.items()}
    if not isinstance(loaders, Iterable):
        raise TypeError(f"ControlFlowCallback: {name} must be a loader key, a list or a dict of them, got {loaders!r}")
    return {key: _Epochs(name, None) for key in loaders}
