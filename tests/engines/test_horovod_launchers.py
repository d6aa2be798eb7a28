"""HorovodEngine under each launcher: equal weights and logs."""

import csv
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.engines.launch_commands import HOROVODRUN, MPIRUN, PYTHON, needs_mpi
from tests.launchers import test_process_environment as launched
from tests.launchers.docs import commands, outputs
from tests.tiny import loader, mlp, train, weights

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")
pytestmark = pytest.mark.horovod

PAGE = Path(__file__).parents[2] / "docs" / "horovod.md"
[START] = commands("Start", PAGE)
COMMANDS = [line.split("#")[0].strip() for line in START.splitlines()]
HOROVODRUN_MPI = "horovodrun --mpi -np 2 python train.py"
HOROVOD_RUN = outputs("Start", PAGE)[0]
PRELUDE = """
import torch
from torch import nn
from runnerkit import dl
from tests.tiny import loader, mlp, sgd, train

class Save(dl.Callback):
    def on_experiment_end(self, runner):
        model = runner.engine.unwrap(runner.model)
        torch.save(model.state_dict(), f"logdir/rank{runner.engine.rank}.pth")

def arguments():
    model = mlp()
    return dict(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), num_epochs=2, logdir="logdir",
        loaders={"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}, callbacks=[Save(order=1000)],
        loggers={"console": None},
    )
"""
SCRIPT = PRELUDE + 'train(**arguments(), engine=dl.HorovodEngine(2, device="cpu"))'


def run(folder, command):
    """Run a command, allowing Open MPI to run as root; return its output."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([os.path.dirname(PYTHON), os.environ["PATH"]]),
        "PYTHONPATH": os.getcwd(),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    """Return weights and logs of the same training by one process, with batches twice as large."""
    logdir = tmp_path_factory.mktemp("one")
    model = mlp()
    data = {"train": loader(64, 16, shuffle=True), "valid": loader(21, 8)}
    train(model, num_epochs=2, logdir=str(logdir), loaders=data)
    return weights(model), logdir


def read_metrics(path):
    with path.open() as file:
        return [{name: float(cell) for name, cell in row.items() if name != "stage"} for row in csv.DictReader(file)]


def test_the_pages_commands_are_those_of_the_parity_law():
    """The parity law tests these commands; `horovodrun --mpi` is tested below."""
    for_root = {"--allow-run-as-root", "--oversubscribe"}
    parity_law = [" ".join(each for each in start if each not in for_root) for start in ([PYTHON], HOROVODRUN, MPIRUN)]
    plain, gloo, mpi = (
        f"{start} train.py".replace(f"{PYTHON} -m horovod.runner.launch", "horovodrun").replace(PYTHON, "python")
        for start in parity_law
    )

    assert [plain, gloo, HOROVODRUN_MPI, mpi] == COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("command", [HOROVODRUN_MPI, "horovod.run"])
def test_other_starts_of_the_page_give_the_weights_and_logs_of_one_process(tmp_path, of_one_process, command):
    """Weights agree in every rank up to the order of float sums, and files are written once.

    `horovod.run` is called in a script with a main guard; the page's dots stand for the arguments.
    """
    if command == HOROVODRUN_MPI:
        needs_mpi()
        script = SCRIPT
    else:
        assert "train(..., engine=" in HOROVOD_RUN
        script, command = PRELUDE + HOROVOD_RUN.replace("...", "**arguments()"), "python train.py"
    (tmp_path / "train.py").write_text(script)

    run(tmp_path, shlex.split(command))

    assert_as_one_process(tmp_path / "logdir", *of_one_process)


def assert_as_one_process(logdir, expected, logs):
    saved = sorted(logdir.glob("rank*.pth"))
    assert len(saved) == 2
    for path in saved:
        model = mlp()
        model.load_state_dict(torch.load(path, weights_only=True))
        torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-6)
    for key in ("train", "valid"):
        rows, expected_rows = (read_metrics(each / "csv" / f"{key}.csv") for each in (logdir, logs))
        assert len(rows) == 2
        assert rows == [pytest.approx(row, rel=1e-6) for row in expected_rows]


OWN_LOGDIR = f"""{PRELUDE}
import os
options = {{"num_epochs": 3, "logdir": f"logdir{{os.environ['HOROVOD_RANK']}}", "resume": "auto", "callbacks": []}}
runner = train(**{{**arguments(), **options}}, engine=dl.HorovodEngine(device="cpu"))
os.write(1, f"{{runner.epoch_step}} epochs, {{runner.batch_step}} steps\\n".encode())
"""


@pytest.mark.slow
def test_rank_zero_decides_for_all_whether_there_is_a_checkpoint(tmp_path):
    """Rank one sees no logdir, as on another machine; without a timeout in Horovod, the job used to hang."""
    (tmp_path / "first.py").write_text(PRELUDE + "train(**arguments())")
    (tmp_path / "script.py").write_text(OWN_LOGDIR)
    run(tmp_path, [PYTHON, "first.py"])
    (tmp_path / "logdir").rename(tmp_path / "logdir0")

    output = run(tmp_path, [*HOROVODRUN, "script.py"])

    assert output.count("3 epochs, 20 steps") == 2  # 2 x 8 steps by one process, then 4 by two


ADASUM_SCRIPT = """
import os, sys
import torch
from runnerkit import dl
from tests.tiny import loader, train

def fit(precision=None, **kwargs):
    engine = dl.HorovodEngine(device="cpu", op="adasum", precision=precision)
    return train(engine=engine, loaders={"train": loader(64, 8)}, **kwargs)

refused = []
for kwargs in (
    {"callbacks": [dl.OptimizerCallback("loss", grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 1})]},
    {"callbacks": [dl.OptimizerCallback("loss", accumulation_steps=2)]},
    {"precision": dl.AMP(torch.float16)},
):
    try:
        fit(**kwargs)
    except ValueError as error:
        refused.append(str(error).split("\\n")[0])
runner = fit()
if runner.engine.is_main_process:
    os.mkdir(sys.argv[1])
    torch.save((runner.model.state_dict(), refused), f"{sys.argv[1]}/result.pth")
"""


def adasum(first, second):
    """Combine two ranks' updates: orthogonal parts add up, parallel parts are averaged (Maleki et al. 2020)."""
    product = (first * second).sum()
    return (1 - product / (2 * first.square().sum())) * first + (1 - product / (2 * second.square().sum())) * second


@pytest.mark.slow
def test_adasum_combines_what_each_rank_would_have_stepped(tmp_path):
    """Weights follow the formula per tensor with each rank's own momentum, and unsupported options are refused."""
    needs_mpi()
    (tmp_path / "script.py").write_text(ADASUM_SCRIPT)

    run(tmp_path, [*MPIRUN, "script.py", "logdir"])

    state, refused = torch.load(tmp_path / "logdir" / "result.pth", weights_only=True)
    model = mlp()
    parameters = list(model.parameters())
    momenta = [[torch.zeros_like(each) for each in parameters] for _ in range(2)]
    for features, targets in loader(64, 16):
        updates = []
        for rank, velocities in enumerate(momenta):
            loss = nn.functional.cross_entropy(model(features[rank::2]), targets[rank::2])
            gradients = torch.autograd.grad(loss, parameters)
            for velocity, gradient in zip(velocities, gradients, strict=True):
                velocity.mul_(0.9).add_(gradient)
            updates.append([-0.1 * velocity for velocity in velocities])
        with torch.no_grad():
            for parameter, first, second in zip(parameters, *updates, strict=True):
                parameter.add_(adasum(first, second))
    trained = mlp()
    trained.load_state_dict(state)
    torch.testing.assert_close(weights(trained), weights(model), rtol=0, atol=1e-6)
    assert ["clip" in refused[0], "accumulation_steps" in refused[1], "float16" in refused[2]] == [True] * 3


def test_adasum_needs_mpi():
    """The error is raised before processes start."""
    with pytest.raises(ValueError, match=r"op='adasum' needs MPI.*mpirun -np 2 python"):
        train(engine=dl.HorovodEngine(2, device="cpu", op="adasum"))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (launched.TORCHRUN, r"torchrun started this process \(TORCHELASTIC_RUN_ID is set\).*horovodrun -np 4"),
        (launched.SRUN, r"srun started this process \(SLURM_STEP_ID is set\).*horovodrun -np 4"),
        (launched.MPIRUN, "mpirun started this process over MPI, but this Horovod was built without it"),
    ],
)
def test_a_launcher_that_horovod_does_not_know_is_named(monkeypatch, variables, message):
    """The error names its variable and the known launchers; otherwise each process would train alone."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hvd, "mpi_built", lambda: False)

    with pytest.raises(ValueError, match=message):
        train(engine=dl.HorovodEngine(2, device="cpu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 0}, "num_processes must be >= 1"),
        ({"compression": "fp8"}, "compression must be 'fp16'"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor must be > 0 and finite, got 0"),
        ({"gradient_predivide_factor": 2, "op": "sum"}, "gradient_predivide_factor=2 needs op='average', got op='sum'"),
        ({"op": "max"}, "op must be 'average', 'sum' or 'adasum'"),
        ({"device": "tpu"}, "device must be 'cuda', 'cpu'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    """The constructor raises the error, which gives the valid values."""
    with pytest.raises(ValueError, match=message):
        dl.HorovodEngine(**arguments)
