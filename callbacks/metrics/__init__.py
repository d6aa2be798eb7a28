"""Callbacks that compute metrics."""
