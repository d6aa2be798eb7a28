"""The table of the parity law in docs/engines.md, written by one test run and checked by the next."""

from pathlib import Path

from tests.engines.parity_job import ALONE, CASES, HOROVOD, TORCH

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- the parity law: written by `make parity` -->\n", "<!-- end of the parity law -->\n"
UNTESTED = {
    "the same on GPUs (nccl, sync_bn)": "these cases run on CPUs",
    "Apex itself": "it needs CUDA; its calls are tested against a stand-in",
}
WHY_BLANK = {
    ALONE: "An engine of one process needs no launcher: under one, each process would train alone.",
    TORCH: "DDP and FSDP need a master address, which `horovodrun` does not set; the error says so.",
    HOROVOD: "Horovod is started by `horovodrun`, `mpirun` or itself; the error under `torchrun` or `srun` says so.",
}
ELSEWHERE = {
    "`torchrun --nnodes=2`, `--nnodes=1:2` (elastic) and `mpirun` on two hosts": "launchers/test_two_hosts.py",
    "`srun` on several nodes, requeued and preempted jobs": "launchers/test_slurm.py",
    "`horovod.run` and `horovodrun --mpi`": "engines/test_horovod_launchers.py",
    "A rank that fails under each of Horovod's launchers": "engines/test_failures.py",
}

Results = dict[tuple[str, str], float]  # {(case, launcher): largest difference of a weight from plain PyTorch's}


def render(results: Results, launchers: list[str]) -> str:
    """Render the table."""
    lines = [
        "| engine, precision | " + " | ".join(launchers) + " | tolerance of the weights | seen |",
        "|---" * (len(launchers) + 3) + "|",
    ]
    for case in CASES:
        seen = [results[case, each] for each in launchers if (case, each) in results]
        marks = ["✓" if (case, each) in results else "" for each in launchers]
        tolerance, reason = CASES[case].tolerance
        bound = f"{tolerance:.0e}: {reason}" if tolerance else reason
        lines.append(f"| {case} | {' | '.join(marks)} | {bound} | {max(seen, default=float('nan')):.0e} |")
    lines += [f"| {what} |{' |' * len(launchers)} not run: {why} | |" for what, why in UNTESTED.items()]
    return "\n".join([*lines, "", below()]) + "\n"


def below() -> str:
    """Explain blank cells, and list where launchers without a column are tested."""
    blanks = [f"- {why}" for why in WHY_BLANK.values()]
    tests = [f"- {what}: [{path}](../tests/{path})" for what, path in ELSEWHERE.items()]
    return "\n".join(["Blank cells:", "", *blanks, "", "Launchers without a column:", "", *tests])


def write(results: Results, launchers: list[str]) -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + render(results, launchers) + END + rest.split(END)[1], encoding="utf-8")


def read() -> set[tuple[str, str]]:
    """Return each (case, launcher) that the page marks as tested."""
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    table = [line for line in text.splitlines() if line.startswith("|")]
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {(row[0], launcher) for row in rows for launcher, cell in zip(header, row, strict=True) if cell == "✓"}
