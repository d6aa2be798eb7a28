"""Scikit-learn models fitted on the features of a network, such as linear probes and nearest neighbors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runnerkit.callback import CallbackOrder
from runnerkit.callbacks.metrics.parts.batch_keys import pick
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.metrics.metric import SamplesMetric
from runnerkit.metrics.reduction import PartialSums
from runnerkit.support.arguments import check_keys, check_names, check_strings

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["SklearnModelCallback"]


class FeaturesAndTargets(SamplesMetric):
    """The samples of one loader."""

    def columns(self, features: Tensor, targets: Tensor) -> list[Tensor]:
        return [features, targets]

    def values(self, *columns: Tensor) -> dict[str, Tensor]:
        return {}


class SklearnModelCallback(LoaderStateCallback[FeaturesAndTargets]):
    """Fit a scikit-learn model on a loader's features and targets at its end, and predict other loaders with it.

    Samples of all processes are gathered, sorted and fitted once, and all ranks use that model: the number of processes
    and shuffling change only the rounding of the features. Predictions are in ``runner.batch[predict_key]`` for metric
    callbacks; each loader logs ``sklearn_score``, the model's ``score`` over the loader (a classifier's accuracy, a
    regressor's R2). Each epoch fits a new model. If `train_loader` is named "train...", its features are those of
    training, with dropout.

    Args:
        feature_key, target_key: keys in ``runner.batch``, with as many rows each; rows of features are flattened.
        train_loader: loader to fit on; it must come before the others.
        valid_loaders: loader or loaders to predict.
        model_fn: constructs the model, for example ``sklearn.linear_model.LogisticRegression``.
        predict_method: "predict", "predict_proba", ...
        predict_key: key for the predictions.
        model_kwargs: keyword arguments of `model_fn`.

    Attributes:
        model: the fitted model; None before the first fit.

    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> SklearnModelCallback("features", "targets", "train", "valid", KNeighborsClassifier, n_neighbors=3).valid_loaders
    ('valid',)
    """

    shapes_training = True  # an evaluation lacks the loader to fit on

    def __init__(
        self,
        feature_key: str,
        target_key: str,
        train_loader: str,
        valid_loaders: str | Sequence[str],
        model_fn: Callable[..., Any],
        predict_method: str = "predict",
        predict_key: str = "sklearn_predict",
        **model_kwargs: Any,
    ) -> None:
        super().__init__()
        self.order = CallbackOrder.Metric - 1  # before metrics, which read the predictions
        check_keys(self, feature_key=feature_key, target_key=target_key)
        check_strings(self, train_loader=train_loader, predict_method=predict_method, predict_key=predict_key)
        self.feature_key, self.target_key = feature_key, target_key
        self.train_loader = train_loader
        self.valid_loaders = (valid_loaders,) if isinstance(valid_loaders, str) else valid_loaders
        check_names(self, valid_loaders=self.valid_loaders)
        self.valid_loaders = tuple(self.valid_loaders)
        if not callable(model_fn):
            raise TypeError(f"SklearnModelCallback: model_fn must be callable, got {model_fn!r}")
        self.make_model = partial(model_fn, **model_kwargs)
        self.predict_method = predict_method
        self.predict_key = predict_key
        self.provides = ("sklearn_score",)
        if not callable(getattr(self.make_model(), predict_method, None)):
            raise ValueError(
                f"SklearnModelCallback: the model of model_fn={model_fn!r} does not have the method "
                f"predict_method={predict_method!r}"
            )
        self.model: Any = None

    def on_stage_start(self, runner: IRunner) -> None:
        super().on_stage_start(runner)
        self.model = None
        keys = list(runner.loaders)
        for key in (self.train_loader, *self.valid_loaders):
            if key not in keys:
                raise ValueError(f"SklearnModelCallback reads loader {key!r}; the loaders are {keys}")
            if keys.index(key) < keys.index(self.train_loader):
                raise ValueError(
                    f"SklearnModelCallback cannot predict loader {key!r} before {self.train_loader!r}, on "
                    f"which it is fitted; the order is {keys}"
                )

    def new_state(self, runner: IRunner) -> FeaturesAndTargets | None:
        return FeaturesAndTargets(()) if runner.loader_key in (self.train_loader, *self.valid_loaders) else None

    def on_batch_end(self, runner: IRunner) -> None:
        if self.new_state(runner) is None:
            return
        (features, targets), _ = pick(runner, self.feature_key, self.target_key, reader="SklearnModelCallback")
        self.state(runner).update(features, targets)
        if runner.loader_key != self.train_loader:
            predictions = getattr(self._fitted(runner), self.predict_method)(_rows(features))
            runner.batch[self.predict_key] = torch.as_tensor(predictions, device=runner.engine.device)

    def _fitted(self, runner: IRunner) -> Any:
        if self.model is None:
            raise RuntimeError(
                f"SklearnModelCallback cannot predict loader {runner.loader_key!r} before it is fitted on "
                f"{self.train_loader!r}: evaluate at the end of epochs"
            )
        return self.model

    def finish(self, runner: IRunner, state: FeaturesAndTargets, total: PartialSums) -> None:
        state.take(total)
        features, targets = state.all_columns()
        rows, labels = _rows(features), targets.detach().cpu().numpy()
        if runner.loader_key == self.train_loader:
            model = self.make_model() if runner.engine.is_main_process else None
            if model is not None:
                order = np.lexsort((*labels.reshape(len(labels), -1).T, *rows.T))
                model.fit(rows[order], labels[order])
            self.model = runner.engine.broadcast_object(model)  # every rank must enter
        elif hasattr(self.model, "score"):
            runner.loader_metrics["sklearn_score"] = float(self.model.score(rows, labels))


def _rows(features: Tensor) -> np.ndarray[Any, Any]:
    return features.detach().float().cpu().flatten(1).numpy()
