"""The benchmark cases and their candidates; the first candidate of each case is raw PyTorch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from benchmarks.cnn.work import NUM_TRAIN, NUM_VALID
from benchmarks.harness import Candidate, Figure
from benchmarks.steps.work import NUM_TURNS, VARIANTS


@dataclass(frozen=True)
class Case:
    """A table of RESULTS.md.

    Attributes:
        key: identifies the case on the command line and its section on the page.
        title, text: heading and description of the section.
        candidates: the first is the baseline.
        figures: the numbers that the candidates print.
        tolerance: relative, for the values that show that all candidates did the same work.
        num_rounds: overrides the command line; 1 for counts, which are the same every time.
        in_turns: run a round's candidates concurrently and let them work in turns, which cancels the machine's noise.
    """

    key: str
    title: str
    text: str
    candidates: tuple[Candidate, ...]
    figures: tuple[Figure, ...]
    tolerance: float = 1e-4
    num_rounds: int | None = None
    in_turns: bool = False


# The variants that each peer supports: barebones reports nothing. Poutyne and Trainer always aggregate the loss.
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
    "log": "loss and accuracy; every 10th step to CSV and TensorBoard",
    "bar": "loss, accuracy and a progress bar",
}
# Details that a variant's title does not mention.
VARIANT_NOTES = {
    "log": " Candidates log different amounts: Catalyst writes every step to TensorBoard; Poutyne writes every step to "
    "CSV and only epochs to TensorBoard; Accelerate writes no CSV; transformers' Trainer logs no accuracy per step.",
    "bar": " Bars redraw at wall-clock intervals, which pass while other candidates have their turn, so they redraw "
    "about once per turn, more often than alone.",
}


def all_cases(peers: str | None = None, *, num_batches: int = 5000) -> list[Case]:
    """Return all cases, including the peers' scripts if `peers`, their environment's interpreter, is given."""
    return [
        *(_steps(variant, peers, num_batches) for variant in VARIANTS),
        *(_calls(variant, peers) for variant in VARIANTS if variant != "bar"),  # a bar redraws at wall-clock intervals
        _cnn(peers),
        CNN_TORCHVISION,
        *PROCESSES,
        CHECKPOINT,
        *LARGE_START,
        IMPORT,
        MEMORY,
        *GROWTH,
        MIXED_PRECISION,
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
        text=f"MLP 64-64-10, SGD with momentum, {num_batches:,} prepared batches of 32. In each round, all candidates "
        f"run concurrently and take turns of {num_batches // NUM_TURNS} steps. The first tenth of the turns is not "
        "timed, nor is the first tenth of each turn, while the caches still hold the previous candidate's data. "
        f"Poutyne and transformers' Trainer always aggregate the loss.{VARIANT_NOTES.get(variant, '')}",
        candidates=_step_candidates(variant, peers, "--num-batches", str(num_batches)),
        figures=(Figure("step_us", "µs a step"),),
        in_turns=True,
    )


def _calls(variant: str, peers: str | None) -> Case:
    return Case(
        key=f"calls-{variant}",
        title=f"Function calls in a training step: {VARIANT_WORDS[variant]}",
        text="Calls of Python and builtin functions, counted by sys.setprofile: 150 steps minus 50, so that one-time "
        f"calls cancel out. Other load on the machine does not change them.{VARIANT_NOTES.get(variant, '')}",
        candidates=_step_candidates(variant, peers, "--count-calls"),
        figures=(Figure("calls", "calls a step", digits=0),),
        num_rounds=1,
    )


CNN_TORCHVISION = Case(
    key="torchvision-cnn",
    title="The small CNN with torchvision's transforms",
    text="As users write it: torchvision's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize, image by image.",
    candidates=(
        Candidate("raw PyTorch", "benchmarks.cnn.published_transforms", ("raw",)),
        Candidate("runnerkit, the same DataLoader", "benchmarks.cnn.published_transforms", ("ours",)),
    ),
    figures=(Figure("seconds", "seconds"),),
    tolerance=0.1,  # each candidate draws its own crops and order
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
        text=f"One epoch of training on {NUM_TRAIN:,} images with random crops and flips, then validation on "
        f"{NUM_VALID:,}; batches of 256; loss and accuracy. Uses scikit-learn's digits if Fashion-MNIST is missing. "
        "All candidates except TensorLoader use a DataLoader without workers and transform single images. The "
        "transforms are torchvision's, rewritten with PIL to give the same numbers in about half the time, because "
        "some peers cannot be imported if PyPI's torchvision is installed beside a CPU-only torch. Images seeded: "
        "torch's generator is seeded before each image from its index and the epoch, so that it gets the same crop and "
        "flip on any number of processes and after any resume, as every sample does in runnerkit. TensorLoader: whole "
        "batches are cropped, flipped and normalized. Imports are not timed, including that of torch._dynamo, which "
        "an optimizer's first step would trigger. All candidates run concurrently and take turns of 3,000 samples, "
        "except TensorLoader, whose epoch is one turn; the wait for a turn is not counted. Lightning starts with two "
        "validation batches, its default; Ignite's metric computes the training loss of each batch a second time.",
        candidates=tuple(candidates),
        figures=(Figure("seconds", "seconds"),),
        tolerance=0.1,  # each candidate draws its own crops and order
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
        title="Steps with two processes",
        text="DistributedDataParallel over gloo, the MLP of the step benchmarks, 500 steps of 32 samples per process "
        "from a DataLoader, mean loss. In each round, all candidates run concurrently and take turns of 25 steps, with "
        "each process on its own core; the first five of a turn are not timed. Of two identical jobs, the one that "
        "starts first is up to 5 % faster, so the order alternates between rounds.",
        candidates=DDP,
        figures=(Figure("step_us", "µs a step"), Figure("cpu_us", "µs of CPU a step")),
        tolerance=0.02,  # the samples are sharded differently
        in_turns=True,
        num_rounds=12,  # both orders equally often
    ),
    Case(
        key="ddp-weights",
        title="Steps with two processes and weighted batches",
        text="The jobs of `ddp-steps`, whose batches have different weights, such as numbers of tokens. Each sums the "
        "weights of both processes while its backward pass runs, and divides the gradients by the sum. CPU time is "
        "that of the training thread of rank zero: a thread of gloo polls while it waits, as long as chance has it.",
        candidates=tuple(replace(each, arguments=("1", "weighted")) for each in DDP),
        figures=(Figure("step_us", "µs a step"), Figure("cpu_us", "µs of CPU a step")),
        tolerance=0.02,  # the samples are sharded differently
        in_turns=True,
        num_rounds=12,
    ),
    Case(
        key="ddp-weights-wide",
        title="Steps with two processes, weighted batches and a million parameters",
        text="The jobs of `ddp-weights` with an MLP 64-16384-10, whose steps are so long that the constant cost of a "
        "weight hardly shows.",
        candidates=tuple(replace(each, arguments=("1", "weighted", "wide")) for each in DDP),
        figures=(Figure("step_us", "µs a step"), Figure("cpu_us", "µs of CPU a step")),
        tolerance=0.02,  # the samples are sharded differently
        in_turns=True,
        num_rounds=6,
    ),
    Case(
        key="ddp-start",
        title="Start-up of two processes",
        text="The jobs of `ddp-steps`, one after the other: from the command to the end of the first step.",
        candidates=DDP,
        figures=(Figure("start_s", "start, s", digits=2),),
        tolerance=0.02,
    ),
    Case(
        key="loader-end",
        title="End of a loader with two processes",
        text="The jobs of `ddp-steps` with 30 metrics: from the last step until the metrics are floats. Raw PyTorch "
        "sums and reduces each metric separately.",
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
    title="Delay of a step that saves a checkpoint",
    text="34 million weights with Adam's state, 0.4 GB, saved every 32nd step to the temporary folder: how much "
    "longer such a step takes than others. Raw PyTorch: torch.save, fsync, os.replace. runnerkit also saves the states "
    "of random generators and samplers, and a checksum. Asynchronous: the step waits only for a copy in memory. "
    "S3: an asynchronous save to an S3 server (moto) on the same machine, which competes for its two cores.",
    candidates=(
        Candidate("raw PyTorch", "benchmarks.checkpoint_stall", ("raw",)),
        Candidate("runnerkit", "benchmarks.checkpoint_stall", ("sync",)),
        Candidate("runnerkit, asynchronous=True", "benchmarks.checkpoint_stall", ("async",)),
        Candidate("runnerkit, asynchronous=True, S3", "benchmarks.checkpoint_stall", ("store",)),
    ),
    figures=(Figure("stall_ms", "ms a checkpoint"),),
    num_rounds=5,
)
LARGE_START = tuple(
    Case(
        key=f"large-{kind}",
        title=f"{words} for two processes",
        text=f"{words} in the calling process, until rank zero completes its first step: seconds, and the peak memory "
        "of all processes together, with shared pages counted once, torch and gradients included (Linux). Raw PyTorch: "
        "mp.spawn, which shares memory, with a copy of the weights in each process.",
        candidates=(
            Candidate("raw PyTorch", "benchmarks.large_start", ("raw", kind)),
            Candidate("runnerkit", "benchmarks.large_start", ("ours", kind)),
        ),
        figures=(Figure("first_step_s", "s to the first step"), Figure("peak_mib", "total peak, MiB", digits=0)),
        num_rounds=4,
    )
    for kind, words in {"data": "A data set of 1 GiB", "model": "A model of 512 MiB"}.items()
)
IMPORT = Case(
    key="import",
    title="Import",
    text="CPU time to import a module and all names in its `__all__`, which runnerkit imports on first access, in a "
    "fresh interpreter; more rounds, since each is short. Torch is imported first and counted; the second figure is "
    "the total relative to torch alone in the same process. Torch leaves 160,000 objects; a full garbage "
    "collection, which takes 0.08 s, may fall into either import.",
    candidates=tuple(Candidate(f"import {name}", "benchmarks.import_time", (name,)) for name in ("torch", "runnerkit")),
    figures=(
        Figure("cpu_s", "CPU seconds", digits=3),
        Figure("of_torch", "relative to torch in the same process", digits=3),
        Figure("modules", "modules", digits=0),
    ),
    num_rounds=25,
)
MEMORY = Case(
    key="memory",
    title="Peak memory",
    text="5,000 steps with mean loss and accuracy: the peak resident memory of the process, and how far it exceeds the "
    "peak when the batches had been made, imports included (Linux).",
    candidates=(
        Candidate("raw PyTorch", "benchmarks.memory", ("raw",)),
        Candidate("runnerkit", "benchmarks.memory", ("ours",)),
    ),
    figures=(Figure("peak_mib", "peak, MiB"), Figure("grown_mib", "after the batches, MiB")),
)


def _growth(who: str, name: str, *arguments: str) -> Candidate:
    return Candidate(name, "benchmarks.growth", (who, *arguments))


def _growing(what: str, numbers: Iterable[int]) -> tuple[Candidate, ...]:
    """Return both candidates for each number, raw PyTorch first."""
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
        text="A step of the MLP; each callback overrides `on_batch_end`.",
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
        text="A step of the MLP with metrics beside the loss, all averaged over the epoch.",
        candidates=_growing("metrics", (1, 10, 100)),
        figures=STEP,
        in_turns=True,
    ),
    Case(
        key="growth-epochs",
        title="More epochs",
        text="Epochs of 3 batches: the median over the first tenth of the epochs, and over the last tenth.",
        candidates=_growing("epochs", (10, 100, 1000)),
        figures=EPOCH,
    ),
    Case(
        key="growth-workers",
        title="Workers between epochs",
        text="10 epochs of 3 batches from a DataLoader with 2 persistent workers: the first epoch, which starts them, "
        "the last epoch, and the number of workers started.",
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
    text="The engines and the CNN of examples/mixed_precision.py on enlarged images of scikit-learn's digits; DDP with "
    "find_unused_parameters and cudnn_benchmark, one process per GPU, and SyncBatchNorm. Each step uses the same "
    "images, split among processes or GPUs. On GPUs: 64 x 64 pixels, 128 and 256 channels, fp16 with a gradient "
    "scaler, wall-clock time, torch.cuda.max_memory_allocated. Without GPUs: 32 x 32 pixels, 16 and 32 channels, bf16, "
    "DataParallel with one replica, DDP with two processes and a batch norm per process, CPU time of all processes, "
    "peak resident memory above that before the first step (Linux). Accuracy: on held-out images.",
    candidates=tuple(
        _mixed(who, name, way, precision)
        for way in WAYS
        for precision in PRECISIONS
        for who, name in (("raw", "raw PyTorch"), ("ours", "runnerkit"))
    ),
    figures=(
        Figure("samples_per_s", "samples a second", digits=0),
        Figure("fullest_mib", "highest peak of a process or GPU, MiB", digits=0),
        Figure("emptiest_mib", "lowest, MiB", digits=0),
        Figure("accuracy_percent", "accuracy, %"),
    ),
    tolerance=0.05,  # DDP's batch norms see half a batch, and AMP rounds
)
