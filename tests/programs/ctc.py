"""CTC: recordings and texts of different lengths, padded within a batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from runnerkit import dl
from tests.programs.common import loader

NUM_LETTERS = 4


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.memory, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, NUM_LETTERS + 1)

    def forward(self, frames):
        return self.head(self.memory(frames)[0]).log_softmax(dim=-1).transpose(0, 1)  # (time, batch, letters)


def recordings(number):
    """Draw recordings of 8 to 12 frames and their texts of 1 to 4 letters."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 13, (number,), generator=generator), torch.randint(1, 5, (number,), generator=generator)
    return [
        (
            torch.randn(frames, 3, generator=generator),
            torch.randint(1, NUM_LETTERS + 1, (letters,), generator=generator),
        )
        for frames, letters in zip(*(each.tolist() for each in lengths), strict=True)
    ]


def collate(samples):
    frames, texts = zip(*samples, strict=True)
    lengths = [torch.tensor([len(each) for each in part]) for part in (frames, texts)]
    return pad_sequence(frames, batch_first=True), pad_sequence(texts, batch_first=True), *lengths


def loop(batch_size):
    model, losses = Reader(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for frames, *texts_and_lengths in loader(recordings(17), batch_size, collate_fn=collate):
            optimizer.zero_grad()
            loss = F.ctc_loss(model(frames), *texts_and_lengths)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return model, losses


class Program(dl.Runner):
    steps_itself = True

    def handle_batch(self, batch):
        frames, *texts_and_lengths = batch
        loss = F.ctc_loss(self.model(frames), *texts_and_lengths)
        self.learn(loss)
        self.batch_metrics["loss"] = loss


def train(batch_size, **options):
    return Program().train(
        model=Reader(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        loaders={"train": loader(recordings(17), batch_size, collate_fn=collate)},
        num_epochs=2,
        **options,
    )
