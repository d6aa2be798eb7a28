"""Callbacks that search for hyperparameters."""
