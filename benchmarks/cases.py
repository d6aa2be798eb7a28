"""What is measured: the cases, each with its candidates, of which the first is raw PyTorch."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.cnn.work import NUM_TRAIN, NUM_VALID
from benchmarks.harness import Candidate, Figure
from benchmarks.steps.work import NUM_TURNS, VARIANTS


@dataclass(frozen=True)
class Case:
    """A table of RESULTS.md.

    Attributes:
        key: its name on the command line, and of its section.
        title, text: what was run.
        candidates: the first is the measure of the others.
        figures: what they print.
        tolerance: relative, of the numbers that show that all did the same work.
        num_rounds: overrides the command line: one for counts that are the same each time.
        in_turns: the candidates of a round live at once and work in turns, which cancels the machine's noise.
        needs_gpu: whether to skip it without one.
    """

    key: str
    title: str
    text: str
    candidates: tuple[Candidate, ...]
    figures: tuple[Figure, ...]
    tolerance: float = 1e-4
    num_rounds: int | None = None
    in_turns: bool = False
    needs_gpu: bool = False


# What a peer cannot do is left out: barebones reports nothing, Poutyne and Trainer always aggregate the loss.
PEERS = {
    "Lightning Fabric": ("lightning_fabric", VARIANTS),
    "Accelerate": ("accelerate_loop", VARIANTS),
    "Ignite": ("ignite_engine", VARIANTS),
    "TorchTNT": ("torchtnt_train", VARIANTS),
    "Poutyne": ("poutyne_model", VARIANTS),
    "Catalyst": ("catalyst_runner", VARIANTS),
    "transformers' Trainer": ("hf_trainer", VARIANTS),
    "Lightning, barebones": ("lightning_trainer", ("nothing",)),
    "Lightning": ("lightning_trainer", VARIANTS),
}
VARIANT_WORDS = {
    "nothing": "nothing logged",
    "loss": "mean loss",
    "accuracy": "mean loss and accuracy",
    "log": "loss and accuracy; each 10th step to CSV and TensorBoard",
    "bar": "loss and accuracy, and a progress bar",
}
# What a variant's times hold that its title does not tell.
VARIANT_NOTES = {
    "log": " Not all log as much: Catalyst writes each step to TensorBoard, Poutyne each to CSV and only epochs to "
    "TensorBoard, Accelerate no CSV, transformers' Trainer no accuracy of steps.",
    "bar": " Bars that are redrawn by the clock, which runs on while others have their turn, are redrawn about once a "
    "turn, oftener than alone.",
}


def all_cases(peers: str | None = None, *, num_batches: int = 5000) -> list[Case]:
    """Return all cases; with the peers' scripts if the interpreter of their environment is given."""
    return [
        *(_steps(variant, peers, num_batches) for variant in VARIANTS),
        *(_calls(variant, peers) for variant in VARIANTS if variant != "bar"),  # a bar moves by the clock
        _cnn(peers),
        CNN_TORCHVISION,
        *PROCESSES,
        CHECKPOINT,
        *LARGE_START,
        IMPORT,
        MEMORY,
        *GROWTH,
        MIXED_PRECISION,
        GPU,
    ]


def _step_candidates(variant: str, peers: str | None, *more: str) -> tuple[Candidate, ...]:
    arguments = ("--variant", variant, *more)
    candidates = [
        Candidate("raw PyTorch", "benchmarks.steps.raw", arguments),
        Candidate("runnerkit", "benchmarks.steps.ours", arguments),
    ]
    for name, (script, variants) in PEERS.items():
        if peers is not None and variant in variants:
            own = (*arguments, "--barebones") if "barebones" in name else arguments
            candidates.append(Candidate(name, f"benchmarks.peers.{script}", own, python=peers))
    return tuple(candidates)


def _steps(variant: str, peers: str | None, num_batches: int) -> Case:
    return Case(
        key=f"steps-{variant}",
        title=f"A training step: {VARIANT_WORDS[variant]}",
        text=f"MLP 64-64-10, SGD with momentum, {num_batches:,} ready batches of 32. In each round all live at once "
        f"and take turns of {num_batches // NUM_TURNS} steps. Not timed are the first tenth of the turns, and of each "
        "the first tenth, while caches hold what the one before left there. "
        f"Poutyne and transformers' Trainer aggregate the loss in any case.{VARIANT_NOTES.get(variant, '')}",
        candidates=_step_candidates(variant, peers, "--num-batches", str(num_batches)),
        figures=(Figure("step_us", "µs a step"),),
        in_turns=True,
    )


def _calls(variant: str, peers: str | None) -> Case:
    return Case(
        key=f"calls-{variant}",
        title=f"Function calls in a training step: {VARIANT_WORDS[variant]}",
        text="Calls of Python and builtin functions, counted by sys.setprofile: 150 steps less 50, so that what comes "
        f"once cancels. No load on the machine changes them.{VARIANT_NOTES.get(variant, '')}",
        candidates=_step_candidates(variant, peers, "--count-calls"),
        figures=(Figure("calls", "calls a step", digits=0),),
        num_rounds=1,
    )


CNN_TORCHVISION = Case(
    key="torchvision-cnn",
    title="The same with torchvision's transforms",
    text="As users write it: RandomCrop, RandomHorizontalFlip, ToTensor, Normalize of torchvision, image by image.",
    candidates=(
        Candidate("raw PyTorch", "benchmarks.cnn.published_transforms", ("raw",)),
        Candidate("runnerkit, the same DataLoader", "benchmarks.cnn.published_transforms", ("ours",)),
    ),
    figures=(Figure("seconds", "seconds"),),
    tolerance=0.1,  # each draws its own crops and order
    in_turns=True,
)


def _cnn(peers: str | None) -> Case:
    candidates = [
        Candidate("raw PyTorch", "benchmarks.cnn.raw"),
        Candidate("runnerkit, the same DataLoader", "benchmarks.cnn.ours"),
        Candidate("raw PyTorch, images seeded", "benchmarks.cnn.seeded"),
        Candidate("runnerkit, TensorLoader", "benchmarks.cnn.tensor_loader"),
    ]
    for name, (script, variants) in PEERS.items():
        if peers is not None and "accuracy" in variants:
            candidates.append(Candidate(name, f"benchmarks.cnn.peers.{script}", python=peers))
    return Case(
        key="cnn",
        title="A small CNN on Fashion-MNIST, from files to metrics",
        text=f"One epoch of training with random crop and flip, then validation, of {NUM_TRAIN:,} and {NUM_VALID:,} "
        "images; batches of 256; loss and accuracy. On scikit-learn's digits where Fashion-MNIST is missing. All but "
        "TensorLoader: a DataLoader without workers, and torchvision's transforms image by image, by hand with PIL, "
        "draw for draw, as some peers cannot be imported where PyPI's torchvision is beside a CPU-only torch; "
        "they give the same numbers in about half of torchvision's time. Images seeded: torch's generator is seeded "
        "before each image, by its index and the epoch, so that it draws the same crop and flip on any number of "
        "processes and after any resume, as each sample does by runnerkit. TensorLoader: whole batches are cut, "
        "flipped and normalized. Imports are not timed, that of torch._dynamo included, which an optimizer's "
        "first step would do. All live at once and take turns of 3,000 samples, but TensorLoader, whose epoch is "
        "one turn; the wait for a turn is not counted. "
        "Lightning begins with two batches of validation, its default; Ignite computes the training loss of each batch "
        "again, in its metric.",
        candidates=tuple(candidates),
        figures=(Figure("seconds", "seconds"),),
        tolerance=0.1,  # each draws its own crops and order
        in_turns=True,
    )


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
DDP = (
    Candidate("raw PyTorch, torchrun", "benchmarks.ddp.raw", ("1",), launcher=TORCHRUN),
    Candidate("runnerkit, torchrun", "benchmarks.ddp.ours", ("1",), launcher=TORCHRUN),
    Candidate("raw PyTorch, mp.spawn", "benchmarks.ddp.raw", ("1",)),
    Candidate("runnerkit, its own processes", "benchmarks.ddp.ours", ("1",)),
)
PROCESSES = (
    Case(
        key="ddp-steps",
        title="Steps of two processes",
        text="DistributedDataParallel over gloo, the model of the first case, 500 steps of 32 a process from a "
        "DataLoader, mean loss. In each round all live at once and take turns of 25 steps, each process on a core of "
        "its own. Of two like jobs the one that starts first is up to 5 % faster, so the order changes from round to "
        "round.",
        candidates=DDP,
        figures=(Figure("step_us", "µs a step"),),
        tolerance=0.02,  # they share the samples differently
        in_turns=True,
        num_rounds=12,  # as many of either order
    ),
    Case(
        key="ddp-start",
        title="The start of two processes",
        text="The same, one after the other: from the command to the end of the first step.",
        candidates=DDP,
        figures=(Figure("start_s", "start, s", digits=2),),
        tolerance=0.02,
    ),
    Case(
        key="loader-end",
        title="The end of a loader in two processes",
        text="The same with 30 metrics: from the last step to metrics that are floats. Raw PyTorch sums and reduces "
        "each metric by itself.",
        candidates=(
            Candidate("raw PyTorch", "benchmarks.ddp.raw", ("30",), launcher=TORCHRUN),
            Candidate("runnerkit", "benchmarks.ddp.ours", ("30",), launcher=TORCHRUN),
        ),
        figures=(
            Figure("end_ms", "loader end, ms", digits=2),
            Figure("collectives", "collectives at the loader's end", digits=0),
        ),
        tolerance=0.02,
    ),
)
CHECKPOINT = Case(
    key="checkpoint",
    title="What a checkpoint makes a step wait",
    text="101 million weights with Adam's state, 1.2 GB, every 32nd step, into the folder of temporary files; what a "
    "step that saves takes longer than others. Raw PyTorch: torch.save, fsync, os.replace. runnerkit also writes what "
    "a resume needs of random generators and samplers, and a checksum; in a thread: a step waits for a copy in memory.",
    candidates=(
        Candidate("raw PyTorch", "benchmarks.checkpoint_stall", ("raw",)),
        Candidate("runnerkit", "benchmarks.checkpoint_stall", ("sync",)),
        Candidate("runnerkit, asynchronous=True", "benchmarks.checkpoint_stall", ("async",)),
    ),
    figures=(Figure("stall_ms", "ms a checkpoint"),),
    num_rounds=5,
)
LARGE_START = tuple(
    Case(
        key=f"large-{kind}",
        title=f"{words} for two processes",
        text=f"{words} in the process that calls, until rank zero has done its first step: seconds, and what all "
        "processes hold together at most, shared pages counted once, torch and gradients included (Linux). Raw "
        "PyTorch: mp.spawn, which shares memory, and a copy of the weights for each process to step on.",
        candidates=(
            Candidate("raw PyTorch", "benchmarks.large_start", ("raw", kind)),
            Candidate("runnerkit", "benchmarks.large_start", ("ours", kind)),
        ),
        figures=(Figure("first_step_s", "s to the first step"), Figure("peak_mib", "together, MiB", digits=0)),
        num_rounds=4,
    )
    for kind, words in {"data": "A data set of 1 GiB", "model": "A model of 512 MiB"}.items()
)
IMPORT = Case(
    key="import",
    title="Import",
    text="CPU time of an import and of all names in its `__all__`, which runnerkit imports when they are asked for, in "
    "a fresh interpreter; more rounds, as it is short. Runnerkit, torch's import included, takes so many times the CPU "
    "time of torch's in the same process, which comes first. Torch leaves 160,000 objects and a full collection of "
    "garbage, 0.08 s, that comes due 10,350 objects later; runnerkit makes 9,330.",
    candidates=tuple(Candidate(f"import {name}", "benchmarks.import_time", (name,)) for name in ("torch", "runnerkit")),
    figures=(
        Figure("cpu_s", "CPU seconds", digits=3),
        Figure("of_torch", "in units of torch's in the same process", digits=3),
        Figure("modules", "modules", digits=0),
    ),
    num_rounds=25,
)
MEMORY = Case(
    key="memory",
    title="Peak memory",
    text="The run of 5,000 steps with mean loss and accuracy: the most resident memory of the whole process, and what "
    "of it came after the batches were made, imports included (Linux).",
    candidates=(
        Candidate("raw PyTorch", "benchmarks.memory", ("raw",)),
        Candidate("runnerkit", "benchmarks.memory", ("ours",)),
    ),
    figures=(Figure("peak_mib", "peak, MiB"), Figure("grown_mib", "after the batches, MiB")),
)


def _growth(who: str, name: str, *arguments: str) -> Candidate:
    return Candidate(name, "benchmarks.growth", (who, *arguments))


def _growing(what: str, numbers: Iterable[int]) -> tuple[Candidate, ...]:
    """Both of each number, raw PyTorch before runnerkit."""
    both = (("raw", "raw PyTorch"), ("ours", "runnerkit"))
    return tuple(_growth(who, f"{name}, {n} {what}", f"--{what}", str(n)) for n in numbers for who, name in both)


STEP, EPOCH = (
    (Figure("step_us", "µs a step"),),
    (Figure("first_us", "µs an epoch, first tenth"), Figure("last_us", "last tenth")),
)
GROWTH = (
    Case(
        key="growth-callbacks",
        title="More callbacks",
        text="A step of case a; each callback overrides `on_batch_end`.",
        candidates=(
            _growth("raw", "raw PyTorch"),
            *(_growth("ours", f"runnerkit, {n} callbacks", "--callbacks", str(n)) for n in (0, 10, 50)),
        ),
        figures=STEP,
        in_turns=True,
    ),
    Case(
        key="growth-metrics",
        title="More metrics",
        text="A step of case a with numbers beside the loss, all averaged over the epoch.",
        candidates=_growing("metrics", (1, 10, 100)),
        figures=STEP,
        in_turns=True,
    ),
    Case(
        key="growth-epochs",
        title="More epochs",
        text="Epochs of 3 batches: the median epoch of the first tenth, and of the last.",
        candidates=_growing("epochs", (10, 100, 1000)),
        figures=EPOCH,
    ),
    Case(
        key="growth-workers",
        title="Workers between epochs",
        text="10 epochs of 3 batches from a DataLoader with 2 persistent workers: the first epoch, which starts them, "
        "the last, and how many were started.",
        candidates=(
            _growth("raw", "raw PyTorch", "--epochs", "10", "--workers", "2"),
            _growth("ours", "runnerkit", "--epochs", "10", "--workers", "2"),
        ),
        figures=(*EPOCH, Figure("workers", "worker processes", digits=0)),
    ),
)

WAYS = {"one": "one device", "dp": "DataParallel", "ddp": "DDP"}
PRECISIONS = {"fp32": "fp32", "amp": "AMP"}


def _mixed(who: str, name: str, way: str, precision: str) -> Candidate:
    return Candidate(
        f"{name}, {WAYS[way]}, {PRECISIONS[precision]}", f"benchmarks.mixed_precision.{who}", (way, precision),
        launcher=("torch.distributed.run", "--standalone", f"--nproc-per-node={torch.cuda.device_count() or 2}")
        if way == "ddp"
        else (),
    )  # fmt: skip


MIXED_PRECISION = Case(
    key="mixed-precision",
    title="Mixed precision three ways",
    text="The engines and the CNN of examples/mixed_precision.py on scikit-learn's digits, enlarged; DDP with "
    "find_unused_parameters and cudnn_benchmark, one process a GPU, and SyncBatchNorm. Each step takes the same "
    "images, shared out if there are several processes or GPUs. On GPUs: 64 x 64, 128 and 256 channels, fp16 with a "
    "gradient scaler, samples by the wall clock, torch.cuda.max_memory_allocated. Without: 32 x 32, 16 and 32 "
    "channels, bf16, DataParallel of one replica, DDP of two processes with batch norms of their own, samples by the "
    "CPU time of all processes, peak of the resident memory above what was held before the first step (Linux). "
    "Accuracy: of images not trained on.",
    candidates=tuple(
        _mixed(who, name, way, precision)
        for way in WAYS
        for precision in PRECISIONS
        for who, name in (("raw", "raw PyTorch"), ("ours", "runnerkit"))
    ),
    figures=(
        Figure("samples_per_s", "samples a second", digits=0),
        Figure("fullest_mib", "peak of the fullest process or GPU, MiB", digits=0),
        Figure("emptiest_mib", "of the emptiest, MiB", digits=0),
        Figure("accuracy_percent", "accuracy, %"),
    ),
    tolerance=0.05,  # DDP's batch norms see halves, AMP rounds
)

GPU_VARIANTS = {"plain": "", "prefetch": ", prefetched", "compile": ", compiled", "graph": ", CUDA graphs"}
GPU = Case(
    key="gpu",
    title="On a GPU",
    text="A ResNet of 13 convolutions, 512 images of 32 x 32 in pinned memory, fp16 AMP, channels_last. Prefetched: "
    "each batch is copied on a stream of its own. CUDA graphs: torch.compile(mode='reduce-overhead'). Host syncs are "
    "what torch.cuda.set_sync_debug_mode warns of; GradScaler.step has one of its own. Idle: the share of the time in "
    "which nothing runs on the GPU, by torch.profiler.",
    candidates=tuple(
        Candidate(f"{name}{words}", "benchmarks.gpu", (who, "--variant", variant))
        for variant, words in GPU_VARIANTS.items()
        for who, name in (("raw", "raw PyTorch"), ("ours", "runnerkit"))
    ),
    figures=(
        Figure("step_us", "µs a step"),
        Figure("syncs", "host syncs a step"),
        Figure("idle_percent", "idle, %"),
    ),
    tolerance=0.05,
    needs_gpu=True,
)
