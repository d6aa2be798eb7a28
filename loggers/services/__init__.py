"""Loggers for tracking services."""
