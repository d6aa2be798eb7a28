"""What lies on disk: checkpoints, weights, rows of predictions; written whole or not at all."""
