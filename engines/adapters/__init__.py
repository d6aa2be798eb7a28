"""Adapters to Apex, Horovod and DDP communication hooks."""
