"""A wrapper that averages gradients, and a conversion that copies the weights of batch norms."""

import copy

import torch.distributed as dist
from torch import nn

from apex import calls


class DistributedDataParallel(nn.Module):
    def __init__(self, module, **options):
        super().__init__()
        calls.append(f"DistributedDataParallel({options})")
        self.module, self.averages = module, True
        for parameter in filter(lambda each: each.requires_grad, module.parameters()):  # as Apex's own
            parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter):
        if self.averages:
            calls.append("allreduce")
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def disable_allreduce(self):
        self.averages = False

    def enable_allreduce(self):
        self.averages = True

    def forward(self, features):
        return self.module(features)


def convert_syncbn_model(model):
    calls.append("convert_syncbn_model")
    for name, child in model.named_children():
        if isinstance(child, nn.BatchNorm1d):
            setattr(model, name, copy.deepcopy(child))
    return model
