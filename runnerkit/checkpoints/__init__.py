"""Checkpoint files: written atomically, verified, indexed and cleaned up."""
