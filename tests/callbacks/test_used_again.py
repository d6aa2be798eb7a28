"""Callbacks that are used again: in a resumed run, in a second run or stage, and in an evaluation beside training."""

import json

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from runnerkit import dl
from tests.interrupt import Interrupt, at
from tests.tiny import loader, mlp, sgd, train, weights

LOADERS = {"train": loader(16, 4), "valid": loader(12, 4)}


def saving(folder, **options):
    return dl.CheckpointCallback(folder, content="runner", **options)


def test_batch_norm_that_was_frozen_trains_again_after_a_resume(tmp_path):
    """The checkpoint of the last frozen epoch holds its evaluation mode."""

    def run(folder, **options):
        freeze = dl.FreezeCallback(["0", "1"], until_epoch=1)
        return train(
            mlp(batch_norm=True), loaders=LOADERS, callbacks=[freeze], logdir=tmp_path / folder, **options
        ).model

    whole = run("whole", num_epochs=3)
    run("parts", num_epochs=1)
    resumed = run("parts", num_epochs=3, resume="auto")

    assert torch.equal(weights(whole), weights(resumed)) and whole[1].num_batches_tracked == 8


def test_an_evaluation_after_training_writes_and_asks_for_nothing(tmp_path):
    """Exports, gradient norms and rates are those of training."""
    runner = train(
        loaders=LOADERS, logdir=tmp_path, lr_scale="linear", callbacks=[dl.TracingCallback(), dl.GradNormCallback()]
    )
    before = (tmp_path / "traced_model.pt2").read_bytes()

    metrics = runner.evaluate_loader(loader(8, 4), model=mlp(seed=5))

    assert metrics["loss"] > 0 and (tmp_path / "traced_model.pt2").read_bytes() == before


def test_an_evaluation_within_training_leaves_the_scale_of_the_rate():
    """The warm-up counts each step."""
    scale, counts = dl.LRScaleCallback("linear", warmup_steps=9), []

    def evaluate(runner):
        if runner.batch_step == 2:
            runner.evaluate_loader(loader(8, 4))
        counts.append(*scale.num_steps.values())

    train(callbacks=[scale, at("on_step_end", evaluate)])

    assert counts == [1, 2, 3, 4]


@pytest.mark.parametrize("average", [dl.EMACallback(0.5), dl.SWACallback(1)], ids=["EMA", "SWA"])
def test_averages_of_weights_that_are_pruned_meanwhile_are_refused(average):
    """They would not be pruned."""
    with pytest.raises(ValueError, match=r"PruningCallback.* averages of .*leave out prune_on_epoch_end"):
        train(callbacks=[dl.PruningCallback(prune_on_epoch_end=True), average])


class LaterSaver(dl.Runner):
    """A runner of two stages, of which the second saves."""

    stages = ("first", "second")

    def __init__(self, folder, *, num_epochs, lr):
        super().__init__(model=mlp())
        self.folder, self.num_stage_epochs, self.lr = folder, num_epochs, lr

    def get_engine(self):
        return "cpu"

    def get_loggers(self):
        return {}

    def get_loaders(self, stage):
        return LOADERS

    def get_optimizer(self, stage, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def get_stage_len(self, stage):
        return 1 if stage == "first" else self.num_stage_epochs

    def get_callbacks(self, stage):
        options = {"monitor": "valid/loss", "load_best_on_end": True}
        return {} if stage == "first" else {"saves": dl.CheckpointCallback(self.folder, **options)}

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        self.batch_metrics["loss"] = loss
        self.learn(loss)


def test_a_later_stage_does_not_save_among_the_checkpoints_of_another_run(tmp_path):
    """Its best weights would be those of that run."""
    LaterSaver(tmp_path, num_epochs=3, lr=0.5).run()

    with pytest.raises(FileExistsError):
        LaterSaver(tmp_path, num_epochs=1, lr=0.0).run()


def test_stages_with_callbacks_of_their_own_may_save_in_one_folder(tmp_path):
    runner = LaterSaver(tmp_path, num_epochs=1, lr=0.1)
    runner.stages = ("second", "third")

    runner.run()

    assert runner.epoch_step == 2


def test_a_new_wrapper_of_the_same_checkpoints_in_each_stage(tmp_path):
    saver = dl.CheckpointCallback(tmp_path, monitor="valid/loss")

    class Stages(LaterSaver):
        def get_callbacks(self, stage):
            return {"saves": dl.ControlFlowCallback(saver, epochs=[1])}

    Stages("", num_epochs=1, lr=0.1).run()

    assert dl.SupervisedRunner(mlp()).load(tmp_path, which="best")


def test_a_soft_update_at_the_start_of_an_epoch_is_made_once(tmp_path):
    """A run that resumes within an epoch has made it."""

    class Two(dl.SupervisedRunner):
        def forward(self, batch, **kwargs):
            return {"logits": self.model["a"](batch["features"])}

    def run(folder, *callbacks, **options):
        models = {"a": mlp(), "t": mlp(seed=2)}
        own = [dl.SoftUpdateCallback("t", "a", 0.5, "on_epoch_start"), saving(folder, every_steps=2)]
        options = {"optimizer": sgd(models["a"]), "num_epochs": 2, **options}
        return train(models, runner=Two(), callbacks=[*own, *callbacks], **options)

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Interrupt(7))
    resumed = run(tmp_path / "parts", resume=tmp_path / "parts")

    assert torch.equal(weights(whole.model["t"]), weights(resumed.model["t"]))


def test_a_schedule_that_is_left_out_for_an_epoch_is_not_stepped_by_the_optimizer():
    """Steps of the optimizer step a schedule, too, if a batch has several."""
    rates, model = [], mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flow = dl.ControlFlowCallback(dl.SchedulerCallback(interval="step"), ignore_epochs=[1])

    note = at("on_epoch_end", lambda runner: rates.append(runner.optimizer.param_groups[0]["lr"]))
    train(model, optimizer=optimizer, scheduler=StepLR(optimizer, 1, 0.5), num_epochs=2, callbacks=[flow, note])

    assert rates == [1.0, 0.5**4]


def test_a_scale_that_is_left_out_for_an_epoch_counts_no_step():
    scale = dl.LRScaleCallback("linear", warmup_steps=9)

    train(num_epochs=2, callbacks=[dl.ControlFlowCallback(scale, epochs=[1])])

    assert scale.num_steps == {"": 4}


def test_an_evaluation_in_another_precision_leaves_that_of_the_criterion():
    seen = []

    class Criterion(nn.CrossEntropyLoss):
        def forward(self, *args):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(*args)

    def evaluate(runner):
        if runner.batch_step == 2:
            runner.evaluate_loader(loader(4, 4), precision="fp32", cpu=True)

    train(criterion=Criterion(), engine="cpu", precision="bf16", callbacks=[at("on_step_end", evaluate)])

    assert seen == [True, True, False, True, True]


def test_a_schedule_begins_again_after_a_run_that_failed():
    """The batch that failed had stepped the optimizer only."""
    schedule, fails = dl.SchedulerCallback(interval="step"), at("on_batch_end", lambda runner: 1 / 0, order=70)

    def run(*callbacks):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        train(model, optimizer=optimizer, scheduler=StepLR(optimizer, 1, 0.5), callbacks=[schedule, *callbacks])
        return optimizer.param_groups[0]["lr"]

    with pytest.raises(ZeroDivisionError):
        run(fails)

    assert run() == 0.5**4


def test_an_interrupted_search_of_a_rate_gives_the_rate_back():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer=optimizer, callbacks=[dl.LRFinder(10.0), Interrupt(3)])

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_logger_of_a_run_that_failed_logs_the_epoch_again(tmp_path):
    logger, fails = dl.JSONLLogger(tmp_path), at("on_loader_end", lambda runner: 1 / runner.is_train_loader)
    options = {"loaders": LOADERS, "loggers": {"console": None, "jsonl": logger}, "logdir": tmp_path, "resume": "auto"}

    with pytest.raises(ZeroDivisionError):
        train(callbacks=[fails], **options)
    train(**options)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loader"], line["epoch"]) for line in lines] == [("train", 1), ("valid", 1)]


def test_each_run_is_profiled(tmp_path):
    profiler = dl.ProfilerCallback(tmp_path / "trace.json", num_batches=2)

    train(callbacks=[profiler])
    (tmp_path / "trace.json").unlink()
    train(callbacks=[profiler])

    assert (tmp_path / "trace.json").exists()


def test_operations_are_counted_for_each_model():
    """A second run with the same callback has a larger model."""
    callback, found = dl.SystemMetricsCallback(peak_flops=1e9), []

    for width in (1, 100):
        train(nn.Sequential(nn.Linear(6, 3 * width), nn.Linear(3 * width, 3)), callbacks=[callback])
        found.append(callback.flops_per_sample)

    assert found[1] == 100 * found[0]


def test_an_evaluation_keeps_the_number_of_operations():
    """They are those of the training batch."""
    callback = dl.SystemMetricsCallback(peak_flops=1e9)

    runner = train(callbacks=[callback])
    counted = callback.flops_per_sample
    runner.evaluate_loader(loader(8, 4), cpu=True)

    assert counted is not None and callback.flops_per_sample == counted


def test_skipped_steps_are_counted_across_a_resume(tmp_path):
    """The gradient scaler skips the first steps of the epoch."""

    def run(folder, *callbacks, **options):
        engine = dl.CPUEngine(precision=dl.AMP(torch.float16, scaler={"init_scale": 2.0**24}))
        saver = saving(folder, every_steps=2)
        return train(engine=engine, loaders={"train": loader(40, 4)}, callbacks=[saver, *callbacks], **options)

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Interrupt(9))
    resumed = run(tmp_path / "parts", resume=tmp_path / "parts")

    skipped = [each.epoch_metrics["train"]["skipped_steps"] for each in (whole, resumed)]
    assert skipped[0] == skipped[1] > 0


class Learns(dl.SupervisedRunner):
    """A runner whose only metrics are those of callbacks."""

    steps_itself = True

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.learn(nn.functional.cross_entropy(self.batch["logits"], self.batch["targets"]))


@pytest.mark.parametrize("metric", [None, "accuracy", "all"])
def test_a_process_without_a_sample_computes_no_aggregate_of_metrics(metric):
    """9 samples in batches of 4 and two processes: the last step has one sample."""
    names = {None: ["accuracy", "loss"], "accuracy": {"accuracy": 0.0, "loss": 1.0}, "all": None}[metric]
    reduction = "weighted_sum" if metric == "accuracy" else "mean"
    callbacks = [dl.AccuracyCallback(), dl.MetricAggregationCallback("score", names, reduction)]
    options = {"runner": Learns(), "criterion": None} if metric == "all" else {}

    runner = train(num_processes=2, loaders={"train": loader(9, 4)}, callbacks=callbacks, **options)

    assert runner.epoch_metrics["train"]["score"] > 0


def test_frozen_epochs_and_checkpoints_without_frozen_parameters_are_refused(tmp_path):
    """A checkpoint leaves out what is frozen when it is saved, and needs it when it is loaded."""
    wrapped = dl.ControlFlowCallback(dl.FreezeCallback("0"), epochs=[2])
    for freeze in (dl.FreezeCallback("0", until_epoch=1), wrapped):
        with pytest.raises(ValueError, match=r"trainable_only=True.* FreezeCallback .*leave out trainable_only"):
            train(callbacks=[freeze, dl.CheckpointCallback(tmp_path, trainable_only=True)])


def test_what_an_earlier_stage_trained_is_not_left_out_of_checkpoints(tmp_path):
    class Stages(LaterSaver):
        def get_callbacks(self, stage):
            saver = dl.CheckpointCallback(tmp_path, trainable_only=True)
            return {} if stage == "first" else {"freezes": dl.FreezeCallback("0"), "saves": saver}

    with pytest.raises(ValueError, match="leave out trainable_only"):
        Stages("", num_epochs=1, lr=0.1).run()


def test_a_pruned_model_is_pruned_further_in_a_later_stage():
    """Weights do not grow back; another model has not been pruned."""
    pruning, logged = dl.PruningCallback(amount=0.5, prune_on_epoch_end=True), []

    class Stages(LaterSaver):
        def get_model(self, stage):
            return self.model

        def get_callbacks(self, stage):
            note = at("on_epoch_end", lambda runner: logged.append(runner.epoch_metrics["train"]["sparsity"]))
            return {"prunes": pruning, "note": note}

    Stages("", num_epochs=2, lr=0.1).run()
    Stages("", num_epochs=1, lr=0.1).run()

    assert logged == pytest.approx([0.5, 0.75, 0.875, 0.5, 0.75], abs=0.02)


def test_a_pruned_model_that_ended_with_better_earlier_weights_is_pruned_on(tmp_path):
    """They have fewer zeros than the masks; a layer that was replaced has none."""
    pruning, zeros = dl.PruningCallback(amount=0.5, prune_on_epoch_end=True), []

    class Stages(LaterSaver):
        def get_model(self, stage):
            if stage == "second":
                self.model[-1] = nn.Linear(16, 3)
            return self.model

        def get_stage_len(self, stage):
            return 3 if stage == "first" else 1

        def get_callbacks(self, stage):
            best = dl.CheckpointCallback(tmp_path, monitor="valid/loss", mode="max", load_best_on_end=True)
            layers = [self.model[0], self.model[-1]]
            note = at("on_epoch_end", lambda runner: zeros.append([(each.weight == 0).sum() for each in layers]))
            return {"prunes": pruning, "note": note} | ({"saves": best} if stage == "first" else {})

    Stages("", num_epochs=1, lr=0.5).run()

    assert zeros == [[48, 24], [72, 36], [84, 42], [72, 24]]


def test_a_model_that_begins_at_zero_has_no_masks_of_an_earlier_run():
    pruning, logged = dl.PruningCallback(amount=0.5, prune_on_epoch_end=True), []

    for _ in range(2):
        model = nn.Linear(6, 3)
        nn.init.zeros_(model.weight)
        runner = train(model, optimizer=sgd(model), callbacks=[pruning])
        logged.append(runner.epoch_metrics["train"]["sparsity"])

    assert logged == [0.5, 0.5]


def test_a_loader_that_is_left_out_keeps_its_place_in_a_resumed_run(tmp_path):
    """Loaders that continue from epoch to epoch, of which one runs in every second epoch."""
    seen = {}

    class Notes(dl.SupervisedRunner):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            seen.setdefault((self.folder, self.epoch_step, self.loader_key), []).append(
                self.batch["features"].sum().item()
            )

    def run(folder, *callbacks, **options):
        runner = Notes()
        runner.folder = folder.name
        loaders = {"train_a": loader(16, 4), "train_b": loader(16, 4, seed=1), "valid": loader(8, 4)}
        periodic = dl.PeriodicLoaderCallback(monitor="valid/loss", train_b=2, valid=1)
        own = [periodic, saving(folder, every_steps=1), *callbacks]
        options = {"loaders": loaders, "epoch_steps": 2, "num_epochs": 4, **options}
        return train(runner=runner, callbacks=own, **options)

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Interrupt(8))
    run(tmp_path / "parts", resume=tmp_path / "parts")

    assert seen["whole", 4, "train_b"] == seen["parts", 4, "train_b"] != seen["whole", 2, "train_b"]


def test_no_worker_of_a_loader_that_is_left_out_outlives_a_failure():
    loaders = {"train_a": loader(16, 4), "train_b": loader(16, 4, num_workers=1), "valid": loader(8, 4)}
    periodic = dl.PeriodicLoaderCallback(monitor="valid/loss", train_b=2, valid=1)
    fails = at("on_loader_end", lambda runner: 1 / (3 - runner.epoch_step))
    before = {*torch.multiprocessing.active_children()}

    with pytest.raises(ZeroDivisionError):
        train(loaders=loaders, epoch_steps=2, num_epochs=3, callbacks=[periodic, fails])

    assert {*torch.multiprocessing.active_children()} <= before


def test_a_search_of_a_rate_that_is_refused_leaves_the_new_optimizers_rate():
    finder, model = dl.LRFinder(10.0), mlp()
    train(model, optimizer=sgd(model, lr=0.001), callbacks=[finder])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    with pytest.raises(ValueError, match="scheduler"):
        train(model, optimizer=optimizer, scheduler=StepLR(optimizer, 1), callbacks=[finder])

    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_run_that_is_resumed_before_it_pruned_has_no_masks_of_the_failed_one(tmp_path):
    def run(model, pruning, *others, **options):
        callbacks = [pruning, saving(tmp_path, every_steps=2), *others]
        return train(model, loaders=LOADERS, callbacks=callbacks, **options)

    whole = train(loaders=LOADERS, callbacks=[dl.PruningCallback(amount=0.5, prune_on_epoch_end=True)])
    model, pruning = mlp(), dl.PruningCallback(amount=0.5, prune_on_epoch_end=True)

    def fail(runner):
        if not runner.is_train_loader:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, pruning, at("on_loader_end", fail, order=200))
    resumed = run(model, pruning, resume=tmp_path)

    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_the_logged_rate_is_unscaled_in_epochs_without_scaling(monkeypatch):
    monkeypatch.setattr(dl.LRScaleCallback, "factor", lambda self, *, world_size, step: 4.0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    callback = dl.ControlFlowCallback(dl.LRScaleCallback("linear"), epochs=[1])
    runner = train(model, optimizer=optimizer, num_epochs=2, callbacks=[callback])

    rates = [each["train"]["lr"] for each in runner.experiment_metrics.values()]
    assert rates == pytest.approx([0.4, 0.1])


def test_weights_that_are_never_trained_may_be_left_out_of_checkpoints_of_the_model(tmp_path):
    saver = dl.CheckpointCallback(tmp_path, trainable_only=True)
    runner = train(callbacks=[dl.FreezeCallback("0"), saver])
    assert runner.epoch_metrics["train"]["loss"] > 0

    model = mlp()
    model[0].requires_grad_(False)
    assert torch.equal(weights(dl.SupervisedRunner(model).load(tmp_path, which="last").model), weights(runner.model))
