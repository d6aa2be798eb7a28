"""Tests that bad input is reported before training and that no file is written or lost."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from runnerkit import dl, utils
from tests.interrupt import at
from tests.tiny import classification, loader, mlp, quiet, sgd, train

LOADERS = {"train": loader(16, 4), "valid": loader(8, 4)}


class Loss(dl.Runner):
    """Runner that writes `value(logits)` as the loss."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def handle_batch(self, batch):
        value = self.value(self.model(batch[0]))
        if value is not None:
            self.batch_metrics["loss"] = value

    def get_callbacks(self, stage):
        steps = {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}
        return {**steps, **super().get_callbacks(stage)}


class Silent(nn.Linear):
    """A model that forgets to return."""

    def __init__(self):
        super().__init__(6, 3)

    def forward(self, features):
        super().forward(features)


OF_ANOTHER = {
    "RandomSampler": RandomSampler(classification(16)),
    "DistributedSampler": DistributedSampler(classification(16), num_replicas=1, rank=0),
    "SubsetRandomSampler": SubsetRandomSampler([0, 15]),
    "WeightedRandomSampler": WeightedRandomSampler([1.0] * 16, num_samples=8),
    "BalanceClassSampler": dl.BalanceClassSampler([0, 1] * 8),
    "a sampler of batches": None,
}


@pytest.mark.parametrize("name", OF_ANOTHER)
def test_a_sampler_of_a_longer_data_set_is_refused_before_training(name):
    """The sampler would raise IndexError during validation, after a whole training epoch."""
    steps = []
    sampler = OF_ANOTHER[name]
    batches = {"batch_sampler": BatchSampler(RandomSampler(classification(16)), 4, drop_last=False)}
    valid = loader(8, **({"batch_size": 4, "sampler": sampler} if sampler else {"batch_size": 1, **batches}))
    with pytest.raises(ValueError, match=r"loader 'valid' has a data set of 8 samples and a \w+Sampler made for 16"):
        train(loaders={"train": loader(16, 4), "valid": valid}, callbacks=[at("on_batch_start", steps.append)])
    assert steps == []


@pytest.mark.parametrize(
    ("sampler", "num_warnings"),
    [(RandomSampler(classification(8)), 1), (RandomSampler(range(8)), 0), (SubsetRandomSampler([1, 3]), 0)],
    ids=["of a shorter data set", "of a range", "of a subset"],
)
def test_a_sampler_that_never_reads_the_last_samples_is_warned_of(caplog, sampler, num_warnings):
    """A sampler made for fewer samples than the data set has causes a warning, unless it evidently selects a subset."""
    train(loaders={"train": loader(16, 4, sampler=sampler)})

    assert caplog.text.count("loader 'train' has a data set of 16 samples") == num_warnings


class OwnSampler(Sampler):
    """A user's own sampler, which torch does not know."""

    def __init__(self, data_source):
        self.data_source = data_source

    def __iter__(self):
        return iter(range(len(self.data_source)))

    def __len__(self):
        return len(self.data_source)


def test_a_sampler_of_the_users_own_for_another_data_set_is_warned_of_before_training(caplog):
    """The meaning of its `data_source` is a guess, so it is not refused: the IndexError after the epoch is kept."""
    valid = loader(8, 4, sampler=OwnSampler(classification(16)))

    with pytest.raises(IndexError):
        train(loaders={"train": loader(16, 4), "valid": valid})

    assert "loader 'valid' has a data set of 8 samples and a OwnSampler made for 16" in caplog.text


class NoBackward(dl.Runner):
    def handle_batch(self, batch):
        self.batch_metrics["error"] = self.model(batch[0]).mean()


def losing(value):
    return {"runner": Loss(value), "criterion": None}


def of(batch):
    return {"loaders": {"train": [batch]}}


def saver(monitor, logdir="log"):
    return dl.CheckpointCallback(logdir, monitor=monitor, mode="min")


BAD = {
    "loaders empty": ({"loaders": {}}, ValueError, "loaders is empty"),
    "loaders no dict": ({"loaders": loader(8, 4)}, TypeError, "loaders must be a dict .* got DataLoader"),
    "loaders missing": ({"loaders": None}, ValueError, "pass loaders="),
    "loader None": ({"loaders": {"train": None}}, TypeError, "loader 'train' is a NoneType"),
    "loader empty": ({"loaders": {"train": []}}, ValueError, "loader 'train' is empty"),
    "loader dropped": ({"loaders": {"train": loader(3, 4, drop_last=True)}}, ValueError, "3 samples.* drop_last=True"),
    "loader of the monitor misspelt": ({"monitor": "vaild/loss"}, ValueError, r"'vaild'; the loaders"),
    "metric of the monitor misspelt": (
        {"monitor": "valid/acuracy", "mode": "max"},
        KeyError,
        r"'acuracy' of loader 'valid', which has \['",
    ),
    "data set in place of a loader": ({"loaders": {"train": classification(8)}}, TypeError, "pass DataLoader"),
    "scheduler of another optimizer": (
        {"scheduler": StepLR(sgd(mlp()), 1)},
        ValueError,
        "steps an optimizer other than",
    ),
    "scheduler made for another": (
        {"scheduler": lambda *_: StepLR(sgd(mlp()), 1)},
        ValueError,
        "an optimizer other than",
    ),
    "scheduler is a class": ({"scheduler": StepLR}, TypeError, "the class StepLR; pass"),
    "criterion is a class": ({"criterion": nn.CrossEntropyLoss}, TypeError, "instance of it: CrossEntropyLoss"),
    "optimizer is a class": ({"optimizer": torch.optim.SGD}, TypeError, "optimizer is the class SGD"),
    "engine is a misspelt name": ({"engine": "dpp"}, ValueError, "unknown engine 'dpp'"),
    "engine is a class": ({"engine": dl.CPUEngine}, TypeError, "class CPUEngine; pass an instance of it: CPUEngine"),
    "callback is a class": ({"callbacks": [dl.BackwardCallback]}, TypeError, "instance of it: BackwardCallback"),
    "callback alone": (lambda: {"callbacks": dl.BackwardCallback("loss")}, TypeError, "BackwardCallback; put it in"),
    "optimizer of another model": ({"optimizer": sgd(mlp())}, ValueError, "none of which belongs to the model"),
    "engine and flag": (
        {"engine": dl.CPUEngine(), "ddp": True},
        ValueError,
        "engine=CPUEngine and ddp=True contradict",
    ),
    "two precisions": ({"amp": True, "fp16": True}, ValueError, "choose one precision"),
    "apex on the CPU": ({"apex": True}, ValueError, "cpu=True, apex=True: Apex needs a GPU"),
    "no epochs": ({"num_epochs": 0}, ValueError, "train: num_epochs must be >= 1 .*got 0"),
    "epochs in parts": ({"num_epochs": 1.5}, TypeError, "num_epochs must be an integer >= 1 .*got 1.5"),
    "steps in parts": ({"valid_every_steps": 2.5}, TypeError, "valid_every_steps .* integer >= 1 or None, got 2.5"),
    "logs in parts": ({"log_every": 0.5}, TypeError, "train: log_every must be an integer >= 1 or None, got 0.5"),
    "resume by a flag": ({"resume": True}, TypeError, r'resume=True is not a path: .* or "auto" to train'),
    "resume of nothing": ({"resume": "no/such/file.pth"}, FileNotFoundError, "no/such/file.pth"),
    "resume of an empty logdir": ({"resume": "."}, FileNotFoundError, "nothing to resume from"),
    "target key missing": (
        of({"features": torch.zeros(2, 6)}),
        KeyError,
        "reads 'targets' of a batch of loader 'train'",
    ),
    "input key missing": (
        of({"image": torch.zeros(2, 6)}),
        KeyError,
        r"\['features'\] not in the batch of loader 'train'",
    ),
    "batch too long": (of((torch.zeros(3, 6), 2, 3)), TypeError, "tuple of 3, not a dict"),
    "callback is none": ({"callbacks": [print]}, TypeError, "expected a runnerkit Callback"),
    "clip params alone": (
        lambda: dl.BackwardCallback("loss", grad_clip_params={"max_norm": 1}),
        ValueError,
        "needs grad_clip_fn",
    ),
    "clip name unknown": (lambda: dl.BackwardCallback("loss", grad_clip_fn="clip_it"), ValueError, "clip_grad_norm_"),
    "hours of another callback": (
        lambda: {"max_hours": 1, "callbacks": [dl.CheckpointCallback("log")]},
        ValueError,
        "does not reach your CheckpointCallback: pass it there",
    ),
    "best of another callback": (
        lambda: {"load_best_on_end": True, "callbacks": [dl.CheckpointCallback("log")]},
        ValueError,
        "needs one CheckpointCallback with monitor=.* has 0 of them",
    ),
    "best of two": (
        lambda: {"load_best_on_end": True, "callbacks": [saver("train/loss"), saver("valid/loss", "other")]},
        ValueError,
        "needs one CheckpointCallback with monitor=.* has 2 of them",
    ),
    "best of two monitors": (
        lambda: {"load_best_on_end": True, "monitor": "train/loss", "callbacks": [saver("valid/loss")]},
        ValueError,
        "monitor='train/loss' differs from the 'valid/loss' of your CheckpointCallback",
    ),
    "what is best": ({"monitor": "valid/accuracy"}, ValueError, "write mode='min' if smaller values are better"),
    "no steps": ({"num_steps": 0}, ValueError, "num_steps must be >= 1 .*got 0"),
    "samples in parts": ({"num_samples": 1.5}, TypeError, "num_samples must be an int"),
    "hours below zero": ({"max_hours": -1}, ValueError, "max_hours must be > 0 or None, got -1"),
    "hours without a logdir": ({"max_hours": 1, "logdir": None}, ValueError, r"train\(max_hours=1\) .*: pass logdir="),
    "no accumulation": ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be >= 1, got 0"),
    "no gradient": ({"gradient_clip": 0}, ValueError, "gradient_clip must be > 0 or None, got 0"),
    "unknown reduction": ({"loss_reduction": "max"}, ValueError, "loss_reduction must be 'mean' or 'sum', got 'max'"),
    "no optimizer made": ({"optimizer": lambda parameters: None}, TypeError, "optimizer= returned NoneType; it must"),
    "no scheduler made": ({"scheduler": lambda optimizer, num_steps: 0.1}, TypeError, "scheduler= returned float; it"),
    "optimizer of two": ({"optimizer": lambda model, lr: 0}, TypeError, r"optimizer= is a function \(model, lr\), but"),
    "scheduler of one": ({"scheduler": lambda made: 0}, TypeError, r"scheduler= is a function \(made\), but is called"),
    "no loss": (losing(lambda logits: None), KeyError, "batch_metrics of batch 1 of loader 'train' lack 'loss'"),
    "no criterion": ({"criterion": None}, KeyError, "lack 'loss' .* pass criterion="),
    "criterion without return": (
        {"criterion": lambda *given: None},
        ValueError,
        "'loss' in batch 1 .* is None; is a return",
    ),
    "forward without return": (lambda: {"model": Silent()}, TypeError, "the model returned None"),
    "frozen model": (lambda: {"model": mlp().requires_grad_(False)}, ValueError, "parameters of the model are frozen"),
    "several losses": (losing(lambda logits: logits), ValueError, r"batch 1 .* must be a scalar .* shape \(4, 3\)"),
    "loss is a number": (losing(lambda logits: logits.mean().item()), ValueError, "with a graph, got a float"),
    "detached": (losing(lambda logits: logits.mean().detach()), ValueError, "without a graph"),
    "NaN": (losing(lambda logits: logits.mean() * float("nan")), ValueError, "is nan in batch 1 of .*'train', rank 0"),
    "infinite": (losing(lambda logits: logits.mean() * float("inf")), ValueError, "'loss' is -?inf in batch 1"),
    "no gradients": (
        lambda: {"runner": NoBackward(), "criterion": None, "callbacks": [dl.OptimizerCallback("loss")]},
        RuntimeError,
        r"add BackwardCallback\('loss'\)",
    ),
    "best of nothing": ({"load_best_on_end": True}, ValueError, "needs monitor=, such as"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, monkeypatch, name):
    """The error shows the expected and the given value; no logs or checkpoints are written."""
    monkeypatch.chdir(tmp_path)
    arguments, error, message = BAD[name]

    with pytest.raises(error, match=message):
        train(**{"logdir": "log", "loaders": LOADERS, **(arguments() if callable(arguments) else arguments)})

    assert not list(tmp_path.glob("log/checkpoints/*.pth"))
    assert not list(tmp_path.glob("log/csv/*.csv"))
    if "metric" in name:
        assert not (tmp_path / "log").exists(), "the corrected call needs an unused logdir"


def test_a_refused_call_leaves_the_runner_as_it_was():
    """A corrected call, or one without the argument, does not meet what an earlier one left."""
    runner = dl.SupervisedRunner()
    before = dict(vars(runner))

    bad = ({"log_every": 0}, {"resume": "auto"}, {"monitor": "valdi/loss"}, {"loggers": {"csv": 3}}, {"hparams": 3})
    for refused in bad:
        with pytest.raises((ValueError, TypeError, KeyError)):
            train(runner=runner, **{"loaders": LOADERS, "gradient_clip": 1.0, "seed": 1, **refused})

    assert vars(runner) == before


def test_a_loss_that_becomes_nan_ends_the_run_before_the_next_checkpoint(tmp_path):
    """The last checkpoint is still that of the previous epoch, with finite weights."""

    def spoil(runner):
        if runner.epoch_step == 2 and runner.loader_batch_step == 2:
            runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("nan")

    with pytest.raises(ValueError, match="'loss' became nan within epoch 2 of loader 'train'"):
        train(callbacks=[at("on_batch_end", spoil, order=30)], num_epochs=3, logdir=tmp_path / "log")

    state = utils.load_checkpoint(tmp_path / "log" / "checkpoints" / "last.pth")
    assert state["counters"]["epoch_step"] == 1
    assert all(torch.isfinite(each).all() for each in state["model_state_dict"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_steps": 0}, "every_steps must be >= 1 or None, got 0"),
        ({"content": "weights"}, "content must be 'model' or 'runner', got 'weights'"),
        ({"monitor": "valid"}, "monitor must be 'loader/metric', got 'valid'; write monitor='valid/loss'"),
        ({"monitor": "valid/mae"}, "monitor='valid/mae' needs a mode: write mode='min' if smaller values are better"),
        ({"load_best_on_end": True}, "load_best_on_end=True needs monitor="),
        ({"max_hours": 1}, "max_hours saves the full state, to resume: pass content='runner'"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(tmp_path, arguments, message):
    """The constructor rejects contradictory or out-of-range arguments."""
    with pytest.raises(ValueError, match=message):
        dl.CheckpointCallback(tmp_path, **arguments)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_new_run_never_mixes_with_an_old_one(tmp_path, num_processes):
    """A logdir with another run's logs is refused and its files stay unchanged, with DDP too."""
    train(logdir=tmp_path / "log", num_epochs=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    with pytest.raises(FileExistsError, match='resume="auto"'):
        train(logdir=tmp_path / "log", num_processes=num_processes)

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("logdir", "error", "words"),
    [
        ("checkpoints", NotADirectoryError, "to logdir .*checkpoints: it is a file; choose another one"),
        ("checkpoints/log", NotADirectoryError, "to logdir .*checkpoints/log: Not a directory; choose another one"),
        ("", FileExistsError, r".*checkpoints: File exists; what was"),
    ],
)
def test_a_logdir_that_cannot_be_written_is_named(tmp_path, caplog, logdir, error, words):
    """The error comes before training, without a warning about locks or the free disk space."""
    (tmp_path / "checkpoints").write_text("in the way")

    with pytest.raises(error, match=f"cannot write {words}") as caught:
        train(logdir=tmp_path / logdir)

    assert not caplog.records and "MB" not in str(caught.value)


def test_resume_of_a_foreign_file_is_refused(tmp_path):
    """Files of other programs are refused."""
    torch.save({"weights": torch.zeros(2)}, tmp_path / "foreign.pth")

    with pytest.raises(ValueError, match="does not hold a whole run"):
        train(resume=tmp_path / "foreign.pth")


def test_a_runner_without_a_model_says_so():
    """A runner that neither is given a model nor overrides get_model raises a ValueError."""
    with pytest.raises(ValueError, match="needs a model: pass model= or override get_model"):
        dl.SupervisedRunner().train(loaders={"train": loader(8, 4)}, cpu=True, **quiet())


def test_checkpoints_of_another_run_are_refused_without_loggers_too(tmp_path):
    """A folder of checkpoints belongs to one run."""

    def checkpoint():
        return dl.CheckpointCallback(tmp_path, content="model")

    train(callbacks=[checkpoint()])

    with pytest.raises(FileExistsError, match="holds the checkpoints of another run"):
        train(callbacks=[checkpoint()])


def test_resuming_one_run_does_not_touch_the_logs_of_another(tmp_path):
    """`resume=A, logdir=B` starts a new run in B, which must be unused."""
    train(logdir=tmp_path / "a", num_epochs=2)
    train(logdir=tmp_path / "b", num_epochs=3)
    before = (tmp_path / "b" / "csv" / "train.csv").read_bytes()

    with pytest.raises(FileExistsError):
        train(logdir=tmp_path / "b", resume=tmp_path / "a", num_epochs=4)
    runner = train(logdir=tmp_path / "c", resume=tmp_path / "a", num_epochs=3)

    assert (tmp_path / "b" / "csv" / "train.csv").read_bytes() == before
    assert runner.epoch_step == 3


def test_hooks_that_are_misspelt_are_warned_of_by_name(caplog):
    """Methods of callbacks, wrapped ones too, and runners cause one warning each if their names resemble an event's."""

    class Misspelt(dl.Callback):
        on_bacth_start = on_train_epoch_end = on_plateau = on_load_checkpoint = lambda self, runner: None
        on_epoch_ends = 3

        def on_epoch_end(self, runner):
            pass

    class Mine(dl.SupervisedRunner):
        def on_epochs_end(self, runner):
            pass

    train(runner=Mine(), callbacks=[Misspelt(), dl.ControlFlowCallback(Misspelt(), epochs=2)], num_epochs=2)

    assert [record.getMessage() for record in caplog.records] == [
        "Mine.on_epochs_end is never called; did you mean the event on_epoch_end?",
        "Misspelt.on_bacth_start is never called; did you mean the event on_batch_start?",
        "Misspelt.on_train_epoch_end is never called; did you mean the event on_epoch_end?",
    ]


@pytest.mark.parametrize("key", ["train/../../../x", "/x", "..", "train/\0x"])
def test_a_loader_key_that_leads_out_of_the_logdir_is_refused(tmp_path, key):
    """CSV files and TensorBoard folders are named after the loader key."""
    with pytest.raises(ValueError, match="they would be outside the logdir"):
        train(loaders={"train": loader(16, 4), key: loader(8, 4)}, logdir=tmp_path / "a" / "b" / "log")

    assert not list(tmp_path.rglob("x*"))


def test_several_loaders_where_one_is_wanted_and_flags_are_refused():
    """A dict of loaders would be iterated as if its keys were batches; pathlib's error would not name `resume`."""
    runner, loaders = dl.SupervisedRunner(mlp()), {"valid": loader(8, 4)}
    words = r"takes one loader, got a dict of \['valid'\]: pass loaders\['valid'\]"

    with pytest.raises(TypeError, match=f"evaluate_loader {words}"):
        runner.evaluate_loader(loaders, cpu=True)
    with pytest.raises(TypeError, match=f"a prediction {words}"):
        list(runner.predict_loader(loader=loaders, cpu=True))
    with pytest.raises(TypeError, match="resume=True is not a path: pass the path of a checkpoint or of a logdir"):
        list(runner.predict_loader(loader=loaders["valid"], resume=True, cpu=True))


def test_an_evaluation_that_finds_no_metrics_says_so(caplog):
    """The warning says what to pass; an evaluation with a metric callback does not warn."""
    runner = dl.SupervisedRunner(mlp())

    found = runner.evaluate_loader(loader(8, 4), callbacks=[dl.AccuracyCallback("logits", "targets")], cpu=True)
    assert found and not caplog.records
    nothing = runner.evaluate_loader(loader(8, 4), cpu=True)

    assert nothing == {}
    [message] = caplog.messages
    assert message.startswith("evaluate_loader found no metrics: ") and "pass criterion=, or " in message


class Hooks(dl.IRunner):
    """A runner that returns loaders of the keys that it is given, and an optimizer if it is told to."""

    def __init__(self, *keys, optimizes=True, stage="train"):
        super().__init__(mlp(), dl.CPUEngine())
        self.keys, self.optimizes, self.stage = keys, optimizes, stage

    @property
    def stages(self):
        return [self.stage]

    def get_loaders(self, stage):
        return {key: loader(8, 4) for key in self.keys}

    def get_optimizer(self, stage, model):
        return sgd(model) if self.optimizes else None

    def handle_batch(self, batch):
        self.batch_metrics["loss"] = nn.functional.cross_entropy(self.model(batch[0]), batch[1])


@pytest.mark.parametrize("key", ["fit", "Fit", "Train", "TRAIN", "Training", "trian", "Train/a", "tain"])
@pytest.mark.parametrize("optimizes", [True, False])
def test_a_loader_that_was_meant_to_be_trained_on_is_refused(key, optimizes):
    """Only keys that start with "train" are trained on; without an error such a run would only evaluate."""
    with pytest.raises(ValueError, match=rf"only loaders whose key starts with 'train'.*'train' for '{key}'"):
        Hooks(key, "valid", optimizes=optimizes).run()
    with pytest.raises(ValueError, match=rf"the loaders are \['{key}', 'valid'\], but only loaders whose key starts"):
        train(loaders={key: loader(8, 4), "valid": loader(8, 4)})


@pytest.mark.parametrize(
    ("runner", "num_warnings"),
    [
        (Hooks("data", "valid"), 1),
        (Hooks("valid"), 1),
        (Hooks("brain", "treatment", "test", optimizes=False), 0),
        (Hooks("train", "Train", "fit"), 0),
        (Hooks("fit", stage="infer"), 0),
    ],
)
def test_a_run_with_an_optimizer_that_trains_on_no_loader_says_so(caplog, runner, num_warnings):
    runner.run()

    assert caplog.text.count("trains nothing: the loaders are") == num_warnings
    assert not num_warnings or "starts with 'train'" in caplog.text


@pytest.mark.parametrize(("keys", "num_warnings"), [(["train"], 1), (["train", "valid"], 0)])
def test_an_interval_of_evaluations_without_a_loader_to_evaluate_is_warned_of(caplog, keys, num_warnings):
    """Otherwise nobody would notice that nothing is evaluated."""
    train(loaders={key: loader(8, 4) for key in keys}, valid_every_steps=1)

    assert caplog.text.count("valid_every_steps=1 evaluates nothing") == num_warnings


class Steps(Hooks):
    def get_callbacks(self, stage):
        return {"optimizer": dl.OptimizerCallback("loss")}


FORGOTTEN = {
    "callbacks": ({"get_callbacks": lambda self: [dl.TimerCallback()]}, TypeError, "get_callbacks .* a dict .* list"),
    "loggers": ({"get_loggers": lambda self: None}, TypeError, "loggers must be a dict .* got NoneType"),
    "one stage": ({"stages": "train"}, TypeError, "stages must be a list of names, got 'train'"),
    "no stage": ({"stages": ()}, ValueError, "stages is empty"),
    "model": ({"get_model": lambda self: None}, TypeError, "get_model returned None"),
    "optimizer": ({"get_optimizer": lambda self, model: None}, KeyError, "an optimizer.* return it in get_optimizer"),
    "learn": (
        {"steps_itself": True, "get_callbacks": lambda self: {}, "get_optimizer": lambda self, model: None,
         "handle_batch": lambda self, batch: self.learn(self.model(batch[0]).sum())},
        KeyError,
        "learn.. needs an optimizer.* return it in get_optimizer",
    ),
    "criterion": (
        {"get_callbacks": lambda self: {"loss": dl.CriterionCallback("logits", "targets")}},
        KeyError,
        "needs a criterion.* return it in get_criterion",
    ),
    "init": ({"__init__": lambda self, key: None}, TypeError, "Wrong.__init__ must call super"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_hook_that_forgets_something_is_named(name):
    """A missing return, a list in the place of a dict, or an ``__init__`` of its own: the error says what to write."""
    members, error, message = FORGOTTEN[name]

    with pytest.raises(error, match=message):
        type("Wrong", (Steps,), members)("train").run()


def test_a_logger_that_is_none_is_left_out_by_the_hook_too():
    """``None`` disables a logger, as in ``train``."""
    runner = type("Quiet", (Hooks,), {"get_loggers": lambda self: {"mine": None}})("train").run()

    assert runner.epoch_step == 1


@pytest.mark.parametrize("call", ["evaluate_loader", "predict_loader"])
def test_a_runner_that_is_not_initialized_says_so(call):
    """Its ``__init__`` must call that of the base class, whatever is called first."""
    runner = type("Wrong", (dl.SupervisedRunner,), {"__init__": lambda self: None})()

    with pytest.raises(TypeError, match=r"Wrong.__init__ must call super\(\)"):
        [*getattr(runner, call)(loader(8, 4), model=mlp())]


def test_two_lengths_of_a_run_contradict_each_other():
    """Otherwise the one that is passed to ``train`` would be ignored."""
    runner = type("Long", (dl.SupervisedRunner,), {"num_epochs": 3})()

    with pytest.raises(ValueError, match=r"num_epochs=2\) contradicts Long.num_epochs, 3"):
        train(runner=runner, num_epochs=2)


class Two(nn.Linear):
    def __init__(self, kind):
        super().__init__(6, 3)
        self.kind = kind

    def forward(self, features):
        return self.kind([("logits", super().forward(features)), ("hidden", features)])


@pytest.mark.parametrize(
    ("kind", "output_key", "error", "message"),
    [
        (dict, ["logit", "hidden"], KeyError, r"output_key \['logit'\]: .*; did you mean 'logits'"),
        (dict, {"logit": "logits"}, KeyError, r"output_key \['logit'\]: .*; did you mean 'logits'"),
        (lambda parts: [part for _, part in parts], ["logits"], TypeError, "names 1 outputs, but .* a list of 2"),
        (lambda parts: parts[0][1], ["logits", "hidden"], TypeError, "names 2 outputs, but .* a Tensor"),
        (lambda parts: parts[0][1], {"logits": "logits"}, TypeError, "names 1 outputs, but .* a Tensor"),
    ],
)
def test_outputs_of_the_model_under_other_names_are_named(kind, output_key, error, message):
    """The rows of a tensor are not taken for several outputs, not even if the batch has as many."""
    with pytest.raises(error, match=message):
        train(Two(kind), runner=dl.SupervisedRunner(output_key=output_key), loaders={"train": loader(4, 2)})


def test_outputs_in_a_dict_are_chosen_by_a_list_of_keys():
    """The keys themselves were taken for the outputs."""
    runner = train(Two(dict), runner=dl.SupervisedRunner(output_key=["logits"]))

    assert runner.epoch_metrics["train"]["loss"] > 0


def test_a_criterion_that_does_not_take_all_outputs_says_how_to_choose():
    """Several outputs are arguments of the criterion by their names."""
    runner = dl.SupervisedRunner(output_key=["logits", "hidden"])

    with pytest.raises(TypeError) as raised:
        train(Two(lambda parts: [part for _, part in parts]), runner=runner)

    assert "CriterionCallback('logits', 'targets')" in raised.value.__notes__[0]


def test_keys_of_several_optimizers_are_explained():
    """A callback without a key, and one whose key is not needed, are told apart from a misspelt key."""
    model = mlp()
    two = {"a": sgd(model), "b": sgd(model)}

    with pytest.raises(KeyError, match=r"one optimizer; .*\['a', 'b'\]: pass optimizer_key="):
        train(model, optimizer=two, callbacks=[dl.BackwardCallback(), dl.OptimizerCallback()])
    with pytest.raises(KeyError, match="the runner has one, without a key: leave optimizer_key out"):
        train(callbacks=[dl.BackwardCallback(), dl.OptimizerCallback(optimizer_key="a")])


@pytest.mark.parametrize("use", [lambda features: mlp()(features), lambda features: features.float()])
def test_unpacking_the_batch_of_a_supervised_runner_is_explained(use):
    """Its batch is a dict, and its keys are not tensors."""

    class Unpacks(dl.SupervisedRunner):
        def handle_batch(self, batch):
            features, _ = batch
            use(features)

    with pytest.raises((TypeError, AttributeError)) as raised:
        train(runner=Unpacks())

    assert "read batch['features']" in raised.value.__notes__[1]
