"""Optimizer steps: how many there are, what their batches weigh, and at which learning rates."""
