"""Training with an average of the weights beside them, which evaluation may use and the stage ends with."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import nn

from runnerkit.arguments import check_strings
from runnerkit.callback import CallbackOrder, ICheckpointCallback, IWeightAverageCallback, innermost
from runnerkit.callbacks.averaged_weights import AveragedWeights, AverageFn
from runnerkit.types import StateDict, as_dict
from runnerkit.unknown_key import UnknownKeyError

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class WeightAverageCallback(IWeightAverageCallback):
    """Base of the callbacks that average weights: when they do is theirs to say.

    Args:
        model_key: which model, if the runner has several; None averages each.
        validate: whether evaluation loaders see the averages, once there are any.
        use_buffers: whether floating-point buffers are averaged too, batch norm's statistics for instance.
    """

    shapes_training = True  # a run that only evaluates has nothing to average

    def __init__(self, *, model_key: str | None, validate: bool, use_buffers: bool) -> None:
        super().__init__(order=CallbackOrder.Optimizer + 5)
        check_strings(self, or_none=True, model_key=model_key)
        self.model_key = model_key
        self.validate = validate
        self.use_buffers = use_buffers
        self.averages: dict[str, AveragedWeights] = {}  # by the models' keys, while a stage trains
        self._is_exchanged = False

    @abstractmethod
    def average_fn(self) -> AverageFn:
        """Give what takes weights into an average."""

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
        for key, model in wanted.items():
            module = runner.engine.unwrap(model)
            self.averages[key] = AveragedWeights(module, average=self.average_fn(), use_buffers=self.use_buffers)

    def _check(self, runner: IRunner, models: dict[str, nn.Module]) -> None:
        name = type(self).__name__
        for key, model in as_dict(runner._training_model).items():
            if key in models and any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
                raise ValueError(
                    f"{name} cannot average shards: torch's AveragedModel copies its module, which FSDP2 refuses; use "
                    "DistributedDataParallelEngine"
                )
        for model in models.values():
            short = {str(each.dtype) for each in model.parameters() if each.dtype.itemsize < 4}
            if short:
                raise ValueError(
                    f"{name} averages in the type of the weights, and {', '.join(sorted(short))} rounds the small "
                    "changes of an average away: keep the weights in float32, and compute in less by amp=True"
                )
        for other in map(innermost, runner.callbacks.values()):
            if isinstance(other, WeightAverageCallback) and other is not self:
                twice = sorted(models.keys() & other.averages.keys())
                if twice:
                    raise ValueError(f"{name} and {type(other).__name__} both average the models {twice}: choose one")
            if isinstance(other, ICheckpointCallback) and other.load_best_on_end and not self.validate:
                raise ValueError(
                    f"load_best_on_end=True ends with the best weights, {name}(validate=False) with an average that "
                    "was never compared with them: choose one, or validate=True"
                )

    def on_loader_start(self, runner: IRunner) -> None:
        if not self.validate or self._is_exchanged != runner.is_train_loader:
            return
        self._exchange()
        if self._is_exchanged and self.use_buffers:  # the engine has shared rank zero's by now, but not these
            for model in as_dict(runner._training_model).values():
                runner.engine.evaluation_model(model)

    def on_validation_end(self, runner: IRunner) -> None:
        self._take_back()

    def on_epoch_end(self, runner: IRunner) -> None:
        self._take_back()

    def _take_back(self) -> None:
        # Not at a loader's end, where others may look again at what was evaluated.
        if self._is_exchanged:
            self._exchange()

    def on_exception(self, runner: IRunner) -> None:
        self._take_back()
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
        if not self.validate:
            return {}
        return {key: each.weights() for key, each in self.averages.items() if each.num_averaged}

    def state_dict(self) -> StateDict:
        return {key: each.state_dict() for key, each in self.averages.items()}

    def load_state_dict(self, state: StateDict) -> None:
        if state.keys() != self.averages.keys():
            raise ValueError(
                f"the checkpoint holds averages of the models {sorted(state)}, {type(self).__name__} averages "
                f"{sorted(self.averages)}"
            )
        for key, each in self.averages.items():
            each.load_state_dict(state[key])
