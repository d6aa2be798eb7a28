"""Base of weight averaging: evaluation may use the average, and the stage ends with it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import nn

from runnerkit.callback import CallbackOrder, ICheckpointCallback, IWeightAverageCallback, innermost
from runnerkit.callbacks.training.parts.averaged_weights import AveragedWeights, AverageFn
from runnerkit.errors import UnknownKeyError
from runnerkit.models.parameters import check_shapes
from runnerkit.support.arguments import check_strings
from runnerkit.types import StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class WeightAverageCallback(IWeightAverageCallback):
    """Base class of callbacks that average weights; subclasses decide when.

    Args:
        model_key: which model, if the runner has several; None averages each.
        validate: whether evaluation loaders use the averages, once there are any.
        use_buffers: whether floating-point buffers, such as batch norm statistics, are averaged too.
    """

    shapes_training = True  # a run that only evaluates has nothing to average

    def __init__(self, *, model_key: str | None, validate: bool, use_buffers: bool) -> None:
        super().__init__(order=CallbackOrder.Optimizer + 5)
        check_strings(self, or_none=True, model_key=model_key)
        self.model_key = model_key
        self.validate = validate
        self.use_buffers = use_buffers
        self.averages: dict[str, AveragedWeights] = {}  # by model key, during a training stage
        self._is_exchanged = False

    @abstractmethod
    def average_fn(self) -> AverageFn:
        """Return the function that updates the average."""

    def on_stage_start(self, runner: IRunner) -> None:
        self.averages, self._is_exchanged = {}, False
        if runner.optimizer is None:
            return  # an infer stage
        models = as_dict(runner.model)
        if self.model_key is not None and self.model_key not in models:
            raise UnknownKeyError(
                f"{type(self).__name__} averages model {self.model_key!r}; the runner has {sorted(models)}"
            )
        wanted = {key: model for key, model in models.items() if self.model_key in (None, key)}
        self._check(runner, wanted)
        engine, prepared = runner.engine, as_dict(runner.current_run.stage.training_model)
        for key in wanted:
            self.averages[key] = AveragedWeights(
                engine.trained_module(prepared[key]),
                own=engine.unwrap(prepared[key]),
                average=self.average_fn(),
                use_buffers=self.use_buffers,
            )

    def _check(self, runner: IRunner, models: dict[str, nn.Module]) -> None:
        name = type(self).__name__
        if runner.current_run.stage.evaluation_weights:
            raise ValueError(f"{name} averages weights, and so does the optimizer, which has eval(): leave one out")
        for model in models.values():
            check_shapes(model, name)
            short = {str(each.dtype) for each in model.parameters() if each.dtype.itemsize < 4}
            if short:
                raise ValueError(
                    f"{name} averages in the dtype of the weights, and {', '.join(sorted(short))} rounds small changes "
                    "of an average away: keep the weights in float32, and use amp=True for mixed precision"
                )
        for other in map(innermost, runner.callbacks.values()):
            if isinstance(other, WeightAverageCallback) and other is not self:
                twice = sorted(models.keys() & other.averages.keys())
                if twice:
                    raise ValueError(f"{name} and {type(other).__name__} both average the models {twice}: choose one")
            if isinstance(other, ICheckpointCallback) and other.load_best_on_end and not self.validate:
                raise ValueError(
                    f"load_best_on_end=True ends with the best weights, but {name}(validate=False) with an average "
                    "that was never evaluated: choose one, or pass validate=True"
                )

    def on_loader_start(self, runner: IRunner) -> None:
        if not self.validate or self._is_exchanged != runner.is_train_loader:
            return
        self._exchange()
        are_sharded = any(each.is_sharded for each in self.averages.values())
        # The engine gathered the weights, and broadcast rank zero's buffers, before the exchange.
        if self._is_exchanged and (self.use_buffers or are_sharded):
            for model in as_dict(runner.current_run.stage.training_model).values():
                runner.engine.evaluation_model(model)

    def on_validation_end(self, runner: IRunner) -> None:
        # Not at a loader's end, where other callbacks may evaluate again.
        if self._is_exchanged:
            self._exchange()

    on_epoch_end = on_validation_end

    def on_exception(self, runner: IRunner) -> None:
        self.on_validation_end(runner)
        self.averages = {}

    def on_stage_end(self, runner: IRunner) -> None:
        self._exchange()
        self.averages, self._is_exchanged = {}, False

    def _exchange(self) -> None:
        for each in self.averages.values():
            if each.num_averaged:
                each.exchange()
        self._is_exchanged = not self._is_exchanged

    def judged_weights(self) -> dict[str, StateDict]:
        if not self.validate or self._is_exchanged:  # the model itself has the averages
            return {}
        return {key: each.weights() for key, each in self.averages.items() if each.num_averaged}

    def state_dict(self) -> StateDict:
        return {key: each.state_dict() for key, each in self.averages.items()}

    def load_state_dict(self, state: StateDict) -> None:
        if state.keys() != self.averages.keys():
            raise ValueError(
                f"the checkpoint holds averages of the models {sorted(state)}, but {type(self).__name__} averages "
                f"{sorted(self.averages)}"
            )
        for key, each in self.averages.items():
            each.load_state_dict(state[key])
