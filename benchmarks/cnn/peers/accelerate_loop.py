"""Case b in Accelerate: the hand-written loop with Accelerate's model, optimizer and loaders."""

from accelerate import Accelerator

from benchmarks.cnn import raw, work


def train(images: dict[str, work.Images]) -> work.Metrics:
    accelerator = Accelerator(cpu=True)
    module = work.make_model(images)
    model, optimizer = accelerator.prepare(module, work.make_optimizer(module))
    loaders = {key: accelerator.prepare(each) for key, each in work.loaders(images).items()}
    return raw.loop(loaders, model=model, optimizer=optimizer, backward=accelerator.backward)


if __name__ == "__main__":
    work.main(train)
