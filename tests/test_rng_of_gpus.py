"""Tests of GPU generators after a resume with another number of GPUs, with a stand-in for torch.cuda."""

from types import SimpleNamespace

import pytest
import torch

from runnerkit.resume import resume_point
from runnerkit.seeding import generators


class Gpus:
    """Stand-in for the generators of `num_gpus` GPUs, whose states are numbers."""

    def __init__(self, monkeypatch, num_gpus):
        self.states = {index: torch.tensor([index]) for index in range(num_gpus)}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states.values()))
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: self.states.update({index: state}))
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: self.states.update(enumerate(states)))


@pytest.mark.parametrize(
    ("num_before", "num_now", "num_restored"), [(2, 2, 2), (4, 2, 2), (1, 2, 1), (0, 1, 0)], ids=str
)
def test_generators_of_the_gpus_that_are_visible_are_restored(monkeypatch, caplog, num_before, num_now, num_restored):
    """Generators of visible GPUs are restored; if the number of GPUs changed, one rank warns."""
    Gpus(monkeypatch, num_before)
    with monkeypatch.context() as saving:
        saving.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.tensor([100 + i]) for i in range(num_before)])
        saved = generators.rng_state()
    gpus = Gpus(monkeypatch, num_now)
    for rank in (0, 1):
        engine = SimpleNamespace(device=torch.device("cuda", rank), is_main_process=rank == 0)
        point = resume_point.ResumePoint()
        point.found = resume_point.Snapshot(state={}, source="last.pth")
        point.found.rng = saved
        point.restore_rng(SimpleNamespace(engine=engine))

    expected = [100 + i if i < num_restored else i for i in range(num_now)]
    assert [int(state) for state in gpus.states.values()] == expected
    message = f"last.pth was saved where a process saw {num_before} GPUs, and {num_now} are visible now"
    assert caplog.text.count(message) == (num_before != num_now)
