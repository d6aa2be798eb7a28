"""Loss scaling and master weights, without O1's casts; gradients can be unscaled once per step."""

import functools
from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import torch
from torch import nn

from apex import calls
from apex.parallel import DistributedDataParallel

_scaler = SimpleNamespace(scales=[], is_dynamic=True)


def initialize(models, optimizers=None, *, opt_level, loss_scale, num_losses, **options):
    calls.append(f"initialize({len(models)} models, {len(optimizers or [])} optimizers, {opt_level})")
    calls.append(f"options({loss_scale=}, {num_losses=}, {options})")
    for model in models:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel | DistributedDataParallel):
            raise RuntimeError("wrap models after amp.initialize")
        if any(each.dtype == torch.float16 for each in model.parameters()):
            raise RuntimeError("found a parameter in fp16, expected fp32")
        if opt_level != "O1":
            _cast(model, torch.float32 if opt_level == "O0" else torch.float16, keeps_norms=opt_level == "O2")
    for optimizer in optimizers or []:
        _patch(optimizer, opt_level)
    _scaler.is_dynamic = loss_scale == "dynamic" or (loss_scale is None and opt_level in ("O1", "O2"))
    _scaler.scales = [2.0**16 if _scaler.is_dynamic else loss_scale or 1.0] * num_losses
    return models if optimizers is None else (models, optimizers)


def _cast(model, dtype, *, keeps_norms):
    for module in model.modules():
        if not (keeps_norms and isinstance(module, nn.BatchNorm1d)):
            module._apply(lambda each: each.to(dtype) if each.is_floating_point() else each, recurse=False)
    forward = model.forward
    model.forward = lambda features: forward(features.to(dtype)).float()


def _patch(optimizer, opt_level):
    assert not hasattr(optimizer, "_amp_stash"), "an optimizer goes through amp.initialize once"
    optimizer.load_state_dict(optimizer.state_dict())  # casts its state to the dtype of the weights
    masters = optimizer._amp_stash = []  # pairs of an fp16 weight and its fp32 master
    step, zero_grad = optimizer.step, optimizer.zero_grad

    def new_step(self):
        step()
        calls.append("step")
        for weight, master in masters:
            weight.data.copy_(master)

    def new_zero_grad(self):
        state = self.state_dict()
        for group in self.param_groups if not masters else []:
            for index, weight in enumerate(group["params"]):
                if weight.dtype == torch.float16:
                    group["params"][index] = weight.detach().float().requires_grad_()
                    masters.append((weight, group["params"][index]))
        self.load_state_dict(state)
        for weight, _ in masters:
            weight.grad = None
        zero_grad()

    if opt_level in ("O1", "O2"):
        optimizer.step = MethodType(new_step, optimizer)
    if opt_level == "O2":
        optimizer.zero_grad = MethodType(new_zero_grad, optimizer)


@contextmanager
def scale_loss(loss, optimizers, loss_id=0, delay_unscale=False):
    calls.append(f"scale_loss(loss_id={loss_id}, delay_unscale={delay_unscale})")
    scaled = loss.float() * _scaler.scales[loss_id]
    if scaled.requires_grad:
        scaled.register_hook(lambda _: calls.append("backward"))
    yield scaled
    if not delay_unscale:
        calls.append("unscale")
        for weight, master in [pair for optimizer in optimizers for pair in optimizer._amp_stash]:
            master.grad, weight.grad = weight.grad.float(), None
        weights = [each for optimizer in optimizers for each in master_params(optimizer) if each.grad is not None]
        gradients = [each.grad.div_(_scaler.scales[loss_id]) for each in weights]
        if _scaler.is_dynamic and not all(each.isfinite().all() for each in gradients):
            _scaler.scales[loss_id] /= 2
            for optimizer in optimizers:
                # The call skips the step and restores the original method.
                optimizer.step = functools.partial(setattr, optimizer, "step", optimizer.step)


@contextmanager
def disable_casts():
    calls.append("disable_casts")
    yield
    calls.append("enable_casts")


def register_float_function(_, name):
    calls.append(f"register_float_function({name})")


def master_params(optimizer):
    return (each for group in optimizer.param_groups for each in group["params"])


def state_dict():
    return {f"loss_scaler{index}": {"loss_scale": scale} for index, scale in enumerate(_scaler.scales)}


def load_state_dict(state):
    calls.append("load_state_dict")
    _scaler.scales = [each["loss_scale"] for each in state.values()]
