"""Reinforcement learning: a sample is an episode's seed, and `handle_batch` plays it with the current policy."""

from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from runnerkit import dl


class Reinforce(dl.Runner):
    """REINFORCE (doi:10.1007/BF00992696) with the batch's mean return at each step as the baseline."""

    def handle_batch(self, batch: dict[str, Tensor]) -> None:
        observations, actions, rewards, is_on = self.play(batch["seeds"])
        to_come = (rewards * is_on).flip(0).cumsum(dim=0).flip(0)
        self.batch_metrics["return"] = to_come[0].mean()
        if self.is_train_loader:
            advantages = (to_come - to_come.sum(dim=1, keepdim=True) / is_on.sum(dim=1, keepdim=True))[is_on]
            advantages /= advantages.std().clamp(min=1)  # std is 0 once all episodes reach the end
            log_probabilities = Categorical(logits=self.model(observations[is_on])).log_prob(actions[is_on])
            self.batch_metrics["loss"] = -(advantages * log_probabilities).mean()

    @torch.no_grad()
    def play(self, seeds: Tensor) -> list[Tensor]:
        """Return observations, actions, rewards, and whether the episode was running: (num_steps, num_seeds, ...).

        The model is unwrapped from DDP, because processes play different numbers of steps.
        """
        envs = gymnasium.make_vec("CartPole-v1", num_envs=len(seeds), vectorization_mode="sync")
        steps, is_on = [], torch.ones_like(seeds, dtype=torch.bool)
        observation, _ = envs.reset(seed=seeds.tolist())  # type: ignore[arg-type]  # typed as a single seed
        while is_on.any():
            seen = torch.from_numpy(observation).to(seeds.device)
            action = Categorical(logits=self.engine.unwrap(self.model)(seen)).sample()
            observation, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
            steps.append((seen, action, torch.from_numpy(reward).to(seen), is_on))
            is_on = is_on & torch.from_numpy(~(terminated | truncated)).to(is_on)
        return [torch.stack(each) for each in zip(*steps, strict=True)]


def main(**where: Any) -> dict[str, float]:
    """Train; return the mean return of 24 new episodes, and that of a random policy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2, bias=False))
    nn.init.zeros_(model.get_parameter("2.weight"))  # the untrained policy is random
    runner = Reinforce(model)
    train, valid = (dl.TensorLoader({"seeds": seeds}, batch_size=8) for seeds in torch.arange(344).split((320, 24)))
    at_random = runner.evaluate_loader(valid, engine=dl.CPUEngine())["return"]
    runner.train(
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loaders={"train": train, "valid": valid},
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")],
        loggers={"console": None},
        **where,
    )
    return {"return": runner.epoch_metrics["valid"]["return"], "return_at_random": at_random}


if __name__ == "__main__":
    learned = main()
    print("upright for {return:.1f} of 500 steps (random policy {return_at_random:.1f})".format(**learned))
