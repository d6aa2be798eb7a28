"""examples/training_tricks.py learns, and each trick has its effect, with one process and with two."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from examples import training_tricks
from runnerkit import dl
from tests.examples.start import start

LR, WARMUP, PATIENCE = 0.03, 20, 2
TRAIN_BATCHES = 23  # 1437 digits, 64 per step


class Evidence(dl.Callback):
    """A callback that records all ranks' initial weights, first epoch's batches and dropout, and each step's rate."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Internal)
        self.initial, self.batches, self.draws, self.rates = [], [], [], []

    def on_stage_start(self, runner):
        state = runner.engine.unwrap(runner.model).state_dict()
        self.initial = runner.engine.gather_object(torch.cat([each.flatten() for each in state.values()]))
        # Draw as dropout would, from this process's generator, and restore it.
        before = torch.get_rng_state()
        self.draws = runner.engine.gather_object(torch.rand(4))
        torch.set_rng_state(before)

    def on_batch_end(self, runner):
        if runner.is_train_loader:
            self.rates.append(runner.optimizer.param_groups[0]["lr"])
            if runner.epoch_step == 1:
                batch = runner.batch["features"].flatten(1), runner.batch["targets"]
                self.batches.append(runner.engine.gather_object(batch))


def train(logdir, *arguments):
    rates = ["--lr", str(LR), "--warmup-steps", str(WARMUP)]
    options = training_tricks.parse(["--logdir", str(logdir), *rates, *arguments])
    evidence = Evidence()
    return training_tricks.train(options, [evidence]), evidence


def samples(step):
    """Return the samples of one step over all ranks, sorted."""
    return sorted(
        (int(target), *row.tolist()) for rows, targets in step for row, target in zip(rows, targets, strict=True)
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train with one process and batches of 64, and with two and batches of 32."""
    folder = tmp_path_factory.mktemp("runs")
    few = ["--patience", str(PATIENCE), "--drop-patience", "0"]
    return {
        "one": train(folder / "one", "--engine", "AMPEngine", "--batch-size", "64", *few),
        "two": train(folder / "two", "--batch-size", "32", *few),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "two"])
def test_it_learns_and_stops_and_its_rate_warms_up_and_drops_on_a_plateau(runs, name):
    """More than 93 % of digits are right. The stopping epoch follows from the logged losses, and so does each step's
    rate: the formula's, and then that of ReduceLROnPlateau."""
    runner, evidence = runs[name]
    losses = [epoch["valid"]["loss"] for epoch in runner.experiment_metrics.values()]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)

    best, bad = math.inf, 0
    expected = [LR * step / WARMUP for step in range(WARMUP)] + [LR] * (TRAIN_BATCHES - WARMUP)
    for epoch, loss in enumerate(losses, start=1):
        best, bad = (loss, 0) if loss < best - 1e-6 else (best, bad + 1)
        assert (bad == PATIENCE) == (epoch == len(losses))
        plateau.step(loss)
        expected += [optimizer.param_groups[0]["lr"]] * TRAIN_BATCHES

    assert runner.epoch_metrics["valid"]["accuracy"] > 0.93
    assert runner.epoch_step == len(losses) < 30
    assert runner.engine.num_processes == {"one": 1, "two": 2}[name]
    assert evidence.rates == pytest.approx(expected[:-TRAIN_BATCHES], rel=0, abs=1e-9)
    assert min(evidence.rates[WARMUP:]) < LR  # the rate did drop


@pytest.mark.slow
def test_one_seed_gives_all_ranks_one_shuffle_and_one_model(runs):
    """Weights, and each step's augmented samples, equal those of one process with the same seed."""
    (_, one), (_, two) = runs["one"], runs["two"]

    assert torch.equal(two.initial[0], two.initial[1]) and torch.equal(one.initial[0], two.initial[0])
    assert len(one.batches) == len(two.batches) == TRAIN_BATCHES
    for ours, theirs in zip(one.batches[:-1], two.batches[:-1], strict=True):
        assert samples(ours) == samples(theirs)


@pytest.mark.slow
def test_each_rank_draws_augmentation_and_dropout_of_its_own(runs):
    """Ranks see different batches and drop different units; a shift depends on the sample, not on the rank."""
    _, two = runs["two"]

    assert not torch.equal(two.draws[0], two.draws[1])
    for (mine, _), (theirs, _) in two.batches:
        assert mine.shape != theirs.shape or not torch.equal(mine, theirs)


def test_shifts_are_drawn():
    """All three shifts occur, drawn from torch's generator."""
    image = torch.arange(64, dtype=torch.uint8).view(8, 8).numpy()

    shifted = {training_tricks.shift(image).tobytes() for _ in range(50)}

    assert len(shifted) == 3 and image.tobytes() in shifted


def test_a_warm_up_by_epochs_and_a_cosine(tmp_path):
    """The warm-up starts from a value, as in the second command, in fp32; Lookahead synchronizes in the last of 115
    steps."""
    asked = ["--scheduler", "cosine", "--warmup-from", "0.001", "--epochs", "5", "--batch-size", "64", "--k", "5"]
    more = ["--engine", "CPUEngine", "--lr", str(LR), "--warmup-epochs", "2"]
    options = training_tricks.parse(["--logdir", str(tmp_path), *more, *asked])
    evidence = Evidence()

    runner = training_tricks.train(options, [evidence])

    by_epoch = [0.001, 0.0155, *(LR * (1 + math.cos(math.pi * i / 3)) / 2 for i in range(3))]
    assert evidence.rates == pytest.approx([rate for rate in by_epoch for _ in range(TRAIN_BATCHES)], abs=1e-9)
    assert runner.epoch_metrics["valid"]["accuracy"] > 0.85
    for weight in runner.model.parameters():
        assert torch.equal(runner.optimizer.state[weight]["slow_param"], weight)


@pytest.mark.timeout(450)
def test_torchrun_runs_it_and_one_line_says_what_came_of_it(tmp_path):
    """The third command runs for one epoch."""
    command = next(line for line in training_tricks.__doc__.splitlines() if line.startswith("torchrun"))

    output = start(command, tmp_path, "--epochs", 1)

    assert output.count("DistributedDataParallelAMPEngine: valid accuracy") == 1
    assert float(output.split("valid accuracy ")[1].split()[0]) > 0.5
