"""HorovodEngine without Horovod installed."""

import sys

import pytest

from runnerkit import dl
from tests.tiny import loader, mlp


def test_without_horovod_the_engine_says_how_to_get_it(monkeypatch):
    """The engine can be constructed, but not run."""
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)

    with pytest.raises(ImportError, match=r"HorovodEngine needs Horovod: see docs/horovod\.md"):
        dl.SupervisedRunner(model=mlp()).evaluate_loader(loader(8, 4), engine=dl.HorovodEngine(2, device="cpu"))
