"""A run that is killed again and again comes out as if nothing had been; `make drills` is the long version."""

import pytest

from tests.faults.drill import PLACES, TIME, Kill, Tally, attempt, drill, fingerprint, table


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_kills"), [(1, 5), (2, 2)])
def test_a_killed_run_equals_the_run_that_was_not(tmp_path, num_processes, num_kills):
    """Weights, moments and counters bit for bit, CSV files and TensorBoard's series."""
    tally = drill(num_kills, num_processes, folder=tmp_path, seed=num_processes)

    assert tally.different == [] and tally.kills.total() >= num_kills


@pytest.mark.slow
def test_the_drill_sees_what_differs(tmp_path):
    """One number of one row, or one weight."""
    run = tmp_path / "run"
    assert not attempt(run, 1, Kill("in the forward pass", 0, num_calls=70), tally := Tally(1))
    assert tally.kills == {"in the forward pass": 1}
    assert attempt(run, 1, None, tally)
    expected = fingerprint(run)

    csv = next(run.glob("csv/*.csv"))
    csv.write_text(csv.read_text().replace("0.", "1.", 1))

    found = fingerprint(run)
    assert [key for key in expected if found[key] != expected[key]] == [f"csv {csv.name}"]


def test_the_table_counts_every_kill():
    """Each place has a row."""
    tally = Tally(1, num_runs=3, different=["broken-1-2: counters differs", "broken-1-2: csv differs"])
    tally.kills.update({place: number for number, place in enumerate([*PLACES, TIME])})

    rows = [line.strip("|").split("|") for line in table([tally]).splitlines()]

    assert [head.strip() for head, _ in rows[2:-4]] == [*PLACES, TIME]
    assert sum(int(number) for _, number in rows[2:-4]) == int(rows[-4][1])
    assert rows[-2][1].strip() == "2"
