"""The Apex engines, against a stand-in that notes Apex's calls and does its arithmetic; once against the real one."""

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.fake_apex.use import stand_in
from tests.tiny import NUM_FEATURES, classification, loader, mlp, quiet, sgd, train_by_hand, weights

NUM_STEPS, BATCH_SIZE = 8, 8


@pytest.fixture
def apex(monkeypatch):
    """The stand-in for the package, in this process and those that it starts."""
    with stand_in(monkeypatch) as package:
        yield package


def train(model, optimizer, batches, *, runner=dl.SupervisedRunner, **kwargs):
    return runner().train(
        **{
            "model": model,
            "criterion": nn.CrossEntropyLoss(),
            "optimizer": optimizer,
            "loaders": {"train": batches},
            **quiet(),
            **kwargs,
        }
    )


def batches_with_overflow(*, at, size):
    """Features so large, in batch `at`, that gradients are finite, and infinite once they are scaled."""
    features, targets = classification(NUM_STEPS * BATCH_SIZE).tensors
    features[at * BATCH_SIZE : (at + 1) * BATCH_SIZE] *= size
    return DataLoader(TensorDataset(features, targets), batch_size=BATCH_SIZE)


def train_o2_by_hand(model, optimizer_of, batches, *, scale=2.0**16):
    """The O2 loop without Apex: a model in fp16, fp32 weights beside it, a loss scale that nothing overflows."""
    model.half()
    halves = list(model.parameters())
    masters = [each.detach().float().requires_grad_() for each in halves]
    optimizer = optimizer_of(masters)
    for features, targets in batches:
        for half in halves:
            half.grad = None
        loss = nn.functional.cross_entropy(model(features.half()).float(), targets)
        (loss * scale).backward()
        for half, master in zip(halves, masters, strict=True):
            master.grad = half.grad.float() / scale
        optimizer.step()
        for half, master in zip(halves, masters, strict=True):
            half.data.copy_(master.data)
    return masters


class Calls(dl.Callback):
    """Brings the stand-in's notes out of the process that trained."""

    def on_stage_end(self, runner):
        from apex import calls

        self.calls = list(calls)


def clip_and_note(parameters):
    from apex import calls

    calls.append("clip")
    nn.utils.clip_grad_norm_(parameters, 0.1)


@pytest.mark.slow
def test_everything_is_called_in_apexs_order(apex):
    """Registered, initialized, wrapped; then scaled, averaged, unscaled, clipped, stepped."""
    engine = dl.DistributedDataParallelAPEXEngine(
        1, device="cpu", float_functions=[(nn.functional, "softplus")], delay_allreduce=True, sync_bn=True
    )
    model, watch = mlp(batch_norm=True), Calls()

    train(
        model,
        sgd(model),
        loader(BATCH_SIZE, BATCH_SIZE),
        engine=engine,
        callbacks=[dl.BackwardCallback("loss", grad_clip_fn=clip_and_note), watch],
    )

    assert watch.calls == [
        "convert_syncbn_model",
        "register_float_function(softplus)",
        "initialize(1 models, 1 optimizers, O1)",
        "DistributedDataParallel(delay_allreduce=True)",
        "scale_loss(loss_id=0, delay_unscale=False)",
        "backward",
        *["allreduce"] * 6,  # weight and bias of two linear layers and of the batch norm
        "unscale",
        "clip",
        "step",
    ]


@pytest.mark.parametrize("opt_level", ["O0", "O1"])
@pytest.mark.parametrize("make", [dl.APEXEngine, dl.DataParallelAPEXEngine])
def test_fp32_arithmetic_is_bit_identical_to_the_hand_written_loop(apex, make, opt_level):
    """A loss scale is a power of two, so that scaling and unscaling leave every bit; clipping sees true gradients."""
    mine, theirs = (mlp(dropout=0.3, batch_norm=True) for _ in range(2))
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)
    clip = dl.BackwardCallback("loss", grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 0.1})

    train(mine, sgd(mine), batches, engine=make("cpu", opt_level=opt_level), callbacks=[clip])
    train_by_hand(theirs, sgd(theirs), batches, max_norm=0.1)

    assert torch.equal(weights(mine), weights(theirs))


@pytest.mark.parametrize("make", [dl.APEXEngine, dl.DataParallelAPEXEngine])
def test_o2_equals_the_hand_written_loop_with_master_weights(apex, make):
    """The same casts, the same bits; the model that is given back has the fp32 weights."""
    mine, theirs = mlp(), mlp()
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)

    train(mine, sgd(mine), batches, engine=make("cpu", opt_level="O2"))
    masters = train_o2_by_hand(theirs, lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9), batches)

    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), masters, strict=True))


def test_data_parallel_copies_a_model_whose_forward_is_its_own(apex, monkeypatch):
    """Copies of a changed forward would all be the first GPU's: Apex changes that of a shell around DataParallel."""
    # As on a machine with GPUs; on this one DataParallel hands each batch through.
    monkeypatch.setattr("runnerkit.engines.apex.split_batches", lambda module, device: nn.DataParallel(module))

    class Look(dl.Callback):
        def on_batch_end(self, runner):
            shell, copied = runner.model, runner.model.module
            self.seen = type(copied), copied.module, "forward" in vars(shell), "forward" in vars(copied.module)

    model, look = mlp(), Look()

    train(
        model,
        sgd(model),
        loader(8, 8),
        engine=dl.DataParallelAPEXEngine("cpu", opt_level="O2"),
        callbacks=[look],
    )

    assert look.seen == (nn.DataParallel, model, True, False)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
def test_two_processes_equal_one_on_the_joined_batch(apex, k):
    """Also when gradients accumulate: scaled and unsent until the pass before the step. To 1e-6, the order of sums."""
    mine, theirs, watch = mlp(), mlp(), Calls()
    num_samples = 5 * k * BATCH_SIZE * 2

    train(
        mine,
        sgd(mine),
        loader(num_samples, BATCH_SIZE),
        engine=dl.DistributedDataParallelAPEXEngine(2, device="cpu"),
        callbacks=[dl.OptimizerCallback("loss", accumulation_steps=k), watch],
    )
    train_by_hand(theirs, sgd(theirs), loader(num_samples, num_samples // 5))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert watch.calls.count("allreduce") == 5 * 4, "four parameters, once a step"
    assert watch.calls.count("scale_loss(loss_id=0, delay_unscale=True)") == 5 * (k - 1)


@pytest.mark.slow
def test_pytorchs_wrapper_averages_what_apex_scales(apex):
    """The precision alone, in an engine that is not Apex's, gradients accumulating. To 1e-6, the order of sums."""
    mine, theirs = mlp(), mlp()
    num_samples = 5 * 3 * BATCH_SIZE * 2

    train(
        mine,
        sgd(mine),
        loader(num_samples, BATCH_SIZE),
        engine=dl.DistributedDataParallelEngine(2, device="cpu", precision=dl.Apex(allow_cpu=True)),
        callbacks=[dl.OptimizerCallback("loss", accumulation_steps=3)],
    )
    train_by_hand(theirs, sgd(theirs), loader(num_samples, num_samples // 5))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_ranks_evaluate_with_rank_zeros_buffers(apex):
    """Apex's wrapper shares no buffers, so that each rank would score its samples with statistics of its own."""
    model = mlp(batch_norm=True)

    runner = train(
        model,
        sgd(model),
        None,
        loaders={"train": loader(64, 8), "valid": loader(3, 8)},
        engine=dl.DistributedDataParallelAPEXEngine(2, device="cpu"),
    )

    with torch.no_grad():
        features, targets = classification(3).tensors
        expected = nn.functional.cross_entropy(model.eval()(features), targets)
    assert runner.epoch_metrics["valid"]["loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.slow
def test_apexs_batch_norm_trains_weights_of_an_optimizer_made_before(apex):
    """Apex copies the weights that it converts; those that the optimizer holds must be the ones in use."""
    model, watch = mlp(batch_norm=True), Calls()
    before = model[1].weight.detach().clone()

    train(
        model,
        sgd(model),
        loader(64, 8),
        engine=dl.DistributedDataParallelAPEXEngine(2, device="cpu", sync_bn=True),
        callbacks=[watch],
    )

    assert "convert_syncbn_model" in watch.calls
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize(("opt_level", "size"), [("O1", 1e35), ("O2", 1e3)])  # of numbers up to 3e38, and to 65504
def test_an_overflow_skips_the_step_and_the_schedulers(apex, opt_level, size):
    """Weights stay, the step is counted as skipped, the learning rate waits, and Apex halves its scale."""
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    class Watch(dl.Callback):
        def __init__(self):
            super().__init__(order=dl.CallbackOrder.External)
            self.weights, self.rates = [], []

        def on_batch_end(self, runner):
            self.weights.append(weights(model))
            self.rates.append(optimizer.param_groups[0]["lr"])

        def on_stage_end(self, runner):
            self.scale = runner.engine.state_dict()["apex"]["loss_scaler0"]["loss_scale"]

    watch = Watch()

    runner = train(
        model,
        optimizer,
        batches_with_overflow(at=3, size=size),
        scheduler=scheduler,
        engine=dl.APEXEngine("cpu", opt_level=opt_level),
        callbacks=[dl.SchedulerCallback(mode="batch"), watch],
    )

    unchanged = [index for index in range(1, NUM_STEPS) if torch.equal(watch.weights[index], watch.weights[index - 1])]
    assert unchanged == [3]
    assert runner.epoch_metrics["train"]["skipped_steps"] == 1
    assert watch.rates == [0.1 * 0.5**step for step in (1, 2, 3, 3, 4, 5, 6, 7)]
    assert watch.scale == 2.0**15


class OverflowOnRankOne(dl.Callback):
    """In the second batch; at the end it compares the ranks' weights."""

    def on_batch_start(self, runner):
        if runner.batch_step == 2 and runner.engine.rank == 1:
            runner.batch[0].mul_(1e35)

    def on_stage_end(self, runner):
        mine, theirs = runner.engine.gather_object(weights(runner.engine.unwrap(runner.model)))
        self.are_equal = torch.equal(mine, theirs)


@pytest.mark.slow
def test_an_overflow_of_one_process_skips_the_step_of_all(apex):
    """Gradients are averaged before Apex looks at them: ranks neither part ways nor wait for one another."""
    model, overflow = mlp(), OverflowOnRankOne()

    runner = train(
        model,
        sgd(model),
        loader(64, 8),
        engine=dl.DistributedDataParallelAPEXEngine(2, device="cpu"),
        callbacks=[overflow],
    )

    assert runner.epoch_metrics["train"]["skipped_steps"] == 1
    assert overflow.are_equal


class Interrupt(dl.Callback):
    """Ends the run as a kill would."""

    def __init__(self, batch_step):
        super().__init__(order=dl.CallbackOrder.External)
        self.batch_step = batch_step

    def on_batch_end(self, runner):
        if runner.batch_step == self.batch_step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_a_resumed_run_equals_the_uninterrupted_one(apex, tmp_path, opt_level):
    """To the bit: loss scale, fp32 master weights and momentum come back, not only the model's rounded weights."""

    def run(logdir, **kwargs):
        model = mlp()
        optimizer = sgd(model, lr=0.01)
        callbacks = [dl.CheckpointCallback(tmp_path / logdir, mode="runner"), *kwargs.pop("callbacks", [])]
        train(
            model,
            optimizer,
            batches_with_overflow(at=2, size=1e35) if opt_level == "O1" else loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE),
            num_epochs=3,
            engine=dl.APEXEngine("cpu", opt_level=opt_level),
            callbacks=callbacks,
            logdir=tmp_path / logdir,
            **kwargs,
        )
        return model, optimizer

    whole, whole_optimizer = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", callbacks=[Interrupt(NUM_STEPS + 3)])
    apex.calls.clear()
    resumed, optimizer = run("broken", resume="auto")

    assert torch.equal(weights(resumed), weights(whole))
    mine, theirs = (each.state_dict()["state"] for each in (optimizer, whole_optimizer))
    assert all(torch.equal(mine[key]["momentum_buffer"], theirs[key]["momentum_buffer"]) for key in theirs)
    assert apex.calls.count("load_state_dict") == 1


@pytest.mark.parametrize("engines", [(dl.CPUEngine(), dl.APEXEngine("cpu")), (dl.APEXEngine("cpu"), dl.CPUEngine())])
def test_a_checkpoint_goes_on_with_another_engine(apex, tmp_path, engines):
    """Weights, momentum and counters are everybody's; with the stand-in's O1 not one bit differs."""
    expected = mlp()
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)

    for num_epochs, engine in zip((1, 2), engines, strict=True):
        model = mlp()
        resume = None if num_epochs == 1 else "auto"
        runner = train(model, sgd(model), batches, engine=engine, num_epochs=num_epochs, logdir=tmp_path, resume=resume)
    train(expected, sgd(expected), batches, engine=dl.CPUEngine(), num_epochs=2)

    assert runner.epoch_step == 2
    assert torch.equal(weights(model), weights(expected))


def test_weights_that_are_loaded_reach_the_master_weights(apex, tmp_path):
    """Under O2 the next step would otherwise put back what the model had before."""
    source, model = mlp(seed=5), mlp()
    torch.save(source.state_dict(), tmp_path / "source.pth")
    checkpoint = dl.CheckpointCallback(tmp_path / "log", resume_model=tmp_path / "source.pth")

    train(
        model,
        sgd(model, lr=0.0),
        loader(BATCH_SIZE, BATCH_SIZE),
        engine=dl.APEXEngine("cpu", opt_level="O2"),
        callbacks=[checkpoint],
    )

    # fp16 keeps 11 bits of a weight below 1
    torch.testing.assert_close(weights(model), weights(source), rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_gradients_left_by_a_loader_that_stops_early_do_not_reach_the_next_step(apex, opt_level):
    """Of three batches two are stepped on and one, scaled still, is dropped; the next epoch's step is of true size."""

    class StopAfterThree(dl.Callback):
        def on_batch_end(self, runner):
            runner.need_early_stop = runner.loader_batch_step == 3

    mine, theirs = mlp(), mlp()
    batches = loader(4 * BATCH_SIZE, BATCH_SIZE)

    train(
        mine,
        sgd(mine),
        batches,
        engine=dl.APEXEngine("cpu", opt_level=opt_level),
        callbacks=[dl.OptimizerCallback("loss", accumulation_steps=2), StopAfterThree()],
        num_epochs=2,
    )
    train_by_hand(theirs, sgd(theirs), list(batches)[:2], num_epochs=2, accumulate=2)

    # O2 computes gradients in fp16: 11 bits of a gradient below 1, times lr 0.1
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6 if opt_level == "O1" else 2e-4)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_what_apex_changed_is_given_back(apex, opt_level):
    """The model is fp32 and calls its own forward, the optimizer steps on its weights; both can be trained again."""
    model = mlp(batch_norm=True)
    optimizer = sgd(model)
    parameters, names = list(model.parameters()), set(vars(optimizer))
    engine = dl.APEXEngine("cpu", opt_level=opt_level)

    train(model, optimizer, loader(16, 8), engine=engine)
    train(model, optimizer, loader(16, 8), engine=engine)

    assert "forward" not in vars(model)
    assert all(a is b and a.dtype == torch.float32 for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
    assert set(optimizer.state) == set(parameters)
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in optimizer.state.values())
    assert set(vars(optimizer)) == names and "step" not in vars(optimizer)
    assert not importlib.import_module("apex.amp").casts_are_active()


class TwoStages(dl.SupervisedRunner):
    """Trains, then predicts."""

    stages = ("train", "infer")

    def get_loaders(self, stage):
        return {stage: loader(16, 8)}


def test_each_stage_is_initialized_and_an_infer_stage_without_optimizer(apex):
    """Apex wants to be called once; all is given back in between, so that the second call finds what the first did."""
    model = mlp()

    runner = train(model, sgd(model), None, loaders=None, engine=dl.APEXEngine("cpu", opt_level="O2"), runner=TwoStages)

    assert [each for each in apex.calls if each.startswith("initialize")] == [
        "initialize(1 models, 1 optimizers, O2)",
        "initialize(1 models, 0 optimizers, O2)",
    ]
    assert runner.epoch_metrics["infer"]["loss"] > 0


class TwoModels(dl.Runner):
    """Two models with an optimizer each; `shared` has one loss for both."""

    def __init__(self, *, shared):
        super().__init__()
        self.shared = shared

    def handle_batch(self, batch):
        features, targets = batch
        losses = {key: nn.functional.cross_entropy(model(features), targets) for key, model in self.model.items()}
        self.batch_metrics.update(losses)
        self.batch_metrics["loss"] = sum(losses.values())

    def get_callbacks(self, stage):
        names = ["loss"] if self.shared else ["a", "b"]
        return {
            **{f"backward_{name}": dl.BackwardCallback(name) for name in names},
            **{
                f"optimizer_{key}": dl.OptimizerCallback("loss" if self.shared else key, key, key) for key in ("a", "b")
            },
        }


@pytest.mark.parametrize("shared", [True, False])
def test_several_models_and_optimizers_go_through_apex_together(apex, shared):
    """One call for all; a loss scale for each loss; a loss of two optimizers unscales the gradients of both."""
    mine, theirs = ({"a": mlp(seed=1), "b": mlp(seed=2)} for _ in range(2))
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)

    TwoModels(shared=shared).train(
        model=mine,
        optimizer={key: sgd(model) for key, model in mine.items()},
        loaders={"train": batches},
        engine=dl.APEXEngine("cpu"),
        **quiet(),
    )
    for model in theirs.values():
        train_by_hand(model, sgd(model), batches)

    for key in ("a", "b"):
        assert torch.equal(weights(mine[key]), weights(theirs[key]))
    assert apex.calls[0] == "initialize(2 models, 2 optimizers, O1)"
    used = {each for each in apex.calls if each.startswith("scale_loss")}
    assert used == {f"scale_loss(loss_id={index}, delay_unscale=False)" for index in ([0] if shared else [0, 1])}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_whoever_averages_gradients_does_so_before_they_are_unscaled(apex, opt_level):
    """As Horovod must: an overflow of one process is then one of all. Once a step, also when gradients accumulate."""
    model = mlp()
    precision = dl.Apex(opt_level, allow_cpu=True, before_unscale=lambda _: apex.calls.append("average"))

    train(
        model,
        sgd(model),
        loader(3 * BATCH_SIZE, BATCH_SIZE),
        engine=dl.DeviceEngine("cpu", precision=precision),
        callbacks=[dl.OptimizerCallback("loss", accumulation_steps=2)],
    )

    assert [each for each in apex.calls if each in ("backward", "average", "unscale", "step")] == [
        *("backward", "backward", "average", "unscale", "step"),
        *("backward", "average", "unscale", "step"),
    ]


# The real one.


def real_apex():
    spec = find_spec("apex")
    return spec is not None and any((Path(each) / "amp").is_dir() for each in spec.submodule_search_locations or ())


@pytest.mark.gpu
@pytest.mark.apex
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Apex computes on NVIDIA GPUs only, and torch sees none")
@pytest.mark.skipif(not real_apex(), reason="NVIDIA Apex with apex.amp (release 25.05 or earlier) is not installed")
@pytest.mark.filterwarnings("ignore:apex:FutureWarning")  # "apex.amp is deprecated": it is
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_nvidias_apex_trains_near_fp32(opt_level, tmp_path):
    """fp16 keeps 11 bits: errors of 8 momentum steps stay under 0.05 in weights of about 1. It also loads its state."""
    mine, theirs = mlp(), mlp()
    batches = loader(NUM_STEPS * BATCH_SIZE, BATCH_SIZE)

    for resume in (None, "auto"):
        runner = train(
            mine,
            sgd(mine),
            batches,
            engine=dl.APEXEngine(opt_level=opt_level),
            num_epochs=1,
            logdir=tmp_path,
            resume=resume,
        )
    train_by_hand(theirs, sgd(theirs), batches)

    assert runner.epoch_step == 1
    assert mine[0].weight.dtype == torch.float32 and mine[0].weight.shape[1] == NUM_FEATURES
    assert (weights(mine).cpu() - weights(theirs)).abs().max() < (1e-3 if opt_level == "O0" else 0.05)
