"""The timer of case a."""

from types import SimpleNamespace

from benchmarks.steps import work


def test_a_turn_is_timed_from_its_second_tenth_on(monkeypatch):
    """Waiting for the turn and the first tenth of its steps, which run with cold caches, are not timed."""
    now = 0.0

    def wait(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(work, "time", SimpleNamespace(perf_counter=lambda: now))
    batches = work.Batches([*range(5001)], SimpleNamespace(wait=lambda: wait(1000)))

    seen = []
    for number in batches:
        seen.append(number)
        wait(100 if number < 500 or number % 100 < 10 else 1)

    assert seen == batches.batches
    assert batches.step_us == 1e6
