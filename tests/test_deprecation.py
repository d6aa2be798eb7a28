"""A check that no old name outlives the version that its warning announces."""

from runnerkit.support.deprecation import REMOVED_IN
from runnerkit.version import __version__


def as_numbers(version):
    return tuple(int(each) for each in version.split("."))


def test_no_old_name_outlives_its_last_version():
    """Version 1.0.0 deletes accepts_old_names and all that it accepts."""
    assert as_numbers(__version__) < as_numbers(REMOVED_IN)
