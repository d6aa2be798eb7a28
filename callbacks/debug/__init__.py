"""Callbacks that find hangs, non-finite values and ranks that diverge."""
