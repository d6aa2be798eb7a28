"""Failures of one rank, reported to all others and to the parent."""
