"""Shares of map-style data: one global order of samples, which processes divide."""
