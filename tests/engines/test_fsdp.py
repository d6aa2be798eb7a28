"""FullyShardedDataParallelEngine: steps equal to one process, full state dicts from shards, and its errors."""

import contextlib
import io
import pickle
import shutil
from functools import partial
from pathlib import PurePosixPath

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from runnerkit import dl, utils
from runnerkit.checkpoints.sharded import _PlainUnpickler
from runnerkit.engines.sharding.shard_policy import ShardPolicy, check_parameters, check_places
from tests.engines.on_cpu import TwoStages, adam, ddp, difference, fsdp
from tests.engines.together import together
from tests.interrupt import Interrupt
from tests.test_resume import Augmented
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights

NUM_STEPS, BATCH_SIZE = 10, 8


def fit(model, engine, optimizer=None, **options):
    options = {"loaders": {"train": loader(NUM_STEPS * 2 * BATCH_SIZE, BATCH_SIZE)}, **options}
    return train(model, engine=engine, optimizer=optimizer or adam(model), **options)


def by_hand(model, *, optimizer=adam, num_processes=2, **kwargs):
    data = loader(NUM_STEPS * 2 * BATCH_SIZE, num_processes * BATCH_SIZE)
    return train_by_hand(model, optimizer(model), data, **kwargs)


class Sharding(dl.Callback):
    """A callback that records which modules are sharded units during training, and the placements of their
    parameters."""

    def __init__(self):
        super().__init__()
        self.units, self.placements = [], set()

    def on_batch_end(self, runner):
        from torch.distributed.fsdp import FSDPModule

        self.units = [name for name, module in runner.model.named_modules() if isinstance(module, FSDPModule)]
        self.placements = {str(tuple(parameter.placements)) for parameter in runner.model.parameters()}


@pytest.fixture(scope="module")
def trained():
    """Train everything for the tests of numbers, models and stages in one launch of two processes."""
    return together(
        lambda: {
            "settings": train_in_every_setting(),
            "accumulated": accumulate_and_clip(),
            "left behind": leave_gradients_behind(),
            "low precision": train_in_low_precision(),
            "tied": train_a_tied_model(),
            "adversaries": train_adversaries(),
            "gathers": count_gathers(),
            "beside a frozen model": [
                train_beside_a_frozen_model(kind) for kind in (torch.optim.Adam, torch.optim.Adagrad)
            ],
            "peeks": peek_between_steps(),
            "followed": follow_after_a_forward_pass(),
            "uneven": evaluate_unevenly(),
        }
    )


# Numbers.

SETTINGS = {
    "as a whole": ({}, [""]),
    "by class": ({"shard_modules": [nn.Linear]}, ["", "0", "3"]),
    "by size": ({"shard_min_parameters": 60, "reshard_after_forward": False}, ["", "0"]),
    "offloaded": ({"shard_modules": [nn.Linear], "cpu_offload": True}, ["", "0", "3"]),
    "compiled": ({"compile": {"backend": "aot_eager"}}, ["_orig_mod"]),
}


def train_in_every_setting():
    found = {}
    for name, (arguments, _) in SETTINGS.items():
        mine, theirs, sharding = mlp(), mlp(), Sharding()
        fit(mine, fsdp(**arguments), callbacks=[sharding])
        by_hand(theirs)
        found[name] = difference(mine, theirs), sharding.units
    return found


def test_every_setting_gives_the_weights_of_one_process_on_the_joined_batch(trained):
    """Weights agree to 1e-6, the order of float sums, and the units are the requested ones."""
    for name, (_, units) in SETTINGS.items():
        assert trained["settings"][name][0] < 1e-6, name
        assert trained["settings"][name][1] == units, name


def accumulate_and_clip():
    norms, trained = [], [mlp(), mlp()]
    for model, engine in zip(trained, (fsdp(shard_modules=[nn.Linear]), ddp()), strict=True):
        clip = {"grad_clip_fn": "clip_grad_norm_", "grad_clip_params": {"max_norm": 0.1}}
        step = dl.OptimizerCallback(accumulation_steps=3, **clip)
        fit(model, engine, callbacks=[step], num_epochs=2)
        runner = fit(model, engine, callbacks=[dl.BackwardCallback("loss", log_gradient=True)])
        norms.append(runner.loader_metrics["gradient_norm"])
    return difference(*trained), norms


class StopInTheMiddle(dl.Callback):
    """A callback that ends each pass with one batch whose gradients no step uses."""

    def on_batch_end(self, runner):
        runner.need_early_stop = runner.loader_batch_step == 5


def leave_gradients_behind():
    found = []
    for arguments in ({}, {"compute_dtype": torch.bfloat16}):
        trained = []
        for num_steps in (4, 5):  # of each pass: without and with a batch that no step follows
            model = mlp()
            step = dl.OptimizerCallback(accumulation_steps=4)
            stop = StopInTheMiddle(order=dl.CallbackOrder.External)
            data = loader((num_steps if num_steps == 4 else 9) * 2 * BATCH_SIZE, BATCH_SIZE)
            fit(model, fsdp(**arguments), callbacks=[step, stop], loaders={"train": data}, num_epochs=3)
            trained.append(model)
        found.append(difference(*trained))
    return found


def test_accumulated_clipped_and_left_behind_gradients_are_those_of_ddp(trained):
    """The norm covers all shards, accumulating passes do not communicate, and unused gradients are dropped."""
    apart, norms = trained["accumulated"]

    assert apart < 1e-6
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert trained["left behind"] == [0.0, 0.0]


def train_in_low_precision():
    found = {}
    for name, batch_norm in (("bf16", False), ("batch norm", True)):
        mine, autocast, full = (mlp(batch_norm=batch_norm) for _ in range(3))
        fit(mine, fsdp(compute_dtype=torch.bfloat16, shard_modules=[nn.Linear]), sgd(mine))
        fit(autocast, ddp(precision=dl.AMP(torch.bfloat16)), sgd(autocast))
        fit(full, ddp(), sgd(full))
        dtypes = {str(each.dtype) for each in mine.parameters()}
        found[name] = difference(mine, autocast), difference(mine, full), dtypes
    for dtype in (torch.bfloat16, torch.float16):
        mine, theirs = mlp(), mlp()
        scale = {"init_scale": 2.0**20}  # overflows in float16, so steps are skipped
        runner = fit(mine, fsdp(precision=dl.AMP(dtype, scaler=scale), shard_modules=[nn.Linear]), sgd(mine))
        scaler = torch.amp.GradScaler("cpu", **scale) if dtype == torch.float16 else None
        by_hand(theirs, optimizer=sgd, autocast=lambda kind=dtype: torch.autocast("cpu", kind), scaler=scaler)
        found[str(dtype)] = difference(mine, theirs), runner.loader_metrics.get("skipped_steps", 0)
    return found


def test_low_precision_stays_near_its_reference(trained):
    """Weights agree to 2e-3: bf16 and fp16 round sums of half batches differently.

    `compute_dtype` is compared with DDP under autocast, and autocast with the hand-written loop on the joined batch.
    """
    found = trained["low precision"]

    for name in ("bf16", "batch norm"):
        from_autocast, from_full, dtypes = found[name]
        assert from_autocast < 2e-3 < from_full, name
        assert dtypes == {"torch.float32"}, "weights stay in full precision"
    assert found["torch.bfloat16"][0] < 2e-3
    assert found["torch.float16"][0] < 2e-3
    assert found["torch.float16"][1] > 0, "this test needs a step that all ranks skip"


class Timeouts(dl.Callback):
    """A callback that records the timeout of each group of the mesh, in seconds."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_batch_end(self, runner):
        mesh = next(runner.model.parameters()).device_mesh
        backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
        self.seconds = [each.options._timeout.total_seconds() for each in backends]


def train_replicas():
    mine, theirs, sharding, timeouts = mlp(), mlp(), Sharding(), Timeouts()
    engine = fsdp(4, replicas=2, shard_modules=[nn.Linear], timeout_s=47)
    fit(mine, engine, callbacks={"sharding": sharding, "timeouts": timeouts})
    by_hand(theirs, num_processes=4)
    return difference(mine, theirs), sharding.placements, timeouts.seconds


def test_replicas_each_hold_the_whole_model(of_four):
    """In two groups of two (HSDP), gradients are averaged over all four, and each group shards the model.

    Both kinds of groups use timeout_s; torch's default is 30 minutes.
    """
    apart, placements, seconds = of_four[0]

    assert apart < 1e-6
    assert placements == {"(Replicate(), Shard(dim=0))"}
    assert seconds == [47.0, 47.0]


# Models and stages.


class Counter(nn.Module):
    """A module with a state that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += self.training
        return x

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Tied(nn.Module):
    """Two layers with one weight, one of them with a frozen bias, and a module with extra state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.counter = Counter()

    def forward(self, x):
        return self.last(self.counter(self.second(torch.relu(self.first(x)))))


def train_a_tied_model():
    mine, theirs = Tied(), Tied()
    fit(mine, fsdp(shard_min_parameters=10_000))
    by_hand(theirs)
    apart = max((a - b).abs().max().item() for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    return apart, mine.second.weight is mine.first.weight, mine.counter.count


class Adversaries(dl.Runner):
    """Two models that train in turns, and a third that never trains."""

    def handle_batch(self, batch):
        features, _ = batch
        maker, judge, frozen = (self.model[key] for key in ("maker", "judge", "frozen"))
        fake = maker(features)
        self.learn("judge", judge(fake.detach()).mean() - judge(frozen(features)).mean())
        self.learn("maker", fake.square().mean() - judge(fake).mean())

    def learn(self, key, loss):
        self.optimizer[key].zero_grad()
        self.engine.backward(loss)
        self.engine.step(self.optimizer[key])
        self.batch_metrics[key] = loss


def train_adversaries():
    found = []
    for engine in (fsdp(shard_modules=[nn.Linear]), ddp()):
        models = {"maker": mlp(), "judge": nn.Linear(3, 1, bias=False), "frozen": mlp(seed=2).requires_grad_(False)}
        nn.init.ones_(models["judge"].weight)
        optimizers = {key: adam(models[key]) for key in ("maker", "judge")}
        fit(models, engine, optimizers, runner=Adversaries())
        found.append(torch.cat([weights(each) for each in models.values()]))
    return (found[0] - found[1]).abs().max().item()


class Gathers(TorchDispatchMode):
    """A count of the units that were gathered."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.fsdp.all_gather_copy_in.default
        return function(*args, **(kwargs or {}))


class CountsGathers(Adversaries):
    """Notes how often weights were gathered in each batch."""

    def __init__(self):
        super().__init__()
        self.gathers, self.apart = [], []

    def handle_batch(self, batch):
        with Gathers() as counter:
            super().handle_batch(batch)
        self.gathers.append(counter.number)


class Peeking(CountsGathers):
    """Changes the weights of the judge between a forward pass without a backward pass and a step of the maker."""

    def learn(self, key, loss):
        judge, ones = self.model["judge"], torch.ones(1, 3)
        self.optimizer[key].zero_grad()
        self.engine.backward(loss)
        with torch.no_grad():
            before = judge(ones)
            if key == "maker":
                for _, shard in self.engine.trained_parameters(judge):
                    shard.mul_(0.5)
            self.engine.step(self.optimizer[key])
            if key == "maker":
                self.apart.append((judge(ones) - before / 2).abs().max().item())


def count_gathers():
    found = []
    for kind in (CountsGathers, Peeking):
        models = {"maker": mlp(), "judge": nn.Linear(3, 1, bias=False), "frozen": mlp(seed=2).requires_grad_(False)}
        runner = kind()
        fit(models, fsdp(), {key: adam(models[key]) for key in ("maker", "judge")}, runner=runner, num_steps=4)
        found.append((runner.gathers, runner.apart))
    return found


def test_a_step_frees_only_weights_that_its_optimizer_holds(trained):
    """The maker's weights, gathered by its forward pass, are still there for its backward pass after the judge's step.

    In a batch the maker is gathered once, and the judge for its own loss and after its step. Weights that the user
    changed are gathered again, whichever optimizer steps.
    """
    (gathers, _), (_, apart) = trained["gathers"]

    assert gathers == [3] * 4
    assert apart == pytest.approx([0.0] * 4, abs=1e-6)


def test_tied_and_frozen_parameters_and_several_models_train_as_elsewhere(trained):
    """A shared weight stays shared, and a model without gradients is not sharded."""
    apart, is_tied, count = trained["tied"]

    assert apart < 1e-6
    assert is_tied
    assert count == NUM_STEPS, "a module's extra state is restored"
    assert trained["adversaries"] < 1e-6


class Distilled(dl.Runner):
    """A model that imitates a frozen one."""

    steps_itself = True

    def handle_batch(self, batch):
        features, _ = batch
        self.learn(self.criterion(self.model["net"](features), self.model["teacher"](features).argmax(dim=1)))


def train_beside_a_frozen_model(kind):
    mine, theirs, teacher = mlp(), mlp(), mlp(seed=2).requires_grad_(False)
    before, make = weights(teacher), partial(kind, lr=0.01, weight_decay=0.1)
    fit({"net": mine, "teacher": teacher}, fsdp(), make, runner=Distilled())
    data = loader(NUM_STEPS * 2 * BATCH_SIZE, 2 * BATCH_SIZE)
    imitated = [(features, teacher(features).argmax(dim=1)) for features, _ in data]
    train_by_hand(theirs, make(theirs.parameters()), imitated)
    return difference(mine, theirs), torch.equal(weights(teacher), before)


def test_a_function_makes_the_optimizer_of_several_models_of_which_one_is_frozen(trained):
    """It gets the parameters of all; those of a frozen model are not sharded, and stay as they are.

    Adagrad has state for each of them from the start.
    """
    for apart, is_kept in trained["beside a frozen model"]:
        assert apart < 1e-6
        assert is_kept


class Peeks(dl.Runner):
    """Runs the model without gradients before and after each step."""

    steps_itself = True

    def handle_batch(self, batch):
        features, targets = batch
        self.engine.zero_grad(self.optimizer)
        self.engine.backward(self.criterion(self.model(features), targets))
        with torch.no_grad():
            self.batch_metrics["before"] = self.criterion(self.model(features), targets)
        self.engine.step(self.optimizer)
        with torch.no_grad():
            self.batch_metrics["after"] = self.criterion(self.model(features), targets)


def peek_between_steps():
    found = []
    for options in ({}, {"shard_modules": [nn.Linear], "reshard_after_forward": False}):
        mine, theirs = mlp(), mlp()
        metrics = fit(mine, fsdp(**options), runner=Peeks()).epoch_metrics["train"]
        by_hand(theirs)
        found.append((difference(mine, theirs), metrics["before"] - metrics["after"]))
    return found


def test_forward_passes_without_gradients_see_each_step(trained):
    """Weights that a forward pass gathered, and no backward pass freed, are gathered again after a step."""
    for apart, gain in trained["peeks"]:
        assert apart < 1e-6
        assert gain > 0


class Followed(dl.Runner):
    """A trainable target network, which only follows another one, after a forward pass of both."""

    steps_itself = True

    def handle_batch(self, batch):
        features, targets = batch
        net, target = self.model["net"], self.model["target"]
        self.learn(self.criterion(net(features), targets))
        with torch.no_grad():
            self.batch_metrics["apart"] = (net(features) - target(features)).square().mean()
        utils.soft_update(target, net, tau=0.25)


def follow_after_a_forward_pass():
    mine, theirs = ({"net": mlp(), "target": mlp(seed=2)} for _ in range(2))
    fit(mine, fsdp(shard_modules=[nn.Linear]), adam(mine["net"]), runner=Followed())
    optimizer = adam(theirs["net"])
    for batch in loader(NUM_STEPS * 2 * BATCH_SIZE, 2 * BATCH_SIZE):
        train_by_hand(theirs["net"], optimizer, [batch])
        with torch.no_grad():
            for target, source in zip(theirs["target"].parameters(), theirs["net"].parameters(), strict=True):
                target.copy_(0.75 * target + 0.25 * source)
    return difference(mine["target"], theirs["target"])


def test_a_target_network_follows_after_a_forward_pass(trained):
    """soft_update changes the shards, not the copies that the forward pass gathered."""
    assert trained["followed"] < 1e-6


def test_the_caller_gets_model_and_optimizer_back_and_a_second_stage_goes_on_with_them():
    """From plain python, the caller gets trained weights, full moments and an optimizer with the same parameters."""
    mine, theirs = mlp(), mlp()
    optimizer, reference = adam(mine), adam(theirs)

    runner = fit(mine, fsdp(shard_modules=[nn.Linear]), optimizer, runner=TwoStages())
    by_hand(theirs, optimizer=lambda _: reference, num_epochs=2)

    assert runner.model is mine and difference(mine, theirs) < 1e-6
    assert optimizer.param_groups[0]["params"][0] is next(mine.parameters())
    for key, state in reference.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(optimizer.state_dict()["state"][key][name], value, rtol=0, atol=1e-6)


class Shrink(dl.Callback):
    """A callback that changes the weights between epochs, as averaging callbacks do."""

    def on_epoch_end(self, runner):
        with torch.no_grad():
            for parameter in runner.model.parameters():
                parameter.mul_(0.9)


def evaluate_unevenly():
    found = []
    for engine in (fsdp(shard_modules=[nn.Linear]), ddp()):
        model = mlp(batch_norm=True)
        callbacks = [dl.AccuracyCallback("logits", "targets"), dl.OptimizerCallback(accumulation_steps=3), Shrink()]
        data = {"train": loader(80, 4), "one": loader(1, 4), "valid": loader(41, 4)}
        runner = fit(model, engine, loaders=data, callbacks=callbacks, valid_every_steps=4, num_epochs=2)
        found.append((model, runner.epoch_metrics, runner.evaluate_loader(loader(41, 4))))
    (mine, mine_metrics, mine_again), (theirs, their_metrics, _) = found
    return difference(mine, theirs), mine_metrics, their_metrics, mine_again


def test_evaluation_neither_hangs_nor_differs_where_ranks_have_unequal_numbers_of_batches(trained):
    """Two ranks evaluate one sample or eleven batches, also within an accumulated step.

    Afterwards, weights can be changed in place, since the weights that evaluation gathered are released.
    """
    apart, mine, theirs, again = trained["uneven"]

    assert apart < 1e-6
    for key, metrics in theirs.items():
        assert mine[key] == pytest.approx(metrics, abs=1e-6), key
    assert 0 < again["loss"] != mine["valid"]["loss"], "evaluated alone, with the weights changed last"


# Checkpoints.


BEST = {"monitor": "valid/loss", "content": "runner"}


def run(logdir, engine, *, callbacks=None, asynchronous=False, **options):
    model = mlp(dropout=0.2, batch_norm=True)
    optimizer = adam(model)
    data = {"train": DataLoader(Augmented(40), batch_size=4, shuffle=True), "valid": loader(21, 4)}
    save = dl.CheckpointCallback(logdir, mode="min", every_steps=3, asynchronous=asynchronous, **BEST)
    options = {"loaders": data, "num_epochs": 2, **options}
    runner = fit(model, engine, optimizer, callbacks={"save": save, **(callbacks or {})}, logdir=logdir, **options)
    return weights(model), moments(optimizer), runner.experiment_metrics


def moments(optimizer):
    states = optimizer.state_dict()["state"].values()
    return torch.cat([state[name].double().flatten() for state in states for name in ("exp_avg", "exp_avg_sq", "step")])


def assert_equal(one, other, *, atol=0.0):
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=atol)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=atol)


def units(**kwargs):
    return fsdp(shard_modules=[nn.Linear], **kwargs)


# {name: (whether checkpoints are sharded, whether a thread writes them)}
FORMS = {"whole files": (False, False), "shards": (True, False), "shards written in a thread": (True, True)}


def save(folder):
    """Train one whole run, and for each form one that is interrupted within its second epoch."""
    whole = run(folder / "whole", units())
    for form, (sharded, asynchronous) in FORMS.items():
        engine, interrupt = units(sharded_checkpoints=sharded), {"interrupt": Interrupt(8)}
        with contextlib.suppress(KeyboardInterrupt):
            run(folder / form / "same", engine, callbacks=interrupt, asynchronous=asynchronous)
    return whole


def go_on(folder, sharded):
    return {
        "same": run(folder / "same", units(sharded_checkpoints=sharded), resume="auto"),
        "ddp": run(folder / "ddp", ddp(), resume="auto"),
        "other units": run(folder / "other", fsdp(sharded_checkpoints=not sharded), resume="auto"),
    }


def test_a_resumed_run_equals_the_uninterrupted_one_on_any_engine(tmp_path):
    """Results are equal bit for bit with the same units, dropout and augmentation; to 1e-6 with DDP and other units.

    The finished run's weights and moments then load on the CPU. Every form of checkpoint is tested.
    """
    whole = together(lambda: save(tmp_path))
    for form, (sharded, _) in FORMS.items():
        assert (tmp_path / form / "same" / "checkpoints" / "model.0002.00000006").is_dir() is sharded
        for name in ("ddp", "other"):
            shutil.copytree(tmp_path / form / "same", tmp_path / form / name, symlinks=True)

    found = together(lambda: {form: go_on(tmp_path / form, sharded) for form, (sharded, _) in FORMS.items()})

    for form, resumed in found.items():
        assert resumed["same"][2] == whole[2], form
        assert_equal(resumed["same"], whole)
        for name in ("ddp", "other units"):
            assert_equal(resumed[name], whole, atol=1e-6)
        assert_equal(run(tmp_path / form / "same", dl.CPUEngine(), resume="auto"), whole)


def test_ddp_checkpoints_go_on_in_shards_and_back(tmp_path):
    """Epochs with DDP, in shards and with DDP again give the weights of three epochs with DDP."""

    def alternate():
        whole = run(tmp_path / "whole", ddp(), num_epochs=3)
        run(tmp_path / "log", ddp(), num_epochs=1)
        run(tmp_path / "log", units(sharded_checkpoints=True, cpu_offload=True), num_epochs=2, resume="auto")
        return whole, run(tmp_path / "log", ddp(), num_epochs=3, resume="auto")

    whole, alternated = together(alternate)

    assert_equal(alternated, whole, atol=1e-6)
    names = {path.name for path in (tmp_path / "log" / "checkpoints").iterdir()}
    assert "last.pth" in names and "last" not in names, "only the newest checkpoint's name exists"


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
    """Return a finished run's folder, and its weights and moments."""
    folder = tmp_path_factory.mktemp("sharded") / "log"
    return folder, run(folder, units(sharded_checkpoints=True))


def test_a_sharded_checkpoint_is_a_folder_with_links_for_names(sharded_run):
    """No unfinished files are left beside it."""
    folder = sharded_run[0] / "checkpoints"

    names = {path.name for path in (folder / "model.0002").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "rest.pth"}
    assert (folder / "last").readlink().name == "model.0002"
    assert (folder / "best").is_symlink()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.fixture(scope="module")
def of_four(sharded_run, tmp_path_factory):
    """Train replicas and read a checkpoint with four processes, launched once."""
    folder = shutil.copytree(sharded_run[0], tmp_path_factory.mktemp("four") / "log", symlinks=True)
    engine = units(num_processes=4, replicas=2, sharded_checkpoints=True)
    return together(lambda: (train_replicas(), run(folder, engine, resume="auto")), num_processes=4)


def test_shards_of_two_processes_are_read_by_another_number(sharded_run, of_four, tmp_path):
    """One and four processes read it; with no epochs left, the weights and moments are those that were saved."""
    folder, expected = sharded_run
    shutil.copytree(folder, tmp_path / "log", symlinks=True)

    resumed = run(tmp_path / "log", units(num_processes=1, sharded_checkpoints=True), resume="auto")

    assert_equal(resumed, expected)
    assert_equal(of_four[1], expected)


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
def test_a_damaged_shard_is_passed_over_for_the_checkpoint_before(sharded_run, tmp_path, caplog, damage):
    """The shard is shorter, has the same size, or is missing."""
    shutil.copytree(sharded_run[0], tmp_path / "log", symlinks=True)
    shard = tmp_path / "log" / "checkpoints" / "model.0002" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "flipped" else content[:100])

    resumed = run(tmp_path / "log", dl.CPUEngine(), resume="auto", num_epochs=2)

    assert "model.0002 is damaged" in caplog.text
    assert sorted(resumed[2]) == [1, 2]


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_that_was_asked_for_is_named(sharded_run, tmp_path, name):
    """A checkpoint that the user chose is not replaced by another one."""
    shutil.copytree(sharded_run[0], tmp_path / "log", symlinks=True)
    folder = tmp_path / "log" / "checkpoints" / "last"
    (folder / name).write_bytes((folder / name).read_bytes()[:100])

    with pytest.raises(ValueError, match=r"checkpoints/model\.0002 is not a complete sharded checkpoint"):
        utils.load_checkpoint(folder)


@pytest.mark.parametrize("source", ["", "checkpoints/last", "checkpoints/model.0002"])
def test_an_exported_checkpoint_is_an_ordinary_one(sharded_run, tmp_path, source):
    """A plain module loads its weights, and one process resumes from it."""
    folder, expected = sharded_run

    out = utils.export_full_state(folder / source, tmp_path / "whole.pth")

    state = torch.load(out, weights_only=True)
    model = mlp(batch_norm=True)
    model.load_state_dict(state["model_state_dict"])
    assert torch.equal(weights(model), expected[0])
    assert_equal(run(tmp_path / "log", dl.CPUEngine(), resume=out), expected)


def test_weights_are_taken_from_shards_at_the_start_and_at_the_end(sharded_run, tmp_path):
    """This covers resume_model, load_best_on_end, and a state_dict of content="model"."""
    folder, _ = sharded_run
    options = {"mode": "max", "resume_model": folder, "load_best_on_end": True, **BEST}
    callbacks = [
        dl.CheckpointCallback(tmp_path / "log", **options),
        dl.CheckpointCallback(tmp_path / "weights", content="model"),
    ]
    model, data = mlp(batch_norm=True), {"train": loader(64, 4), "valid": loader(21, 4)}

    fit(model, units(sharded_checkpoints=True), loaders=data, callbacks=callbacks, num_epochs=3)

    best = utils.load_checkpoint(tmp_path / "log" / "checkpoints" / "best")["model_state_dict"]
    last = utils.load_checkpoint(tmp_path / "weights" / "checkpoints" / "last.pth")
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
    assert last.keys() == best.keys() and not torch.equal(last["0.weight"], best["0.weight"])


def test_a_list_of_tensors_that_would_run_code_is_refused(tmp_path):
    """The pickled list may contain only known classes."""
    marker = tmp_path / "marker"

    class Malicious:
        def __reduce__(self):
            return (marker.touch, ())

    folder = tmp_path / "model.0001"
    utils.save_checkpoint({"shards": {"places": {}, "files": {}}}, folder / "rest.pth")
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious()))

    with pytest.raises(ValueError, match="must not contain"):
        utils.load_checkpoint(folder)

    assert not marker.exists()


def test_a_path_that_python_3_13_pickled_is_read_by_any():
    """Python 3.13 pickles paths under another module, which does not exist here."""
    written = b"cpathlib._local\nPosixPath\n(S'shard.distcp'\ntR."

    assert _PlainUnpickler(io.BytesIO(written)).load() == PurePosixPath("shard.distcp")


# Errors.


def test_units_are_chosen_inner_ones_first():
    """Units are chosen by class, or by size without inner units; containers that are never called are not units."""

    def block():
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))

    model = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(2, 2)})
    names = {module: name for name, module in model.named_modules()}

    for policy, expected in (
        (ShardPolicy(None, None), []),
        (ShardPolicy([nn.Sequential], None), ["blocks.0", "blocks.1"]),
        (ShardPolicy(None, 40), ["blocks.0.0", "blocks.1.0"]),
        (ShardPolicy(None, 50), ["blocks.0", "blocks.1"]),
        (ShardPolicy([nn.Sequential], 40), ["blocks.0.0", "blocks.0", "blocks.1.0", "blocks.1"]),
    ):
        assert [names[each] for each in policy.units(model)] == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shard_modules": ["Linear"]}, TypeError, "must hold classes of modules"),
        (
            {"shard_modules": nn.Linear},
            TypeError,
            r"shard_modules must be a list .* \[nn.Linear\], got <class .*Linear",
        ),
        ({"shard_modules": "Linear"}, TypeError, "shard_modules must be a list of classes .* got 'Linear'"),
        (
            {"tensor_parallel": 2, "plan": "auto"},
            TypeError,
            "plan must map .* got 'auto'; leave it out to take the mod",
        ),
        ({"shard_min_parameters": 0}, ValueError, "must be >= 1, got 0"),
        ({"replicas": 3, "num_processes": 4}, ValueError, "must divide the number of processes, got 3 for 4"),
        ({"compute_dtype": torch.float16}, ValueError, r"precision=AMP\(torch.float16\)"),
        ({"compute_dtype": torch.bfloat16, "precision": dl.AMP()}, ValueError, "accepts either .*; got AMP"),
        ({"sync_bn": True}, TypeError, "got sync_bn"),
    ],
)
def test_bad_arguments_are_refused_where_they_are_given(arguments, error, message):
    """The error is raised before processes start."""
    with pytest.raises(error, match=message):
        fsdp(**arguments)


def test_parameters_that_cannot_be_sharded_are_named():
    """The error says what to do about them."""
    tied = Tied()
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(ValueError, match=r"first.weight and second.weight are shared.*shard_min_parameters"):
        check_parameters({"": tied}, {"": ShardPolicy([nn.Linear], None).units(tied)})
    with pytest.raises(ValueError, match=r"a.first.weight and b.first.weight are shared by two models"):
        check_parameters({"a": tied, "b": tied}, {"a": [], "b": []})
    with pytest.raises(ValueError, match=r"parameter m.scale is a scalar.*\(1,\)"):
        check_parameters({"m": scalar}, {"m": []})
    with pytest.raises(ValueError, match=r"m.weight is on the meta device.*\(init='meta'\) trains such models"):
        check_places({"m": nn.Linear(2, 2, device="meta")}, on_meta={})
    with pytest.raises(ValueError, match="contains Conv2d, but the model does not; it has Counter, Linear, Tied"):
        ShardPolicy([nn.Conv2d], None).check([tied], needs_units=False)


def test_the_amp_name_fixes_the_precision():
    """The name fixes the precision, as for the other engines."""
    assert dl.FullyShardedDataParallelAMPEngine(2, dtype=torch.bfloat16).precision.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="fixes its precision"):
        dl.FullyShardedDataParallelAMPEngine(2, precision=dl.FP32())
