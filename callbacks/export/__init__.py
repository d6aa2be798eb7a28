"""Callbacks that export the trained model."""
