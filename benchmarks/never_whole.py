"""Peak resident memory of each process of FSDP2, with models that are made whole or on the meta device.

python -m benchmarks.never_whole

A model of 1 GB is trained, evaluated, saved and resumed in 1, 2 and 4 processes. A phase's peak is that of the process
that needs most, above the memory that it has after its imports. The optimizer is SGD: the moments of others are always
sharded, and would be added to both. `--write` writes the table to RESULTS.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.resident import resident_mib
from benchmarks.results import conditions, write_section
from runnerkit import dl

WIDTH, NUM_BLOCKS = 512, 120
PHASES = ("start", "training", "evaluation", "save", "end", "resume")
# glibc keeps what tensors below a growing limit of up to 32 MB leave; with a fixed limit, it returns their memory.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


class Block(nn.Module):
    """A feed-forward block of 8 MB: a unit that is gathered, used and freed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.down(torch.relu(self.up(x)))
        return added


class Peaks(dl.Callback):
    """Records the peak of each phase, and forgets the peaks before it."""

    def __init__(self, folder: Path, *, is_resumed: bool) -> None:
        super().__init__(order=dl.CallbackOrder.External + 100)  # after the checkpoint
        self.folder, self.is_resumed = folder, is_resumed

    def on_stage_start(self, runner: dl.IRunner) -> None:
        if not self.is_resumed:
            self._end("start", runner)

    def on_epoch_start(self, runner: dl.IRunner) -> None:
        if self.is_resumed:
            self._end("resume", runner)

    def on_loader_end(self, runner: dl.IRunner) -> None:
        self._end("training" if runner.is_train_loader else "evaluation", runner)

    def on_epoch_end(self, runner: dl.IRunner) -> None:
        self._end("epoch", runner)  # the save comes after every other callback's end of the epoch

    def on_stage_end(self, runner: dl.IRunner) -> None:
        self._end("save", runner)

    def on_experiment_end(self, runner: dl.IRunner) -> None:
        self._end("end", runner)

    def _end(self, phase: str, runner: dl.IRunner) -> None:
        before = float(os.environ["HELD_MIB"])
        path = self.folder / f"{phase}.{runner.engine.rank}"
        path.write_text(str(resident_mib("VmHWM") - before))
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)


class Runner(dl.SupervisedRunner):
    """Trains two steps, and evaluates one batch."""

    def __init__(self, folder: Path, num_processes: int, init: str, *, is_resumed: bool) -> None:
        super().__init__()
        self.folder, self.num_processes, self.init = folder, num_processes, init
        self.goes_on = is_resumed

    def get_stage_len(self, stage: str) -> int:
        return 2 if self.goes_on else 1

    def get_engine(self) -> dl.IEngine:
        return dl.FullyShardedDataParallelEngine(
            self.num_processes, device="cpu", shard_modules=[Block], init=self.init
        )

    def get_model(self, stage: str) -> nn.Module:
        os.environ.setdefault("HELD_MIB", str(resident_mib("VmRSS")))
        Path("/proc/self/clear_refs").write_text("5")
        return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))

    def get_loaders(self, stage: str) -> dict[str, DataLoader[tuple[Tensor, ...]]]:
        data = TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))
        return {"train": DataLoader(data, batch_size=2), "valid": DataLoader(data, batch_size=2)}

    def get_criterion(self, stage: str) -> nn.Module:
        return nn.MSELoss()

    def get_optimizer(self, stage: str, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-6)

    def get_callbacks(self, stage: str) -> dict[str, dl.ICallback]:
        resume = self.folder if self.goes_on else None
        save = dl.CheckpointCallback(self.folder, content="runner", resume_runner=resume)
        return {**super().get_callbacks(stage), "save": save, "peaks": Peaks(self.folder, is_resumed=self.goes_on)}

    def get_loggers(self) -> dict[str, dl.ILogger]:
        return {}


def measured(num_processes: int, init: str) -> dict[str, float]:
    """Return the largest peak of a process in each phase, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        for action in ("run", "resume"):
            command = [sys.executable, "-m", "benchmarks.never_whole", "--case"]
            command += [json.dumps([folder, num_processes, init, action == "resume"])]
            subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True)
        peaks = {path.name: float(path.read_text()) for path in Path(folder).glob("*.[0-9]")}
    return {phase: max(peak for name, peak in peaks.items() if name.startswith(phase)) for phase in PHASES}


def main() -> None:
    """Measure each case, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        folder, num_processes, init, is_resumed = json.loads(options.case)
        Runner(Path(folder), num_processes, init, is_resumed=is_resumed).run()
        return
    rows = ["| processes | made | " + " | ".join(PHASES) + " |", "|---:|---|" + "---:|" * len(PHASES)]
    for num_processes in (1, 2, 4):
        peaks = {init: measured(num_processes, init) for init in ("whole", "meta")}
        for init, each in peaks.items():
            cells = " | ".join(f"{each[phase]:,.0f}" for phase in PHASES)
            rows.append(f"| {num_processes} | {init} | {cells} |")
        ratios = " | ".join(f"{peaks['meta'][phase] / peaks['whole'][phase]:.2f}" for phase in PHASES)
        rows.append(f"| {num_processes} | ratio | {ratios} |")
        print("\n".join(rows[-3:]), flush=True)
    size = sum(each.numel() for each in Block().parameters()) * NUM_BLOCKS * 4 / 2**20
    text = f"Peak MiB per process for {size:,.0f} MiB of weights. {conditions(1)}\n\n" + "\n".join(rows)
    if options.write:
        title = "Memory of a sharded model, made whole or on the meta device"
        write_section("never_whole", text, command="python -m benchmarks.never_whole --write", title=title)


if __name__ == "__main__":
    main()
