"""Adapters to Apex, Horovod, torchao and DDP communication hooks."""
