"""Accumulators and key handling for the metric callbacks."""
