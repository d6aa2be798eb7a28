"""The stop-watch of case a."""

from types import SimpleNamespace

from benchmarks.steps import work


def test_a_turn_is_timed_from_its_second_tenth_on(monkeypatch):
    """Waits, and what a step costs while caches are cold, are nobody's."""
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
