"""Options of DistributedDataParallel, compared with the hand-written loop or with their documentation."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from runnerkit import dl
from runnerkit.engines.process_environment import ProcessEnvironment
from tests.engines.on_cpu import ddp
from tests.engines.together import together
from tests.tiny import classification, loader, mlp, sgd, train, train_by_hand, weights

NUM_STEPS, BATCH_SIZE = 10, 8
NUM_SAMPLES = NUM_STEPS * 2 * BATCH_SIZE


def train_on(model, *, num_processes=2, batches=None, callbacks=None, **options):
    data = {"train": batches or loader(NUM_SAMPLES, BATCH_SIZE)}
    return train(model, loaders=data, callbacks=callbacks, engine=ddp(num_processes, **options))


def reference():
    model = mlp()
    train_by_hand(model, sgd(model), loader(NUM_SAMPLES, 2 * BATCH_SIZE))
    return weights(model)


FASTER = [
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True, "ddp_kwargs": {"bucket_cap_mb": 1}},
    {"compile": {"backend": "aot_eager"}},
]


def rank_one():
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook


HOOKS = {
    "fp16": 1e-3,  # 11 bits of each gradient: relative 5e-4, times lr 0.1 and momentum, over 10 steps
    "bf16": 1e-2,  # 8 bits: relative 4e-3
    "powersgd": 1e-6,  # exact for its first 1,000 steps
    rank_one: 0.5,  # a rank-1 approximation from step 2 on: close, but not equal
}


@pytest.fixture(scope="module")
def trained():
    """Train with each option, and with options that meet, in one launch of two processes."""
    options = [*FASTER, *({"comm_hook": hook} for hook in HOOKS)]
    return together(lambda: ([weights(train_on(mlp(), **each).model) for each in options], train_with_several()))


def test_options_about_speed_leave_the_weights_alone(trained):
    """They change when and where gradients are averaged, not the result: 1e-6, the order of float sums."""
    for options, found in zip(FASTER, trained[0], strict=False):
        assert (found - reference()).abs().max() < 1e-6, options


def test_comm_hooks_compress_gradients(trained):
    """Weights are as close to the reference as the compression allows, and differ if it loses precision."""
    for (hook, tolerance), found in zip(HOOKS.items(), trained[0][len(FASTER) :], strict=True):
        difference = (found - reference()).abs().max()
        assert difference < tolerance, hook
        assert hook == "powersgd" or difference > 1e-7, hook


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(20, 5, sparse=True), nn.Linear(5, 2))


def test_buckets_laid_out_before_the_first_step_change_no_weights():
    """With three or more processes, zero gradients are reduced first; models with sparse gradients are skipped."""
    bags = torch.arange(96 * 4).view(96, 4) ** 2 % 20
    data = {mlp: classification(96), words: TensorDataset(bags, bags[:, 0] % 2)}
    options = ({}, {"gradient_as_bucket_view": True})

    def work(make_model):
        batches = DataLoader(data[make_model], batch_size=8)
        return [weights(train_on(make_model(), num_processes=3, batches=batches, **each).model) for each in options]

    for make_model, found in together(lambda: {each: work(each) for each in data}, num_processes=3).items():
        by_hand = make_model()
        train_by_hand(by_hand, sgd(by_hand), DataLoader(data[make_model], batch_size=24))
        for each in found:
            torch.testing.assert_close(each, weights(by_hand), rtol=1e-5, atol=1e-6)


def test_hooks_on_parameters_see_gradients_of_training_only():
    """Hooks do not see the zero gradients that lay out buckets, and one on a single rank does not make others wait."""
    engine = ddp(3)

    def work():
        engine.setup()
        model, seen = mlp(), []
        weight = model[0].weight
        weight.register_hook(lambda gradient: seen.append(bool(gradient.any())))
        handles = [weight.register_post_accumulate_grad_hook(lambda own: seen.append(bool(own.grad.any())))]
        if not engine.is_main_process:
            handles.pop().remove()
        wrapped, batches = engine.wrap(model), loader(96, 8)
        for features, targets in list(batches)[engine.rank :: 3]:
            nn.functional.cross_entropy(wrapped(features), targets).backward()
        for handle in handles:
            handle.remove()
        wrapped(features).sum().backward()
        everyone = engine.gather_object((seen, model[3].bias.grad))
        engine.cleanup()
        return everyone

    everyone = engine.launch(work)

    assert [seen for seen, _ in everyone] == [[True] * 9, [True] * 5, [True] * 5]
    assert all(torch.equal(gradient, everyone[0][1]) for _, gradient in everyone)


def images(num_samples):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_samples, 3, 8, 8, generator=generator)
    return TensorDataset(features, torch.randint(0, 3, (num_samples,), generator=generator))


def convnet():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class OverflowOnRankOne(dl.Callback):
    """A callback that overflows in rank one's second batch and compares the ranks' weights at the end."""

    def __init__(self):
        super().__init__(order=30)  # between the loss and its backward pass

    def on_batch_end(self, runner):
        if runner.batch_step == 2 and runner.engine.rank == 1:
            runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("inf")

    def on_stage_end(self, runner):
        mine, theirs = runner.engine.gather_object(weights(runner.engine.unwrap(runner.model)))
        self.are_equal = torch.equal(mine, theirs)


def train_at_two_paces(engine):
    """Train one model with two optimizers, one of which accumulates."""
    model = mlp()
    optimizers = {"a": sgd(model[0]), "b": sgd(model[3])}
    batch_size = 2 * BATCH_SIZE // (2 if engine.is_ddp else 1)
    callbacks = [
        dl.OptimizerCallback("loss", optimizer_key="a", accumulation_steps=2),
        dl.OptimizerCallback("loss", optimizer_key="b"),
    ]
    data = {"train": loader(NUM_SAMPLES, batch_size)}
    train(model, optimizer=optimizers, loaders=data, engine=engine, callbacks=callbacks)
    return weights(model)


def train_with_several():
    found = {}
    accumulated, by_hand = mlp(), mlp()
    train_on(accumulated, static_graph=True, callbacks=[dl.OptimizerCallback("loss", accumulation_steps=2)])
    train_by_hand(by_hand, sgd(by_hand), loader(NUM_SAMPLES, 2 * BATCH_SIZE), accumulate=2)
    found["static graph, accumulated"] = (weights(accumulated) - weights(by_hand)).abs().max().item()

    mine, by_hand = convnet(), convnet()
    options = {"channels_last": True, "gradient_as_bucket_view": True, "compile": {"backend": "aot_eager"}}
    train_on(mine, batches=DataLoader(images(64), BATCH_SIZE), comm_hook="powersgd", **options)
    train_by_hand(by_hand, sgd(by_hand), DataLoader(images(64), 2 * BATCH_SIZE))
    found["channels last, compiled"] = (weights(mine) - weights(by_hand)).abs().max().item()

    found["two paces"] = [train_at_two_paces(engine) for engine in (ddp(), dl.CPUEngine())]

    overflow, precision = OverflowOnRankOne(), dl.AMP(torch.float16)
    runner = train_on(mlp(), precision=precision, comm_hook="fp16", callbacks=[overflow])
    found["skipped"], found["equal"] = runner.epoch_metrics["train"]["skipped_steps"], overflow.are_equal
    return found


def test_options_work_together(trained):
    """Accumulation with a static graph; layout with views, compiler and hook; fp16 with one rank's overflow."""
    found = trained[1]

    assert found["static graph, accumulated"] < 1e-6
    assert found["channels last, compiled"] < 1e-5  # summation order differs
    torch.testing.assert_close(*found["two paces"], rtol=0, atol=1e-6)
    assert found["skipped"] == 1, "by both ranks, since gradients are averaged before they are checked"
    assert found["equal"]


def test_powersgd_is_refused_where_gradients_may_be_infinite():
    """An infinite gradient would stay in the error feedback, and every later step would be skipped."""
    engine = ddp(comm_hook="powersgd", precision=dl.AMP(torch.float16))
    engine.open_device(torch.device("cpu"))

    with pytest.raises(ValueError, match="forever: use bf16 or fp32, or comm_hook='fp16'"):
        engine.wrap(mlp())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": [0, 0]}, r"different GPU indices >= 0, such as \[0, 2\], got \[0, 0\]"),
        ({"devices": []}, "different GPU indices"),
        ({"devices": [0, -1]}, "different GPU indices"),
        ({"devices": [0], "device": "cpu"}, "omit them with device='cpu'"),
        ({"devices": [0, 1], "num_processes": 3}, "num_processes=3, but 2 devices"),
        ({"timeout_s": 0}, "timeout_s must be > 0, got 0"),
        ({"num_processes": 0}, "num_processes must be >= 1, got 0"),
        ({"address": "localhost"}, "address and port go together"),
        ({"device": "cuda:0"}, "device must be 'cuda', 'cpu' or None, got 'cuda:0'; devices="),
        ({"device": "gpu"}, "device must be 'cuda', 'cpu' or None, got 'gpu'; devices="),
        *(({"comm_hook": hook}, "comm_hook must be 'fp16', 'bf16', 'powersgd'") for hook in ("fp8", ("state",), 16)),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments, message):
    """The error is raised before processes start; an unknown device would silently be the CPU."""
    with pytest.raises(ValueError, match=message):
        dl.DistributedDataParallelEngine(**arguments)


@pytest.mark.parametrize("number", [True, 2.0, "2", (2, 4.0)], ids=str)
def test_a_number_of_processes_is_an_integer(number):
    """True would be one process."""
    with pytest.raises(TypeError, match=r"num_processes must be an integer, or \(least, most\) with launcher=, got"):
        dl.DistributedDataParallelEngine(number)


def test_unknown_arguments_are_named():
    """The error also lists the known arguments."""
    with pytest.raises(TypeError, match=r"DistributedDataParallelEngine got chanels_last; .* channels_last"):
        dl.DistributedDataParallelEngine(2, chanels_last=True)


def test_devices_choose_the_gpus_in_their_order(monkeypatch):
    """Process i of a machine uses the i-th device of the list, in any order."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    engine = dl.DistributedDataParallelEngine(devices=[3, 1])

    devices = [str(engine._choose_device(place(local_rank))) for local_rank in range(2)]

    assert engine.num_processes == 2
    assert devices == ["cuda:3", "cuda:1"] and chosen == [3, 1]
    with pytest.raises(RuntimeError, match=r"process 2 of this machine lacks a GPU: devices=\[3, 1\]"):
        engine._choose_device(place(2))


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    """The error is raised before processes start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(RuntimeError, match=r"devices=\[0, 1\] are GPUs, but torch sees none"):
        dl.DistributedDataParallelEngine(devices=[0, 1]).launch(int)


def place(local_rank, launcher="runnerkit"):
    return ProcessEnvironment(launcher, local_rank, local_rank, 2)


def test_slurm_may_show_each_task_its_own_gpu_only(monkeypatch):
    """Under Slurm it is GPU 0 for each task; elsewhere, a process without its own GPU is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    engine = dl.DistributedDataParallelEngine(2)

    device = engine._choose_device(place(1, launcher="srun"))

    assert str(device) == "cuda:0"
    with pytest.raises(RuntimeError, match="process 1 of this machine lacks GPU 1, as there are only 1"):
        engine._choose_device(place(1))


def test_sync_bn_on_a_cpu_says_why_not(capfd):
    """Training continues with each process's own statistics."""
    train_on(mlp(batch_norm=True), sync_bn=True)

    assert "sync_bn=True is ignored: torch's SyncBatchNorm runs on GPUs only" in capfd.readouterr().err


class Uneven(dl.SupervisedRunner):
    """A runner that builds each rank's loader itself, with one batch less on rank one."""

    def get_loaders(self, stage):
        data = classification(4 * BATCH_SIZE - 2 * BATCH_SIZE * self.engine.rank)
        return {"train": DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, 2, self.engine.rank))}


def test_ranks_that_would_train_on_unequal_numbers_of_batches_are_refused():
    """The error comes before the first batch; otherwise one rank would wait for the other until the timeout."""
    with pytest.raises(ValueError, match=r"loader 'train' has \[2, 1\] batches on the ranks"):
        train(runner=Uneven(), num_processes=2, loaders=None)


@pytest.mark.parametrize(
    ("engine", "argument"),
    [
        (dl.DistributedDataParallelEngine, "find_unused_parameters=True"),
        (dl.DistributedDataParallelAMPEngine, "find_unused_parameters=True"),
        (dl.DistributedDataParallelAPEXEngine, "delay_allreduce=True"),
    ],
)
def test_an_engine_names_the_argument_of_its_own_that_allows_unused_parameters(engine, argument):
    """It is one that the engine accepts."""
    allows = engine(2, device="cpu")._exchange.allows_unused

    assert allows.startswith(f"pass engine=dl.{engine.__name__}({argument}), instead of ddp=True")
    assert engine(2, device="cpu", **{argument.split("=")[0]: True})
