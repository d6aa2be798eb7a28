"""Callbacks that show what a run does: progress, timings, memory and gradients."""
