"""HorovodEngine: two processes match one on the joined batch, in every way to write a step."""

from functools import partial

import pytest
import torch
from sklearn.metrics import accuracy_score
from torch import nn

from runnerkit import dl
from runnerkit.communicator import OneProcess
from tests.engines import horovod_cases as cases
from tests.engines import test_closures as closures
from tests.engines.horovod_cases import BATCH_SIZE, NUM_SAMPLES
from tests.tiny import classification, loader, mlp, sgd, train_by_hand, weights

pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")
pytestmark = [pytest.mark.horovod, pytest.mark.slow]

JOINED = 2 * BATCH_SIZE
NUM_STEPS = NUM_SAMPLES // JOINED
NUM_PARAMETERS = len(list(mlp().parameters()))
FLOAT_SUMS = {"rtol": 0, "atol": 1e-6}  # the order of float32 sums


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return rank zero's results of all cases, from one launch of two processes."""
    return dl.HorovodEngine(2).launch(partial(cases.run_all, str(tmp_path_factory.mktemp("horovod"))))


def by_hand(*, lr=0.1, batches=None, **kwargs):
    model = mlp()
    train_by_hand(model, sgd(model, lr=lr), batches or loader(NUM_SAMPLES, JOINED), **kwargs)
    return weights(model)


def clipped_under_a_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return by_hand(max_norm=0.1, autocast=lambda: torch.autocast("cpu", torch.float16), scaler=scaler)


def joined_in_steps():
    features, targets = classification(11 * JOINED).tensors
    return list(zip(features.split(4 * JOINED), targets.split(4 * JOINED), strict=True))


# The hand-written loop, the tolerance, and the number of steps.
TRAININGS = {
    "fp32": (by_hand, 1e-6, NUM_STEPS),
    "gradients_summed": (lambda: by_hand(lr=0.2), 1e-6, NUM_STEPS),  # the number of processes times the average
    "fp16_compression": (by_hand, 1e-3, NUM_STEPS),  # less than 2^-11 of each gradient, in 20 steps with lr 0.1
    "clipped": (lambda: by_hand(max_norm=0.1), 1e-6, NUM_STEPS),  # the norm is that of the joined batch
    "clipped_under_a_scaler": (clipped_under_a_scaler, 2e-4, NUM_STEPS),  # averaged, unscaled, then clipped
    "accumulated": (lambda: by_hand(batches=joined_in_steps()), 1e-6, 3),  # 11 batches in steps of 4
}


@pytest.mark.parametrize("case", TRAININGS)
def test_two_processes_equal_one_on_the_joined_batch(results, case):
    """Gradients are averaged, and sent once in a step; weights agree up to the order of float sums, or rounding."""
    (expected, tolerance, num_steps), (found, num_sent, dtypes) = TRAININGS[case], results["trainings"][case]

    torch.testing.assert_close(found, expected(), rtol=0, atol=tolerance)
    assert num_sent == num_steps * NUM_PARAMETERS
    assert dtypes == {torch.float16 if case == "fp16_compression" else torch.float32}
    assert case != "fp16_compression" or not torch.equal(found, results["trainings"]["fp32"][0])


def test_gradients_that_are_divided_first_do_not_overflow(results):
    """In fp16, the sum of two gradients of 40,000 is infinite; divided by two first, the average is 40,000."""
    found = results["large_gradients_in_fp16"]

    assert found == {1.0: float("-inf"), 2.0: pytest.approx(-4.0)}


def test_a_gradient_that_overflows_in_one_rank_is_skipped_by_all(results):
    """Otherwise the ranks' weights would differ from then on, with steps by callbacks and by handle_batch."""
    num_skipped, by_callbacks = results["overflow_in_one_rank"]
    share_stepped, by_hand = results["overflow_by_hand"]

    assert num_skipped == 1
    assert share_stepped == pytest.approx(1 - 1 / NUM_STEPS)
    for first, second in (by_callbacks, by_hand):
        assert torch.equal(first, second)
        assert first.isfinite().all()


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("way", cases.WAYS)
def test_a_step_by_hand_is_the_step(results, way, op):
    """Whatever the order of zero_grad, backward and step, gradients cover all ranks and are sent once per backward
    pass."""
    model_weights, num_sent = results["by_hand"][way, op]

    expected = by_hand(lr=0.1 if op == "average" else 0.2)
    torch.testing.assert_close(model_weights, expected, **FLOAT_SUMS)
    assert num_sent == NUM_STEPS * NUM_PARAMETERS * (2 if way == "two losses" else 1)


def test_a_gan_trains_although_its_generator_leaves_gradients_in_the_discriminator(results):
    """zero_grad drops them, as in one process."""
    models, optimizers = cases.adversaries()
    for features, _ in loader(NUM_SAMPLES, JOINED):
        cases.step_of_adversaries(
            models, optimizers, features, lambda loss: loss.backward(), lambda optimizer: optimizer.step()
        )

    torch.testing.assert_close(results["gan"], torch.cat([weights(model) for model in models.values()]), **FLOAT_SUMS)


def test_a_schedule_that_steps_with_the_optimizer_acts_on_horovods(results):
    """OneCycleLR, made for the user's optimizer, changes the rate of the wrapped one, and is restored afterwards."""
    model_weights, lr, is_given_back = results["batch_scheduler"]
    model = mlp()
    optimizer, scheduler = cases.one_cycle(model)
    for batch in loader(NUM_SAMPLES, JOINED):
        train_by_hand(model, optimizer, [batch])
        scheduler.step()

    torch.testing.assert_close(model_weights, weights(model), **FLOAT_SUMS)
    assert lr == optimizer.param_groups[0]["lr"]
    assert is_given_back


def test_a_plateau_lowers_the_rate(results):
    """The learning rate falls to a tenth after each of three epochs, since no loss reaches the threshold."""
    assert results["plateau_scheduler"] == pytest.approx(0.1 * 0.1**3)


def test_the_users_optimizer_keeps_its_state_and_its_hooks(results):
    """Adam keeps its moments for a second run, and a user's hook runs once per step."""
    model_weights, num_hooked = results["the_users_optimizer_goes_on"]
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        train_by_hand(model, optimizer, loader(NUM_SAMPLES, JOINED))

    # Adam divides by the root of a mean square: where it is small, the order of float sums matters more.
    torch.testing.assert_close(model_weights, weights(model), rtol=0, atol=1e-4)
    assert num_hooked == 2 * NUM_STEPS


def test_an_optimizer_that_cannot_be_wrapped_is_refused(results):
    """The error names the class and the missing argument."""
    assert "cannot wrap a NeedsTwo" in results["unwrappable"]
    assert "'lr'" in results["unwrappable"]


def test_an_optimizers_own_attributes_are_carried(results):
    """Horovod makes another object from the optimizer's groups alone."""
    model = mlp()
    train_by_hand(model, torch.optim.SGD(model.parameters(), lr=0.1 / 4), loader(NUM_SAMPLES, JOINED))

    torch.testing.assert_close(results["own_attributes"], weights(model), **FLOAT_SUMS)


def test_lbfgs_steps_as_by_hand_on_the_joined_batch(results):
    """Each evaluation of the closure averages the gradients."""
    expected = closures.by_hand(closures.model_of("odd"))

    torch.testing.assert_close(results["closures"], expected, rtol=1e-9, atol=1e-12)


def test_training_starts_from_the_weights_of_rank_zero(results):
    """Parameters and buffers may have any dtype; after training, the parameters are equal bit for bit."""
    (first, second), metrics, model, num_scored = results["models_that_differ"]

    untrained = cases.Odd(rank=0)
    for name in ("mask", "steps"):
        assert torch.equal(second[name], untrained.state_dict()[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name]), name
        if name != "layers.0.bias":  # the batch norm after it cancels it, so its gradient is zero
            assert not torch.equal(parameter, untrained.get_parameter(name)), f"{name} was not trained"
    features, targets = classification(41).tensors
    with torch.no_grad():
        logits = model.eval()(features)
    assert num_scored == 41
    assert metrics["accuracy"] == pytest.approx(accuracy_score(targets, logits.argmax(dim=1)), abs=1e-7)
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)


def test_collectives_keep_types_and_ranks(results):
    """float64 sums stay float64, and gathered objects may have different types."""
    reduced, gathered, received = results["collectives"]

    thirds = torch.tensor([1.0, 1e-12], dtype=torch.float64) / 3
    assert reduced["sum"].dtype == torch.float64 and torch.equal(reduced["sum"], thirds + (thirds + 1))
    assert reduced["mean"] == 0.5
    assert reduced["min"].tolist() == [0, 5]
    assert reduced["max"].dtype == torch.bfloat16 and reduced["max"] == 1
    assert torch.equal(reduced["strided"], 2 * torch.arange(6.0).view(2, 3).T)
    assert gathered == ["zero", {"rank": 1}]
    assert received == [{"from": 0}, {"from": 0}]


def test_a_resumed_run_equals_the_uninterrupted_one(results):
    """Interrupted within an epoch and resumed from the newest checkpoint, weights and metrics are equal bit for bit."""
    (whole, whole_metrics), (parts, parts_metrics) = results["resumed"]

    assert torch.equal(whole, parts)
    assert whole_metrics == parts_metrics


def test_sync_bn_on_a_cpu_says_that_it_has_no_effect(results):
    """The option is not silently ignored."""
    assert len(results["sync_bn_on_a_cpu"]) == 1
    assert "sync_bn=True is ignored" in results["sync_bn_on_a_cpu"][0]


def test_nothing_of_horovod_is_left_on_the_model(results):
    """A backward pass after the run sends nothing."""
    assert results["allreduces_are_left"] == []


def forward_as_horovods(batch_norm):
    """Change the module as a training forward pass on a GPU would: one buffer in place, one replaced."""
    batch_norm.running_mean.add_(1)
    batch_norm.num_batches_tracked = batch_norm.num_batches_tracked + 1


class Shared(nn.Module):
    """A module with one batch norm under two names, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3, affine=False).eval()
        self.nothing = None


@pytest.fixture
def on_a_gpu():
    """Return an engine that swaps batch norms as on a GPU, in one process and without communication."""
    engine = dl.HorovodEngine(device="cpu", sync_bn=True)
    engine.communicator = OneProcess()
    engine.device = torch.device("cuda")
    return engine


@pytest.mark.parametrize("end", ["release", "cleanup"])
def test_the_users_batch_norms_come_back_with_what_was_trained(on_a_gpu, end):
    """After success and failure, the modules, the optimizer's parameters and the trained statistics are the user's."""
    import horovod.torch as hvd

    models = {"mlp": mlp(batch_norm=True), "shared": Shared(), "alone": nn.BatchNorm2d(2).eval()}
    before = {key: list(model.modules()) for key, model in models.items()}
    parameters = {key: dict(model.named_parameters()) for key, model in models.items()}

    prepared, _ = on_a_gpu.prepare(models, {})
    swapped = [each for model in prepared.values() for each in model.modules() if isinstance(each, hvd.SyncBatchNorm)]
    names = {key: model.state_dict().keys() for key, model in prepared.items()}
    for each in swapped:
        forward_as_horovods(each)
    is_one = prepared["shared"].first is prepared["shared"].second
    modes = [prepared["mlp"][1].training, prepared["shared"].frozen.training, prepared["alone"].training]
    released = on_a_gpu.release(prepared, {})[0] if end == "release" else models
    on_a_gpu.cleanup()

    assert len(swapped) == 4 and is_one and modes == [True, False, False]
    for key, model in models.items():
        assert released[key] is model
        assert names[key] == model.state_dict().keys()
        assert all(one is other for one, other in zip(model.modules(), before[key], strict=True))
        assert all(parameter is parameters[key][name] for name, parameter in model.named_parameters())
    for each in (models["mlp"][1], models["shared"].second, models["shared"].frozen, models["alone"]):
        assert (each.running_mean == 1).all() and each.num_batches_tracked == 1
    assert not models["alone"].training and models["mlp"][1].training
