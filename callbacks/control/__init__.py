"""Callbacks that control which loaders and batches run, and when a run stops."""
