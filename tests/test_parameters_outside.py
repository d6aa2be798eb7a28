"""Parameters that an optimizer trains outside the model: refused, as they would be neither saved nor averaged."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, sgd, train, weights


def uncertain(losses, log_var):
    """Weight losses by learned uncertainties (Kendall et al. 2018)."""
    return (losses * (-log_var).exp() + log_var).sum()


class LossWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, losses):
        return uncertain(losses, self.log_var)


class Outside(dl.IRunner):
    """A runner with learnable loss weights: its own parameter, or a module beside the model."""

    def __init__(self, engine, *, registers=False, adds_in=None):
        super().__init__()
        self._engine, self.registers, self.adds_in = engine, registers, adds_in
        self.log_var = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.num_epochs = 2

    def get_engine(self):
        return self._engine

    def get_loaders(self, stage):
        return {"train": loader(24, 12 // self.engine.num_processes)}

    def get_model(self, stage):
        return {"net": mlp(), "weights": LossWeights()} if self.registers else mlp()

    def get_optimizer(self, stage, model):
        if self.registers:
            return torch.optim.Adam([*model["net"].parameters(), *model["weights"].parameters()], lr=0.01)
        more = [self.log_var] if self.adds_in is None else []
        return torch.optim.Adam([*model.parameters(), *more], lr=0.01)

    def get_callbacks(self, stage):
        return {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}

    def on_epoch_start(self, runner):
        if self.epoch_step == self.adds_in:
            self.optimizer.add_param_group({"params": [self.log_var]})

    def handle_batch(self, batch):
        features, targets = batch
        net = self.model["net"] if self.registers else self.model
        losses = both_losses(net(features), targets)
        self.batch_metrics["loss"] = (
            self.model["weights"](losses) if self.registers else uncertain(losses, self.log_var)
        )


def both_losses(logits, targets):
    return torch.stack([nn.functional.cross_entropy(logits, targets), logits.square().mean()])


ENGINES = [
    pytest.param(dl.CPUEngine, id="one process"),
    pytest.param(lambda: dl.DistributedDataParallelEngine(2, device="cpu"), id="ddp", marks=pytest.mark.slow),
    pytest.param(lambda: dl.FullyShardedDataParallelEngine(2, device="cpu"), id="fsdp", marks=pytest.mark.slow),
    pytest.param(lambda: dl.HorovodEngine(2, device="cpu"), id="horovod", marks=pytest.mark.horovod),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_of_the_runner_is_refused(engine):
    """The error, raised before training, has the number of parameters, their shapes, and where to put them."""
    with pytest.raises(ValueError, match=r"the optimizer trains .*: 1, of shape \(2,\); put them .*get_model"):
        Outside(engine()).run()


def test_a_parameter_added_later_is_refused():
    """``add_param_group`` in the second epoch is noticed before that epoch trains."""
    runner = Outside(dl.CPUEngine(), adds_in=2)

    with pytest.raises(ValueError, match=r"the optimizer trains .*: 1, of shape \(2,\)"):
        runner.run()

    assert runner.batch_step == 2


def test_train_refuses_before_it_starts_processes():
    """`train` names the optimizer by its key."""
    model, head = mlp(), nn.Linear(3, 2)
    optimizers = {"net": sgd(model), "head": torch.optim.SGD([*head.parameters(), *model[0].parameters()], lr=0.1)}

    with pytest.raises(ValueError, match=r"optimizer 'head' trains .*: 2, of shape \(2, 3\), \(2,\)"):
        train(model, optimizer=optimizers, num_processes=2)


def test_constants_outside_the_model_may_be_in_an_optimizer():
    """A frozen parameter is never changed, so nothing of it is lost."""
    model = mlp()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2), requires_grad=False)], lr=0.1)

    assert train(model, optimizer=optimizer).optimizer_step == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_loss_weights_beside_the_model_train_as_by_hand(engine):
    """The recipe of the error message gives the weights of a hand-written loop over the global batches."""
    net, log_var = mlp(), nn.Parameter(torch.tensor([0.5, -0.5]))
    optimizer = torch.optim.Adam([*net.parameters(), log_var], lr=0.01)
    for features, targets in [*loader(24, 12)] * 2:
        optimizer.zero_grad()
        uncertain(both_losses(net(features), targets), log_var).backward()
        optimizer.step()

    runner = Outside(engine(), registers=True).run()

    torch.testing.assert_close(runner.model["weights"].log_var, log_var, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights(runner.model["net"]), weights(net), rtol=0, atol=1e-6)


class ArcHead(nn.Module):
    """A criterion that holds class centres."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.centres.weight)

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(self.centres(outputs), targets)


def train_with_head(num_epochs, **options):
    model, criterion = mlp(), ArcHead()
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=0.01)
    options = {"loaders": {"train": loader(24, 8)}, "num_epochs": num_epochs, **options}
    return train(model, criterion=criterion, optimizer=optimizer, **options)


def test_a_criterions_parameters_are_trained_saved_and_resumed(tmp_path):
    """In one process they are those of a hand-written loop, also in a run that was interrupted, bit for bit."""
    model, head = mlp(), ArcHead()
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.01)
    for features, targets in [*loader(24, 8)] * 3:
        optimizer.zero_grad()
        head(model(features), targets).backward()
        optimizer.step()

    train_with_head(2, logdir=tmp_path)
    resumed = train_with_head(3, logdir=tmp_path, resume="auto")

    assert torch.equal(resumed.criterion.centres.weight, head.centres.weight)
    assert torch.equal(weights(resumed.model), weights(model))


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(lambda: dl.DistributedDataParallelEngine(1, device="cpu"), id="ddp"),
        pytest.param(lambda: dl.FullyShardedDataParallelEngine(1, device="cpu"), id="fsdp", marks=pytest.mark.slow),
        pytest.param(lambda: dl.HorovodEngine(1, device="cpu"), id="horovod", marks=pytest.mark.horovod),
    ],
)
def test_a_criterion_with_parameters_of_its_own_is_refused(engine):
    """Each rank would train another criterion."""

    with pytest.raises(ValueError, match=r"ArcHead has trainable parameters.*: 1, of shape \(3, 3\); .*get_model"):
        train(criterion=ArcHead(), engine=engine())
