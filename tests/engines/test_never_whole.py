"""FullyShardedDataParallelEngine(init="meta"): the numbers of one process, though no process has the whole model."""

import logging
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from runnerkit import dl, utils
from runnerkit.engines.sharding.optimizer_shards import check_known
from tests.engines.on_cpu import TwoStages, adam, ddp, difference, fsdp
from tests.engines.together import together
from tests.interrupt import Interrupt
from tests.test_resume import Augmented
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, train, weights

SEED = 42  # the runner's default
WIDTH = 9  # an odd number of rows, which two processes share unequally


class Block(nn.Module):
    """A layer with a skip connection, batch norm, dropout and a parameter of its own."""

    def __init__(self, dropout):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def reset_parameters(self):
        """Fill the module's own parameter, and change one of the layer within it."""
        nn.init.normal_(self.scale, mean=1.0, std=0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        """Map (N, WIDTH) to (N, WIDTH)."""
        return x + self.dropout(torch.relu(self.norm(self.linear(x)) * self.scale + self.shift))


def make(dropout=0.0):
    return nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), Block(dropout), Block(dropout), nn.Linear(WIDTH, NUM_CLASSES))


def on_meta(**kwargs):
    with utils.parameters_on_meta():
        return make(**kwargs)


def whole(**kwargs):
    return utils.initialize_parameters(make(**kwargs), seed=SEED)


def meta(**options):
    return fsdp(**{"shard_modules": [Block], "init": "meta", **options})


FEW = {"train": loader(16, 4)}
DATA = {"train": loader(80, 4, shuffle=True), "one": loader(1, 4), "valid": loader(41, 4)}


def fit(model, engine, **options):
    options = {"callbacks": [dl.AccuracyCallback("logits", "targets")], "loaders": DATA, **options}
    return train(model, engine=engine, **{"optimizer": adam(model), **options})


class Largest(dl.Callback):
    """A callback that records how many weights this process holds at a time, and in which places there are values."""

    def __init__(self):
        super().__init__()
        self.held, self.own = {}, set()

    def on_stage_start(self, runner):
        self._look(runner, "start")

    def on_loader_start(self, runner):
        self._look(runner, runner.loader_key)

    def on_batch_end(self, runner):
        self._look(runner, f"{runner.loader_key} batch")

    def on_stage_end(self, runner):
        self._look(runner, "end")

    def _look(self, runner, when):
        model = runner.current_run.stage.training_model
        held = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
        self.held[when] = sum(each.numel() for each in held)
        self.own |= {each.device.type for each in runner.engine.unwrap(model).parameters()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train everything in one launch of two processes."""
    folder = tmp_path_factory.mktemp("never_whole")
    write_sources(folder)
    return together(
        lambda: {
            "numbers": train_on_both(folder / "numbers"),
            "stages": train_two_stages(folder / "stages"),
            "hook": train_by_hook(folder / "hook"),
            "sources": load_from_everywhere(folder),
            "best": load_the_best(folder / "best"),
            "left behind": train_what_was_left_behind(),
            "evaluated": evaluate_from_everywhere(folder),
        }
    )


# Numbers.


def train_on_both(folder):
    largest, model, reference = Largest(), on_meta(), whole()
    checkpoint = dl.CheckpointCallback(folder, content="runner")
    metric = dl.AccuracyCallback("logits", "targets")
    runner = fit(model, meta(), callbacks=[metric, largest, checkpoint], num_epochs=2, valid_every_steps=4)
    theirs = fit(reference, ddp(), num_epochs=2, valid_every_steps=4)
    is_empty = all(each.is_meta for each in runner.model.parameters())
    runner.load(folder, which="last")
    apart = difference(runner.model, reference)
    return apart, runner.experiment_metrics, theirs.experiment_metrics, largest.held, largest.own, is_empty


def test_losses_metrics_and_weights_are_those_of_whole_models(trained):
    """They equal those of DDP that starts with initialize_parameters(), to 1e-6, the order of float sums.

    Evaluation has 1 and 41 samples, which two processes share unequally.
    """
    apart, mine, theirs, *_ = trained["numbers"]

    assert apart < 1e-6
    for epoch, loaders in theirs.items():
        for key, metrics in loaders.items():
            assert mine[epoch][key] == pytest.approx(metrics, abs=1e-6), key


def test_no_process_has_the_whole_model(trained):
    """At the start, in training, in evaluation, when it is saved and in the end, only the outer layers are gathered."""
    *_, held, own, is_empty = trained["numbers"]
    blocks = 2 * sum(each.numel() for each in make()[1].parameters())
    outer = sum(each.numel() for each in make().parameters()) - blocks

    assert held.keys() == {"start", "train", "train batch", "one", "one batch", "valid", "valid batch", "end"}
    assert max(held.values()) <= outer + -(-blocks * 5 // 9), held
    assert own == {"meta"}
    assert is_empty


def train_two_stages(folder):
    model, reference = on_meta(), whole()
    runner = fit(model, meta(), runner=TwoStages(), callbacks=[dl.CheckpointCallback(folder, content="runner")])
    fit(reference, ddp(), runner=TwoStages())
    runner.load(folder, which="last")
    return difference(model, reference)


def test_the_second_stage_goes_on_with_weights_and_moments_of_the_first(trained):
    """Both stay in the processes between stages."""
    assert trained["stages"] < 1e-6


class Told(logging.Handler):
    """A handler that records what the library logs in this process; used in a `with` statement."""

    def __enter__(self):
        self.words = []
        logging.getLogger("runnerkit").addHandler(self)
        return self.words

    def __exit__(self, *_):
        logging.getLogger("runnerkit").removeHandler(self)

    def emit(self, record):
        self.words.append(record.getMessage())


def train_by_hook(folder):
    class Runner(dl.SupervisedRunner):
        def get_engine(self):
            return meta()

        def get_loaders(self, stage):
            return FEW

        def get_model(self, stage):
            return make()

        def get_criterion(self, stage):
            return nn.CrossEntropyLoss()

        def get_optimizer(self, stage, model):
            return adam(model)

        def get_callbacks(self, stage):
            return {**super().get_callbacks(stage), "checkpoint": dl.CheckpointCallback(folder, content="model")}

        def get_loggers(self):
            return {}

    with Told() as words:
        runner = Runner().run()
    is_empty = all(each.is_meta for each in runner.model.parameters())
    runner.load(folder, which="last")
    fit(reference := whole(), ddp(), loaders=FEW)
    return is_empty, difference(runner.model, reference), words


def test_a_hook_makes_the_model_as_for_any_engine(trained):
    """``get_model`` runs with parameters on the meta device; weights alone (content="model") are sharded too."""
    is_empty, apart, words = trained["hook"]

    assert is_empty
    assert apart < 1e-6
    assert not any("lost" in each for each in words)


# Weights from elsewhere.

SOURCES = ("weights.pth", "weights.safetensors", "dcp", "dcp of a state", "checkpoint.pth")


def random_weights():
    model, generator = make(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def write_sources(folder):
    from safetensors.torch import save_file

    state = random_weights().state_dict()
    torch.save(state, folder / "weights.pth")
    save_file(state, folder / "weights.safetensors")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
    dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
    whole = {"model": state, "optimizer": {"step": torch.ones(1)}}
    dcp.save(whole, checkpoint_id=folder / "dcp of a state", no_dist=True)
    utils.save_checkpoint({"model_state_dict": state}, folder / "checkpoint.pth")


def load_from_everywhere(folder):
    found = {}
    for name in SOURCES:
        start = dl.CheckpointCallback(folder / f"run of {name}", content="runner", resume_model=folder / name)
        model = on_meta()
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        runner = fit(model, meta(), optimizer=still, callbacks=[start], loaders=FEW)
        runner.load(folder / f"run of {name}", which="last")
        pairs = zip(runner.model.parameters(), random_weights().parameters(), strict=True)
        found[name] = all(torch.equal(mine, theirs) for mine, theirs in pairs)
    return found


def test_a_run_starts_with_weights_from_any_source(trained):
    """A file of weights, .safetensors, a checkpoint, and folders that torch.distributed.checkpoint wrote."""
    assert trained["sources"] == dict.fromkeys(SOURCES, True)


def test_an_optimizer_whose_state_is_made_in_its_constructor_is_refused():
    """Adagrad's sums would stay on the meta device."""
    with utils.parameters_on_meta():
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Adagrad makes its state before parameters have values"):
        check_known(torch.optim.Adagrad(model.parameters()), [*model.parameters()], key="optimizer")


def test_any_engine_starts_with_a_folder_of_torch_distributed_checkpoint(tmp_path):
    """One process reads the whole model from it."""
    write_sources(tmp_path)
    runner = fit(whole(), dl.CPUEngine(), loaders=FEW)

    runner.load(tmp_path / "dcp of a state")

    assert torch.equal(weights(runner.model), weights(random_weights()))


class Worse(dl.Callback):
    """A callback that spoils the weights after the first epoch."""

    def on_epoch_end(self, runner):
        if runner.epoch_step == 2:
            with torch.no_grad():
                for parameter in runner.current_run.stage.training_model.parameters():
                    parameter.mul_(100.0)


def load_the_best(folder):
    best = {"monitor": "valid/loss", "mode": "min"}
    checkpoint = dl.CheckpointCallback(folder, content="runner", load_best_on_end=True, **best)
    seen = []

    class Last(dl.Callback):
        def on_stage_end(self, runner):
            seen.extend(each.to_local().clone() for each in runner.current_run.stage.training_model.parameters())

    worse = Worse(order=dl.CallbackOrder.Internal)
    model = on_meta()
    fit(model, meta(), callbacks=[checkpoint, worse, Last(order=dl.CallbackOrder.External + 1)], num_epochs=3)
    best = whole()
    best.load_state_dict(utils.load_checkpoint(folder / "checkpoints" / "best")["model_state_dict"])
    return [torch.equal(mine, theirs.chunk(2)[0]) for mine, theirs in zip(seen, best.parameters(), strict=True)]


def test_the_best_weights_are_loaded_by_shards(trained):
    """load_best_on_end gives each process the rows of the best checkpoint."""
    assert all(trained["best"])
    assert len(trained["best"]) == len([*make().parameters()])


def train_what_was_left_behind():
    model = on_meta()
    with Told() as words:
        fit(model, meta(), loaders=FEW)
    try:
        fit(model, meta(), loaders=FEW)
    except ValueError as error:
        return str(error), words


def test_a_model_whose_weights_were_left_behind_does_not_start_anew(trained):
    """A second run with the same object needs a checkpoint. If the first one saves none, it says so."""
    error, words = trained["left behind"]

    assert "were left in the checkpoints of its last run: pass resume=" in error
    assert ["saves no checkpoint: pass a logdir" in each for each in words].count(True) == 1


# Evaluation without training.


def evaluate(model, engine, **options):
    runner = dl.SupervisedRunner(model, engine)
    return runner.evaluate_loader(loader(41, 4), criterion=nn.CrossEntropyLoss(), **options)["loss"]


def evaluate_from_everywhere(folder):
    model = on_meta()
    found = {"initial values": evaluate(model, meta())}
    fit(model, meta(), loaders=FEW)  # still has its initial values
    for name in SOURCES:
        found[name] = evaluate(model, meta(), resume=folder / name)
    logdir = folder / "run of dcp"
    loaded = dl.SupervisedRunner().load(logdir, model=make(), which="last").model
    found["logdir"] = evaluate(model, meta(), resume=logdir), evaluate(loaded, dl.CPUEngine())
    try:
        evaluate(model, meta())
    except ValueError as error:
        found["error"] = str(error)
    model = on_meta()
    evaluate(model, meta(), resume=folder / "dcp")
    try:
        fit(model, meta(), loaders=FEW)
    except ValueError as error:
        found["trained"] = str(error)
    return found


def test_a_loader_is_evaluated_without_training(trained):
    """evaluate_loader scores initial values, which the model keeps, and weights from any source."""
    found = trained["evaluated"]
    words = "were left in the checkpoints of its last run: pass resume="
    assert words in found.pop("error")
    assert words in found.pop("trained")

    assert found.pop("initial values") == pytest.approx(evaluate(whole(), dl.CPUEngine()), abs=1e-6)
    expected = evaluate(random_weights(), dl.CPUEngine())
    mine, theirs = found.pop("logdir")
    assert mine == pytest.approx(theirs, rel=1e-6)
    assert found == dict.fromkeys(SOURCES, pytest.approx(expected, rel=1e-6))


# Resuming.


def run(logdir, engine, *, model=None, callbacks=(), asynchronous=False, **options):
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=3, asynchronous=asynchronous)
    data = {"train": DataLoader(Augmented(40), batch_size=4, shuffle=True), "valid": loader(21, 4)}
    options = {"loaders": data, "callbacks": {"save": save, **dict(callbacks)}, "num_epochs": 3, **options}
    return fit(model or on_meta(dropout=0.2), engine, logdir=logdir, **options)


def weights_in(logdir):
    return utils.load_checkpoint(logdir / "checkpoints" / "last")


def interrupt_and_resume(folder):
    run(folder / "all", meta())
    for name, options in {"at once": {}, "asynchronous": {"asynchronous": True}}.items():
        try:
            run(folder / name, meta(), callbacks={"stop": Interrupt(8)}, **options)
        except KeyboardInterrupt:
            run(folder / name, meta(), resume=folder / name)


@pytest.mark.slow
def test_an_interrupted_run_continues_bit_for_bit(tmp_path):
    """Weights, moments and metrics equal those of the run without interruption, with dropout and augmentation."""
    together(lambda: interrupt_and_resume(tmp_path))

    expected = weights_in(tmp_path / "all")
    for name in ("at once", "asynchronous"):
        found = weights_in(tmp_path / name)
        torch.testing.assert_close(found["model_state_dict"], expected["model_state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(found["optimizer_state_dict"], expected["optimizer_state_dict"], rtol=0, atol=0)
        assert found["counters"]["epoch_metrics"] == expected["counters"]["epoch_metrics"]


@pytest.mark.slow
def test_engines_resume_one_anothers_checkpoints(tmp_path):
    """One process continues what two without the whole model began, and these what one process began."""
    run(tmp_path / "sharded", meta(), num_epochs=1)
    shutil.copytree(tmp_path / "sharded", tmp_path / "by one", symlinks=True)
    one = run(tmp_path / "by one", dl.CPUEngine(), model=make(dropout=0.2), num_epochs=1, resume=tmp_path / "by one")

    expected = weights_in(tmp_path / "sharded")["model_state_dict"]
    torch.testing.assert_close(one.model.state_dict(), expected, rtol=0, atol=0)

    run(tmp_path / "whole", dl.CPUEngine(), model=whole(dropout=0.2), num_epochs=1)
    resumed = run(tmp_path / "whole", meta(), num_epochs=1, resume=tmp_path / "whole")  # nothing is left to train
    assert resumed.epoch_step == 1
    run(tmp_path / "whole", meta(), num_epochs=2, resume=tmp_path / "whole")
    assert weights_in(tmp_path / "whole")["counters"]["epoch_step"] == 2


# Errors.


def test_what_cannot_be_done_without_the_whole_model_is_named(tmp_path):
    """The errors say what to do instead."""
    with pytest.raises(ValueError, match="init must be 'whole' or 'meta', got 'cpu'"):
        meta(init="cpu")
    with pytest.raises(ValueError, match=r"init='meta' needs shard_modules=\[Block\] or shard_min_parameters"):
        meta(shard_modules=None)
    with pytest.raises(ValueError, match=r"init='meta'\) does not predict: .* runner.load\(logdir\)"):
        list(dl.SupervisedRunner().predict_loader(loader=loader(4, 2), model=on_meta(), engine=meta()))


class Listed(nn.Module):
    """A module with parameters in a list and a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.scales = nn.Linear(2, 2), nn.ParameterList([torch.ones(2), torch.ones(2)])
        self.by_name = nn.ModuleDict({"inner": nn.ParameterDict({"shift": nn.Parameter(torch.ones(2))})})

    def reset_parameters(self):
        for each in self.scales:
            nn.init.normal_(each)


class Filled(Listed):
    """The same with a method that fills all of them."""

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.by_name["inner"]["shift"])


def test_a_module_fills_its_lists_of_parameters():
    """They cannot fill themselves."""
    with utils.parameters_on_meta():
        model, unfilled = Filled(), Listed()
    expected = utils.initialize_parameters(Filled(), seed=SEED)

    utils.initialize_parameters(model, seed=SEED)

    assert torch.equal(weights(model), weights(expected))
    assert not torch.equal(model.scales[0], model.scales[1]) and not model.by_name["inner"]["shift"].any()
    with pytest.raises(ValueError, match=r"no method gives by_name.inner.shift initial values"):
        utils.initialize_parameters(unfilled, seed=SEED)


def assigned():
    """Return a model whose first weight is assigned, as from_pretrained assigns all."""
    with utils.parameters_on_meta():
        model = make()
        model[0].weight = nn.Parameter(torch.ones(WIDTH, NUM_FEATURES))
    return model


@pytest.mark.slow
def test_weights_that_the_model_was_made_with_are_not_silently_initial_values(tmp_path):
    """Otherwise a run from pretrained weights would begin with random ones."""
    write_sources(tmp_path)
    words = (
        "values that 0.weight got when the model was made were dropped.* resume_model=folder, not by from_pretrained"
    )

    with pytest.raises(ValueError, match=words):
        fit(assigned(), meta())

    start = dl.CheckpointCallback(tmp_path / "log", resume_model=tmp_path / "dcp")
    model = assigned()
    fit(model, meta(), optimizer=torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[start], loaders=FEW)
    loaded = dl.SupervisedRunner().load(tmp_path / "log", model=make(), which="last").model
    assert torch.equal(loaded[0].weight, random_weights()[0].weight)


@pytest.mark.slow
def test_models_that_do_not_fit_are_named():
    """Parameters with values, or methods that fill none, are found before the first batch."""

    class Unfilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.scale = Block(0.0), nn.Parameter(torch.ones(3))

    with utils.parameters_on_meta():
        unfilled = Unfilled()
    with pytest.raises(ValueError, match=r"parameter 0.weight has a value, which init='meta' would drop"):
        fit(make(), meta())
    with pytest.raises(ValueError, match=r"no module within it is a unit: .* a smaller shard_min_parameters"):
        fit(on_meta(), meta(shard_modules=None, shard_min_parameters=10**6))
    with pytest.raises(ValueError, match=r"no method gives scale initial values: .* reset_parameters\(\)"):
        fit(unfilled, meta())
    without_buffers = make().to("meta")  # torch.device("meta") leaves out linspace if transformers patched it first
    with pytest.raises(ValueError, match=r"buffer 1.shift is on the meta device, without a value"):
        fit(without_buffers, meta())
