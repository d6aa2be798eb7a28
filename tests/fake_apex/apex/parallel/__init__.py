"""Gradients averaged as each becomes ready, and a batch norm of another class."""

import torch
import torch.distributed as dist
from torch import nn

from apex import calls


class DistributedDataParallel(nn.Module):
    def __init__(self, module, message_size=10000000, delay_allreduce=False, gradient_average=True):
        super().__init__()
        calls.append(f"DistributedDataParallel(delay_allreduce={delay_allreduce})")
        self.module = module
        self._disable_allreduce = False
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter):
        if not self._disable_allreduce:
            calls.append("allreduce")
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def disable_allreduce(self):
        self._disable_allreduce = True

    def enable_allreduce(self):
        self._disable_allreduce = False

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input):
        pass


def convert_syncbn_model(module, process_group=None, channel_last=False):
    """Replace batch norms, with copies of their weights, as Apex does."""
    converted = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        calls.append("convert_syncbn_model")
        converted = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine)
        converted.running_mean, converted.running_var = module.running_mean, module.running_var
        with torch.no_grad():
            converted.weight.copy_(module.weight)
            converted.bias.copy_(module.bias)
    for name, child in module.named_children():
        converted.add_module(name, convert_syncbn_model(child))
    return converted
