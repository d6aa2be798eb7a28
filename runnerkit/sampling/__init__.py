"""Which process gets which samples of a loader, and from which seeds they draw."""
