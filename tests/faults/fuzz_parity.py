"""Compare random runs with a hand-written loop over the same global batches, in float64.

python -m tests.faults.fuzz_parity --cases 500 --seed 0
"""

import argparse
import logging
import os
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runnerkit.engines.launch.spawn import spawn
from tests.faults.fuzz_run import train, train_by_hand
from tests.faults.fuzz_setting import Setting
from tests.free_port import free_ports

SEEDS = range(30)  # of the slow tests
_MOST_PROCESSES = 3
_TOGETHER = 50  # cases that share a launch, and are reported together


@dataclass(frozen=True)
class Case:
    """A setting, and the processes and workers of its run."""

    seed: int
    setting: Setting
    num_processes: int
    num_workers: int
    persistent: bool

    @classmethod
    def draw(cls, seed: int) -> "Case":
        """Draw a case, which depends on the seed only; one in ten has several processes, one in twenty workers."""
        chance = random.Random(seed)
        num_processes = chance.choice([2, 3]) if seed % 10 == 3 else 1
        num_workers = 2 if seed % 20 == 7 else 0
        setting = Setting.draw(chance, processes=num_processes, workers=num_workers)
        return cls(seed, setting, num_processes, num_workers, persistent=chance.random() < 0.5)

    def difference(self) -> str:
        """Run the case and describe how it differs from the loop; empty if it does not. Every rank must call."""
        try:
            found = train(
                self.setting, num_processes=self.num_processes, num_workers=self.num_workers, persistent=self.persistent
            )
        except Exception:
            return f"raised {traceback.format_exc(limit=-3)}"
        expected = train_by_hand(self.setting, num_processes=self.num_processes, told=found.told)
        if (found.num_steps, found.num_samples) != (expected.num_steps, expected.num_samples):
            return f"{found.num_steps} steps of {found.num_samples} samples instead of {expected.num_steps} of " + str(
                expected.num_samples
            )
        if found.told not in (None, expected.num_steps):
            return f"the schedule was told {found.told} steps, and {expected.num_steps} were taken"
        if found.told is None and not self.may_be_unknown:
            return f"the schedule was not told that the run has {expected.num_steps} steps"
        off = float((found.weights - expected.weights).abs().max())
        if off > 1e-10 or abs(found.rate - expected.rate) > 1e-12:
            return f"weights are off by {off:.2g}, the learning rate is {found.rate:g} instead of {expected.rate:g}"
        return ""

    @property
    def may_be_unknown(self) -> bool:
        """True if the number of steps depends on the length of a stream, or on the sizes of its batches."""
        setting = self.setting
        has_length = setting.kind not in ("stream", "lanes") or setting.epoch_steps is not None
        is_endless = setting.kind == "lanes" and setting.limit is None
        has_sizes = setting.kind in ("map", "tensors", "sized") or is_endless
        only_steps = setting.num_epochs is None and setting.num_samples is None
        return not only_steps and not (has_length and (has_sizes or setting.num_samples is None))


def differences(cases: Sequence[Case]) -> list[str]:
    """Run the cases, those with several processes in one launch; return a line for each that differs."""
    alone = [case for case in cases if case.num_processes == 1]
    shared = [case for case in cases if case.num_processes > 1]
    found = [*zip(alone, (case.difference() for case in alone), strict=True)]
    if shared:
        found += zip(shared, in_processes([(case.num_processes, case.difference) for case in shared]), strict=True)
    return [f"seed {case.seed}: {what}\n    {case}" for case, what in found if what]


def in_processes(jobs: Sequence[tuple[int, Callable[[], Any]]]) -> list[Any]:
    """Call functions one after another, each in as many processes as it needs; return rank zero's results."""
    variables = {"MASTER_ADDR": "127.0.0.1"}
    return spawn(partial(_all, jobs, free_ports(len(jobs))), num_processes=_MOST_PROCESSES, variables=variables)


def _all(jobs: Sequence[tuple[int, Callable[[], Any]]], ports: Sequence[int]) -> list[Any]:
    quieten()
    rank, found = int(os.environ["RANK"]), []
    for (num_processes, job), port in zip(jobs, ports, strict=True):
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_processes))
        os.environ |= {**sizes, "RANK": str(rank), "MASTER_PORT": str(port)}
        if num_processes == 1:
            del os.environ["RANK"], os.environ["WORLD_SIZE"]  # as without a launcher
        if rank < num_processes:  # another one waits for the next job's port
            found.append(job())
    return found


def quieten() -> None:
    """Silence warnings that the settings are meant to cause."""
    warnings.simplefilter("ignore")
    logging.getLogger("runnerkit").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main(draw: Callable[[int], Any], differences_of: Callable[[list[Any]], Iterable[str]]) -> None:
    """Run as many cases as the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    arguments = parser.parse_args()
    quieten()
    cases = [draw(seed) for seed in range(arguments.seed, arguments.seed + arguments.cases)]
    num_different = 0
    for first in range(0, len(cases), _TOGETHER):
        for line in differences_of(cases[first : first + _TOGETHER]):
            print(line, flush=True)
            num_different += 1
    print(Counter(case.setting.kind for case in cases))
    print(f"{num_different} of {len(cases)} cases differ")
    raise SystemExit(num_different > 0)


if __name__ == "__main__":
    main(Case.draw, differences)
