"""A callback that interrupts a run within training."""

from runnerkit import dl


class Interrupt(dl.Callback):
    """A callback that raises KeyboardInterrupt in `event` of training step `batch_step`, after other callbacks."""

    def __init__(self, batch_step, event="on_batch_end"):
        super().__init__(order=dl.CallbackOrder.External)
        self.batch_step = batch_step
        setattr(self, event, self.interrupt)

    def interrupt(self, runner):
        """Raise at the given step of a training loader."""
        if runner.is_train_loader and runner.batch_step == self.batch_step:
            raise KeyboardInterrupt
