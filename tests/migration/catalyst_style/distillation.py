"""A student learns from a trained teacher, whose parameters stay as they are."""

import torch
from catalyst import dl, utils
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class DistilRunner(dl.Runner):
    def handle_batch(self, batch):
        x, y = batch
        self.model["teacher"].eval()
        with torch.no_grad():
            teacher = self.model["teacher"](x)
        student = self.model["student"](x)
        self.batch = {"t_logits": teacher, "s_logits": student, "targets": y}
        loss = F.kl_div(F.log_softmax(student, dim=1), teacher.softmax(dim=1), reduction="batchmean")
        self.batch_metrics["kl"] = loss
        self.batch_metrics["loss"] = loss + F.cross_entropy(student, y)


def main():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(120, 8, generator=draw)
    loader = DataLoader(TensorDataset(features, features[:, :4].argmax(dim=1)), batch_size=32)
    torch.manual_seed(0)
    teacher, student = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    dl.SupervisedRunner().train(
        model=teacher,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(teacher.parameters(), lr=0.1),
        loaders={"train": loader},
        num_epochs=2,
    )
    utils.set_requires_grad(teacher, False)
    runner = DistilRunner()
    runner.train(
        model={"teacher": teacher, "student": student},
        optimizer=torch.optim.Adam(student.parameters(), lr=0.02),
        loaders={"train": loader, "valid": loader},
        callbacks=[
            dl.AccuracyCallback(input_key="t_logits", target_key="targets", topk=(1,), prefix="teacher_"),
            dl.AccuracyCallback(input_key="s_logits", target_key="targets", topk=(1,), prefix="student_"),
            dl.BackwardCallback("loss"),
            dl.OptimizerCallback("loss"),
        ],
        num_epochs=3,
    )
    metrics = runner.epoch_metrics["valid"]
    return {
        **{name: metrics[name] for name in ("teacher_accuracy01", "student_accuracy01")},
        "student": student[0].weight.sum().item(),
        "teacher": teacher.weight.sum().item(),
    }
