"""Records that the debugging callbacks compare."""
