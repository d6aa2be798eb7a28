"""The same script under torchrun: one node, and two."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd, weights

SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from torch import nn
    from runnerkit import dl
    from tests.tiny import loader, mlp, sgd

    model = mlp()
    runner = dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), num_epochs=2, logdir=sys.argv[1],
        loaders={"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}, ddp=True, cpu=True,
    )
    assert runner.model is model and runner.epoch_metrics["valid"]["loss"] > 0
    torch.save(model.state_dict(), f"{sys.argv[1]}/rank{runner.engine.rank}.pth")
    """
)


def torchrun(tmp_path, *options):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path / "logdir")]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def spawned_weights():
    model = mlp()
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        num_epochs=2,
        loaders={"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)},
        ddp=True,
        cpu=True,
        **quiet(),
    )
    return weights(model)


def assert_ranks_hold(expected, logdir):
    for rank in range(2):
        model = mlp()
        model.load_state_dict(torch.load(logdir / f"rank{rank}.pth", weights_only=True))
        torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-6)
    assert sorted(path.name for path in (logdir / "csv").iterdir()) == ["train.csv", "valid.csv"]


@pytest.mark.slow
def test_torchrun_gives_the_weights_of_plain_python(tmp_path):
    """The launcher changes nothing; logs are written once."""
    process = torchrun(tmp_path, "--standalone", "--nproc-per-node=2")

    output, _ = process.communicate(timeout=100)

    assert process.returncode == 0, output
    assert_ranks_hold(spawned_weights(), tmp_path / "logdir")


@pytest.mark.slow
def test_two_nodes_give_the_weights_of_one(tmp_path):
    """Two launchers, one process each, meet at an address: a node is where LOCAL_RANK starts at 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    nodes = [
        torchrun(
            tmp_path,
            "--nnodes=2",
            f"--node-rank={rank}",
            "--nproc-per-node=1",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=100)[0] for node in nodes]

    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert_ranks_hold(spawned_weights(), tmp_path / "logdir")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2 must be in"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR is not"),
    ],
)
def test_a_wrong_environment_is_named(monkeypatch, variables, message):
    """The variable, its value, and what was expected."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = mlp()

    with pytest.raises(ValueError, match=message):
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            loaders={"train": loader(16, 8)},
            ddp=True,
            cpu=True,
            **quiet(),
        )
