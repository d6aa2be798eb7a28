"""A scikit-learn model on the features that a network gives: a linear probe, nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runnerkit.arguments import check_keys, check_names, check_strings
from runnerkit.callback import CallbackOrder
from runnerkit.callbacks.keys import pick
from runnerkit.callbacks.loader_samples import LoaderSamples
from runnerkit.callbacks.loader_state import LoaderStateCallback
from runnerkit.fused_reduction import Share

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class SklearnModelCallback(LoaderStateCallback[LoaderSamples]):
    """Fit a scikit-learn model on a loader's features and targets, at its end; predict others with it.

    Of several processes all samples are gathered and sorted, fitted once, and everybody predicts with that model: the
    number of processes, and a shuffle, change nothing but the features' own rounding. Predictions stand in
    ``runner.batch[predict_key]`` for metric callbacks; the loader has ``sklearn_score``, what the model's ``score``
    gives for all of it (a classifier's accuracy, a regressor's R2). Each epoch fits anew. The features of
    `train_loader` are those of training, dropout included, if its name begins with "train".

    Args:
        feature_key, target_key: in ``runner.batch``, as many rows each; rows of features are flattened.
        train_loader: whose samples it is fitted on; it comes before the others.
        valid_loaders: whose samples it predicts.
        model_fn: makes the model: ``sklearn.linear_model.LogisticRegression``, say.
        predict_method: "predict", "predict_proba", ...
        predict_key: of the predictions.
        model_kwargs: arguments of `model_fn`.

    Attributes:
        model: the fitted one; None before.

    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> SklearnModelCallback("features", "targets", "train", "valid", KNeighborsClassifier, n_neighbors=3).valid_loaders
    ('valid',)
    """

    shapes_training = True  # a run that only evaluates has no loader to fit on

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
        self.order = CallbackOrder.Metric - 1  # metrics read the predictions
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
                f"SklearnModelCallback: model_fn={model_fn!r} makes no model with a method "
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
                    f"SklearnModelCallback predicts loader {key!r} by what it fits on {self.train_loader!r}, "
                    f"which comes later: {keys}"
                )

    def new_state(self, runner: IRunner) -> LoaderSamples | None:
        return LoaderSamples() if runner.loader_key in (self.train_loader, *self.valid_loaders) else None

    def on_batch_end(self, runner: IRunner) -> None:
        if self.new_state(runner) is None:
            return
        (features, targets), _ = pick(runner, self.feature_key, self.target_key, reader="SklearnModelCallback")
        self.state(runner).add([features, targets])
        if runner.loader_key != self.train_loader:
            predictions = getattr(self._fitted(runner), self.predict_method)(_rows(features))
            runner.batch[self.predict_key] = torch.as_tensor(predictions, device=runner.engine.device)

    def _fitted(self, runner: IRunner) -> Any:
        if self.model is None:
            raise RuntimeError(
                f"SklearnModelCallback is asked for loader {runner.loader_key!r} before it was fitted on "
                f"{self.train_loader!r}: evaluate at the end of epochs"
            )
        return self.model

    def finish(self, runner: IRunner, state: LoaderSamples, total: Share) -> None:
        features, targets = (torch.cat(column) for column in zip(*total.others, strict=True))
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
