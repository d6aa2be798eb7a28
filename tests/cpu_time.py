"""A pytest plugin that prints the CPU time of each test file: ``pytest -p tests.cpu_time``.

The CPU time of a test, in seconds, is that of its process and of all processes that it started and waited for.
"""

import resource
from collections import defaultdict

import pytest

PROPERTY = "cpu_s"
NUM_FILES = 30  # in the table


def _cpu_s():
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Add the CPU time since this process's last report to the report, which carries it to the main process."""
    report = yield
    now = _cpu_s()
    report.user_properties.append((PROPERTY, now - item.config.stash.get(_KEY, now)))
    item.config.stash[_KEY] = now
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """Start counting after collection."""
    session.config.stash[_KEY] = _cpu_s()


def pytest_terminal_summary(terminalreporter):
    """Print the table."""
    seconds, counts = defaultdict(float), defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    path = report.nodeid.partition("::")[0]
                    seconds[path] += value
                    counts[path] += report.when == "call"
    terminalreporter.section(f"CPU time of {sum(counts.values())} tests: {sum(seconds.values()) / 60:.1f} minutes")
    for path, value in sorted(seconds.items(), key=lambda each: -each[1])[:NUM_FILES]:
        terminalreporter.line(f"{value:8.1f} s  {counts[path]:4d} tests  {path}")


_KEY = pytest.StashKey[float]()
