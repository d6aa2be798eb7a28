"""PPO: rounds of games that the policy plays itself; several clipped steps on each round; no data."""

import torch
from torch import nn
from torch.distributions import Bernoulli

from runnerkit import dl
from tests.programs import draws
from tests.programs.common import network

NUM_ROUNDS, NUM_MOVES, NUM_PASSES, GAMMA, LAMBDA = 6, 5, 3, 0.9, 0.8


class Carts:
    """Carts on a line, pushed left or right; the reward is for staying near 0. They stay where a round left them."""

    def __init__(self, num_carts):
        self.state = torch.zeros(num_carts, 2)  # place, speed

    def move(self, push_right, kicks):
        place, speed = self.state.unbind(dim=1)
        speed = 0.8 * speed + 0.2 * (2 * push_right - 1) + 0.1 * kicks
        self.state = torch.stack([0.8 * place + speed, speed], dim=1)
        return -self.state[:, 0].square()


@torch.no_grad()
def play(model, carts, random):
    """Return states, actions, their log probabilities, advantages and returns, (moves * carts, ...) each."""
    states, actions, before, values, rewards = [], [], [], [], []
    for _ in range(NUM_MOVES):
        logits, value = model(carts.state).unbind(dim=1)
        action = (random.rand(len(logits)) < logits.sigmoid()).to(logits)
        states, actions, values = [*states, carts.state], [*actions, action], [*values, value]
        before.append(Bernoulli(logits=logits).log_prob(action))
        rewards.append(carts.move(action, random.randn(len(logits))))
    values.append(model(carts.state)[:, 1])
    advantages, later = [], 0.0
    for move in reversed(range(NUM_MOVES)):
        later = rewards[move] + GAMMA * values[move + 1] - values[move] + GAMMA * LAMBDA * later
        advantages.insert(0, later)
    returns = [sum(pair) for pair in zip(advantages, values, strict=False)]
    return [torch.cat(each) for each in (states, actions, before, advantages, returns)]


def loss_of(model, states, actions, before, advantages, returns):
    logits, values = model(states).unbind(dim=1)
    policy = Bernoulli(logits=logits)
    ratio = (policy.log_prob(actions) - before).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (0.5 * (values - returns).square() - gain - 0.01 * policy.entropy()).mean()


def loop(batch_size):
    model, carts, losses = network(2, 8, 2), Carts(batch_size), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(NUM_ROUNDS):
        rollout = play(model, carts, draws)
        for _ in range(NUM_PASSES):
            for rows in draws.randperm(len(rollout[0])).chunk(2):
                optimizer.zero_grad()
                loss = loss_of(model, *(each[rows] for each in rollout))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        losses.append(loss.detach())
    return model, losses


class Program(dl.Runner):
    steps_itself = True

    def __init__(self, num_carts):
        super().__init__()
        self.carts = Carts(num_carts)

    def handle_batch(self, number):
        rollout = play(self.model, self.carts, torch)
        self.batch_size = len(rollout[0])
        for _ in range(NUM_PASSES):
            for rows in torch.randperm(self.batch_size).chunk(2):
                loss = loss_of(self.model, *(each[rows] for each in rollout))
                self.learn(loss, gradient_clip=0.5)
        self.batch_metrics["loss"] = loss

    def state_dict(self):
        return {"carts": self.carts.state}

    def load_state_dict(self, state):
        self.carts.state = state["carts"]


def train(batch_size, **options):
    return Program(batch_size).train(
        model=network(2, 8, 2),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        loaders={"train": range(NUM_ROUNDS)},
        **options,
    )
