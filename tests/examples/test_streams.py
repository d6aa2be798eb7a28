"""The examples of streams train alike in one and in two processes, with and without data workers."""

import pytest
import torch

from examples.streams import hugging_face, tar_shards

JOBS = [(1, 0), (1, 2), (2, 2)]  # processes, and data workers of each
EXAMPLES = {
    "ShardedFiles": (tar_shards.main, []),
    "WebDataset": (tar_shards.main, ["--webdataset"]),
    "Hugging Face": (hugging_face.main, []),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_any_job_reaches_the_same_weights(tmp_path, name):
    """The noise of each sample is a function of its place, so two processes differ by rounding only."""
    main, options = EXAMPLES[name]
    weights, accuracies = {}, {}
    for processes, workers in JOBS:
        ddp = ["--ddp"] if processes == 2 else []
        runner = main([*options, *ddp, "--data", str(tmp_path / "data"), "--epochs", "4", "--workers", str(workers)])
        weights[processes, workers] = torch.cat([each.flatten() for each in runner.model.state_dict().values()])
        accuracies[processes, workers] = runner.epoch_metrics["valid"]["accuracy"]

    assert torch.equal(weights[1, 0], weights[1, 2])
    torch.testing.assert_close(weights[1, 0], weights[2, 2], rtol=1e-3, atol=1e-4)
    assert min(accuracies.values()) > 0.9
    assert accuracies[1, 0] == pytest.approx(accuracies[2, 2], abs=0.01)
