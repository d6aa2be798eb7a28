"""Measure the cases and write their sections of RESULTS.md.

python -m benchmarks, or python -m benchmarks --cases steps import --rounds 3 --peers .venv-peers/bin/python
"""

import argparse
import sys
from pathlib import Path

from benchmarks import results
from benchmarks.cases import PEERS, Case, all_cases
from benchmarks.harness import CandidateFailed, measure

PACKAGES = (
    "torch", "accelerate", "catalyst", "lightning", "poutyne", "pytorch-ignite", "torchtnt", "transformers",
)  # fmt: skip


def write(case: Case, *, num_rounds: int, peers: str | None, path: Path) -> bool:
    """Measure a case and write its section; return whether all candidates succeeded.

    Earlier results are kept if nothing could be measured, or if they contain rows of peers and no peers are measured
    now; in the latter case the new table is printed.
    """
    heading = f"## {case.title}\n\n{case.text}\n"
    num_rounds = case.num_rounds or num_rounds
    conditions = results.conditions(num_rounds)  # read first, so that the load excludes the benchmark
    try:
        outcome = measure(case.candidates, num_rounds=num_rounds, tolerance=case.tolerance, in_turns=case.in_turns)
    except CandidateFailed as failure:
        _not_measured(case.key, heading, str(failure), path)
        return False
    before = results.read_section(case.key, path)
    if not peers and any(f"| {name} |" in before for name in PEERS):
        print(
            f"{case.key}: {path} is unchanged because it contains rows of other frameworks: pass --peers, "
            "or --results for another page",
            file=sys.stderr,
        )
        print(results.table(outcome, case.figures))
        return not outcome.failures
    if peers:
        conditions += f" Peers: {results.versions(peers, PACKAGES)}."
    parts = [heading, conditions + "\n", results.table(outcome, case.figures)]
    if drawing := results.plot(case.key, outcome, case.figures[0], path.parent / "plots"):
        parts.append(f"\n{drawing}")
    results.write_section(case.key, "\n".join(parts), path)
    return not outcome.failures


def _not_measured(key: str, heading: str, reason: str, path: Path) -> None:
    before = results.read_section(key, path)
    if before and "\nNot measured: " not in before:
        print(f"{key}: {reason}; {path} keeps the earlier measurement", file=sys.stderr)
        return
    print(f"{key}: {reason}", file=sys.stderr)
    results.write_section(key, f"{heading}\nNot measured: {reason}.", path)


def main() -> None:
    """Measure the selected cases; exit with 1 after writing all sections if a candidate failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help="keys of cases, or prefixes of keys (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="an even number balances the two orders (default: 10)")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of the environment with the peers")
    parser.add_argument("--num-batches", type=int, default=5000, help="of the steps cases (default: 5000)")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {options.rounds}")
    cases = all_cases(options.peers, num_batches=options.num_batches)
    wanted = tuple(options.cases or ("",))
    unknown = [key for key in wanted if not any(case.key.startswith(key) for case in cases)]
    if unknown:
        parser.error(f"no case starts with {unknown[0]!r}; the cases are {', '.join(case.key for case in cases)}")
    came_through = True
    for case in cases:
        if case.key.startswith(wanted):
            print(f"{case.key}: {case.title}", file=sys.stderr, flush=True)
            came_through &= write(case, num_rounds=options.rounds, peers=options.peers, path=options.results)
    sys.exit(0 if came_through else 1)


if __name__ == "__main__":
    main()
