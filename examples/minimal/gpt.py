"""A small GPT that predicts the next byte of Python's `help()` topics from the previous 32 bytes."""

from functools import partial
from math import log
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl

CONTEXT, WIDTH, BATCH_SIZE = 32, 64, 16


class GPT(nn.Module):
    """A causal transformer that maps (N, CONTEXT) bytes to next-byte logits (N, 256, CONTEXT)."""

    def __init__(self) -> None:
        super().__init__()
        self.what, self.where = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        return torch.transpose(self.head(self.blocks(self.what(text) + self.where.weight, mask, is_causal=True)), 1, 2)


def entropy(symbols: Tensor) -> float:
    """Return the entropy of the symbol distribution in bits, the lower bound of any code based on counts only."""
    shares = symbols.flatten().bincount() / symbols.numel()
    return float(torch.special.entr(shares).sum()) / log(2)


def write(model: nn.Module, text: Tensor, num_bytes: int) -> str:
    """Continue `text` with sampled bytes; return the continuation on one line."""
    for _ in range(num_bytes):
        text = torch.cat([text, model(text[None, -CONTEXT:])[0, :, -1].softmax(dim=0).multinomial(1)])
    return " ".join(bytes(text[-num_bytes:].tolist()).decode(errors="replace").split())


def main(**where: Any) -> dict[str, Any]:
    """Train; return bits per byte on unseen pages, their unigram and bigram entropies, and a sample."""
    torch.manual_seed(0)
    rows = torch.tensor(list("".join(topics.values()).encode())).unfold(0, CONTEXT + 1, CONTEXT)
    train, valid = rows[:-2000:2], rows[-2000:]
    load = partial(dl.TensorLoader, batch_size=BATCH_SIZE)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, len(train) // BATCH_SIZE + 1, pct_start=0.1),
        loaders={"train": load(train[:, :-1], train[:, 1:], shuffle=True), "valid": load(valid[:, :-1], valid[:, 1:])},
        loggers={"console": None},
        **where,
    )
    bits, sample = runner.epoch_metrics["valid"]["loss"] / log(2), write(runner.model.cpu(), valid[0, 1:], num_bytes=60)
    bigram = entropy(256 * valid[:, :-1] + valid[:, 1:]) - entropy(valid[:, :-1])
    return {"bits": bits, "unigram": entropy(valid[:, 1:]), "bigram": bigram, "sample": sample}


if __name__ == "__main__":
    learned = main()
    print("bits per byte {bits:.2f} (unigram {unigram:.2f}, bigram {bigram:.2f}): {sample}".format(**learned))
