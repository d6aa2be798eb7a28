"""Callbacks that train: loss, backward pass, optimizer, scheduler and weight averages."""
