"""The loss of each batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from runnerkit.callback import CallbackOrder, ICriterionCallback
from runnerkit.callbacks.metrics.parts.batch_keys import Keys, pick
from runnerkit.errors import check_component
from runnerkit.support.arguments import check_keys, check_strings
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["CriterionCallback"]


class CriterionCallback(ICriterionCallback):
    """Call the runner's criterion on each batch and put the loss, a () tensor with its graph, into `batch_metrics`.

    Args:
        input_key, target_key: batch keys passed to the criterion: a str by position, a list of them as the arguments of
            the same names, or {batch key: argument name}. By default those of the SupervisedRunner.
        metric_key: name of the loss.
        criterion_key: which criterion, if the runner has several.
        prefix, suffix: added to the name.
    Raises:
        KeyError: the criterion or a batch key does not exist; the message lists the existing ones.
        TypeError: keys are not given, and the runner is not a SupervisedRunner.

    >>> CriterionCallback("logits", "targets", metric_key="loss").provides
    ('loss',)
    """

    def __init__(
        self,
        input_key: Keys | None = None,
        target_key: Keys | None = None,
        metric_key: str = "loss",
        criterion_key: str | None = None,
        prefix: str = "",
        suffix: str = "",
    ) -> None:
        super().__init__(order=CallbackOrder.Internal)
        check_keys(self, or_none=True, input_key=input_key, target_key=target_key)
        check_strings(self, metric_key=metric_key, prefix=prefix, suffix=suffix)
        check_strings(self, or_none=True, criterion_key=criterion_key)
        self.input_key = input_key
        self.target_key = target_key
        self.criterion_key = criterion_key
        self.metric_key = f"{prefix}{metric_key}{suffix}"
        self.provides = (self.metric_key,)
        self._keys: tuple[Keys, Keys] | None = None  # in the runner, where they are not given
        self._key = criterion_key or None  # None: the runner has one
        self._autocast: AbstractContextManager[Any] | None = None  # the engine's, while a loader runs

    def on_stage_start(self, runner: IRunner) -> None:
        criterions = as_dict(runner.criterion)
        check_component(self, "criterion", self.criterion_key, criterions)
        self._key = (self.criterion_key or "") if isinstance(runner.criterion, dict) else None
        self._keys = self._find_keys(runner)

    def on_loader_start(self, runner: IRunner) -> None:
        self._autocast = None  # that of the engine; an evaluation within a loader may have another

    on_loader_end = on_loader_start

    def _find_keys(self, runner: IRunner) -> tuple[Keys, Keys]:
        if self.input_key is not None and self.target_key is not None:
            return self.input_key, self.target_key
        of_runner = getattr(runner, "criterion_keys", None)
        if of_runner is None:
            raise TypeError(
                f"CriterionCallback: pass input_key= and target_key=, keys of the batch, since {type(runner).__name__} "
                "is not a SupervisedRunner, whose output_key and target_key would be the default"
            )
        inputs, targets = of_runner()
        own = self.input_key, self.target_key
        return inputs if own[0] is None else own[0], targets if own[1] is None else own[1]

    def on_batch_end(self, runner: IRunner) -> None:
        criterion: Any = runner.criterion if self._key is None else runner.criterion[self._key]
        keys = self._keys or self._find_keys(runner)  # a wrapper may leave out the stage's start
        arguments, keyword_arguments = pick(runner, *keys, reader="CriterionCallback")
        if self._autocast is None:
            self._autocast = runner.engine.autocast()
        with self._autocast:
            try:
                runner.batch_metrics[self.metric_key] = criterion(*arguments, **keyword_arguments)
            except TypeError as error:
                if keyword_arguments:
                    error.add_note(
                        f"the criterion got the arguments {list(keyword_arguments)} by name: to choose parts of the "
                        "batch, pass for example callbacks=[dl.CriterionCallback('logits', 'targets')]"
                    )
                raise
