"""The state of a run: captured, checked for compatibility and restored."""
