"""A recommender that ranks all items to predict a customer's next purchases."""

from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl

NUM_ITEMS = 100


class Popularity(nn.Module):
    """A baseline that recommends the most popular items to everyone."""

    def __init__(self, bought: Tensor) -> None:
        super().__init__()
        self.counts = nn.Parameter(bought.sum(0), requires_grad=False)

    def forward(self, bought: Tensor) -> Tensor:
        return self.counts.expand_as(bought)


def purchases(num_people: int) -> dict[str, Tensor]:
    """Draw customers with two of ten tastes; ten purchases are given, five are the targets: (N, 100) zeros and ones."""
    kinds = torch.arange(NUM_ITEMS) % 10
    tastes = torch.rand(num_people, 10).topk(2).indices
    liking = 0.05 + (kinds == tastes[:, :, None]).any(dim=1)
    items = torch.multinomial(liking / (1 + torch.arange(NUM_ITEMS) // 10), 15)  # some items of a kind are more popular
    empty = torch.zeros(num_people, NUM_ITEMS)
    return {"bought": empty.scatter(1, items[:, :10], 1), "next": empty.scatter(1, items[:, 10:], 1)}


def main(**where: Any) -> dict[str, tuple[float, float]]:
    """Train; return retrieval metrics for unseen customers, with those of popularity."""
    torch.manual_seed(0)
    train, valid = purchases(2000), purchases(1000)
    loaders = {
        "train": dl.TensorLoader(train, batch_size=100, shuffle=True),
        "valid": dl.TensorLoader(valid, batch_size=100),
    }
    ranking = [each("scores", "next", topk=10) for each in (dl.HitrateCallback, dl.MRRCallback, dl.NDCGCallback)]
    runner = dl.SupervisedRunner(input_key="bought", output_key="scores", target_key="next")
    popular = runner.evaluate_loader(loaders["valid"], callbacks=ranking, model=Popularity(train["bought"]))
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(NUM_ITEMS, 32), nn.Tanh(), nn.Linear(32, NUM_ITEMS))
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),  # the targets need not sum to 1
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders=loaders,
        callbacks=ranking,
        num_epochs=15,
        loggers={"console": None},
        **where,
    )
    metrics = runner.epoch_metrics["valid"]
    return {key: (metrics[key], popular[key]) for key in ("hitrate10", "mrr10", "ndcg10")}


if __name__ == "__main__":
    learned = main()
    print(", ".join(f"{key} {ours:.3f} (popularity {theirs:.3f})" for key, (ours, theirs) in learned.items()))
