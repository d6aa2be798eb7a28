"""Tests of the Apex engines against a package that records Apex's calls, and one test against NVIDIA's Apex."""

import copy
import functools
import importlib

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests import tiny
from tests.engines.together import together
from tests.fake_apex.use import stand_in
from tests.tiny import NUM_FEATURES, classification, loader, mlp, sgd, train_by_hand, weights

LEVELS = ["O0", "O1", "O2", "O3"]
ENGINES = {level: functools.partial(dl.APEXEngine, "cpu", opt_level=level) for level in LEVELS} | {"CPU": dl.CPUEngine}


@pytest.fixture
def apex(monkeypatch):
    """Yield the recording package."""
    with stand_in(monkeypatch) as package:
        yield package


def train(model, *callbacks, num_batches=6, **options):
    """Train a classifier; return the runner."""
    data = {"train": loader(num_batches * 8, 8)}
    return tiny.train(model, callbacks=callbacks, **{"loaders": data, **options})


def by_hand(model, *, num_batches=6, batch_size=8, **kwargs):
    """Train by the hand-written loop; return the weights."""
    train_by_hand(model, sgd(model), loader(num_batches * batch_size, batch_size), **kwargs)
    return weights(model)


class Watch(dl.Callback):
    """A recorder of weights and learning rates that can also make one batch overflow, or interrupt the run."""

    def __init__(self, *, overflow=(0, 0, 1.0), interrupts_after=0):
        super().__init__(order=dl.CallbackOrder.External)
        self.rank, self.step, self.size = overflow
        self.interrupts_after, self.weights, self.rates = interrupts_after, [], []

    def on_batch_start(self, runner):
        if (runner.engine.rank, runner.loader_batch_step) == (self.rank, self.step):
            (runner.batch["features"] if isinstance(runner.batch, dict) else runner.batch[0]).mul_(self.size)

    def on_batch_end(self, runner):
        self.weights.append(weights(runner.engine.unwrap(runner.model)))
        self.rates.append(runner.optimizer.param_groups[0]["lr"])
        if runner.batch_step == self.interrupts_after:
            raise KeyboardInterrupt

    def on_stage_end(self, runner):
        self.state = copy.deepcopy(runner.engine.state_dict())
        self.weights_of_ranks = runner.engine.gather_object(self.weights[-1])


def train_in_two_processes(make, **engines):
    """Return what rank zero has after training under O1, under O2, and with each of `engines`."""
    watch = Watch(overflow=(1, 2, 1e35))
    runner = train(mlp(), watch, engine=make())
    results = {"overflow": (runner.epoch_metrics["train"]["skipped_steps"], torch.equal(*watch.weights_of_ranks))}
    for k in (1, 3):
        engines |= {"O1": make(opt_level="O1"), "O2": make(opt_level="O2")}
        results[k] = {name: mlp() for name in engines}
        for name, model in results[k].items():
            accumulate = dl.OptimizerCallback("loss", accumulation_steps=k)
            train(model, accumulate, engine=engines[name], num_batches=5 * 2 * k)
    return results


def train_over_apex_parallel():
    """Return the same for `apex.parallel` and PyTorch's wrapper, and the calls of a run that uses every option."""
    make = functools.partial(dl.DistributedDataParallelAPEXEngine, 2, device="cpu")
    calls, model = importlib.import_module("apex").calls, mlp(batch_norm=True)
    step = dl.OptimizerCallback("loss", accumulation_steps=2, grad_clip_fn=lambda _: calls.append("clip"))
    engine = make(delay_allreduce=True, sync_bn=True, float_functions=[(nn.functional, "softplus")])
    runner = train(model, step, engine=engine, loaders={"train": loader(4 * 8, 8), "valid": loader(3, 8)})
    results = {"calls": list(calls), "model": model, "loss": runner.epoch_metrics["valid"]["loss"]}
    ddp = dl.DistributedDataParallelEngine(2, device="cpu", precision=dl.Apex(allow_cpu=True))
    return results | train_in_two_processes(make, PyTorch=ddp)


@pytest.fixture(scope="module", params=["apex.parallel", pytest.param("Horovod", marks=pytest.mark.horovod)])
def two_processes(request):
    """Return the results of two connected processes; one launch of each kind serves all tests."""
    with pytest.MonkeyPatch.context() as patch, stand_in(patch):
        if request.param == "apex.parallel":
            return together(train_over_apex_parallel)
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
        make = functools.partial(dl.HorovodAPEXEngine, 2, device="cpu")
        return make().launch(functools.partial(train_in_two_processes, make))


@pytest.mark.parametrize("two_processes", ["apex.parallel"], indirect=True)
def test_apex_is_called_in_its_documented_order(two_processes):
    """Accumulated gradients are neither reduced nor unscaled before the last pass; clipping follows unscaling."""
    assert two_processes["calls"] == [
        *("convert_syncbn_model", "register_float_function(softplus)", "initialize(1 models, 1 optimizers, O1)"),
        "options(loss_scale=None, num_losses=1, {'verbosity': 0, 'keep_batchnorm_fp32': None})",
        "DistributedDataParallel({'delay_allreduce': True})",
        *("scale_loss(loss_id=0, delay_unscale=True)", "backward"),
        *("scale_loss(loss_id=0, delay_unscale=False)", "backward"),
        *["allreduce"] * 6,  # weight and bias of two linear layers and of the batch norm
        *("unscale", "clip", "step", "disable_casts"),
    ]


@pytest.mark.parametrize("two_processes", ["apex.parallel"], indirect=True)
def test_batch_norms_train_the_optimizers_weights_and_evaluate_with_rank_zeros_buffers(two_processes):
    """Apex's conversion copies the weights that the optimizer already holds; its wrapper does not share buffers."""
    model, (features, targets) = two_processes["model"].eval(), classification(3).tensors
    loss = nn.functional.cross_entropy(model(features), targets)

    assert not torch.equal(model[1].weight, mlp(batch_norm=True)[1].weight)
    assert two_processes["loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_two_processes_equal_one_on_the_joined_batch(two_processes, k):
    """Gradients are averaged over processes. Tolerances: the order of fp32 sums, and fp16's 11 bits under O2."""
    expected = by_hand(mlp(), num_batches=5, batch_size=2 * k * 8)

    for name, model in two_processes[k].items():
        torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-3 if name == "O2" else 1e-6)


def test_an_overflow_of_one_process_skips_the_step_of_all(two_processes):
    """Gradients are averaged before Apex checks them, so all ranks see the overflow and keep equal weights."""
    assert two_processes["overflow"] == (1, True)


def test_a_model_without_trainable_parameters_is_not_wrapped(apex):
    """A frozen model needs no averaging of gradients."""
    frozen, engine = mlp().requires_grad_(False), dl.DistributedDataParallelAPEXEngine(2, device="cpu")

    with engine.no_sync(frozen):
        assert engine.wrap(frozen) is engine.unwrap(frozen) is frozen


def test_data_parallel_copies_a_model_whose_forward_is_its_own(apex, monkeypatch):
    """Apex patches a shell around DataParallel: replicas of a patched forward would all call the first GPU's."""
    # Split batches as on a machine with several GPUs.
    monkeypatch.setattr("runnerkit.engines.apex.split_batches", lambda module, device: nn.DataParallel(module))
    engine, model = dl.DataParallelAPEXEngine("cpu", opt_level="O2"), mlp()
    engine.setup()

    shell = engine.prepare({"": model}, {"": sgd(model)})[0][""]

    assert type(shell.module) is nn.DataParallel and shell.module.module is engine.unwrap(shell) is model
    assert "forward" in vars(shell) and "forward" not in vars(model)


@pytest.mark.parametrize(("opt_level", "size"), [("O1", 1e35), ("O2", 1e3)])  # of numbers up to 3e38, and to 65504
def test_an_overflow_skips_the_step_and_the_schedulers(apex, opt_level, size):
    """An overflow keeps weights and learning rate, is counted as a skipped step, and halves Apex's loss scale."""
    model, watch = mlp(), Watch(overflow=(0, 4, size))
    optimizer = sgd(model)
    kwargs = {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)}

    runner = train(model, dl.SchedulerCallback(interval="step"), watch, engine=ENGINES[opt_level](), **kwargs)

    assert [torch.equal(*watch.weights[step : step + 2]) for step in range(5)] == [False, False, True, False, False]
    assert runner.epoch_metrics["train"]["skipped_steps"] == 1
    assert watch.rates == [0.1 * 0.5**step for step in (1, 2, 3, 3, 4, 5)]
    assert watch.state["apex"]["loss_scaler0"]["loss_scale"] == 2.0**15


@pytest.mark.parametrize(("first", "second"), [*zip(LEVELS, LEVELS, strict=True), ("CPU", "O1"), ("O1", "CPU")])
def test_a_resumed_run_equals_the_uninterrupted_one(apex, tmp_path, first, second):
    """Loss scale, fp32 master weights and momentum are restored exactly; another engine can resume, too."""
    overflow = (0, 3, 1e35 if first == second == "O1" else 1.0)

    def run(key, folder, *, interrupts_after=0, resume=None):
        model, watch = mlp(), Watch(overflow=overflow, interrupts_after=interrupts_after)
        optimizer, save = sgd(model, lr=0.01), dl.CheckpointCallback(folder, content="runner")
        kwargs = {"optimizer": optimizer, "num_epochs": 2, "logdir": folder, "resume": resume}
        train(model, save, watch, engine=ENGINES[key](), **kwargs)
        momenta = [each["momentum_buffer"].flatten() for each in optimizer.state_dict()["state"].values()]
        return torch.cat([weights(model), *momenta]), watch.state.get("apex")

    whole, scalers = run(first, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path / "broken", interrupts_after=9)
    resumed, resumed_scalers = run(second, tmp_path / "broken", resume="auto")

    assert torch.equal(resumed, whole)
    assert resumed_scalers == scalers or first != second


def test_weights_that_are_loaded_reach_the_master_weights(apex):
    """Otherwise, under O2, the next step would restore the previous weights."""
    engine, model, source = ENGINES["O2"](), mlp(), mlp(seed=5)
    engine.setup()
    engine.prepare({"": model}, {"": (optimizer := sgd(model, lr=0.0))})

    engine.load_model_state_dict(model, source.state_dict())
    optimizer.step()

    # fp16 keeps 11 bits of a weight below 1
    torch.testing.assert_close(weights(model), weights(source), rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize(("opt_level", "tolerance"), [("O1", 1e-6), ("O2", 2e-4)])  # fp16: 11 bits, times lr 0.1
def test_gradients_left_by_a_loader_that_stops_early_do_not_reach_the_next_step(apex, opt_level, tolerance):
    """The third batch's scaled gradients are dropped. Gradients are averaged once per step, before unscaling."""

    class StopAfterThree(dl.Callback):
        def on_batch_end(self, runner):
            runner.need_early_stop = runner.loader_batch_step == 3

    model = mlp()
    precision = dl.Apex(opt_level, allow_cpu=True, before_unscale=lambda _: apex.calls.append("average"))
    callbacks = dl.OptimizerCallback("loss", accumulation_steps=2), StopAfterThree()

    train(model, *callbacks, engine=dl.DeviceEngine("cpu", precision=precision), num_epochs=2)

    epoch = ["backward", "backward", "average", "unscale", "step", "backward"]
    assert [each for each in apex.calls if each in epoch] == 2 * epoch
    expected = by_hand(mlp(), num_batches=2, num_epochs=2, accumulate=2)
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=tolerance)


def test_a_step_first_unscales_accumulated_gradients(apex):
    """A step may follow passes that all accumulate. Apex's pending skip of a step does not outlive the stage."""
    engine, model = dl.APEXEngine("cpu", opt_level="O0", loss_scale="dynamic"), mlp()
    engine.setup()
    models, optimizers = engine.prepare({"": model}, {"": (optimizer := sgd(model))})
    with engine.accumulate(model):
        engine.backward(model(torch.ones(1, NUM_FEATURES)).sum(), optimizer)

    assert engine.step(optimizer)
    assert apex.calls[-3:] == ["backward", "scale_loss(loss_id=0, delay_unscale=False)", "unscale"]

    with pytest.raises(ValueError, match="this SGD is not an optimizer of this stage"):
        engine.backward(torch.ones(()), sgd(mlp()))
    engine.backward(model(torch.full((1, NUM_FEATURES), 1e35)).sum(), optimizer)
    assert "step" in vars(optimizer)
    engine.release(models, optimizers)
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_each_stage_restores_what_apex_changed(apex, opt_level):
    """Model and optimizer have their own methods and fp32 state again, so both can be trained once more."""
    model, watch, engine = mlp(batch_norm=True), Watch(), ENGINES[opt_level]()
    optimizer = sgd(model)
    parameters, names = list(model.parameters()), set(vars(optimizer))

    for callbacks in ((), (watch,)):
        train(model, *callbacks, engine=engine, optimizer=optimizer)
    predictions = list(dl.SupervisedRunner(model).predict_loader(loader=loader(8, 8), engine=engine))

    counts = [f"initialize(1 models, {count} optimizers, {opt_level})" for count in (1, 1, 0)]
    assert [each for each in apex.calls if each.startswith("initialize")] == counts and len(predictions) == 1
    assert opt_level != "O1" or apex.calls[-1] == "disable_casts"
    assert "forward" not in vars(model) and set(vars(optimizer)) == names
    assert all(a is b and a.dtype == torch.float32 for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
    assert set(optimizer.state) == set(parameters)
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in optimizer.state.values())
    halved = [*model[0].parameters(), *model[-1].parameters()] if opt_level == "O2" else []  # norms stay in fp32
    assert all(torch.equal(a, b) for a, b in zip(halved, watch.state["masters"][0], strict=True))


class Zeroed(dl.Callback):
    """A callback that changes a frozen parameter."""

    def on_stage_start(self, runner):
        runner.engine.unwrap(runner.current_run.stage.training_model)[0].bias.data.zero_()


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_what_is_not_trained_is_not_rounded(apex, opt_level):
    """After the run, frozen parameters and buffers have all bits of their values, unless something changed them."""
    model = mlp()
    model[0].requires_grad_(False).register_buffer("third", torch.tensor(1 / 3))
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model[-1])

    train(model, Zeroed(), engine=ENGINES[opt_level](), optimizer=optimizer)

    for name in ("0.weight", "0.third"):
        assert torch.equal(model.state_dict()[name], before[name]), name
    assert not model[0].bias.any()
    assert not torch.equal(model[-1].weight, before["3.weight"])


class TwoModels(dl.Runner):
    """Two models, a loss of each, and their sum."""

    def handle_batch(self, batch):
        features, targets = batch
        losses = {key: nn.functional.cross_entropy(model(features), targets) for key, model in self.model.items()}
        self.batch_metrics.update(losses, loss=sum(losses.values()))


@pytest.mark.parametrize("opt_level", ["O0", "O1"])
@pytest.mark.parametrize("make", [dl.APEXEngine, dl.DataParallelAPEXEngine])
@pytest.mark.parametrize("losses", [("loss", "loss"), ("a", "b")])
def test_fp32_arithmetic_is_bit_identical_to_the_hand_written_loop(apex, opt_level, make, losses):
    """Each loss has a scale, a power of two. Clipping sees unscaled gradients, also of a loss of two optimizers."""
    mine, theirs = ({key: mlp(seed=seed, batch_norm=True) for seed, key in enumerate("ab")} for _ in range(2))
    clip = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 0.1}}
    steps = [dl.OptimizerCallback(loss, key, key, **clip) for key, loss in zip("ab", losses, strict=True)]
    callbacks = [dl.BackwardCallback(loss) for loss in sorted(set(losses))] + steps
    optimizers = {key: sgd(model) for key, model in mine.items()}

    train(mine, *callbacks, engine=make("cpu", opt_level=opt_level), optimizer=optimizers, runner=TwoModels())

    assert all(torch.equal(weights(mine[key]), by_hand(theirs[key], max_norm=0.1)) for key in "ab")
    assert apex.calls[0] == f"initialize(2 models, 2 optimizers, {opt_level})" and "num_losses=2" in apex.calls[1]
    used = {each for each in apex.calls if each.startswith("scale_loss")}
    assert used == {f"scale_loss(loss_id={index}, delay_unscale=False)" for index in range(len(set(losses)))}


@pytest.mark.gpu
@pytest.mark.apex
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Apex computes on NVIDIA GPUs only, and torch sees none")
@pytest.mark.filterwarnings("ignore:apex:FutureWarning")  # apex.amp itself warns that it is deprecated
@pytest.mark.parametrize("opt_level", LEVELS)
def test_nvidias_apex_trains_near_fp32(opt_level, tmp_path):
    """fp16 keeps 11 bits: errors of 6 momentum steps stay under 0.05 in weights of about 1. It also loads its state."""
    pytest.importorskip("apex.amp", reason="NVIDIA Apex, release 25.05 or earlier, is missing", exc_type=ImportError)
    model = mlp()

    for resume in (None, "auto"):
        runner = train(model, engine=dl.APEXEngine(opt_level=opt_level), num_epochs=1, logdir=tmp_path, resume=resume)

    assert runner.epoch_step == 1
    assert model[0].weight.dtype == torch.float32 and model[0].weight.shape[1] == NUM_FEATURES
    assert (weights(model).cpu() - by_hand(mlp())).abs().max() < (1e-3 if opt_level == "O0" else 0.05)
