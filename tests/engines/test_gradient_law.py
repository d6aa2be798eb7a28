"""The law of gradients: a step is that of one process with the global batch, whatever its parts weigh."""

import functools
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from runnerkit import dl
from tests.engines import gradient_cases as cases
from tests.engines.together import together

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- the gradient law: written by `make parity` -->\n", "<!-- end of the gradient law -->\n"
BOUNDS = {"float64": 1e-12, "float32": 1e-6, "bf16": 1e-2}  # bf16 rounds parts of a batch differently from the whole
LAW = [
    *((name, number) for name in list(cases.ENGINES)[:2] for number in cases.PROCESSES),
    *(pytest.param("HorovodEngine", number, marks=pytest.mark.horovod) for number in cases.PROCESSES),
    ("DataParallelEngine", 1),
]


@functools.cache
def expected():
    return [cases.by_hand(case) for case in cases.CASES]


@pytest.fixture(scope="module")
def seen():
    """Collect the largest differences; `make parity` writes them into the docs."""
    results = {}
    yield results
    if "RUNNERKIT_WRITE_PARITY_TABLE" in os.environ:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        PAGE.write_text(before + BEGIN + render(results) + END + rest.split(END)[1], encoding="utf-8")


def render(results):
    header = ["engine", "processes", *(f"{name}, bound {BOUNDS[name]:.0e}" for name in cases.PRECISIONS)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for (name, number), differences in results.items():
        lines.append(
            f"| {name} | {number} | " + " | ".join(f"{differences[each]:.0e}" for each in cases.PRECISIONS) + " |"
        )
    return "\n".join(lines) + "\n"


def trained(name, number):
    job = partial(cases.run_all, name, number)
    if name == "DataParallelEngine":
        return job()
    if name == "HorovodEngine":
        pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")
        return dl.HorovodEngine(number).launch(job)
    return together(job, num_processes=number)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), LAW)
def test_a_step_is_that_of_one_process_with_the_global_batch(seen, name, number):
    """With ragged tails, accumulation, token weights and clipping, 20 steps give the weights of a hand-written loop."""
    found = trained(name, number)

    differences = dict.fromkeys(cases.PRECISIONS, 0.0)
    for case, mine, theirs in zip(cases.CASES, found, expected(), strict=True):
        difference = (mine - theirs).abs().max().item()
        differences[case.precision] = max(differences[case.precision], difference)
        assert difference <= BOUNDS[case.precision], (case, difference)
    seen[name, number] = differences


def test_the_table_in_the_docs_is_of_these_tests():
    """Exactly the engines and numbers of processes that are tested have a row."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()[2:]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")[:2]) for line in table]
    law = [each.values if hasattr(each, "values") else each for each in LAW]
    assert rows == [(name, str(number)) for name, number in law]


def test_the_cases_differ_from_equal_weights():
    """The references with and without token weights, and with and without accumulation, are far apart."""
    references = [each for each, case in zip(expected(), cases.CASES, strict=True) if case.precision == "float64"]
    for number, one in enumerate(references):
        for other in references[:number]:
            assert (one - other).abs().max() > 1e-4
    assert torch.isfinite(torch.stack(references)).all()
