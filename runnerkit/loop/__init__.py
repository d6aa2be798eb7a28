"""The parts of the training loop that surround a batch."""
