"""Seeds, generator states and deterministic algorithms."""
