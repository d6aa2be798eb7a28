"""The law: with every engine, precision and launcher, weights, metrics and logs equal those of plain PyTorch."""

import functools
import importlib
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.engines import parity_table
from tests.engines.launch_commands import HOROVODRUN, MPIRUN, PYTHON, TORCHRUN
from tests.engines.parity_job import (
    ALONE,
    CASES,
    GLOBAL_BATCH,
    HOROVOD,
    NUM_EPOCHS,
    NUM_SAMPLES,
    NUM_VALID,
    ONE_PROCESS,
    TORCH,
    logdir_of,
)
from tests.launchers import slurm
from tests.tiny import classification, loader, mlp, sgd, train_by_hand, weights

JOB = "tests.engines.parity_job"
EXECUTE = "import sys, nbformat, nbclient; nbclient.execute(nbformat.read(sys.argv[1], as_version=4), timeout=540)"


def run(command, **variables):
    stand_in = Path(__file__).parents[1] / "fake_apex"
    paths = os.pathsep.join([os.getcwd(), str(stand_in)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=560, env=environment)


def python(folder, cases):
    """Run in plain python, where runnerkit starts the processes."""
    return run([PYTHON, "-m", JOB, str(folder), *cases])


def notebook(folder, cases):
    """Run in a notebook's kernel, where runnerkit starts the processes."""
    nbformat = pytest.importorskip("nbformat")
    cell = f"from {JOB} import main\nmain({str(folder)!r}, *{list(cases)!r})"
    path = folder / "parity.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), path)
    return run([PYTHON, "-c", EXECUTE, str(path)])


def torchrun(folder, cases):
    """Run under torchrun on one machine."""
    return run([*TORCHRUN, "-m", JOB, str(folder), *cases])


def srun(folder, cases):
    """Run under Slurm's srun, with two tasks on one node."""
    if slurm.why_not():
        pytest.skip(slurm.why_not())
    with slurm.Slurm() as cluster:
        return run(["srun", "-n", "2", PYTHON, "-m", JOB, str(folder), *cases], **cluster.environment)


def mpirun(folder, cases):
    """Run under Open MPI's mpirun; Horovod must have been built with MPI."""
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    if cases[0].startswith("Horovod") and not importlib.import_module("horovod.torch").mpi_built():
        pytest.skip("Horovod was built without MPI")
    return run([*MPIRUN, "-m", JOB, str(folder), *cases])


def horovodrun(folder, cases):
    """Run under Horovod's own launcher, with Gloo."""
    return run([*HOROVODRUN, "-m", JOB, str(folder), *cases])


LAUNCHERS = {each.__name__: each for each in (python, notebook, torchrun, srun, mpirun, horovodrun)}
LAW = [(case, launcher) for case in CASES for launcher in CASES[case].launchers]
# One job for the cases that a launcher starts in the same way.
JOBS = [(launcher, family) for family in (ALONE, TORCH, HOROVOD) for launcher in family]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Run a job when it is first requested; return its folder, the cases and the output."""

    @functools.cache
    def job(launcher, family):
        if family == HOROVOD:
            pytest.importorskip(
                "horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it"
            )
        folder = tmp_path_factory.mktemp(launcher)
        cases = [case for case in CASES if CASES[case].launchers == family]
        done = LAUNCHERS[launcher](folder, cases)
        return folder, cases, f"{done.stdout}{done.stderr}\nit exited with {done.returncode}"

    return job


@pytest.fixture(scope="module")
def seen():
    """Collect the differences from plain PyTorch; `make parity` writes them into the docs."""
    results = {}
    yield results
    if "RUNNERKIT_WRITE_PARITY_TABLE" in os.environ:
        parity_table.write(results, list(LAUNCHERS))


@functools.cache
def by_hand(dtype, scaled):
    """Run plain PyTorch on the same batches; return weights, each epoch's loss, validation loss and accuracy."""
    model = mlp()
    autocast = functools.partial(torch.autocast, "cpu", dtype=dtype, enabled=dtype is not None)
    losses = train_by_hand(
        model,
        sgd(model, lr=0.05),
        loader(NUM_SAMPLES, GLOBAL_BATCH),
        num_epochs=NUM_EPOCHS,
        autocast=autocast,
        scaler=torch.amp.GradScaler("cpu") if scaled else None,
    )
    features, targets = classification(NUM_VALID, seed=1).tensors
    with torch.no_grad(), autocast():
        logits = model.eval()(features)
    loss = nn.functional.cross_entropy(logits.float(), targets).item()
    epochs = torch.stack(losses).view(NUM_EPOCHS, -1).double().mean(dim=1).tolist()
    return weights(model), epochs, loss, (logits.argmax(1) == targets).double().mean().item()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launcher", "family"), JOBS, ids=[f"{each}-of-{len(family)}" for each, family in JOBS])
def test_every_engine_precision_and_launcher_gives_what_plain_pytorch_gives(jobs, seen, launcher, family):
    """With the same data and seed, weights agree to the stated tolerance, and metrics and log files are the same."""
    one_process, _, _ = jobs("python", ALONE)
    folder, cases, output = jobs(launcher, family)

    assert [case for case in cases if not (logdir_of(case, folder) / "result.pth").exists()] == [], output[-3000:]
    for case in cases:
        seen[case, launcher] = assert_as_by_hand(case, logdir_of(case, folder), one_process)


def assert_as_by_hand(case, logdir, one_process):
    """Check a case's results; return the largest difference of a weight."""
    result = torch.load(logdir / "result.pth", weights_only=True)
    dtype, (tolerance, _) = CASES[case].dtype, CASES[case].tolerance
    expected_weights, expected_losses, expected_loss, expected_accuracy = by_hand(dtype, CASES[case].scaled)

    model = mlp()
    model.load_state_dict(result["weights"])
    torch.testing.assert_close(weights(model), expected_weights, rtol=0, atol=tolerance)
    # Batches of another size round differently in 16 bits, and the loss is a mean over them.
    loose = tolerance + {None: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert result["metrics"]["valid"]["loss"] == pytest.approx(expected_loss, abs=loose)
    assert result["metrics"]["valid"]["accuracy"] == expected_accuracy
    assert result["metrics"]["train"]["loss"] == pytest.approx(expected_losses[-1], abs=loose)
    assert_same_logs(logdir, logdir_of(ONE_PROCESS[dtype], one_process), loose=loose, is_full=dtype is None)
    assert pd.read_csv(logdir / "csv" / "train.csv")["loss"].tolist() == pytest.approx(expected_losses, abs=loose)
    return (weights(model) - expected_weights).abs().max().item()


def assert_same_logs(logdir, one_process, *, loose, is_full):
    """Compare files and their values; in 16 bits, one training sample may be classified differently."""
    assert _files(logdir) == FILES
    assert (logdir / "hparams.yml").read_text() == (one_process / "hparams.yml").read_text()
    for key in ("train", "valid"):
        rows, expected = (pd.read_csv(each / "csv" / f"{key}.csv") for each in (logdir, one_process))
        for each in (rows, expected):  # no scaler skipped a step; Apex has one where the reference does not
            assert "skipped_steps" not in each or not each.pop("skipped_steps").any()
        assert rows.columns.tolist() == expected.columns.tolist()
        for name in rows:
            flips = 1.01 / NUM_SAMPLES if key == "train" and name.startswith("accuracy") and not is_full else 0
            bound = loose if name == "loss" else flips
            exact = rows[name].tolist() == expected[name].tolist()
            assert exact or (rows[name] - expected[name]).abs().max() <= bound, (key, name)
        _assert_tensorboard_has(rows, logdir / "tensorboard" / key)


def _assert_tensorboard_has(rows, folder):
    """Check that TensorBoard has the CSV file's values in single precision."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    for name in rows.columns.drop(["stage", "epoch", "step"]):
        assert [event.value for event in events.Scalars(name)] == pytest.approx(rows[name].tolist(), rel=1e-6), name


def test_the_table_in_the_docs_is_of_these_tests():
    """Exactly the marked cells are tested."""
    assert parity_table.read() == set(LAW)


def test_each_blank_cell_of_the_table_has_a_reason_below_it():
    """The page has a reason for each family of engines, and an existing test for each launcher without a column."""
    assert set(parity_table.WHY_BLANK) == {case.launchers for case in CASES.values()}
    assert parity_table.below() in parity_table.PAGE.read_text(encoding="utf-8")
    assert all((Path(__file__).parents[1] / path).exists() for path in parity_table.ELSEWHERE.values())


FILES = {
    "hparams.yml",
    "environment.json",
    "status.json",
    "result.pth",
    *("csv/train.csv", "csv/valid.csv", "tensorboard/train/events", "tensorboard/valid/events"),
    *(f"checkpoints/{name}" for name in ("index.json", "last.pth", "model.0001.pth", "model.0002.pth")),
}


def _files(logdir):
    paths = [path.relative_to(logdir) for path in logdir.rglob("*") if path.is_file()]
    return {str(path.with_name("events")) if path.name.startswith("events") else str(path) for path in paths}
