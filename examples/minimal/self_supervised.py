"""Self-supervised learning: matching two views of an image without labels, evaluated by a linear probe."""

from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

from runnerkit import dl
from runnerkit.contrib import Digits

NUM_LABELS = 200
shift = dl.BatchRandomCrop(padding=2)  # each image by up to two pixels in any direction


class SimCLR(dl.Runner):
    """Cross-entropy over the similarities of all views of a batch (NT-Xent, arXiv:2002.05709)."""

    def handle_batch(self, batch: dict[str, Tensor]) -> None:
        views = shift(batch["images"].repeat(2, 1, 1, 1))
        codes = normalize(self.model(views + 0.1 * torch.randn_like(views)), dim=1)
        places = torch.arange(len(codes), device=codes.device)
        similarities = (codes @ codes.T / 0.2).masked_fill(places == places[:, None], -torch.inf)
        self.batch_metrics["loss"] = cross_entropy(similarities, places.roll(len(batch["images"])))


def conv(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Build a convolution that halves the image, with batch norm and ReLU."""
    conv = nn.Conv2d(num_inputs, num_outputs, 3, stride=2, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(num_outputs), nn.ReLU())


@torch.no_grad()
def probe(encoder: nn.Module, train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor]) -> float:
    """Return the accuracy of a linear classifier trained with few labels on the outputs of `encoder`."""
    seen, unseen = (encoder.eval()(images) for images, _ in (train, valid))
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    return float(classifier.fit(seen[:NUM_LABELS], train[1][:NUM_LABELS]).score(unseen, valid[1]))


def main(**where: Any) -> dict[str, float]:
    """Train on shifted digits; return a probe's accuracy on pixels, and on codes before and after training."""
    torch.manual_seed(0)
    parts = (Digits(train=True), Digits(train=False))
    train, valid = ((shift(pad(each.images[:, None] / 255, (2, 2, 2, 2))), each.targets) for each in parts)
    encoder = nn.Sequential(conv(1, 16), conv(16, 32), nn.Flatten())
    model = nn.Sequential(encoder, nn.Linear(288, 32))
    learned = {"pixels": probe(nn.Flatten(), train, valid), "untrained": probe(encoder, train, valid)}
    runner = SimCLR().train(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.003),
        loaders={"train": dl.TensorLoader({"images": train[0]}, batch_size=120, shuffle=True)},
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")],
        num_epochs=30,
        loggers={"console": None},
        **where,
    )
    return {**learned, "accuracy": probe(runner.model[0].cpu(), train, valid)}


if __name__ == "__main__":
    learned = main()
    print("accuracy {accuracy:.1%} (untrained encoder {untrained:.1%}, pixels {pixels:.1%})".format(**learned))
