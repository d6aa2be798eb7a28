"""Case a in Accelerate: the hand-written loop with Accelerate's model, optimizer and backward.

Accelerate writes only TensorBoard, since it does not include a CSV tracker.
"""

from pathlib import Path

from accelerate import Accelerator

from benchmarks.steps import raw, work


def train(batches: work.Batches, variant: str, folder: Path) -> work.Trained:
    accelerator = Accelerator(cpu=True, log_with="tensorboard" if variant == "log" else None, project_dir=folder)
    if variant == "log":
        accelerator.init_trackers("run")
    module = work.make_model()
    model, optimizer = accelerator.prepare(module, work.make_optimizer(module))
    trained = raw.loop(
        batches,
        variant,
        model=model,
        optimizer=optimizer,
        backward=accelerator.backward,
        log=(lambda step, scalars: accelerator.log(scalars, step=step)) if variant == "log" else None,
    )
    accelerator.end_training()
    return trained._replace(model=module)


if __name__ == "__main__":
    work.main(train)
