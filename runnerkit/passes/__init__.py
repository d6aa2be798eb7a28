"""Passes over a loader outside the training loop: evaluation, prediction, recomputation."""
