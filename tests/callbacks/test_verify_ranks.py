"""`check=True` reports that ranks agree, and raises an error if they do not."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.callbacks.debug.parts.rank_samples import SeenSamples, describe_samples
from runnerkit.callbacks.debug.parts.rank_weights import largest_difference
from runnerkit.callbacks.debug.parts.recorded_loader import RecordedSampler
from runnerkit.sampling.sharding import shard_loader
from tests.callbacks import verify_ranks_cases as cases
from tests.engines.together import together
from tests.test_resume import Augmented
from tests.tiny import loader, mlp, train

SOUND = [
    "the model's 6 parameters are the same on 2 ranks after training on loader 'train'",
    "2 ranks saw 48 different samples of loader 'train' (of 160), none twice",
    "the model's 9 parameters and buffers are the same on 2 ranks before loader 'valid'",
    "2 ranks saw all 21 samples of loader 'valid', each once",
    "one process computes the same loss, accuracy of loader 'valid' from these 21 samples, to 1e-06",
]


@pytest.fixture(scope="module")
def said():
    """Return the findings of every case; one launch of two processes serves all tests."""
    return together(cases.run_all)


def test_a_sound_job_of_two_processes_is_told_in_words(said):
    """Three epochs give each finding once; batches that a loader's workers prefetch in vain do not count."""
    assert said["sound"] == said["with workers"] == SOUND


def test_shards_and_half_precision_are_checked_too(said):
    """FSDP2 gathers its parameters for evaluation, so they can be compared; bf16 has a larger tolerance."""
    assert said["sound, FSDP2"] == [
        "the model's parameters are sharded on 2 ranks after training on loader 'train'",
        *SOUND[1:],
    ]
    assert said["sound, bf16"] == [*SOUND[:-1], SOUND[-1].replace("1e-06", "1e-04")]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("weighted", "2 ranks saw 48 positions in the order of loader 'train', none twice; its WeightedRandomSampler"),
        ("padded", "2 ranks saw 21 of the 21 samples of loader 'valid', 1 sample (0) of them twice: its Distributed"),
        ("drawn metric", "noise of loader 'valid' is random: "),
        ("drawn metric", SOUND[-1]),
        ("maximum", "largest of loader 'valid' depends on how samples are batched"),
    ],
)
def test_what_is_no_mistake_is_told(said, case, words):
    """Samplers of the user may repeat samples, and metrics may be random or no mean over samples."""
    assert any(words in finding for finding in said[case])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("every rank the same", "'train': 2 ranks were given 24 samples (5, 9, 16, 23, 30, ...) more than once."),
        ("unlike orders", "'train': rank 1 orders the samples differently from rank 0"),
        ("parameter", "differs between ranks after training on loader 'train': '0.weight' on rank 1 by up to 0.75"),
        ("buffer", "differs between ranks before loader 'valid': '1.running_mean' on rank 1 by up to 0.5"),
        ("rank in metric", "'odd' of loader 'valid' depends on the number of processes: 2 give 0.4761905, one alone"),
        ("own meter", "'total' of loader 'valid' differs between ranks: 11 on rank 0, 10 on rank 1"),
    ],
)
def test_what_is_broken_raises(said, case, message):
    """The error says what was found and what to do."""
    assert isinstance(said[case], str)
    assert message in said[case]


def test_meters_of_the_users_own_are_as_without_the_check(said):
    """Numbers, lists, tensors and objects on the runner are restored, and so is a callback's state."""
    told, metrics, num_batches, findings = said["meters"]

    assert (told, metrics, num_batches, []) == said["meters, unchecked"]
    assert metrics["valid"]["own"] == 21, "the sum over ranks"
    assert any("computes the same half, one, loss of loader 'valid'" in finding for finding in findings)


def test_every_kind_of_loader_is_verified_as_far_as_it_can_be(said):
    """Samples are checked if they have indices, and metrics if one process can read all batches."""
    found = said["every kind"]
    own, whole = "a OwnLoader does not report the samples in its batches", "all 21 samples of loader {!r}, each once"
    seen = {  # by loader: the samples that two ranks saw, and from how many the metrics were computed again
        **dict.fromkeys(["tensors", "prefetched", "own_batches", "lists"], (whole, 21)),
        "limited": ("16 different samples of loader {!r} (of 21), none twice", 16),
        "limited_tensors": ("8 different samples of loader {!r} (of 21), none twice", 8),
        "rows": ("all 6 batches of the data set's own of loader {!r}, each once", 21),
        "stream": ("6 batches of loader {!r}, which are shares of one common stream", 21),
        "stream_workers": ("6 batches of loader {!r}, which are shares of one common stream", 21),
        "limited_stream": ("4 batches of loader {!r}, which are shares of one common stream", 16),
    }
    expected = {
        "own": [
            f"{own}, so those seen of loader 'own' are unknown",
            f"metrics of loader 'own' were not recomputed by one process: {own}",
        ]
    }
    for key, (words, num_samples) in seen.items():
        same = SOUND[-1].replace("'valid'", repr(key)).replace("21 samples", f"{num_samples} samples")
        expected[key] = [f"2 ranks saw {words.format(key)}", same]
    of_key = {key: [each for each in found if f"loader {key!r}" in each and "model" not in each] for key in expected}
    assert of_key == expected and expected.keys() == cases.every_kind().keys()


@pytest.mark.horovod
def test_horovod_is_checked_too():
    """Horovod gives the same findings and the same error."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")

    said = dl.HorovodEngine(2).launch(cases.run_horovod)

    assert said["sound"] == SOUND
    assert "'0.weight' on rank 1 by up to 0.75" in said["parameter"]


def supervised(loaders, **options):
    return train(loaders=loaders, check=True, **options)


def findings(runner):
    return runner.callbacks["_verify_ranks"].findings


def test_findings_are_printed_on_the_console(capsys):
    """One process has no other ranks to agree with, but its samples and metrics are checked."""
    console = {"console": dl.ConsoleLogger()}
    supervised({"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}, loggers=console)

    checks = [line for line in capsys.readouterr().out.splitlines() if line.startswith("check: ")]
    assert checks == [
        "check: 1 process saw 24 different samples of loader 'train' (of 64), none twice",
        "check: 1 process saw all 21 samples of loader 'valid', each once",
        "check: one process computes the same loss of loader 'valid' from these 21 samples, to 1e-06",
    ]


def test_the_check_changes_neither_training_nor_the_loader():
    """The weights equal those of an equally short run, and the loader gets its batch sampler back."""
    loaders = {"train": loader(24, 8, shuffle=True), "valid": loader(24, 8)}
    batch_sampler = loaders["train"].batch_sampler

    checked, plain = supervised(loaders), train(loaders=loaders)

    assert all(map(torch.equal, checked.model.parameters(), plain.model.parameters()))
    assert checked.epoch_metrics == plain.epoch_metrics
    assert loaders["train"].batch_sampler is batch_sampler


@pytest.mark.parametrize("flag", ["check", "overfit"])
def test_a_short_run_does_not_shorten_a_later_evaluation(flag):
    """The flags apply to the training run only: `evaluate_loader` scores all 41 samples, as plain PyTorch does."""
    model, data = mlp(), loader(41, 4, seed=1)

    loss = train(model, loaders={"train": loader(64, 8)}, **{flag: True}).evaluate_loader(data)["loss"]

    features, targets = data.dataset.tensors
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model.eval()(features), targets).item()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_validation_within_the_training_loader_is_a_pass_of_its_own():
    """Both passes are checked, each against its own samples."""
    runner = supervised({"train": loader(64, 8), "valid": loader(21, 8)}, valid_every_steps=2)

    assert findings(runner) == [
        "1 process saw all 21 samples of loader 'valid', each once",
        "one process computes the same loss of loader 'valid' from these 21 samples, to 1e-06",
        "1 process saw 24 different samples of loader 'train' (of 64), none twice",
    ]


def test_what_a_sample_draws_is_drawn_alike_when_it_is_evaluated_again():
    """Augmentation depends on seed, epoch and the sample's position only, so the metric is not reported as random."""

    runner = supervised({"train": loader(16, 8), "valid": DataLoader(Augmented(21), batch_size=8)})

    assert findings(runner)[-1].startswith("one process computes the same loss of loader 'valid' from these 21 samples")


def test_metrics_of_a_list_of_batches_are_computed_again():
    """The single process can read a list twice, but not an iterator."""
    batches = list(loader(21, 4))

    again = supervised({"train": loader(16, 8), "valid": batches})
    once = supervised({"train": loader(16, 8), "valid": iter(batches)}, num_epochs=1)

    assert findings(again)[-1] == "one process computes the same loss of loader 'valid' from these 12 samples, to 1e-06"
    assert findings(once)[-1].endswith("process: a list_iterator yields its batches once")


def test_a_loader_that_gives_its_batches_once_is_named():
    """A custom class gives no sign of it before the second pass."""

    class Once:
        def __init__(self, batches):
            self.rest = iter(batches)

        def __iter__(self):
            return self.rest

    valid = Once(list(loader(21, 7)))

    with pytest.raises(ValueError, match="a Once yielded 3 batches, and 0 in a second pass; a loader must yield"):
        supervised({"train": loader(16, 8), "valid": valid})


def shares(num_samples, batch_size, world_size, *, num_batches, spoil):
    """Return the arguments for `describe_samples` as ranks of a job would record them, without processes."""
    found, recorded, given = [], None, None
    for rank in range(world_size):
        whole = DataLoader(range(num_samples), batch_size=batch_size, shuffle=True)
        given = shard_loader(whole, key="train", training=True, rank=rank, world_size=world_size, seed=1)
        recorded = RecordedSampler(given.batch_sampler)
        vars(given)["batch_sampler"] = recorded
        list(recorded)
        spoil(rank, recorded.given)
        found.append(SeenSamples.of(recorded, num_batches=num_batches, is_complete=False))
    return {"shares": found, "loader": given, "key": "train", "order": recorded.order}


def repeat(rank, batches):
    if rank == 2:
        batches[1][3] = batches[0][0]


def skip(rank, batches):
    if rank == 1:
        del batches[1]


@pytest.mark.parametrize(
    ("spoil", "words"), [(repeat, r"3 ranks were given 1 sample \(\d+\) more than once"), (skip, "3 ranks were")]
)
def test_one_sample_given_twice_and_a_batch_left_out_are_found(spoil, words):
    """A single mistake among 90 samples is found."""
    with pytest.raises(ValueError, match=words):
        describe_samples(**shares(200, 10, 3, num_batches=3, spoil=spoil))


def test_tensors_of_unlike_shapes_are_infinitely_far_apart():
    """Tensors of different shapes cannot be subtracted."""
    assert largest_difference([torch.zeros(2), torch.tensor([0.0, -3.0])]) == 3.0
    assert largest_difference([torch.zeros(2), torch.zeros(3)]) == float("inf")
    assert largest_difference([torch.zeros(2), None]) == float("inf")
