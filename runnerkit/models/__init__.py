"""Tools for models: summary, pruning and export."""
