"""Knowledge distillation: a small student learns a teacher's probabilities, without labels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from runnerkit import dl
from runnerkit.contrib import Digits

TEMPERATURE = 2.0


class Distillation(dl.Runner):
    """A runner with an optimizer for the student only; DDP does not wrap the frozen teacher."""

    def handle_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        features, targets = batch
        logits = self.model["student"](features)
        with torch.no_grad():
            wanted = self.model["teacher"].eval()(features)
        mine, theirs = (log_softmax(each / TEMPERATURE, dim=1) for each in (logits, wanted))
        self.batch_metrics["loss"] = TEMPERATURE**2 * kl_div(mine, theirs, log_target=True, reduction="batchmean")
        self.batch_metrics["agreement"] = (logits.argmax(1) == wanted.argmax(1)).float().mean()
        self.batch = {"logits": logits, "targets": targets}


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: 64 pixels in [0, 1] and one of ten classes."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


def main(**where: Any) -> dict[str, float]:
    """Train the teacher, then the student; return their accuracies and how often they agree."""
    torch.manual_seed(0)
    loaders = {"train": loader(train=True), "valid": loader(train=False)}
    alike = {"loaders": loaders, "num_epochs": 10, "loggers": {"console": None}, **where}
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10))
    student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    accuracy = dl.AccuracyCallback("logits", "targets")
    taught = dl.SupervisedRunner().train(
        model=teacher,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(teacher.parameters(), lr=0.005),
        callbacks=[accuracy],
        **alike,
    )
    runner = Distillation().train(
        model={"teacher": taught.model.requires_grad_(False), "student": student},
        optimizer=torch.optim.Adam(student.parameters(), lr=0.01),
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss"), accuracy],
        **alike,
    )
    of_student = runner.epoch_metrics["valid"]
    of_teacher = taught.epoch_metrics["valid"]["accuracy"]
    return {"teacher": of_teacher, "student": of_student["accuracy"], "agreement": of_student["agreement"]}


if __name__ == "__main__":
    learned = main()
    print("teacher {teacher:.1%}, student {student:.1%}; they agree on {agreement:.1%}".format(**learned))
