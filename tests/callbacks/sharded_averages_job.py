"""A small transformer trained with averages of its weights, which torch's AveragedModel computes beside it."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from runnerkit import dl, utils
from runnerkit.support.torch_internals import local
from tests.engines.tensor_parallel_job import SEED, Transformer, train

DECAY = 0.8
FUNCTIONS = {"ema": get_ema_multi_avg_fn(DECAY), "swa": get_swa_multi_avg_fn()}


def make(*, on_meta=False):
    """Return the model in float64."""
    if on_meta:
        with utils.parameters_on_meta():
            return Transformer().double()
    return utils.initialize_parameters(Transformer().double(), seed=SEED)


class Reference(dl.Callback):
    """A callback that gathers all weights and feeds them to AveragedModel, in each process.

    Attributes:
        is_average: by place, whether all processes hold the weights of AveragedModel there, bit for bit.
        final: the weights at the end of the stage.
        held: the part of the average that the process holds which holds most.
    """

    def __init__(self, average):
        super().__init__(order=dl.CallbackOrder.External)
        self.average, self.plain, self.is_average, self.final, self.held = average, make(), {}, {}, 0.0
        self.averaged = AveragedModel(self.plain, multi_avg_fn=FUNCTIONS[average])

    def on_batch_end(self, runner):
        if runner.is_train_loader and self.average == "ema":
            self._update(runner)

    def on_loader_end(self, runner):
        if runner.is_train_loader and self.average == "swa" and runner.epoch_step >= 2:
            self._update(runner)

    def on_loader_start(self, runner):
        if not runner.is_train_loader and int(self.averaged.n_averaged):
            self._compare(runner, f"evaluation {runner.epoch_step}")
            average = runner.callbacks["average"].averages[""].weights().values()
            held = sum(local(each).numel() for each in average) / sum(each.numel() for each in average)
            self.held = max(runner.engine.gather_object(held))

    def on_stage_end(self, runner):
        self.final = self._compare(runner, "end")

    def _update(self, runner):
        self.plain.load_state_dict(gathered(runner))
        self.averaged.update_parameters(self.plain)

    def _compare(self, runner, place):
        mine, theirs = gathered(runner), self.averaged.module.state_dict()
        is_equal = all(torch.equal(mine[name], each) for name, each in theirs.items())
        self.is_average[place] = all(runner.engine.gather_object(is_equal))
        return mine


def gathered(runner):
    """Return the weights that the next forward pass uses; every rank must call."""
    # Its state_dict() would free gathered ones.
    module = runner.engine.trained_module(runner.current_run.stage.training_model)
    state = runner.engine.whole_state({name: each.detach() for name, each in module.named_parameters()})
    return {name: whole.clone() for name, whole in state.items()}


def run(engine, *, average="ema", num_epochs=3, batch_size=8, on_meta=False, **kwargs):
    """Train; return what the reference found, and the metrics of each epoch."""
    reference = Reference(average)
    callback = dl.EMACallback(DECAY) if average == "ema" else dl.SWACallback(2, validate=True)
    runner = train(
        engine, model=make(on_meta=on_meta), batch_size=batch_size, num_epochs=num_epochs,
        callbacks={"average": callback, "reference": reference}, **kwargs,
    )  # fmt: skip
    return reference.is_average, reference.held, reference.final, runner.experiment_metrics
