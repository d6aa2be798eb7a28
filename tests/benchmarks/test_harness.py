"""The benchmark harness compares equal work and reports each candidate that failed or did different work."""

import re
import subprocess
import sys
from itertools import pairwise

import pytest

from benchmarks import readme_table, results
from benchmarks.__main__ import write
from benchmarks.calls import calls_per_step
from benchmarks.cases import Case, all_cases
from benchmarks.harness import ROOT, Candidate, CandidateFailed, Figure, check_same, measure, run

FIGURE = Figure("step_us", "µs a step")
FIGURES_LINE = "import json; print(json.dumps({'step_us': %s, 'same': {'loss': %s}}))"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Make a candidate from a line of Python."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name, line):
        (tmp_path / f"{name}.py").write_text(line)
        return Candidate(name, name)

    return make


@pytest.mark.slow
def test_command_measures_raw_and_ours_and_keeps_other_sections(tmp_path):
    """Both candidates train the tiny case to the same mean loss, and the page keeps its other sections."""
    page = tmp_path / "RESULTS.md"
    page.write_text("# Measured\n\n## Notes\n\nkept\n")

    options = ["--cases", "steps-accuracy", "--rounds", "1", "--num-batches", "40", "--results", str(page)]
    command = [sys.executable, "-m", "benchmarks", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("# Measured\n\n## Notes\n\nkept\n")
    assert "| raw PyTorch |" in text and "| runnerkit |" in text and "not measured" not in text
    assert done.stderr.count('"accuracy"') == 2
    assert (tmp_path / "plots" / "steps-accuracy.png").stat().st_size > 1000


def test_candidates_take_turns_and_are_held_against_the_first(script):
    """Candidates run alternately, and each ratio compares figures of the same round."""
    first, second = script("first", FIGURES_LINE % (100, 2)), script("second", FIGURES_LINE % (150, 2))

    outcome = measure([first, second], num_rounds=2)

    assert outcome.reports["second"] == [{"step_us": 150, "same": {"loss": 2}}] * 2
    assert outcome.ratio("second", FIGURE) == 1.5
    assert "| second | 150.0 | constant | 1.50 |" in results.table(outcome, [FIGURE])


TURNS = """
import json, sys, time
from benchmarks.turns import Turns
turns, stretches = Turns(), []
for number in range(3):
    turns.wait()
    begin = time.perf_counter()
    time.sleep({sleep_s})
    stretches.append((begin, time.perf_counter()))
    {then}
figures = dict(stretches=stretches, waited=turns.waited, step_us=1e6 * sum(end - begin for begin, end in stretches))
print(json.dumps(figures))
"""


def test_stretches_of_work_alternate_and_never_overlap(script):
    """Candidates run as concurrent processes; each turn starts after the previous one ends and is compared with it."""
    first = script("first", TURNS.format(sleep_s=0.02, then=""))
    second = script("second", TURNS.format(sleep_s=0.04, then=""))

    outcome = measure([first, second], num_rounds=1, in_turns=True)

    firsts, seconds = (outcome.reports[name][0]["stretches"] for name in ("first", "second"))
    stretches = [stretch for pair in zip(firsts, seconds, strict=True) for stretch in pair]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(stretches))
    assert outcome.reports["first"][0]["waited"] >= 2 * 0.04
    totals = [sum(end - begin for begin, end in each) for each in (firsts, seconds)]
    assert outcome.ratio("second", FIGURE) == pytest.approx(totals[1] / totals[0])


def test_a_candidate_that_ends_early_loses_its_turns_only(script):
    """The others keep their turns after a candidate fails or is killed while it waits."""
    kill = "import os; number == 1 and os.kill(os.getpid(), 9)"
    others = [
        script("whole", TURNS.format(sleep_s=0, then="")),
        script("broken", TURNS.format(sleep_s=0, then="raise RuntimeError('no such optimizer')")),
        script("killed", TURNS.format(sleep_s=0, then=kill)),
    ]

    outcome = measure(others, num_rounds=2, in_turns=True)

    assert len(outcome.reports["whole"]) == 2 and outcome.failures == {
        "broken": "exit code 1: RuntimeError: no such optimizer",
        "killed": "exit code -9: no message",
    }


def test_failures_are_told_in_words(script):
    """A candidate that fails, differs in work or metrics, or prints nothing is dropped; the others are measured."""
    lines = {
        "first": FIGURES_LINE % (100, 2), "broken": "raise RuntimeError('no such optimizer')",
        "lazy": FIGURES_LINE % (1, 3), "silent": "",
    }  # fmt: skip

    outcome = measure([script(name, line) for name, line in lines.items()], num_rounds=1)

    assert outcome.failures == {
        "broken": "exit code 1: RuntimeError: no such optimizer",
        "lazy": "did different work: loss is 3 instead of 2",
        "silent": "exit code 0: no message",
    }
    assert "\nlazy: not measured, did different work: loss is 3 instead of 2." in results.table(outcome, [FIGURE])
    with pytest.raises(CandidateFailed, match="did different work: reports \\[\\] instead of \\['loss'\\]"):
        check_same({}, {"same": {"loss": 1.0}}, tolerance=1e-4)


def test_candidates_that_hang_or_cannot_start_are_reported(script):
    """The error contains the time limit or the operating system's message; without a baseline, the case ends."""
    with pytest.raises(CandidateFailed, match="broken: exit code 1: RuntimeError: no data"):
        measure([script("broken", "raise RuntimeError('no data')")], num_rounds=1)
    with pytest.raises(CandidateFailed, match=r"took more than 0\.5 s"):
        run(script("hanging", "import time; time.sleep(60)"), timeout_s=0.5)
    with pytest.raises(CandidateFailed, match=r"cannot start: .*No such file"):
        run(Candidate("peer", "any", python="no/such/python"))


def test_stderr_is_a_terminal(script):
    """Candidates write to a terminal, so that their progress bars are drawn and cost what they cost a user."""
    line = "import sys, json; print(json.dumps({'is_terminal': sys.stderr.isatty()}))"

    assert run(script("bar", line)) == {"is_terminal": True}


def test_calls_are_counted_exactly():
    """Python functions, builtins and methods each count as one call; calls outside the steps cancel out."""

    def step(numbers):
        numbers.append(len(numbers))

    def train(num_steps):
        sorted(abs(each) for each in range(10))
        numbers = []
        for _ in range(num_steps):
            step(numbers)

    assert calls_per_step(train) == 3.0


def test_what_was_measured_outlives_a_run_that_measures_nothing(script, tmp_path, capsys):
    """A page keeps earlier results, and other sections byte for byte, if the first candidate fails."""
    page = tmp_path / "RESULTS.md"
    case = Case("any", "Any", "Text.", (script("broken", "raise RuntimeError('no data')"),), (FIGURE,))
    reason = "broken: exit code 1: RuntimeError: no data"

    assert not write(case, num_rounds=1, peers=None, path=page)
    assert results.read_section("any", page) == f"## Any\n\nText.\n\nNot measured: {reason}."

    results.write_section("other", "second", page)
    results.write_section("any", "as text: 812 µs", page)
    before = page.read_text()
    assert before.index("812 µs") < before.index("second")
    assert not write(case, num_rounds=1, peers=None, path=page)
    assert page.read_text() == before
    assert f"any: {reason}; {page} keeps the earlier measurement" in capsys.readouterr().err


def test_rows_of_peers_are_not_replaced_by_none(script, tmp_path, capsys):
    """Without peers, a table that has their rows is only printed."""
    page = tmp_path / "RESULTS.md"
    case = Case("any", "Any", "Text.", (script("first", FIGURES_LINE % (100, 2)),), (FIGURE,))
    results.write_section("any", "| | µs |\n|---|---|\n| Ignite | 812.0 |", page)
    before = page.read_text()
    assert write(case, num_rounds=1, peers=None, path=page)
    printed = capsys.readouterr()
    assert page.read_text() == before
    assert "| first | 100.0 |" in printed.out and "rows of other frameworks: pass --peers" in printed.err
    assert write(case, num_rounds=1, peers=sys.executable, path=page)
    assert "| first | 100.0 |" in results.read_section("any", page)


def test_cases_begin_with_raw_pytorch_and_have_keys_of_their_own():
    """Keys are unique; the first row is raw PyTorch and the second is runnerkit."""
    cases = all_cases("python-of-peers")

    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        if case.key != "import":
            assert [each.name.split(",")[0] for each in case.candidates[:2]] == ["raw PyTorch", "runnerkit"]


def test_each_section_of_the_results_has_the_heading_that_its_command_writes():
    """Sections of cases have their titles, those of other commands the title in their source."""
    page = results.RESULTS.read_text(encoding="utf-8")
    found = re.findall(r"^<!-- (.+): written by python -m ([\w.]+).* -->\n(.*)$", page, flags=re.MULTILINE)
    titles = {case.key: case.title for case in all_cases("python-of-peers")}

    assert len(found) == page.count("<!-- end of ") > 25
    for key, module, line in found:
        if module == "benchmarks":
            assert line == f"## {titles[key]}"
        else:
            source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            assert f'title = "{line.removeprefix("## ")}"\n' in source and line.startswith("## ")


def test_pages_state_the_smallest_and_the_largest_ratio_of_the_step_times():
    """Those of the README's table, which a rerun changes."""
    [row] = [line for line in readme_table.table().splitlines() if line.startswith("| runnerkit |")]
    ratios = sorted(re.findall(r"[\d.]+", row), key=float)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert row in readme
    for page in ("index", "performance"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("\n", " ")
        assert f"a step of a tiny model takes {ratios[0]} to {ratios[-1]} times as long" in text
