"""Sharding of parameters for FSDP2."""
