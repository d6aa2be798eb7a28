"""EMACallback and SWACallback with FSDP2: the averages of one process, though each process holds only its shards."""

import pytest
import torch

from runnerkit import dl
from tests.callbacks.sharded_averages_job import run
from tests.engines.tensor_parallel_job import mesh
from tests.engines.together import together

# By number of processes: name, (tensor_parallel, batch_size), arguments of the engine.
MESHES = {
    2: {
        "shards": (1, 4, {}),
        "cpu_offload": (1, 4, {"cpu_offload": True}),
        "tensor": (2, 8, {}),
        "meta": (1, 4, {"init": "meta"}),
    },
    4: {
        "replicas": (1, 2, {"replicas": 2}),
        "tensor and meta": (2, 4, {"init": "meta"}),
    },
}


def run_all(num_processes):
    return {
        (name, average): run(
            mesh(num_processes, size, **options), average=average, batch_size=batch_size, on_meta="init" in options
        )
        for name, (size, batch_size, options) in MESHES[num_processes].items()
        for average in ("ema", "swa")
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_averages_its_shards_as_one_process_does(num_processes):
    """Averages are those of AveragedModel bit for bit, in evaluation and at the end, and those of one process to 1e-12.

    Weights are in float64, so only the order of sums differs. No process holds more than about half an average.
    """
    expected = {average: run(dl.CPUEngine(), average=average) for average in ("ema", "swa")}

    found = together(lambda: run_all(num_processes), num_processes=num_processes)

    for (name, average), (is_average, held, final, metrics) in found.items():
        *_, theirs, their_metrics = expected[average]
        places = [*(f"evaluation {epoch}" for epoch in ((1, 2, 3) if average == "ema" else (2, 3))), "end"]
        assert held < 0.65, (name, average)
        assert is_average == dict.fromkeys(places, True), (name, average)
        for key, value in theirs.items():
            torch.testing.assert_close(final[key], value, rtol=0, atol=1e-12)
        for epoch, loaders in their_metrics.items():
            assert metrics[epoch]["valid"] == pytest.approx(loaders["valid"], abs=1e-12), (name, average, epoch)
    assert len(found) == 2 * len(MESHES[num_processes])
