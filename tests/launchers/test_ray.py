"""A cluster of two Ray nodes on this machine: results, failures, restarts and signals are those of local processes."""

import os
import re
import signal
import socket
import sys

import pandas as pd
import pytest
import torch

from runnerkit import dl
from runnerkit.engines.launch.ray_actor import reserved_port
from tests.launchers.docs import scripts
from tests.launchers.jobs import ROOT
from tests.launchers.ray_jobs import ENDS_S, Script, needs_ray
from tests.tiny import loader, mlp, train, weights

ENGINES = {"ddp": dl.DistributedDataParallelEngine, "fsdp": dl.FullyShardedDataParallelEngine}
NUM_EPOCHS = 3


def _local(folder, engine, num_epochs):
    options = {"num_epochs": num_epochs, "logdir": folder / "local"}
    data = {"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}
    return train(mlp(), engine=ENGINES[engine](2, device="cpu"), loaders=data, **options)


def _resumed(folder, counts):
    """Train an epoch with each number of processes of this machine, from the last checkpoint."""
    for num_epochs, count in enumerate(counts, 1):
        options = {"num_epochs": num_epochs, "logdir": folder / "local", "resume": "auto"}
        data = {"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}
        local = train(mlp(), engine=dl.DistributedDataParallelEngine(count, device="cpu"), loaders=data, **options)
    return local


def _assert_same(script, folder, engine="ddp", num_epochs=NUM_EPOCHS, counts=()):
    """Check that a script ended with the weights, metrics, counters and logs of a run on this machine, bit for bit.

    The run has two processes, or in each epoch the number in `counts`.
    """
    local = _resumed(folder, counts) if counts else _local(folder, engine, num_epochs)
    result = torch.load(script.logdir / "result.pth", weights_only=True)
    model = mlp()
    model.load_state_dict(result["weights"])
    assert torch.equal(weights(model), weights(local.model))
    assert (result["steps"], result["num_processes"]) == (local.batch_step, local.engine.num_processes)
    assert {key: values["loss"] for key, values in result["metrics"].items()} == {
        key: values["loss"] for key, values in local.epoch_metrics.items()
    }
    for key in ("train", "valid"):
        logs = [
            pd.read_csv(each / "csv" / f"{key}.csv")[["epoch", "loss"]] for each in (script.logdir, folder / "local")
        ]
        pd.testing.assert_frame_equal(*logs, check_exact=True)


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize("engine", ENGINES)
def test_results_and_logs_come_back_as_from_local_processes(cluster, tmp_path, engine):
    """Weights, metrics, counters and logs are those of two processes of this machine; output has the rank."""
    script = Script(cluster, tmp_path, engine, NUM_EPOCHS, "nothing", 0)

    assert script.end() == 0, script.output

    _assert_same(script, tmp_path, engine)
    assert {rank for rank, _ in re.findall(r"\(rank (\d) pid=(\d+)\S*\) starts with pid \2", script.output)} == {
        "0",
        "1",
    }


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_an_exception_is_raised_by_the_caller_with_its_traceback(cluster, tmp_path):
    script = Script(cluster, tmp_path, "ddp", NUM_EPOCHS, "raises", 0)

    assert script.end() == 1

    assert "LookupError: on one rank" in script.output
    assert re.search(r'RankTraceback: rank 1 of 2\n"""(?s:.*)line \d+, in on_batch_end', script.output), script.output


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_killed_actor_ends_the_run(cluster, tmp_path):
    """The error names the rank and its node, within seconds."""
    script = Script(cluster, tmp_path, "ddp", NUM_EPOCHS, "holds", 0)
    os.kill(int(script.wait_for(r"holds with pid (\d+)")[1]), signal.SIGKILL)

    assert script.end(ENDS_S) == 1

    assert re.search(r"WorkerError: rank 1 of 2 was lost, on node [\d.]+: ", script.output), script.output


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_killed_node_is_replaced_and_the_run_continues_exactly(own_cluster, tmp_path):
    """After the loss of a node the job waits for another one, and ends as the uninterrupted run."""
    script = Script(own_cluster, tmp_path, "ddp", NUM_EPOCHS, "holds", 1)
    script.wait_for("holds with pid")
    own_cluster.do("kill")
    script.wait_for("the job starts again")
    own_cluster.do("add 1")

    assert script.end() == 0, script.output

    assert script.output.count("begins epoch 1") <= 2  # of two ranks, once
    _assert_same(script, tmp_path)


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_after_the_loss_of_a_node_the_job_continues_with_fewer_processes(own_cluster, tmp_path):
    """It ends as a run of two processes that is stopped after its first epoch and resumed with one."""
    script = Script(own_cluster, tmp_path, "ddp", NUM_EPOCHS, "holds", 1, 1, 2)
    script.wait_for("holds with pid")
    own_cluster.do("kill")

    assert script.end() == 0, script.output

    _assert_same(script, tmp_path, counts=(2, 1, 1))


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_job_that_starts_again_uses_a_node_that_was_added(own_cluster, tmp_path):
    """It starts on one node of one CPU; after a failure it has two processes."""
    own_cluster.do("kill")
    script = Script(own_cluster, tmp_path, "ddp", NUM_EPOCHS, "holds", 1, 1, 2)
    pid = int(script.wait_for(r"holds with pid (\d+)")[1])
    own_cluster.do("add 1")
    os.kill(pid, signal.SIGKILL)

    assert script.end() == 0, script.output

    _assert_same(script, tmp_path, counts=(1, 2, 2))


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_ctrl_c_saves_and_leaves_nobody_behind(cluster, tmp_path):
    """The ranks stop after a step and save; the script continues from there when it is started again."""
    script = Script(cluster, tmp_path, "ddp", NUM_EPOCHS, "holds", 0)
    script.wait_for("holds with pid")
    script.process.send_signal(signal.SIGINT)

    assert script.end() == 130, script.output

    again = Script(cluster, tmp_path, "ddp", NUM_EPOCHS, "nothing", 0)
    assert again.end() == 0, again.output
    _assert_same(again, tmp_path)


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_a_killed_script_leaves_nobody_behind(cluster, tmp_path):
    script = Script(cluster, tmp_path, "ddp", NUM_EPOCHS, "holds", 0)
    script.wait_for("holds with pid")
    script.process.kill()

    assert script.end() == -signal.SIGKILL


PREDICTS = """
import os
import torch
from runnerkit import dl
from tests.tiny import loader, mlp


class Runner(dl.SupervisedRunner):
    def predict_batch(self, batch, fails=False):
        if fails and self.engine.rank == 1:
            raise LookupError("in a prediction")
        print(f"predicts with pid {os.getpid()}", flush=True)
        return super().predict_batch(batch)


runner = Runner(model=mlp(), engine=dl.DistributedDataParallelEngine(2, device="cpu", launcher=dl.RayLauncher()))
data = loader(101, 4)
torch.save([each["logits"] for each in runner.predict_loader(data)], "logits.pth")
with_break = runner.predict_loader(data)
next(with_break)
with_break.close()
try:
    list(runner.predict_loader(data, fails=True))
except LookupError as error:
    print("raised:", error, flush=True)
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_predictions_arrive_while_they_are_made(cluster, tmp_path):
    """All are those of one process, in the loader's order; an early end and an exception leave nobody behind."""
    (tmp_path / "predict.py").write_text(PREDICTS)
    script = Script(cluster, tmp_path, script=tmp_path / "predict.py")

    assert script.end() == 0, script.output

    alone = dl.SupervisedRunner(model=mlp()).predict_loader(loader(101, 4), cpu=True)
    logits = torch.cat([each["logits"] for each in alone])
    torch.testing.assert_close(torch.cat(torch.load(tmp_path / "logits.pth")), logits)
    assert "raised: in a prediction" in script.output


@needs_ray
@pytest.mark.slow
@pytest.mark.cold
def test_the_script_of_the_page_runs(cluster, tmp_path):
    [text] = scripts("A Ray cluster")
    (tmp_path / "script.py").write_text(text)
    script = Script(cluster, tmp_path, script=tmp_path / "script.py")

    assert script.end() == 0, script.output


def test_the_page_shows_the_scripts_that_the_benchmark_compares():
    """Their lines are counted, and their times measured, by benchmarks/ray_start.py."""
    files = [ROOT / "benchmarks" / "on_ray" / name for name in ("ours.py", "ray_train.py")]

    assert scripts("A Ray cluster, beside Ray Train") == [each.read_text(encoding="utf-8") for each in files]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give a bound port to nobody")
def test_the_port_of_rank_zero_is_nobody_elses_until_it_listens():
    """Seconds pass between the choice of the port and rank zero's start, in which other programs take free ports."""
    with reserved_port() as reserved, socket.socket() as other:
        port = reserved.getsockname()[1]
        with pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", port))

        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
            pass


def test_without_ray_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    engine = dl.DistributedDataParallelEngine(2, device="cpu", launcher=dl.RayLauncher())

    with pytest.raises(ImportError, match=re.escape("pip install 'runnerkit[ray]'")):
        train(engine=engine)


@pytest.mark.parametrize("engine", ENGINES.values())
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"launcher": "ray", "num_processes": 2}, TypeError, "a RayLauncher, got 'ray'"),
        ({"launcher": dl.RayLauncher()}, ValueError, "num_processes="),
        (
            {"launcher": dl.RayLauncher(), "num_processes": 2, "address": "10.0.0.1", "port": 1},
            ValueError,
            "omit them",
        ),
        ({"num_processes": (2, 4)}, ValueError, r"num_processes=\(2, 4\) needs launcher="),
        ({"launcher": dl.RayLauncher(), "num_processes": (0, 4)}, ValueError, r"1 <= least <= most, got \(0, 4\)"),
        ({"launcher": dl.RayLauncher(), "num_processes": (4, 2)}, ValueError, r"1 <= least <= most, got \(4, 2\)"),
        ({"launcher": dl.RayLauncher(), "num_processes": [4]}, ValueError, r"\(least, most\)"),
    ],
)
def test_what_does_not_go_with_a_launcher_is_refused(engine, options, error, words):
    with pytest.raises(error, match=words):
        engine(device="cpu", **options)


@pytest.mark.parametrize("sizes", [{"replicas": 2}, {"tensor_parallel": 2}])
def test_a_mesh_needs_one_number_of_processes(sizes):
    with pytest.raises(ValueError, match=r"one number of processes, got num_processes=\(2, 4\)"):
        dl.FullyShardedDataParallelEngine((2, 4), launcher=dl.RayLauncher(), **sizes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_restarts": -1}, "max_restarts must be >= 0"),
        ({"resources": {"CPU": 0}}, "resources must be amounts > 0"),
        ({"resources": {"GPU": 2}}, "a process uses one GPU"),
    ],
)
def test_wrong_numbers_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        dl.RayLauncher(**options)
