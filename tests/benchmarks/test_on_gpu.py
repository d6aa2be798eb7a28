"""Tests of `make gpu`: its report, time limits and isolation, and that each of its comparisons can fail."""

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu import apex_levels, machine, memory, overflow, parity, resume, run, step_time, work
from benchmarks.on_gpu.check import Failed, Outcome, Setting, Skipped, exact_arithmetic
from benchmarks.on_gpu.compare import require_close, require_equal, require_same_loss, timings
from benchmarks.on_gpu.report import Report
from benchmarks.on_gpu.schedule import run_checks
from runnerkit import dl
from tests.benchmarks import on_gpu_checks

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
PART = "tests.benchmarks.on_gpu_checks"
CPU = Setting("cpu")
ROOT = Path(__file__).parents[2]


def outcomes(*names, limit_s=60.0, num_jobs=1, start_method="fork"):
    checks = [each for each in on_gpu_checks.CHECKS if each.name in names]
    found = run_checks([(PART, checks)], CPU, limit_s=limit_s, num_jobs=num_jobs, start_method=start_method)
    return {each.name: each for each in found}


# The report.


def test_both_files_of_a_report_hold_every_outcome(tmp_path):
    """The page is made from the data of the JSON file, and both are replaced after each outcome."""
    report = Report(tmp_path / "new" / "report", machine={"device": "1 x GPU"}, parts={"a": "Part A", "b": "Part B"})
    report.add(Outcome("a", "GPUEngine", "passed", figures={"difference": 3e-8, "same bits": False}, seconds=1.25))
    first = json.loads((tmp_path / "new" / "report.json").read_text())
    figures, lines = {"ratio": 1.0346, "loss": math.nan}, ["Traceback", "Error: x"]
    report.add(Outcome("a", "DDP", "failed", "a | b", figures, 2, lines))
    report.add(Outcome("b", "Apex", "skipped", "not installed"))

    data = json.loads((tmp_path / "new" / "report.json").read_text())
    page = (tmp_path / "new" / "report.md").read_text()

    assert [each["name"] for each in first["checks"]] == ["GPUEngine"]
    assert data["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "not run": 0} and report.has_failures
    assert data["checks"][0] == asdict(report.outcomes[0]) and data["machine"] == {"device": "1 x GPU"}
    rows = (
        "| GPUEngine | passed | difference 3.0e-08; same bits no | 1.2 |", "| Apex | skipped: not installed |  | 0.0 |",
        r"| DDP | failed: a \| b | ratio 1.035; loss nan | 2.0 |",
    )  # fmt: skip
    assert all(row in page for row in rows)
    assert "### Failed: DDP\n\na | b\n\n```text\nTraceback\nError: x\n```" in page
    assert page.index("## Part A") < page.index("## Part B") < page.index("### Failed")


# Isolation and time limits.


def test_checks_that_fail_in_any_way_end_no_other():
    """An exception, a wrong figure, a crash and an exit are reported with their reasons; the others run."""
    expected = {
        "passes": ("passed", ""),
        "fails": ("failed", "weights differ"),
        "raises": ("failed", "ZeroDivisionError: division | by zero"),
        "is skipped": ("skipped", "needs CUDA: nothing to see"),
        "crashes": ("failed", "was killed by signal SIGSEGV"),
        "exits": ("failed", "ended with exit code 3 and without a result"),
        "after": ("passed", ""),
    }

    found = outcomes(*expected)

    assert {name: (each.status, each.reason) for name, each in found.items()} == expected
    assert found["passes"].figures == {"ratio": 1.0346, "device": "cpu"}
    assert found["fails"].figures == {"difference": 0.5}
    assert "last words" in found["raises"].last_lines and found["raises"].last_lines[-1] == "and more"


def test_a_check_that_hangs_is_killed_with_its_processes(tmp_path, monkeypatch):
    """Its limit is kept, its stack is in the report, and a process that it started is gone."""
    monkeypatch.setenv(on_gpu_checks.MARKS, str(tmp_path))

    began = time.monotonic()
    found = outcomes("hangs", "after")

    assert time.monotonic() - began < 60
    assert (found["hangs"].status, found["hangs"].reason) == ("failed", "took more than 8 s")
    assert any("in hangs" in line for line in found["hangs"].last_lines)
    assert not _is_running(int((tmp_path / "child").read_text()))
    assert found["after"].status == "passed"


def _is_running(pid):
    """Return True unless the process has ended; one that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_checks_for_which_no_time_is_left_are_reported():
    """The total limit counts from the start of the command."""
    began, checks = time.monotonic() - 100, on_gpu_checks.CHECKS[:1]

    [found] = run_checks([(PART, checks)], CPU, limit_s=100, num_jobs=1, start_method="fork", began=began)

    assert (found.status, found.reason) == ("not run", "no time left")


def test_timed_checks_run_alone(tmp_path, monkeypatch):
    """Others run at the same time, but none beside a timed one."""
    monkeypatch.setenv(on_gpu_checks.MARKS, str(tmp_path))
    found = outcomes("beside", "beside too", "alone", "after", num_jobs=2)

    times = {name: (each.figures["began"], each.figures["ended"]) for name, each in found.items()}
    assert times["beside too"][0] < times["beside"][1] and times["beside"][0] < times["beside too"][1]
    assert times["alone"][0] >= max(times["beside"][1], times["beside too"][1])
    assert times["after"][0] >= times["alone"][1]


def test_a_part_that_cannot_be_imported_fails_alone(tmp_path, monkeypatch, capsys):
    """The others run, the report names the part, and the exit code is 1."""
    monkeypatch.setattr(run, "PRELOADED", ())

    code = run.run(
        "cpu", {"machine": "Machine", "tests.missing": "Missing", PART: "Part"}, path=tmp_path / "report",
        limit_s=4.0, num_jobs=2,
    )  # fmt: skip

    page = (tmp_path / "report.md").read_text()
    assert code == 1
    assert "import of tests.missing | failed" in page and "## Part" in page
    assert "ModuleNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("works_in", "expected"), [({"fork", "spawn"}, "fork"), ({"spawn"}, "spawn"), (set(), "spawn")]
)
def test_processes_are_started_anew_if_the_device_does_not_compute_in_a_fork(tmp_path, monkeypatch, works_in, expected):
    """The first check decides how the others are started."""

    def fake(parts, setting, *, start_method, **limits):
        yield Outcome("machine", "computes", "passed" if start_method in works_in else "failed", "no kernel")

    monkeypatch.setattr(run, "run_checks", fake)
    report = Report(tmp_path / "report", machine={}, parts={})

    assert run._probe(CPU, report, limit_s=60, began=time.monotonic()) == expected
    assert report.has_failures is (not works_in) and report.machine["processes"] == expected


def test_the_parent_process_never_starts_cuda():
    """CUDA does not work in forks of a process that has started it; importing every part must not ask for devices."""
    script = (
        "import sys, torch, importlib\n"
        "def refuse(*args): raise SystemExit('asked for CUDA devices')\n"
        "torch._C._cuda_getDeviceCount = torch.cuda.is_available = torch.cuda.device_count = refuse\n"
        "torch.cuda._lazy_init = refuse\n"
        "from benchmarks.on_gpu import __main__, child, machine, run\n"
        "[importlib.import_module(name) for name in run.PRELOADED]\n"
        "machine.describe_host()\n"
        "names = [(part, each.name) for part in __main__.PARTS for each in child.checks_of(part)]\n"
        "assert len(set(names)) == len(names), 'a process finds its check by part and name'\n"
        "print(len(names))\n"
    )

    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


@pytest.mark.slow
def test_checks_run_in_fresh_interpreters():
    """As the command line does where forks cannot use the device."""
    found = outcomes("passes", "fails", start_method="spawn")

    assert (found["passes"].status, found["fails"].reason) == ("passed", "weights differ")


# The comparisons.


def test_weights_that_differ_or_did_not_move_fail():
    """Equal weights pass only if training changed them by more than the tolerance; NaN never passes."""
    start, theirs = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    assert require_close(theirs, theirs, tolerance=0.0, start=start)["difference"] == 0
    assert require_close(theirs + 1e-7, theirs, tolerance=1e-6, start=start)["moved"] == 1
    for wrong, tolerance, message in [
        (theirs + 1e-5, 1e-6, "differ by 1.0e-05"), (theirs + 1e-12, 0.0, "differ by"), (theirs, 0.5, "changed"),
        (theirs * math.nan, 1e-6, "differ by inf"), (theirs[:2], 1e-6, "2 values were compared with 3"),
    ]:  # fmt: skip
        with pytest.raises(Failed, match=message):
            require_close(wrong, theirs, tolerance=tolerance, start=start)
    with pytest.raises(Failed, match="changed weights by only"):
        require_close(start, start, tolerance=0.0, start=start)


def test_counts_losses_and_peaks_that_differ_fail():
    """The reason names what differs."""
    assert require_equal({"skipped": 2, "scale": 4.0}, {"skipped": 2}) == {"skipped": 2, "scale": 4.0}
    with pytest.raises(Failed, match="skipped is 1 instead of 2"):
        require_equal({"skipped": 1}, {"skipped": 2})
    assert require_same_loss(1.01, 1.0, {}, tolerance=0.02) == {"loss": 1.01}
    for loss in (1.03, math.nan):
        with pytest.raises(Failed, match="did different work"):
            require_same_loss(loss, 1.0, {}, tolerance=0.02)
    gpu = Setting("cuda")
    assert memory.compare_peaks(105.0, 100.0, gpu)["ratio"] == 1.05
    with pytest.raises(Failed, match="the peak is 120 MiB, that of the hand-written loop 100"):
        memory.compare_peaks(120.0, 100.0, gpu)


def test_timings_are_medians_of_pairs_and_idle_is_what_no_span_covers():
    """The ratio is the median of the ratios, not the ratio of the medians; spans may overlap, and come in any order."""
    figures = timings([10.0, 40.0, 90.0], [10.0, 20.0, 30.0])

    assert (figures["raw, µs a step"], figures["runnerkit, µs a step"], figures["ratio"]) == (20, 40, 2)
    assert step_time.idle_share([(0, 4), (3, 5), (9, 10)]) == pytest.approx(0.4)
    assert step_time.idle_share([(2, 3), (0, 10)]) == 0


@pytest.mark.parametrize(
    ("case", "make"),
    [("GPUEngine", partial(dl.AMPEngine, "cpu", dtype=torch.bfloat16)), ("AMPEngine bf16", dl.CPUEngine)],
)
def test_an_engine_of_another_precision_breaks_the_parity_law(case, make):
    """An engine that computes in a precision other than that of the hand-written loop fails."""
    right = parity.CASES[case]
    assert parity.compare(right, CPU)["difference"] == 0

    with pytest.raises(Failed, match="from plain PyTorch"):
        parity.compare(replace(right, make=lambda setting: make()), CPU)


@pytest.mark.parametrize("has_shares", [False, True])
def test_fp32_is_noticed_where_mixed_precision_is_claimed(has_shares):
    """Whatever the tolerance, weights must not be those of fp32."""
    options = {"make": lambda setting: dl.CPUEngine(), "tolerance": 5e-3, "has_shares": has_shares}
    case = replace(parity.CASES["AMPEngine bf16"], **options)

    with pytest.raises(Failed, match="nearer to those of fp32"):
        parity.compare(case, CPU)


def test_a_scaler_that_skips_other_steps_fails(monkeypatch):
    """The number of skipped steps, the scale and the learning rate are compared before the weights."""
    right = overflow.with_runnerkit

    def other(setting, *, max_norm):
        monkeypatch.setattr(overflow, "SCALER", {"init_scale": 2.0**10, "growth_interval": 4})
        try:
            return right(setting, max_norm=max_norm)
        finally:
            monkeypatch.undo()

    assert overflow.compare(CPU)["skipped"] > 1
    monkeypatch.setattr(overflow, "with_runnerkit", other)
    with pytest.raises(Failed, match="skipped is"):
        overflow.compare(CPU)


class DrawsOnce(dl.Callback):
    """A callback that takes a random number which the uninterrupted run used for dropout."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Internal)
        self.has_drawn = False

    def on_batch_start(self, runner):
        if not self.has_drawn:
            torch.rand(())
        self.has_drawn = True


def test_a_resumed_run_with_other_random_numbers_fails(monkeypatch):
    """The comparison is bit for bit, and dropout depends on the state of the generator."""
    assert resume.compare_exactly(resume._one, CPU)["difference"] == 0
    right = resume.train

    def wrong(make_engine, logdir, **options):
        more = {"callbacks": {"draws": DrawsOnce()}} if "resume" in options else {}
        return right(make_engine, logdir, **options, **more)

    monkeypatch.setattr(resume, "train", wrong)
    with pytest.raises(Failed, match="weights differ"):
        resume.compare_exactly(resume._one, CPU)


def test_a_runner_that_trains_on_other_data_is_not_timed():
    """Both loops of a pair must have the same mean loss."""
    job = work.tiny(CPU)
    reference = step_time.ByHand(job, job.make_batch(), CPU, compile=None)
    inputs, targets = job.make_batch()
    turns = step_time.Turns((inputs, targets.flip(0)), reference.run, CPU, num_steps=5, num_pairs=2)

    loss = step_time.with_runnerkit(job, turns, CPU, compile=None)

    assert len(turns.ours_us) == len(turns.raw_us) == 2 and reference.num_steps == 20
    with pytest.raises(Failed, match="did different work"):
        require_same_loss(loss, reference.loss, {}, tolerance=1e-4)


def test_apex_is_skipped_with_the_variable_to_set(monkeypatch, tmp_path):
    """Without sources, with a folder that lacks them, and with NVIDIA's on a CPU."""
    for name in ("amp", "optimizers"):
        (tmp_path / "apex" / name).mkdir(parents=True)
    for source, message in [("", "is not set"), ("/nowhere", "lacks the folder apex/amp"), (tmp_path, "CUDA")]:
        monkeypatch.setenv("APEX_SOURCE", str(source))
        with pytest.raises(Skipped, match=message):
            apex_levels.compare("O1", CPU)


def test_arithmetic_is_exact_only_within_the_context(monkeypatch):
    """The settings of torch are restored."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = torch.backends.cudnn.allow_tf32

    with exact_arithmetic():
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.allow_tf32

    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.allow_tf32 == before


def test_the_device_is_checked_by_what_it_computes(monkeypatch):
    """A wrong product fails the first check."""
    assert machine.describe_device(CPU)["device"].startswith("CPU")
    monkeypatch.setattr(torch, "ones", torch.zeros)
    with pytest.raises(Failed, match=r"computed 0\.0 instead of"):
        machine.describe_device(CPU)
