"""R2, the fraction of the targets' variance that a regression explains."""

from __future__ import annotations

from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.regression import R2Metric

__all__ = ["R2SquaredCallback"]


class R2SquaredCallback(ObjectMetricCallback):
    """Log ``r2squared``, averaged over the outputs.

    Args:
        input_key, target_key: keys of outputs and targets, (N,) or (N, D) each, in ``runner.batch``; by default
            `output_key` and `target_key` of the SupervisedRunner.
        prefix, suffix: see :class:`~runnerkit.metrics.R2Metric`.

    >>> R2SquaredCallback("logits", "targets").provides
    ('r2squared',)
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        *,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metric = R2Metric(prefix=prefix, suffix=suffix)
        super().__init__(metric, log_on_batch=False, input_key=input_key, target_key=target_key)
