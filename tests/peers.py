"""The other frameworks' environment, for tests that run their programs."""

from pathlib import Path

import pytest

PEERS = Path(__file__).parents[1] / ".venv-peers"


def needs_peers():
    if not (PEERS / "installed").exists():
        pytest.skip("the other frameworks are not installed: `make .venv-peers/installed` gives them a folder")
