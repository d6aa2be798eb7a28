"""The environment of the other frameworks, for tests that run their programs."""

from pathlib import Path

import pytest

PEERS = Path(__file__).parents[1] / ".venv-peers"


def needs_peers():
    """Skip the test unless the other frameworks are installed."""
    if not (PEERS / "installed").exists():
        pytest.skip("the other frameworks are not installed: run `make .venv-peers/installed`")
