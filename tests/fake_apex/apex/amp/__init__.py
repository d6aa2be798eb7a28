"""Loss scaling, casting and master weights, as far as a caller can see them."""

from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import torch
from torch import nn
from torch.optim import Optimizer

from apex import calls
from apex.parallel import DistributedDataParallel

_state = SimpleNamespace(scalers=[], registered=[], is_active=False)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, DistributedDataParallel)
_NORMS = nn.modules.batchnorm._BatchNorm


class _Scaler:
    def __init__(self, loss_scale):
        self.is_dynamic = loss_scale == "dynamic"
        self.scale = 2.0**16 if self.is_dynamic else float(loss_scale)
        self.unskipped = 0


def register_float_function(module, name):
    calls.append(f"register_float_function({name})")
    _state.registered.append((module, name))


def initialize(
    models,
    optimizers=None,
    enabled=True,
    opt_level="O1",
    cast_model_type=None,
    patch_torch_functions=None,
    keep_batchnorm_fp32=None,
    master_weights=None,
    loss_scale=None,
    cast_model_outputs=None,
    num_losses=1,
    verbosity=1,
    min_loss_scale=None,
    max_loss_scale=2.0**24,
):
    assert isinstance(models, list) and (optimizers is None or isinstance(optimizers, list))
    calls.append(f"initialize({len(models)} models, {len(optimizers or [])} optimizers, {opt_level})")
    for model in models:
        if isinstance(model, _WRAPPERS):
            raise RuntimeError("parallel wrappers come after amp.initialize")
        if any(each.dtype == torch.float16 for each in model.parameters()):
            raise RuntimeError("found a parameter in fp16, expected fp32")
    if opt_level in ("O0", "O2", "O3"):
        for model in models:
            _cast(model, opt_level, keep_batchnorm_fp32)
        for optimizer in optimizers or []:
            optimizer.load_state_dict(optimizer.state_dict())
    for optimizer in optimizers or []:
        _process(optimizer, has_masters=opt_level == "O2", patches_step=opt_level == "O1")
    scale = loss_scale if loss_scale is not None else "dynamic" if opt_level in ("O1", "O2") else 1.0
    _state.scalers = [_Scaler(scale) for _ in range(num_losses)]
    _state.is_active = opt_level == "O1"
    return models if optimizers is None else (models, optimizers)


def _cast(model, opt_level, keep_batchnorm_fp32):
    dtype = torch.float32 if opt_level == "O0" else torch.float16
    keeps_norms = opt_level == "O2" if keep_batchnorm_fp32 is None else keep_batchnorm_fp32
    for module in model.modules():
        if not (keeps_norms and isinstance(module, _NORMS)):
            module._apply(lambda each: each.to(dtype) if each.is_floating_point() else each, recurse=False)
    original = model.forward

    def forward(*args, **kwargs):
        args = [each.to(dtype) if each.is_floating_point() else each for each in args]
        return original(*args, **kwargs).float()

    model.forward = forward


def _process(optimizer, *, has_masters, patches_step):
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("an optimizer goes through amp.initialize once only")
    stash = optimizer._amp_stash = SimpleNamespace(
        has_masters=has_masters, is_initialized=False, pairs=[], kept=None, is_scaled=False, is_patched=False
    )
    step, zero_grad = optimizer.step, optimizer.zero_grad

    def new_step(self, closure=None):
        result = step()
        calls.append("step")
        for weight, master in stash.pairs:
            weight.data.copy_(master.data)
            master.grad = None
        return result

    def new_zero_grad(self):
        _make_masters(self)
        for weight, _ in stash.pairs:
            weight.grad = None
        zero_grad()

    if has_masters:
        optimizer.zero_grad = MethodType(new_zero_grad, optimizer)
    if has_masters or patches_step:
        optimizer.step = MethodType(new_step, optimizer)


def _make_masters(optimizer):
    """As late as Apex does: at the first zero_grad or scale_loss."""
    stash = optimizer._amp_stash
    if stash.is_initialized:
        return
    stash.is_initialized = True
    for group in optimizer.param_groups if stash.has_masters else []:
        for index, weight in enumerate(group["params"]):
            if weight.requires_grad and weight.dtype == torch.float16:
                master = weight.detach().clone().float().requires_grad_()
                stash.pairs.append((weight, master))
                group["params"][index] = master
                if weight in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(weight)
    optimizer.load_state_dict(optimizer.state_dict())


@contextmanager
def scale_loss(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False):
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    scaler = _state.scalers[loss_id]
    calls.append(f"scale_loss(loss_id={loss_id}, delay_unscale={delay_unscale})")
    if scaler.scale == 1.0 and not scaler.is_dynamic and not any(each._amp_stash.has_masters for each in optimizers):
        yield loss.float()
        return
    if not delay_unscale:
        for optimizer in optimizers:
            if not optimizer._amp_stash.is_scaled:
                _put_gradients_aside(optimizer)
    scaled = loss.float() * scaler.scale
    if scaled.requires_grad:
        scaled.register_hook(lambda _: calls.append("backward"))
    yield scaled
    if delay_unscale:
        for optimizer in optimizers:
            optimizer._amp_stash.is_scaled = True
        return
    overflows = [_unscale(optimizer, scaler.scale) for optimizer in optimizers]
    calls.append("unscale")
    if not scaler.is_dynamic:
        return
    scaler.unskipped = 0 if any(overflows) else scaler.unskipped + 1
    if any(overflows):
        scaler.scale /= 2
        for optimizer in optimizers:
            if not optimizer._amp_stash.is_patched:
                _skip_next_step(optimizer)
    elif scaler.unskipped == 2000:
        scaler.scale, scaler.unskipped = min(scaler.scale * 2, 2.0**24), 0


def _put_gradients_aside(optimizer):
    _make_masters(optimizer)
    stash = optimizer._amp_stash
    for weight, _ in stash.pairs:
        weight.grad = None
    halves = {id(master) for _, master in stash.pairs}
    stash.kept = {}
    for each in master_params(optimizer):
        if id(each) not in halves:
            stash.kept[each], each.grad = each.grad, None


def _unscale(optimizer, scale):
    _make_masters(optimizer)
    stash = optimizer._amp_stash
    has_overflow = False
    for weight, master in stash.pairs:
        if weight.grad is not None:
            has_overflow |= not bool(weight.grad.isfinite().all())
            new = weight.grad.float() / scale
            master.grad = new if master.grad is None else master.grad + new
    masters = {id(master) for _, master in stash.pairs}
    for each in list(master_params(optimizer)):
        if id(each) in masters:
            continue
        kept = (stash.kept or {}).get(each)
        if each.grad is not None:
            has_overflow |= not bool(each.grad.isfinite().all())
            each.grad /= scale
            if kept is not None:
                each.grad += kept
        else:
            each.grad = kept
    stash.kept, stash.is_scaled = None, False
    return has_overflow


def _skip_next_step(optimizer):
    step = optimizer.step
    optimizer._amp_stash.is_patched = True

    def skip_step(closure=None):
        calls.append("skip")
        for _, master in optimizer._amp_stash.pairs:
            master.grad = None
        optimizer.step = step
        optimizer._amp_stash.is_patched = False

    optimizer.step = skip_step


@contextmanager
def disable_casts():
    _state.is_active = False
    yield
    _state.is_active = True


def casts_are_active():
    """Not Apex's: whether O1's casts would act now."""
    return _state.is_active


def master_params(optimizer):
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination=None):
    return {
        f"loss_scaler{index}": {"loss_scale": each.scale, "unskipped": each.unskipped}
        for index, each in enumerate(_state.scalers)
    }


def load_state_dict(state_dict):
    calls.append("load_state_dict")
    for each, saved in zip(_state.scalers, state_dict.values(), strict=True):
        each.scale, each.unskipped = saved["loss_scale"], saved["unskipped"]
