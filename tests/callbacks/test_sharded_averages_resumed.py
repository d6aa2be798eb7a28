"""Averages with FSDP2 in checkpoints: exact resume, other engines and numbers of processes, the best and the last."""

import shutil

import pytest
import torch
from torch.utils.data import DataLoader

from runnerkit import dl, utils
from tests.engines.test_never_whole import Block, make, on_meta, whole
from tests.engines.together import together
from tests.interrupt import Interrupt
from tests.test_resume import Augmented
from tests.tiny import loader, train, weights

KINDS = {"file": {}, "sharded": {"sharded_checkpoints": True}, "meta": {"init": "meta"}}


def fsdp(kind, num_processes=2):
    options = {"device": "cpu", "timeout_s": 60, "shard_modules": [Block], **KINDS[kind]}
    return dl.FullyShardedDataParallelEngine(num_processes, **options)


def model_of(kind, **kwargs):
    return on_meta(**kwargs) if kind == "meta" else whole(**kwargs)


def fit(logdir, engine, model, *, average=None, interrupt_at=None, num_epochs=3, resume=None, **kwargs):
    """Train with dropout, augmentation, batch norm and accumulated steps."""
    judge = {"monitor": "valid/loss", "mode": "min"}
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=2, **judge, **kwargs)
    callbacks = {
        "average": average or dl.EMACallback(0.8, use_buffers=True),
        "optimizer": dl.OptimizerCallback("loss", accumulation_steps=2),
        "save": save,
        "interrupt": Interrupt(interrupt_at),
    }
    loaders = {"train": DataLoader(Augmented(40), batch_size=4, shuffle=True), "valid": loader(21, 4)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    options = {"num_epochs": num_epochs, "resume": resume, "logdir": logdir}
    return train(model, engine=engine, optimizer=optimizer, loaders=loaders, callbacks=callbacks, **options)


def last_of(logdir):
    return utils.load_checkpoint(next((logdir / "checkpoints").glob("last*")))


def interrupt_and_resume(folder, make_average, kind):
    def one(name, **kwargs):
        fit(folder / name, fsdp(kind), model_of(kind, dropout=0.3), average=make_average(), **kwargs)

    one("all")
    with pytest.raises(KeyboardInterrupt):
        one("broken", interrupt_at=8)
    one("broken", resume=folder / "broken")


AVERAGES = {"ema": lambda: dl.EMACallback(0.8, use_buffers=True), "swa": lambda: dl.SWACallback(1)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resumed_average_of_shards_equals_that_of_the_uninterrupted_run(tmp_path):
    """Averages, weights, moments and metrics are equal bit for bit, in a file, in shards and without a whole model."""

    def run_all():
        for kind in KINDS:
            for name, average in AVERAGES.items():
                interrupt_and_resume(tmp_path / kind / name, average, kind)

    together(run_all)

    for kind in KINDS:
        for name in AVERAGES:
            expected, found = (last_of(tmp_path / kind / name / run) for run in ("all", "broken"))
            assert found["callbacks"]["average"][""]["num_averaged"] > 2
            for part in ("model_state_dict", "trained_model_state_dict", "optimizer_state_dict"):
                torch.testing.assert_close(found.get(part), expected.get(part), rtol=0, atol=0)
            torch.testing.assert_close(found["callbacks"]["average"], expected["callbacks"]["average"], rtol=0, atol=0)
            assert found["counters"]["epoch_metrics"] == expected["counters"]["epoch_metrics"]
            of_file = last_of(tmp_path / "file" / name / "all")["callbacks"]["average"]
            torch.testing.assert_close(found["callbacks"]["average"], of_file, rtol=0, atol=1e-6)


def copy_of(logdir, name):
    return shutil.copytree(logdir, logdir.parent / f"{logdir.name} for {name}", symlinks=True)


def resume_at_end(logdir, engine):
    """Resume a run that has ended; return the weights that it then has: the average."""
    return weights(fit(logdir, engine, whole(), resume=logdir, num_epochs=2).model)


@pytest.mark.slow
def test_averages_are_read_by_any_engine(tmp_path):
    """A run that has ended is resumed, and its model gets the average that the checkpoint holds; so does an export."""
    together(lambda: [fit(tmp_path / kind, fsdp(kind), model_of(kind), num_epochs=2) for kind in KINDS] and None)
    copies = {(source, kind): copy_of(tmp_path / source, kind) for source in KINDS for kind in ("file", "sharded")}

    found = together(lambda: {key: resume_at_end(logdir, fsdp(key[1])) for key, logdir in copies.items()})
    for source in KINDS:
        found[source, "one process"] = resume_at_end(copy_of(tmp_path / source, "one"), dl.CPUEngine())

    assert len(found) == 9
    for (source, kind), theirs in found.items():
        model, state = make(), last_of(tmp_path / source)
        model.load_state_dict(state["model_state_dict"])
        assert torch.equal(theirs, weights(model)), (source, kind)
        averaged = state["callbacks"]["average"][""]["weights"]
        assert all(torch.equal(averaged[name], each) for name, each in model.state_dict().items())
        out = utils.export_pretrained(tmp_path / source, tmp_path / f"{source} out", config={"width": 1}, which="last")
        assert torch.equal(weights(dl.SupervisedRunner().load(out, model=make()).model), weights(model))
        for name, _ in model.named_parameters():
            assert averaged[name].data_ptr() == state["model_state_dict"][name].data_ptr(), "saved once"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_number_of_processes_continues_an_average_of_shards(tmp_path):
    """Four continue what two saved in a file and in shards, with the same result, though they draw other numbers."""

    def begin():
        for kind in ("file", "meta"):
            fit(tmp_path / kind, fsdp(kind), model_of(kind), num_epochs=2)

    together(begin)
    copies = [copy_of(tmp_path / kind, 4) for kind in ("file", "meta")]
    together(lambda: [fit(each, fsdp("meta", 4), on_meta(), resume=each) for each in copies] and None, num_processes=4)

    one, other = map(last_of, copies)
    assert one["counters"]["epoch_step"] == 3
    assert one["callbacks"]["average"][""]["num_averaged"] == other["callbacks"]["average"][""]["num_averaged"] == 8
    torch.testing.assert_close(one["model_state_dict"], other["model_state_dict"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_best_average_is_loaded_at_the_end(tmp_path):
    """load_best_on_end loads the average that was evaluated best, not the weights trained at that time."""

    def run_all():
        return {
            kind: weights(fit(tmp_path / kind, fsdp(kind), model_of(kind), load_best_on_end=True, num_epochs=4).model)
            for kind in ("file", "sharded")
        }

    found = together(run_all)

    for kind, theirs in found.items():
        best = make()
        state = utils.load_checkpoint(next((tmp_path / kind / "checkpoints").glob("best*")))
        best.load_state_dict(state["model_state_dict"])
        assert torch.equal(theirs, weights(best))
        trained = [each.double().flatten() for each in state["trained_model_state_dict"].values()]
        assert not torch.equal(weights(best), torch.cat(trained))


def save_weights(folder):
    for kind in KINDS:
        model = model_of(kind)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        loaders = {"train": loader(40, 4), "valid": loader(21, 4)}
        callbacks = [dl.EMACallback(0.8), dl.CheckpointCallback(folder / kind, content="model")]
        train(model, engine=fsdp(kind), optimizer=optimizer, loaders=loaders, callbacks=callbacks, num_epochs=2)
        if kind != "meta":
            torch.save(model.state_dict(), folder / f"{kind}.pth")


def test_checkpoints_of_weights_alone_hold_the_average(tmp_path):
    """content="model" saves what evaluation used, which is what the run ends with; runner.load reads it."""
    together(lambda: save_weights(tmp_path))

    found = {}
    for kind in KINDS:
        runner = dl.SupervisedRunner()
        runner.model = make()
        runner.load(tmp_path / kind, which="last")
        found[kind] = runner.model.state_dict()
    for kind in ("file", "sharded"):
        expected = torch.load(tmp_path / f"{kind}.pth", weights_only=True)
        torch.testing.assert_close(found[kind], expected, rtol=0, atol=0)
    torch.testing.assert_close(found["meta"], found["file"], rtol=0, atol=1e-6)


def train_swa(engine, model):
    optimizer, swa = torch.optim.SGD(model.parameters(), lr=0.1), Last()
    loaders = {"train": loader(42, 4, shuffle=True), "valid": loader(21, 4)}
    train(model, engine=engine, optimizer=optimizer, loaders=loaders, callbacks=[swa], num_epochs=3)
    return swa.state


class Last(dl.SWACallback):
    """SWACallback that gathers the state in the end, after batch norm statistics are recomputed."""

    def __init__(self):
        super().__init__(2)
        self.state = {}

    def on_stage_end(self, runner):
        """End the stage."""
        super().on_stage_end(runner)
        runner.engine.training_model(runner.current_run.stage.training_model)
        module = runner.engine.trained_module(runner.current_run.stage.training_model)
        self.state = {name: each.clone() for name, each in runner.engine.whole_state(module.state_dict()).items()}


def test_statistics_of_batch_norm_are_recomputed_as_with_ddp():
    """Two processes with 11 and 10 batches of 4, and 2 in the last, compute the same means, to 1e-6."""
    ddp = dl.DistributedDataParallelEngine(2, device="cpu", timeout_s=60)

    expected, *found = together(
        lambda: [train_swa(ddp, whole()), *(train_swa(fsdp(kind), model_of(kind)) for kind in KINDS)]
    )

    assert len(found) == 3
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-6)
        assert int(each["1.norm.num_batches_tracked"]) == int(expected["1.norm.num_batches_tracked"]) > 0
