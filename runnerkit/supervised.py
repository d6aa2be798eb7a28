"""`SupervisedRunner`: supervised training without a custom `handle_batch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from runnerkit.callback import (
    IBackwardCallback,
    ICallback,
    ICriterionCallback,
    IOptimizerCallback,
    ISchedulerCallback,
)
from runnerkit.callbacks import BackwardCallback, CriterionCallback, OptimizerCallback, SchedulerCallback
from runnerkit.callbacks.training.scheduler import wants_argument
from runnerkit.engine import IEngine
from runnerkit.errors import UnknownKeyError
from runnerkit.train import Runner, holds
from runnerkit.types import Batch, Model, is_maker

Keys: TypeAlias = str | list[str] | dict[str, str]


class SupervisedRunner(Runner):
    """A runner for supervised training: keys of the batch connect model and criterion, so no `handle_batch` is needed.

    A batch is a tuple (features, targets), or a dict. Criterion, backward, optimizer and scheduler callbacks are added
    unless one of that kind is passed.

    Args:
        model: may also be passed to `train`.
        engine: may also be passed to `train`.
        input_key: batch keys passed to the model: one, a list in order, or {batch key: argument name}.
        output_key: name of the model's output; a list of names for a tuple, {key: new name} for a dict. The outputs of
            a ``ModelOutput`` of transformers keep their names, and without a criterion its "loss" is the loss.
        target_key: batch keys passed to the criterion in addition to the output.
        loss_key: name of the loss among the metrics.

    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    >>> model = torch.nn.Linear(4, 2)
    >>> runner = SupervisedRunner().train(
    ...     model=model, criterion=torch.nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loaders={"train": DataLoader(data, batch_size=8)}, loggers={"console": None}, cpu=True,
    ... )
    >>> sorted(runner.epoch_metrics["train"])
    ['loss', 'lr', 'momentum']
    """

    def __init__(
        self,
        model: Model | None = None,
        engine: IEngine | None = None,
        input_key: Keys = "features",
        output_key: Keys = "logits",
        target_key: Keys = "targets",
        loss_key: str = "loss",
    ) -> None:
        super().__init__(model, engine)
        self.input_key = input_key
        self.output_key = output_key
        self.target_key = target_key
        self.loss_key = loss_key
        self._read_keys()

    def _read_keys(self) -> None:
        self._keys = self.input_key, self.target_key
        self._input_names = _names(self.input_key)
        self._batch_names = [*self._input_names, *_names(self.target_key)]

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        callbacks = super().get_callbacks(stage)
        outputs = list(self.output_key.values()) if isinstance(self.output_key, dict) else self.output_key
        if self.criterion is not None and not holds(callbacks, ICriterionCallback):
            callbacks["_criterion"] = CriterionCallback(outputs, self.target_key, metric_key=self.loss_key)
        if self.optimizer is not None:
            if not holds(callbacks, IBackwardCallback):
                callbacks["_backward"] = BackwardCallback(self.loss_key)
            if not holds(callbacks, IOptimizerCallback):
                callbacks["_optimizer"] = OptimizerCallback(self.loss_key)
        # A scheduler of any class is stepped.
        if self.scheduler is not None and not holds(callbacks, ISchedulerCallback):
            counts_steps = is_maker(self._given.scheduler) and not wants_argument(self.scheduler)
            callbacks["_scheduler"] = SchedulerCallback(mode="batch" if counts_steps else None)
        return callbacks

    def handle_batch(self, batch: Batch) -> None:
        """Run the model; `self.batch` becomes a dict of the batch and the model's outputs."""
        named = self._named(batch)
        outputs = self._forward(named)
        self.batch = {**named, **outputs}
        if self.criterion is None and self.loss_key in outputs:
            self.batch_metrics[self.loss_key] = outputs[self.loss_key]

    def predict_batch(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        """Return the model's outputs for `batch`, named by `output_key`."""
        return self._forward(self._named(batch), **kwargs)

    def inputs_of(self, batch: Batch) -> tuple[Any, ...]:
        """Return the model's inputs in a batch, in the order of `input_key`."""
        named = self._named(batch)
        return tuple(named[key] for key in self._input_names)

    def _named(self, batch: Batch) -> dict[str, Any]:
        if self._keys != (self.input_key, self.target_key):  # the attributes were changed
            self._read_keys()
        if isinstance(batch, list | tuple) and len(batch) <= len(self._batch_names):
            return dict(zip(self._batch_names, batch, strict=False))
        if isinstance(batch, Mapping):
            return dict(batch)
        if isinstance(batch, Tensor):
            return {self._batch_names[0]: batch}
        length = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise TypeError(
            f"a batch of loader {self.loader_key!r} is a {type(batch).__name__}{length}, not a dict or a tuple of "
            f"{self._batch_names} (input_key and target_key)"
        )

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        try:
            inputs = [batch[key] for key in self._input_names]
        except KeyError:
            missing = [key for key in self._input_names if key not in batch]
            raise UnknownKeyError(
                f"input_key {missing} not in the batch of loader {self.loader_key!r}, which has {list(batch)}"
            ) from None
        if isinstance(self.input_key, dict):
            output = self.model(**dict(zip(self.input_key.values(), inputs, strict=True)), **kwargs)
        else:
            output = self.model(*inputs, **kwargs)
        if isinstance(self.output_key, str):
            if type(output) is not Tensor and _is_model_output(output):  # most are tensors; the check takes calls
                return {**output}
            return {self.output_key: output}
        if isinstance(self.output_key, dict):
            return {name: output[key] for key, name in self.output_key.items()}
        return dict(zip(self.output_key, output, strict=True))


def _is_model_output(output: Any) -> bool:
    """Return whether `output` is a ``ModelOutput`` of transformers, whose values have names of their own."""
    return isinstance(output, Mapping) and hasattr(output, "to_tuple")


def _names(keys: Keys) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys)
