"""Communicators: a process group of torch.distributed, and Horovod."""
