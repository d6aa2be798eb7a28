"""Runners that need no `handle_batch`: `SupervisedRunner`, and `SelfSupervisedRunner` for contrastive training."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from runnerkit.callback import IBackwardCallback, ICallback, ICriterionCallback, IOptimizerCallback
from runnerkit.callbacks import BackwardCallback, CriterionCallback, OptimizerCallback
from runnerkit.engine import IEngine
from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.support.arguments import check_keys, check_strings
from runnerkit.train import Runner
from runnerkit.train_options import holds
from runnerkit.types import Batch, Model, as_dict, models_by_key

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

Keys: TypeAlias = str | list[str] | dict[str, str]


class SupervisedRunner(Runner):
    """A runner for supervised training: keys of the batch connect model and criterion, so no `handle_batch` is needed.

    A batch is a tuple (features, targets), which becomes a dict before `handle_batch` and before the callbacks' events,
    or a dict. Criterion, backward, optimizer and scheduler callbacks are added unless one of that kind is passed.

    Args:
        model: may also be passed to `train`.
        engine: an engine or its name, such as "ddp"; may also be passed to `train`.
        input_key: batch keys passed to the model: one as its first argument, a list as the arguments of the same names,
            or {batch key: argument name}.
        output_key: name of the model's output; a list of names for a tuple, or of keys of a dict; {key: new name} for
            a dict. The outputs of a ``ModelOutput`` of transformers keep their names, and without a criterion its
            "loss" is the loss.
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
    ['loss', 'lr']
    """

    def __init__(
        self,
        model: Model | None = None,
        engine: IEngine | str | None = None,
        input_key: Keys = "features",
        output_key: Keys = "logits",
        target_key: Keys = "targets",
        loss_key: str = "loss",
    ) -> None:
        super().__init__(model, engine)
        check_keys(self, input_key=input_key, output_key=output_key, target_key=target_key)
        check_strings(self, loss_key=loss_key)
        self.input_key = input_key
        self.output_key = output_key
        self.target_key = target_key
        self.loss_key = loss_key
        self._read_keys()

    # The names in Catalyst, which its examples of custom runners use.
    _input_key = property(lambda self: self.input_key)
    _output_key = property(lambda self: self.output_key)
    _target_key = property(lambda self: self.target_key)
    _loss_key = property(lambda self: self.loss_key)

    def _read_keys(self) -> None:
        self._keys = self.input_key, self.target_key
        keys = _names(self.input_key)
        self._arguments = self.input_key if isinstance(self.input_key, dict) else dict(zip(keys, keys, strict=True))
        # A key of both, such as an autoencoder's, is one part: the label in (image, label) must not replace the image.
        self._batch_names = [*dict.fromkeys([*keys, *_names(self.target_key)])]

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        callbacks = super().get_callbacks(stage)
        if self.criterion is not None and not holds(callbacks, ICriterionCallback):
            callbacks["_criterion"] = CriterionCallback(*self.criterion_keys(), metric_key=self.loss_key)
        if self.optimizer is not None and not self.steps_itself:
            if not holds(callbacks, IBackwardCallback):
                callbacks["_backward"] = BackwardCallback(self.loss_key)
            if not holds(callbacks, IOptimizerCallback):
                for key in as_dict(self.optimizer):
                    name = "_optimizer" + (f"_{key}" if key else "")
                    callbacks[name] = OptimizerCallback(self.loss_key, optimizer_key=key or None)
        return callbacks | self._scheduler_callbacks(callbacks)

    def criterion_keys(self) -> tuple[Keys, Keys]:
        """Return the batch keys of the criterion's arguments, which a CriterionCallback without keys reads."""
        outputs = list(self.output_key.values()) if isinstance(self.output_key, dict) else _names(self.output_key)
        # One output is the first argument; several have names, so that the targets need one too.
        if len(outputs) == 1:
            return outputs[0], self.target_key
        return outputs, _names(self.target_key) if type(self.target_key) is str else self.target_key

    def on_batch_start(self, runner: IRunner) -> None:
        self.batch = self._named(self.batch)

    def handle_batch(self, batch: Batch) -> None:
        """Run the model; `self.batch` becomes a dict of the batch and the model's outputs."""
        named = batch if type(batch) is dict else self._named(batch)  # a test instead of a call
        outputs = self.forward(named)
        self.batch = {**named, **outputs}
        if self.criterion is None and self.loss_key in outputs:
            self.batch_metrics[self.loss_key] = outputs[self.loss_key]

    def predict_batch(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        """Return the model's outputs for `batch`, named by `output_key`."""
        return self.forward(self._named(batch), **kwargs)

    def inputs_of(self, batch: Batch, model: nn.Module) -> tuple[Any, ...]:
        """Return a model's inputs in a batch, in the order of its ``forward``.

        Raises:
            KeyError: the batch lacks one of them.
            TypeError: ``forward`` does not take them by position.
        """
        named = self._named(batch)
        if not all(key in named for key in self._arguments):
            raise self._no_inputs(named)
        inputs = {name: named[key] for key, name in self._arguments.items()}
        if isinstance(self.input_key, str):
            return tuple(inputs.values())
        bound = signature(model.forward).bind(**inputs)
        if bound.kwargs:
            raise TypeError(f"{type(model).__name__}.forward takes {list(bound.kwargs)} by name only")
        return bound.args

    def _named(self, batch: Batch) -> Batch:
        """Return a tuple, a tensor or a mapping as a dict; anything else unchanged."""
        if self._keys != (self.input_key, self.target_key):  # the attributes were changed
            self._read_keys()
        kind = type(batch)
        if kind is dict:
            return batch
        if kind is list or kind is tuple or isinstance(batch, list | tuple):  # the first tests avoid a call
            names = self._batch_names
            return dict(zip(names, batch, strict=False)) if len(batch) <= len(names) else batch
        if isinstance(batch, Mapping):
            return dict(batch)
        return {self._batch_names[0]: batch} if isinstance(batch, Tensor) else batch

    def forward(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        """Call the model on a batch that is a dict, and return its outputs by name.

        `handle_batch` and `predict_batch` use it: override it for a model that the keys cannot describe.
        """
        try:
            inputs = [batch[key] for key in self._arguments]
        except (KeyError, TypeError, IndexError):
            raise self._no_inputs(batch) from None
        if isinstance(self.input_key, str):
            output = self.model(*inputs, **kwargs)
        else:
            output = self.model(**dict(zip(self._arguments.values(), inputs, strict=True)), **kwargs)
        if isinstance(self.output_key, str):
            if type(output) is not Tensor:  # most are; the check takes calls
                if _is_model_output(output):
                    return {**output}
                if output is None:
                    raise TypeError("the model returned None; is a return missing in its forward?")
            return {self.output_key: output}
        names = self.output_key
        try:
            if isinstance(names, dict):
                return {name: output[key] for key, name in names.items()}
            if isinstance(output, tuple | list):  # not a tensor, whose rows are not outputs
                return dict(zip(names, output, strict=True))
            if isinstance(output, Mapping):
                return {name: output[name] for name in names}
        except (KeyError, TypeError, IndexError, ValueError):
            pass
        raise self._no_outputs(output)

    def _no_inputs(self, batch: Batch) -> Exception:
        """Return the error for a batch that lacks an input, or could not be named."""
        where = f"batch of loader {self.loader_key!r}"
        if isinstance(batch, dict):
            missing = [key for key in self._arguments if key not in batch]
            found = f"input_key {missing} not in the {where}, which has {list(batch)}"
            return UnknownKeyError(found + did_you_mean(missing[0], batch))
        length = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        return TypeError(
            f"a {where} is a {type(batch).__name__}{length}, not a dict or a tuple of {self._batch_names} (input_key "
            "and target_key)"
        )

    def _no_outputs(self, output: Any) -> Exception:
        """Return the error for an output of the model that lacks what `output_key` names."""
        keys, returned = list(self.output_key), f"the model returned a {type(output).__name__}"
        if isinstance(output, Mapping):
            missing = [key for key in keys if key not in output]
            found = f"output_key {missing or keys}: {returned} of {list(output)}"
            return UnknownKeyError(found + (did_you_mean(missing[0], output) if missing else ""))
        length = f" of {len(output)}" if isinstance(output, list | tuple) else ""
        return TypeError(f"output_key {keys} names {len(keys)} outputs, but {returned}{length}")


class SelfSupervisedRunner(SupervisedRunner):
    """A runner for contrastive training: the criterion compares the model's projections of two views of each sample.

    A batch is a tuple (sample, left view, right view), with or without a target, as
    :class:`~runnerkit.data.SelfSupervisedDatasetWrapper` yields, or a dict. The model returns (embedding, projection);
    it is called with the sample and with each view. With several models, in a dict or an ``nn.ModuleDict``, each is
    called, and the names of its outputs begin with its key: "encoder_projection_left".

    Args:
        model: may also be passed to `train`.
        engine: an engine or its name, such as "ddp"; may also be passed to `train`.
        input_key, target_key: names of sample and target in the batch.
        loss_key: name of the loss among the metrics.
        augemention_prefix, projection_prefix, embedding_prefix: names of views and outputs, to which ``_left`` and
            ``_right`` are added, and ``_origin`` for the sample's outputs.
        loss_mode_prefix: which outputs the criterion compares, if no CriterionCallback is passed.

    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.encoder, self.head = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         embedding = self.encoder(x)
    ...         return embedding, self.head(embedding)
    >>> views, model = torch.randn(3, 32, 4), Model()
    >>> runner = SelfSupervisedRunner().train(
    ...     model=model, criterion=torch.nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loaders={"train": DataLoader(TensorDataset(*views), batch_size=8)}, loggers={"console": None}, cpu=True,
    ... )
    >>> sorted(runner.batch)[:3]
    ['augment_left', 'augment_right', 'embedding_left']
    """

    def __init__(
        self,
        model: Model | None = None,
        engine: IEngine | str | None = None,
        input_key: str = "features",
        target_key: str = "target",
        loss_key: str = "loss",
        augemention_prefix: str = "augment",
        projection_prefix: str = "projection",
        embedding_prefix: str = "embedding",
        loss_mode_prefix: str = "projection",
    ) -> None:
        self.views = [f"{augemention_prefix}_left", f"{augemention_prefix}_right"]
        self.embedding_prefix, self.projection_prefix = embedding_prefix, projection_prefix
        self.loss_mode_prefix = loss_mode_prefix
        super().__init__(model, engine, input_key=input_key, target_key=target_key, loss_key=loss_key)

    def _read_keys(self) -> None:
        super()._read_keys()
        self._batch_names[1:1] = self.views

    def criterion_keys(self) -> tuple[Keys, Keys]:
        return f"{self.loss_mode_prefix}_left", f"{self.loss_mode_prefix}_right"

    def forward(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        views = dict(zip((*self.views, self.input_key), ("left", "right", "origin"), strict=True))
        if not isinstance(batch, dict):
            raise self._no_inputs(batch)
        if not all(key in batch for key in views):
            where = f"the batch of loader {self.loader_key!r}"
            raise UnknownKeyError(f"SelfSupervisedRunner reads {list(views)} of {where}, which has {list(batch)}")
        outputs = {}
        for name, model in models_by_key(self.model).items():
            prefix = f"{name}_" if name else ""
            for key, side in views.items():
                embedding, projection = model(batch[key], **kwargs)
                outputs[f"{prefix}{self.projection_prefix}_{side}"] = projection
                outputs[f"{prefix}{self.embedding_prefix}_{side}"] = embedding
        return outputs


def _is_model_output(output: Any) -> bool:
    """Return whether `output` is a ``ModelOutput`` of transformers, whose values have names of their own."""
    return isinstance(output, Mapping) and hasattr(output, "to_tuple")


def _names(keys: Keys) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys)
