"""Files on disk: atomic writes, checksums, predictions, and the lock of a logdir."""
