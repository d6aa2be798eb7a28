"""Helpers of the training callbacks."""
