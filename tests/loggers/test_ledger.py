"""Ledger: a resumed run continues the same run of a service and sends nothing twice."""

import pytest

from runnerkit.logger import Step
from runnerkit.loggers.services.ledger import Ledger

# The metrics that a run logs, in order: names, epoch, step.
RUN = [
    (["train/batch/loss"], 1, 2),
    (["valid/loss"], 1, 2),
    (["train/batch/loss"], 1, 4),
    (["train/loss"], 1, 4),
    (["valid/loss", "valid/auc"], 1, 4),
    (["valid/loss", "valid/auc"], 1, 4),  # at the end of the epoch, and after its last step
    (["train/batch/loss"], 2, 6),
    (["infer/loss"], 3, 6),  # nothing is trained
    (["infer/loss"], 4, 6),
]


def send(folder, records, *, is_resumed, service):
    """Send like a logger; `service` receives the sent values."""
    ledger = Ledger(folder)
    ledger.open(is_resumed=is_resumed)
    ledger.start(ledger.run_id or "first")
    for names, epoch, batch in records:
        step = Step("train", "", epoch, batch)
        unsent = ledger.unsent(names, step=step)
        if unsent:
            service.append((unsent, epoch, batch))
            ledger.note(unsent, step=step)
            ledger.write()
    ledger.close()
    return ledger


@pytest.mark.parametrize("killed_after", range(len(RUN) + 1))
def test_killed_and_resumed_runs_send_what_an_unkilled_one_sends(tmp_path, killed_after):
    """For any checkpoint and kills, every value is sent once, in order."""
    unkilled = []
    send(tmp_path / "unkilled", RUN, is_resumed=False, service=unkilled)

    for last in range(killed_after + 1):
        service, folder = [], tmp_path / str(last)
        send(folder, RUN[:killed_after], is_resumed=False, service=service)
        send(folder, RUN[last:killed_after], is_resumed=True, service=service)  # killed at the same place again
        ledger = send(folder, RUN[last:], is_resumed=True, service=service)

        assert service == unkilled
        assert (ledger.run_id, ledger.num_sent, ledger.furthest()) == ("first", len(unkilled), (4, 6))


def test_one_place_is_sent_once_and_a_new_name_there_too(tmp_path):
    """A metric logged twice at one step keeps its first value."""
    service = []

    send(tmp_path, [(["a"], 1, 1), (["a", "b"], 1, 1), (["a"], 1, 1)], is_resumed=False, service=service)

    assert service == [(["a"], 1, 1), (["b"], 1, 1)]


def test_a_note_torn_by_a_kill_does_not_count(tmp_path):
    """The run resumes; the value of the incomplete note is sent again."""
    service = []
    send(tmp_path, RUN[:2], is_resumed=False, service=service)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('[1, 4, ["train/ba')

    send(tmp_path, RUN[2:4], is_resumed=True, service=service)

    assert service == RUN[:4]


def test_the_file_does_not_grow_with_each_start(tmp_path):
    """Each start summarizes the earlier notes in one line."""
    service = []

    for num in range(1, 6):
        send(tmp_path, RUN[num - 1 : num], is_resumed=num > 1, service=service)

    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 3


def test_notes_of_another_run_are_refused(tmp_path):
    """Two runs never share a service's run by accident; the message names both solutions."""
    send(tmp_path / "log" / "mlflow", RUN, is_resumed=False, service=[])

    with pytest.raises(FileExistsError, match=r'log holds the logs of another run.*resume="auto".*another logdir'):
        Ledger(tmp_path / "log" / "mlflow").open(is_resumed=False)
