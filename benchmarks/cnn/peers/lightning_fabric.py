"""Case b in Lightning Fabric: the hand-written loop with Lightning Fabric's model, optimizer and loaders."""

from lightning.fabric import Fabric

from benchmarks.cnn import raw, work


def train(images: dict[str, work.Images]) -> work.Metrics:
    fabric = Fabric(accelerator="cpu", devices=1)
    module = work.make_model(images)
    model, optimizer = fabric.setup(module, work.make_optimizer(module))
    loaders = {key: fabric.setup_dataloaders(each) for key, each in work.loaders(images).items()}
    return raw.loop(loaders, model=model, optimizer=optimizer, backward=fabric.backward)


if __name__ == "__main__":
    work.main(train)
