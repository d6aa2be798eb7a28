"""Export of a trained model as a torch.export program, as ONNX, and as ONNX with 8-bit weights."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from runnerkit import dl, utils
from runnerkit.contrib import Digits

FILES = {"program": "model.pt2", "onnx": "model.onnx", "int8": "int8.onnx"}


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: 64 pixels in [0, 1] and one of ten classes."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


def answer(path: Path, features: Tensor) -> Tensor:
    """Run a file of either format without the model's code."""
    if path.suffix == ".pt2":
        logits: Tensor = torch.export.load(path).module()(features)
        return logits
    return torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {"features": features.numpy()})[0])


def main(**where: Any) -> dict[str, tuple[int, float, float]]:
    """Train and export; return each file's size in bytes, largest difference from the model, and accuracy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005),
        loaders={"train": loader(train=True)},
        num_epochs=5,
        loggers={"console": None},
        **where,
    )
    model, (features, targets), learned = runner.model.cpu().eval(), loader(train=False).dataset[:], {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised by torch's own ONNX exporter
        paths = {name: Path(folder, file) for name, file in FILES.items()}
        program = torch.export.export(model, (features,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, paths["program"])
        torch.onnx.export(program, (), paths["onnx"], input_names=["features"], external_data=False, verbose=False)
        utils.quantize_onnx(paths["onnx"], paths["int8"])
        expected = model(features).detach()
        for name, path in paths.items():
            logits = answer(path, features)
            distance, hits = (logits - expected).abs().max(), logits.argmax(1) == targets
            learned[name] = (path.stat().st_size, distance.item(), hits.float().mean().item())
    return learned


if __name__ == "__main__":
    learned = main()
    print("; ".join("{}: {:,} bytes, differs by {:.1g}, accuracy {:.1%}".format(key, *learned[key]) for key in learned))
