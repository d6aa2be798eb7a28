"""Helpers of the control callbacks."""
