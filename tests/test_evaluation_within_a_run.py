"""Tests that evaluation and prediction leave everything as it was, wherever they are called."""

import random
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.engines.together import together
from tests.interrupt import at
from tests.tiny import classification, loader, mlp, train, weights

EVENTS = (
    "on_stage_start", "on_epoch_start", "on_loader_start", "on_batch_start", "on_batch_end", "on_step_end",
    "on_validation_end", "on_loader_end", "on_epoch_end", "on_stage_end",
)  # fmt: skip
EXTRA = 10  # samples


class Predicts(dl.SupervisedRunner):
    def predict_batch(self, batch):
        return self.model(batch[0])


def net():
    """Create a model whose training depends on modes, on generators and on buffers."""
    return mlp(dropout=0.4, batch_norm=True)


def extra():
    return loader(EXTRA, 4, seed=5, shuffle=False)


def by_hand(model):
    """Return the accuracy and the logits of a module, as it is on rank zero, on the extra samples."""
    features, targets = classification(EXTRA, seed=5).tensors
    with torch.no_grad():
        logits = model.eval()(features)
    return (logits.argmax(1) == targets).double().mean().item(), logits


def copied(runner):
    """Return a copy of the runner's model as rank zero has it."""
    model = net()
    model.load_state_dict(runner.engine.broadcast_object(runner.engine.model_state_dict(runner.model)))
    return model


def check_metrics(metrics, model):
    assert metrics["accuracy"] == pytest.approx(by_hand(model)[0], abs=1e-6)


def evaluate(runner):
    check_metrics(runner.evaluate_loader(extra()), copied(runner))


def evaluate_own(runner, by=None, **options):
    found = (by or runner).evaluate_loader(extra(), callbacks=[dl.AccuracyCallback("logits", "targets")], **options)
    check_metrics(found, copied(runner))


def evaluate_alone(runner):
    evaluate_own(runner, dl.SupervisedRunner(), model=runner.model, engine=dl.CPUEngine())


def evaluate_on_its_engine(runner):
    evaluate_own(runner, dl.SupervisedRunner(runner.model, runner.engine))


def evaluate_on_the_cpu(runner):
    """The trained module stays where it is: another engine than the run's evaluates a copy."""
    check_metrics(runner.evaluate_loader(extra(), cpu=True), copied(runner))


def evaluate_another(runner):
    other = mlp(seed=9)
    check_metrics(runner.evaluate_loader(extra(), model=other), other)


def predict(runner):
    found = torch.cat(list(runner.predict_loader(loader=extra())))
    torch.testing.assert_close(found.float(), by_hand(copied(runner))[1], rtol=2e-2, atol=2e-2)


def predict_a_part(runner):
    for _ in runner.predict_loader(loader=extra()):
        break


def predict_alone(runner):
    list(Predicts(runner.model, dl.CPUEngine()).predict_loader(loader=extra()))


def train_a_probe(runner):
    """Another run within this one, whose seed is its own."""
    train(net(), num_epochs=1)


CALLS = (
    evaluate, evaluate_own, evaluate_alone, evaluate_on_its_engine, evaluate_on_the_cpu, evaluate_another, predict,
    predict_a_part, predict_alone, train_a_probe,
)  # fmt: skip


class Calls(dl.Callback):
    """Calls `call` in one event of two; the metrics of all loaders are those of a run without it."""

    def __init__(self, event, call):
        super().__init__()
        self.calls = 0

        def on_event(runner):
            self.calls += 1
            if self.calls % 2 == 0 or event in ("on_stage_start", "on_stage_end"):
                call(runner)

        setattr(self, event, on_event)

    def __deepcopy__(self, memo):
        return self


def trained(*callbacks, **options):
    """Train two epochs, and return the weights, all metrics, and the run's next random number."""
    drawn = []
    draw = at("on_experiment_end", lambda runner: drawn.append(torch.rand(1).item()), order=1000)
    loaders = {"train": loader(22, 4, shuffle=True), "valid": loader(9, 4, seed=1)}
    callbacks = [dl.AccuracyCallback("logits", "targets"), *callbacks, draw]
    options = {"runner": Predicts(), "num_epochs": 2, "valid_every_steps": 3, **options}
    runner = train(net(), loaders=loaders, callbacks=callbacks, **options)
    return weights(runner.model), runner.experiment_metrics, drawn


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


# Each event with an evaluation and a loop over predictions that is left, and each call in two events.
CALLED = [(event, call) for event in EVENTS for call in (evaluate, predict_a_part)]
CALLED += [(event, call) for event in ("on_batch_start", "on_epoch_end") for call in CALLS]


@pytest.mark.parametrize(("event", "call"), dict.fromkeys(CALLED), ids=lambda each: getattr(each, "__name__", each))
def test_training_goes_on_as_if_nothing_was_called(event, call):
    """Weights, metrics and random numbers are those of a run without the call, whose results are right."""
    calls = Calls(event, call)
    assert_same(trained(calls), undisturbed())
    assert calls.calls


@cache
def undisturbed():
    return trained()


@pytest.mark.parametrize("call", [evaluate, predict, evaluate_on_its_engine], ids=lambda each: each.__name__)
@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16], ids=str)
def test_precision_stays(precision, call):
    """The gradient scaler, its hooks and the cast weights are those of the run."""

    def engine():
        return dl.AMPEngine(dtype=precision, device="cpu")

    assert_same(trained(Calls("on_step_end", call), engine=engine()), trained(engine=engine()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        dl.DistributedDataParallelEngine,
        partial(dl.DistributedDataParallelAMPEngine, dtype=torch.float16),
        dl.FullyShardedDataParallelEngine,
        pytest.param(dl.HorovodEngine, marks=pytest.mark.horovod),
    ],
    ids=["DDP", "DDP, fp16", "FSDP", "Horovod"],
)
def test_processes_evaluate_and_predict_within_a_run(engine):
    """In several processes too, training goes on as if nothing was called; each sample counts once."""

    has_own_buffers = "Fully" in str(engine) or "Horovod" in str(engine)  # on each rank, or no whole model
    others = [] if has_own_buffers else [evaluate_alone, evaluate_on_its_engine]
    runs = [(), *((Calls("on_step_end", call),) for call in (evaluate, predict, predict_a_part, *others))]

    def job():
        return [trained(*callbacks, engine=engine(2, device="cpu")) for callbacks in runs]

    expected, *found = engine(2, device="cpu").launch(job) if engine is dl.HorovodEngine else together(job)

    for each in found:
        assert_same(each, expected)


class _ItsOwnEvents(Predicts):
    """A runner whose own events evaluate."""

    scores = ()

    def on_loader_end(self, runner):
        super().on_loader_end(runner)
        self.scores = (*self.scores, self.evaluate_loader(extra())["accuracy"])


def test_events_that_evaluate_are_not_called_again():
    """A runner's own event, and a wrapped callback's, may evaluate: within that they get no events."""
    runner = _ItsOwnEvents()
    wrapped = Calls("on_loader_end", evaluate)
    assert_same(trained(dl.ControlFlowCallback(wrapped, loaders="valid"), runner=runner), undisturbed())
    assert len(runner.scores) == 2 * (1 + 2) and wrapped.calls


def test_callbacks_that_are_passed_get_all_events():
    """A callback that only the evaluation has starts and ends with it; those of the run get no events of a stage."""

    def noted_in(seen):
        callback = dl.Callback()
        for event in (*EVENTS, "on_experiment_start", "on_experiment_end"):
            setattr(callback, event, lambda runner, event=event: seen.append(event))
        return callback

    of_passed, of_run = [], []
    loader_events = ["on_loader_start", *["on_batch_start", "on_batch_end"] * 3, "on_loader_end"]

    def call(runner):
        before = len(of_run)
        runner.evaluate_loader(extra(), callbacks=[noted_in(of_passed)])
        runner.evaluate_loader(extra())
        assert of_run[before:] == loader_events

    trained(noted_in(of_run), Calls("on_stage_start", call))
    starts, ends = ([f"on_{part}_{end}" for part in ("experiment", "stage", "epoch")] for end in ("start", "end"))
    assert of_passed == [*starts, *loader_events, *ends[::-1]]


def test_weights_of_a_checkpoint_are_not_loaded_into_the_model_in_training(tmp_path):
    """Before the fix, the training silently continued from them."""
    train(mlp(seed=9), logdir=tmp_path)
    arguments = {"loader": extra(), "resume": tmp_path}

    def call(runner):
        assert len([*runner.predict_loader(**arguments, model=mlp())]) == len(extra())
        of_file = runner.evaluate_loader(**arguments, model=mlp())
        assert of_file == runner.evaluate_loader(
            extra(), model=dl.SupervisedRunner().load(tmp_path, model=mlp(), which="last").model
        )
        for each in runner, Predicts(runner.model, runner.engine):
            for method in (each.predict_loader, each.evaluate_loader):
                with pytest.raises(ValueError, match="would replace the weights in training"):
                    method(**arguments)

    assert_same(trained(Calls("on_epoch_end", call)), undisturbed())


# ------------------------------------------------------------------------------------------------------- without a run


@pytest.mark.slow
def test_processes_that_evaluate_another_model_leave_the_runners_alone():
    """The weights that come back from other processes are those of the model that was passed."""
    model, criterion = net(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    runner = Predicts(model, dl.DistributedDataParallelEngine(2, device="cpu"))
    runner.criterion = criterion
    before = weights(model)
    other = mlp(seed=9, dropout=0.4, batch_norm=True)
    runner.evaluate_loader(extra(), model=other, criterion=nn.CrossEntropyLoss(weight=torch.ones(3)))
    assert torch.equal(weights(model), before)
    assert criterion.weight.tolist() == [1.0, 2.0, 3.0]


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("call", [evaluate, evaluate_own, predict, predict_a_part], ids=lambda each: each.__name__)
def test_modes_and_generators_of_the_caller_stay(call):
    """A submodule in evaluation mode stays in it, the others in training mode, and no generator moves."""
    model = net()
    model[1].eval()
    modes, before = [each.training for each in model.modules()], states()
    runner = Predicts(model, dl.CPUEngine())
    if call is evaluate:
        runner.evaluate_loader(extra(), criterion=nn.CrossEntropyLoss())
    else:
        call(runner)
    assert [each.training for each in model.modules()] == modes
    assert states() == before


def test_a_loop_over_predictions_has_its_own_random_numbers():
    """Between two predictions, random numbers and modes are those of the loop's code."""
    model = net()
    runner = Predicts(model, dl.CPUEngine())
    torch.manual_seed(3)
    alone = [torch.rand(1).item() for _ in range(3)]
    torch.manual_seed(3)
    among = [torch.rand(1).item() for _ in runner.predict_loader(loader=extra()) if model.training]
    assert among == alone


def test_an_evaluation_within_a_run_is_a_run_of_its_own():
    """`current_run` exists before a run, is another object in each, and is the outer one after an evaluation."""
    runner, runs = Predicts(), []
    assert runner.current_run.stage.training_model is None and not runner.current_run.resume_point.is_found

    def evaluate(runner):
        outer = runner.current_run
        note = at("on_loader_start", lambda runner: runs.append(runner.current_run))
        runner.evaluate_loader(extra(), callbacks=[note])
        runs.append(runner.current_run)
        assert runner.current_run is outer

    for _ in range(2):
        train(net(), runner=runner, loaders={"train": loader(8, 4)}, callbacks=[at("on_step_end", evaluate)])

    outer = [id(each) for each in runs[1::2]]
    assert outer[:2] == [outer[0]] * 2 and outer[2:] == [id(runner.current_run)] * 2
    assert len({id(each) for each in runs}) == 6
