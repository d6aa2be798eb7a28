"""Callbacks that act at one point of a run."""

from runnerkit import dl


def at(event, call, **options):
    """Return a callback that calls `call(runner)` in `event`."""
    return type("At", (dl.Callback,), {event: lambda self, runner: call(runner)})(**options)


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
