"""Tests of the trial batch that is evaluated before training if a callback reads a metric that no callback declares."""

import pytest

from runnerkit import dl
from runnerkit.engines.launch.spawn import spawn
from tests.free_port import free_port
from tests.tiny import loader, train


class OwnMetric(dl.SupervisedRunner):
    """Runner that computes a metric itself and fails once, in the first evaluation on one rank."""

    def fail(self, where):
        if where == self.fails_in and self.engine.rank == self.fails_on:
            self.fails_on = None
            raise ZeroDivisionError(f"nothing to divide by in the {where}")

    def handle_batch(self, batch):
        super().handle_batch(batch)
        if self.is_valid_loader:
            self.fail("batch")
            self.batch_metrics["mine"] = self.batch["logits"].mean()

    def on_loader_end(self, runner):
        if self.is_valid_loader:
            self.fail("end")
        super().on_loader_end(runner)


class FailsToShare(dl.IMetricCallback):
    def share(self, runner):
        if runner.is_valid_loader and runner.engine.rank == 1:
            raise ZeroDivisionError("nothing to share")


def fit(engine, *, fails_in, fails_on=1, **callbacks):
    runner = OwnMetric()
    runner.fails_in, runner.fails_on = fails_in, fails_on
    loaders = {"train": loader(32, 4), "valid": loader(10, 2)}
    stop = dl.EarlyStoppingCallback(3, monitor="valid/mine", mode="min")
    train(runner=runner, engine=engine, loaders=loaders, callbacks={"stop": stop, **callbacks})
    return runner.epoch_metrics["valid"]["mine"], runner.batch_step


def ddp():
    return dl.DistributedDataParallelEngine(2, device="cpu")


def on_two_processes(job):
    """Run `job` on two processes and return the result of rank zero."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return spawn(job, num_processes=2, variables=variables)


def fail_in_a_batch_and_at_the_end():
    return {where: fit(ddp(), fails_in=where) for where in ("batch", "end", "nowhere")}


def fail_to_share():
    return fit(ddp(), fails_in="nowhere", share=FailsToShare())


def test_a_batch_that_fails_on_one_rank_lets_no_rank_part_ways():
    """If one rank fails in the trial batch, all ranks start training and get the metrics of a run without failure."""
    found = on_two_processes(fail_in_a_batch_and_at_the_end)

    assert found["batch"] == found["end"] == found["nowhere"]
    assert found["nowhere"][1] == 4


def test_a_rank_that_fails_where_others_wait_for_it_ends_the_job():
    """A rank that fails while others wait in a collective ends the job with its own error."""
    with pytest.raises(ZeroDivisionError, match="nothing to share"):
        on_two_processes(fail_to_share)


def test_one_process_fails_in_training_and_not_before():
    """An error in the trial batch is ignored, because training reports errors with their place."""
    plain = fit(dl.CPUEngine(), fails_in="nowhere")

    assert fit(dl.CPUEngine(), fails_in="batch", fails_on=0) == plain


class FirstLook(dl.Callback):
    """Callback that records the runner's attributes at the start of an epoch and logs a text."""

    def on_epoch_start(self, runner):
        self.seen = {name: value for name, value in vars(runner).items() if name.startswith(("loader", "batch", "is_"))}
        current = self.seen.pop("loader_pass")
        self.seen["means"] = current.num_skipped, current.ends_stage, current.means.num_samples, current.means.totals()
        self.wraps = type(runner.model)
        runner.log_text("note", "an epoch starts")


def test_the_first_epoch_starts_as_if_no_batch_had_been_evaluated():
    """The trial batch leaves no attributes of its loader, so that `on_epoch_start` does not log under "valid"."""

    def first_look(**callbacks):
        look, runner = FirstLook(), OwnMetric()
        runner.fails_in = runner.fails_on = None
        train(runner=runner, loaders=loaders, callbacks={"look": look, **callbacks})
        return look

    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    plain, checked = first_look(), first_look(stop=dl.EarlyStoppingCallback(3, monitor="valid/mine", mode="min"))

    assert {name: repr(value) for name, value in plain.seen.items() if name != "loaders"} == {
        name: repr(value) for name, value in checked.seen.items() if name != "loaders"
    }
    assert checked.seen["loader_key"] == "" and plain.wraps is checked.wraps
