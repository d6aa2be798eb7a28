"""WGAN-GP: a critic with a penalty on its gradient, and every third batch a step of the generator."""

import torch

from runnerkit import dl
from tests.programs import draws
from tests.programs.common import loader, network, points


def networks():
    return {"generator": network(3, 8, 2), "critic": network(2, 8, 1, seed=2)}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.0, 0.9))


def critic_loss(critic, real, fake, share):
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def loop(batch_size):
    models, losses, step = networks(), [], 0
    generator, critic = models["generator"], models["critic"]
    of_generator, of_critic = adam(generator.parameters()), adam(critic.parameters())
    for _ in range(2):
        for real, _ in loader(points(30), batch_size):
            step += 1
            fake = generator(draws.randn(len(real), 3))
            of_critic.zero_grad()
            loss = critic_loss(critic, real, fake.detach(), draws.rand(len(real), 1))
            loss.backward()
            of_critic.step()
            if step % 3 == 0:
                of_generator.zero_grad()
                (-critic(fake).mean()).backward()
                of_generator.step()
            losses.append(loss.detach())
    return models, losses


class Program(dl.Runner):
    steps_itself = True

    def handle_batch(self, batch):
        real, generator, critic = batch[0], self.model["generator"], self.model["critic"]
        fake = generator(torch.randn(len(real), 3))
        loss = critic_loss(critic, real, fake.detach(), torch.rand(len(real), 1))
        self.learn(loss, optimizer="critic")
        if self.batch_step % 3 == 0:
            self.learn(-critic(fake).mean(), optimizer="generator")
        self.batch_metrics["loss"] = loss


def train(batch_size, **options):
    return Program().train(
        model=networks(),
        optimizer={"generator": adam, "critic": adam},
        loaders={"train": loader(points(30), batch_size)},
        num_epochs=2,
        **options,
    )
