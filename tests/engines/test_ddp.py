"""DistributedDataParallelEngine: the ranks' training, and the results that the calling process receives."""

import os
import signal
import sys
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.engines.launch.spawn import spawn
from runnerkit.torchvision_cpu import import_torchvision
from tests.tiny import classification, loader, mlp, sgd, train, weights


class Watch(dl.Callback):
    """A callback that reports a rank's state through metrics, the only way out of ranks other than the first."""

    def on_batch_end(self, runner):
        parameter = next(runner.engine.unwrap(runner.model).parameters())
        runner.batch_metrics["is_shared"] = float(parameter.is_shared())
        runner.batch_metrics["rank"] = float(runner.engine.rank)


@pytest.mark.cold  # a rank has to apply torchvision's workaround itself
def test_the_caller_gets_the_trained_model_and_the_metrics():
    """With ddp=True from plain python, the calling process receives the model, optimizer state and metrics.

    A torchmetrics object can be sent although torchvision may need a workaround here. States are reduced, not values.
    """
    import_torchvision()
    from torchmetrics.classification import MulticlassAUROC

    model = mlp()
    before = weights(model)
    optimizer = sgd(model)

    data = {"train": loader(64, 8, shuffle=True), "valid": loader(41, 8)}
    metric = dl.LoaderMetricCallback(MulticlassAUROC(3), "logits", "targets", metric_key="auc")
    callbacks = [dl.AccuracyCallback("logits", "targets"), metric, Watch()]
    runner = train(model, optimizer=optimizer, loaders=data, callbacks=callbacks, num_epochs=3, ddp=True, cpu=True)

    assert runner.model is model
    assert not torch.equal(weights(model), before)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"] is not None
    assert runner.epoch_step == 3 and sorted(runner.experiment_metrics) == [1, 2, 3]
    with torch.no_grad():
        features, targets = classification(41).tensors
        probabilities = model.eval()(features).double().softmax(dim=1)
    expected = accuracy_score(targets, probabilities.argmax(dim=1))
    assert runner.epoch_metrics["valid"]["accuracy"] == pytest.approx(expected, abs=1e-7)
    expected = roc_auc_score(targets, probabilities, multi_class="ovr", average="macro")
    assert runner.epoch_metrics["valid"]["auc"] == pytest.approx(expected, abs=1e-6)
    assert runner.epoch_metrics["train"]["is_shared"] == 0.0, "ranks train on shared memory"
    assert runner.epoch_metrics["train"]["rank"] == 0.5, "mean over two ranks with equal numbers of samples"


@pytest.mark.parametrize(("num_processes", "num_valid"), [(2, 41), (3, 1)])
def test_batch_norm_and_an_uneven_valid_set_neither_hang_nor_count_twice(num_processes, num_valid):
    """Each sample is scored exactly once, even if the ranks do not divide the length or there is only one sample."""
    model = mlp(batch_norm=True)

    data = {"train": loader(50, 8), "valid": loader(num_valid, 4)}
    metric = dl.AccuracyCallback("logits", "targets")
    runner = train(model, num_processes=num_processes, loaders=data, callbacks=[metric])

    features, targets = classification(num_valid).tensors
    with torch.no_grad():
        logits = model.eval()(features)
    assert runner.loader_sample_step == num_valid
    expected = {
        "accuracy": accuracy_score(targets, logits.argmax(1)),
        "loss": nn.functional.cross_entropy(logits, targets).item(),
    }
    assert {key: runner.epoch_metrics["valid"][key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert runner.sample_step == 50


def test_the_number_of_processes_is_known_before_they_start():
    """A schedule's total number of steps depends on it."""
    assert dl.DistributedDataParallelEngine(3).num_processes == 3
    assert dl.DistributedDataParallelEngine(device="cpu").world_size == 2


def test_a_second_engine_in_the_same_process_works():
    """DDP, CPU and DDP again run in one process, so no global state is left."""
    model = mlp()

    for kwargs in ({"ddp": True}, {}, {"ddp": True}):
        runner = train(model, cpu=True, **kwargs)

        assert runner.engine.is_ddp is bool(kwargs)


def test_a_model_without_gradients_beside_a_trained_one_is_left_bare():
    """DDP refuses a frozen module, so a distillation's teacher is not wrapped."""
    student, teacher = mlp(), mlp(seed=2).requires_grad_(False)

    class Distillation(dl.Runner):
        def handle_batch(self, batch):
            features, _ = batch
            loss = nn.functional.mse_loss(self.model["student"](features), self.model["teacher"](features))
            self.batch_metrics["loss"] = loss

    callbacks = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")]
    arguments = {"optimizer": sgd(student), "loaders": {"train": loader(64, 8)}, "callbacks": callbacks}
    models = {"student": student, "teacher": teacher}
    runner = train(models, runner=Distillation(), num_processes=2, num_epochs=2, **arguments)

    losses = [runner.experiment_metrics[epoch]["train"]["loss"] for epoch in (1, 2)]
    assert losses[1] < losses[0]
    assert torch.equal(weights(teacher), weights(mlp(seed=2)))


class Note(dl.Callback):
    """A callback that records its epochs."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, runner):
        self.epochs.append(runner.epoch_step)


class NoteUnderLock(Note):
    """A callback that keeps a lock made in the training process."""

    def on_stage_start(self, runner):
        self.lock = threading.Lock()


def test_lambdas_local_classes_and_what_objects_have_noted_travel(capfd):
    """The caller's own callbacks are updated, those that a hook made and attributes of the runner come back.

    cloudpickle sends what plain pickle refuses. A lock that was made there stays, and a warning names it.
    """

    class LocalNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.activation = mlp(), lambda x: x * 2

        def forward(self, x):
            return self.activation(self.layers(x))

    class Hooked(dl.SupervisedRunner):
        def get_callbacks(self, stage):
            return super().get_callbacks(stage) | {"made": NoteUnderLock(), "whole": Note()}

        def on_epoch_end(self, runner):
            self.notes = {"epochs": runner.epoch_step, "pid": os.getpid()}
            self.lock = threading.Lock()

    model, note = LocalNet(), NoteUnderLock()
    before = weights(model)

    arguments = {"criterion": lambda logits, targets: nn.functional.cross_entropy(logits, targets), "num_epochs": 2}
    runner = train(model, runner=Hooked(), num_processes=2, callbacks={"note": note}, **arguments)

    assert not torch.equal(weights(model), before)
    assert runner.notes["epochs"] == 2 and runner.notes["pid"] != os.getpid()
    assert runner.callbacks["note"] is note
    assert [runner.callbacks[key].epochs for key in ("note", "made", "whole")] == [[1, 2]] * 3
    assert not any(hasattr(each, "lock") for each in (runner, note, runner.callbacks["made"]))
    assert "runner.callbacks['made'].lock stays in the process that trained" in capfd.readouterr().err


def test_two_stages_on_one_model_are_wrapped_once():
    """The second stage gets the bare module that the first one trained."""

    class Stages(dl.SupervisedRunner):
        stages = ("first", "second")

        def on_stage_start(self, runner):
            assert not isinstance(self.model, nn.parallel.DistributedDataParallel)

    model = mlp()
    runner = train(model, runner=Stages(), num_processes=2)

    assert runner.model is model
    assert runner.epoch_step == 2


COMMUNICATIONS = []


def counting_hook(state, bucket):
    """Average a bucket as DDP does, and count it."""
    COMMUNICATIONS.append(bucket.index())
    future = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class CountCommunications(dl.Callback):
    """A callback that reports the count from the rank."""

    def on_loader_end(self, runner):
        runner.loader_metrics["communications"] = len(COMMUNICATIONS)


def test_gradients_that_accumulate_are_not_communicated():
    """8 batches in steps of 4 average the one bucket twice, not eight times."""
    engine = dl.DistributedDataParallelEngine(2, device="cpu", comm_hook=(None, counting_hook))
    callbacks = [dl.OptimizerCallback("loss", accumulation_steps=4), CountCommunications()]

    runner = train(loaders={"train": loader(64, 4)}, callbacks=callbacks, engine=engine)

    assert runner.batch_step == 8
    assert runner.epoch_metrics["train"]["communications"] == 2


class TwoHeads(nn.Module):
    """A model that uses one of its two heads."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = mlp(), mlp()

    def forward(self, features):
        return self.used(features)


def test_find_unused_parameters_is_reachable():
    """A model with unused parameters trains."""
    model = TwoHeads()
    before = weights(model.used)

    train(model, engine=dl.DistributedDataParallelEngine(2, device="cpu", find_unused_parameters=True))

    assert not torch.equal(weights(model.used), before)
    assert torch.equal(weights(model.unused), weights(mlp()))


def test_unused_parameters_are_named_with_the_argument_that_allows_them():
    """Also if every process gets the same batches, so that the first step's gradients are equal without an exchange."""
    model = TwoHeads()
    model.used.requires_grad_(False)[0].weight.requires_grad_(True)  # torch's numbers count trained parameters only
    same = DataLoader(TensorDataset(torch.ones(64, 6), torch.ones(64, dtype=torch.long)), batch_size=4)

    for data, names in (
        (loader(64, 4), "'unused.0.weight', 'unused.0.bias', 'unused.3.weight', 'unused.3.bias'"),
        (same, "the parameters unused.0.weight, unused.0.bias, unused.3.weight, unused.3.bias:"),
    ):
        with pytest.raises(Exception, match=r"gradients|finished reduction") as raised:
            train(model, num_processes=2, loaders={"train": data})

        message = "".join([str(raised.value), *raised.value.__notes__])
        assert names in message
        assert "engine=dl.DistributedDataParallelEngine(find_unused_parameters=True)" in message


def _outlive_groups(num_groups):
    """Wrap a model, destroy the group, then release the wrapper, as when a traceback keeps it alive."""
    signal.alarm(60)  # ends the process wherever it hangs
    sys.setswitchinterval(1e-6)  # seconds; makes it more likely that a thread of the group is at work
    engine = dl.DistributedDataParallelEngine(1, device="cpu")
    for _ in range(num_groups):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        wrapped = engine.wrap(nn.Linear(2, 2))
        dist.all_gather([torch.zeros(1000)], torch.ones(1000))
        dist.destroy_process_group()
        del wrapped


def test_a_model_that_outlives_its_group_does_not_stand_still():
    """Before the fix, one of the first 30 such groups ended in a deadlock within torch."""
    spawn(partial(_outlive_groups, 200), num_processes=1, variables={})
