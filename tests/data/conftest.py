"""Files that several tests of streams read."""

import pytest

from tests.data.stream_sources import write_files


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a folder with the numbers 0 to 95 in JSON lines and in tar archives."""
    folder = tmp_path_factory.mktemp("shards")
    write_files(folder)
    return folder
