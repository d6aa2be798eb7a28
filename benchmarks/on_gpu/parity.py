"""Part a: every engine and precision gives the weights of a hand-written PyTorch loop."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.on_gpu.check import Check, Failed, Figures, Setting, Skipped, exact_arithmetic
from benchmarks.on_gpu.compare import largest_difference, require_close, require_same_loss, weights
from benchmarks.on_gpu.ranks import run_ranks
from runnerkit import dl
from runnerkit.engine import IEngine

NUM_SAMPLES, GLOBAL_BATCH, NUM_EPOCHS, LR = 96, 16, 2, 0.05
BF16, FP16 = torch.bfloat16, torch.float16
EXACT_ON_GPU = 1e-6  # the report shows the difference, which is 0 if the same kernels ran
SUMS = 2e-6  # the order of float sums
ROUNDING = {None: SUMS, BF16: 3e-3, FP16: 5e-4}  # shares of a batch round differently from the whole batch
LOSS_TOLERANCE = 2e-2  # relative; 16-bit losses of shares round differently


@dataclass(frozen=True)
class Case:
    """An engine and what the hand-written loop must do to match it.

    Attributes:
        make: creates the engine.
        dtype: autocast's dtype in the hand-written loop; None is fp32.
        has_shares: whether several processes share a batch.
        splits: whether all GPUs of one process share a batch.
        tolerance: absolute, of the weights; None chooses by the shares and `dtype`.
        needs: why the case needs CUDA; empty if a CPU has an equivalent.
    """

    make: Callable[[Setting], IEngine]
    dtype: torch.dtype | None = None
    channels_last: bool = False
    has_shares: bool = False
    splits: bool = False
    tolerance: float | None = None
    needs: str = ""

    def shares_a_batch(self, setting: Setting) -> bool:
        """Return whether no device computes a whole batch."""
        return self.has_shares or (self.splits and setting.is_gpu and setting.num_devices > 1)

    def allowed(self, setting: Setting) -> float:
        """Return the tolerance of the weights."""
        if self.tolerance is not None:
            return self.tolerance
        if self.shares_a_batch(setting):
            return ROUNDING[self.dtype]
        return EXACT_ON_GPU if setting.is_gpu else 0.0


def images() -> TensorDataset:
    """Return learnable images, (96, 3, 8, 8), whose class is the brightest channel."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
    return TensorDataset(pixels, pixels.mean(dim=(2, 3)).argmax(dim=1))


def make_model() -> nn.Sequential:
    """Create a small convolutional network, without batch norm, whose statistics would depend on a process's share."""
    torch.manual_seed(1)
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8 * 8 * 8, 3))


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def by_hand(setting: Setting, *, dtype: torch.dtype | None, channels_last: bool = False) -> tuple[Tensor, float]:
    """Train with a hand-written loop; return the weights and the last epoch's mean loss."""
    device = setting.device
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    model = make_model().to(device, memory_format=memory_format)
    optimizer, scaler = make_optimizer(model), torch.amp.GradScaler(device.type, enabled=dtype == FP16)
    model.train()
    for _ in range(NUM_EPOCHS):
        losses = []
        for pixels, targets in DataLoader(images(), batch_size=GLOBAL_BATCH):
            pixels, targets = pixels.to(device, memory_format=memory_format), targets.to(device)
            optimizer.zero_grad()
            with nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype):
                loss = nn.functional.cross_entropy(model(pixels), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    return weights(model), torch.stack(losses).double().mean().item()


def with_runnerkit(engine: IEngine) -> tuple[Tensor, float]:
    """Train the same with an engine; each process gets its share of the global batch."""
    model = make_model()
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=make_optimizer(model),
        loaders={"train": DataLoader(images(), batch_size=GLOBAL_BATCH // engine.num_processes)},
        num_epochs=NUM_EPOCHS,
        engine=engine,
        loggers={"console": None},
    )
    return weights(model), runner.epoch_metrics["train"]["loss"]


def compare(case: Case, setting: Setting, train: Callable[[], tuple[Tensor, float]] | None = None) -> Figures:
    """Train with the case's engine and with the hand-written loop; compare weights and losses.

    Args:
        train: replaces the training with the case's engine.
    """
    if case.needs:
        setting.require_gpu(case.needs)
    with exact_arithmetic():
        ours, loss = train() if train is not None else with_runnerkit(case.make(setting))
        theirs, their_loss = by_hand(setting, dtype=case.dtype, channels_last=case.channels_last)
        figures = require_close(ours, theirs, tolerance=case.allowed(setting), start=weights(make_model()))
        if case.dtype is not None:
            in_fp32, _ = by_hand(setting, dtype=None)
            require_precision(ours, theirs, in_fp32, figures, has_shares=case.shares_a_batch(setting))
    return require_same_loss(loss, their_loss, figures, tolerance=LOSS_TOLERANCE)


def require_precision(ours: Tensor, theirs: Tensor, in_fp32: Tensor, figures: Figures, *, has_shares: bool) -> None:
    """Check that an engine computed in 16 bits, by the distance of its weights to those of fp32.

    Args:
        has_shares: shares of a batch differ from the whole as much as 16 bits from 32; then they must only differ from
            fp32 by more than the order of sums explains.
    Raises:
        Failed: the weights are those of fp32.
    """
    from_fp32 = figures["difference from fp32"] = largest_difference(ours, in_fp32)
    least = SUMS if has_shares else 2 * largest_difference(ours, theirs)
    if not from_fp32 > least:
        raise Failed("weights are nearer to those of fp32 than to those of mixed precision", figures)


def in_ranks_on_one_gpu(setting: Setting) -> Figures:
    """Start two processes that share the first device, as a launcher would, and compare the result of rank zero."""
    case = Case(make=_of_the_launcher, has_shares=True)

    def train() -> tuple[Tensor, float]:
        result = run_ranks("benchmarks.on_gpu.parity", 2, setting)
        return result["weights"], result["loss"]

    return compare(case, setting, train)


def _of_the_launcher(setting: Setting) -> IEngine:
    return dl.DistributedDataParallelEngine(
        device="cuda" if setting.is_gpu else "cpu", backend="gloo", **_options(setting)
    )


def rank_main(setting: Setting) -> dict[str, Any]:
    """Train in a process that :func:`run_ranks` started."""
    with exact_arithmetic():
        trained, loss = with_runnerkit(_of_the_launcher(setting))
    return {"weights": trained, "loss": loss}


def _options(setting: Setting) -> dict[str, Any]:
    # The processes of an engine do not inherit the settings of `exact_arithmetic`.
    return {"tf32": False} if setting.is_gpu else {}


def _one(setting: Setting, **options: Any) -> IEngine:
    return dl.GPUEngine(**_options(setting), **options) if setting.is_gpu else dl.CPUEngine(**options)


def _amp(setting: Setting, **options: Any) -> IEngine:
    return dl.AMPEngine(setting.device, **_options(setting), **options)


def _dp(setting: Setting, **options: Any) -> IEngine:
    make = dl.DataParallelAMPEngine if "dtype" in options else dl.DataParallelEngine
    return make(setting.device, **_options(setting), **options)


def _several(make: Callable[..., IEngine], setting: Setting, *, one: bool = False, **options: Any) -> IEngine:
    """Create an engine with one process or with one per GPU, over nccl; on a CPU, with two processes over gloo."""
    if not one and (not setting.is_gpu or setting.num_devices < 2):
        raise Skipped("needs several GPUs")
    if not one and GLOBAL_BATCH % setting.num_devices:
        raise Skipped(f"{setting.num_devices} GPUs do not divide a batch of {GLOBAL_BATCH}")
    num_processes = 1 if one and setting.is_gpu else setting.num_devices
    return make(num_processes, device=setting.device_type, **_options(setting), **options)


def _compiled(setting: Setting, **options: Any) -> IEngine:
    # Generating code for a CPU takes minutes; this backend only traces.
    arguments = options.pop("arguments", {}) if setting.is_gpu else {"backend": "aot_eager"}
    make = _amp if "dtype" in options else _one
    return make(setting, compile=arguments or True, **options)


DDP, DDP_AMP = dl.DistributedDataParallelEngine, dl.DistributedDataParallelAMPEngine
FSDP, FSDP_AMP = dl.FullyShardedDataParallelEngine, dl.FullyShardedDataParallelAMPEngine
GRAPHS = {"mode": "reduce-overhead"}
COMPILED = 2e-5  # fused kernels sum in another order
ONE = {"one": True}


def _case(make: Callable[..., IEngine], options: dict[str, Any] | None = None, **fields: Any) -> Case:
    return Case(make=partial(make, **(options or {})), **fields)


CASES = {
    "GPUEngine": _case(_one),
    "GPUEngine, channels_last": _case(_one, {"channels_last": True}, channels_last=True),
    "AMPEngine bf16": _case(_amp, {"dtype": BF16}, dtype=BF16),
    "AMPEngine fp16": _case(_amp, {"dtype": FP16}, dtype=FP16),
    "AMPEngine bf16, channels_last": _case(
        _amp, {"dtype": BF16, "channels_last": True}, dtype=BF16, channels_last=True
    ),
    "DataParallelEngine": _case(_dp, splits=True),
    "DataParallelAMPEngine bf16": _case(_dp, {"dtype": BF16}, dtype=BF16, splits=True),
    "DataParallelAMPEngine fp16": _case(_dp, {"dtype": FP16}, dtype=FP16, splits=True),
    "DDP, one process over nccl": _case(partial(_several, DDP), ONE, has_shares=True),
    "DDP, one process per GPU over nccl": _case(partial(_several, DDP), has_shares=True),
    "DDP bf16": _case(partial(_several, DDP_AMP), {**ONE, "dtype": BF16}, dtype=BF16, has_shares=True),
    "DDP fp16": _case(partial(_several, DDP_AMP), {**ONE, "dtype": FP16}, dtype=FP16, has_shares=True),
    "FSDP2": _case(partial(_several, FSDP), ONE, has_shares=True),
    "FSDP2, one process per GPU": _case(partial(_several, FSDP), has_shares=True),
    "FSDP2, compute_dtype=bf16": _case(
        partial(_several, FSDP), {**ONE, "compute_dtype": BF16}, dtype=BF16, has_shares=True
    ),
    "FSDP2 AMP fp16": _case(partial(_several, FSDP_AMP), {**ONE, "dtype": FP16}, dtype=FP16, has_shares=True),
    "compile": _case(_compiled, tolerance=COMPILED),
    "compile, bf16": _case(_compiled, {"dtype": BF16}, dtype=BF16, has_shares=True),
    "CUDA graphs": _case(_compiled, {"arguments": GRAPHS}, tolerance=COMPILED, needs="CUDA graphs"),
    "CUDA graphs, fp16": _case(
        _compiled, {"arguments": GRAPHS, "dtype": FP16}, dtype=FP16, has_shares=True, needs="CUDA graphs"
    ),
}


def _check(name: str, case: Case) -> Check:
    def run(setting: Setting) -> Figures:
        figures = compare(case, setting)
        return figures if "CUDA graphs" not in name else {**figures, "graphs skipped": num_skipped_graphs()}

    return Check(name, run, limit_s=150 if "compile" in name or "graphs" in name else 90)


def num_skipped_graphs() -> int:
    """Return how often torch.compile fell back from CUDA graphs in this process.

    Raises:
        Failed: it never recorded a graph.
    """
    from torch._dynamo.utils import counters

    skipped = int(counters["inductor"]["cudagraph_skips"])
    if skipped:
        raise Failed(f"torch.compile skipped CUDA graphs {skipped} times")
    return skipped


CHECKS = (
    *(_check(name, case) for name, case in CASES.items()),
    Check("DDP, two processes on one device over gloo", in_ranks_on_one_gpu),
)
