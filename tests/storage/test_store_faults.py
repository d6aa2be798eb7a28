"""Operations on a store while the network or the store fails."""

import random

import numpy as np
import pytest
import torch

from runnerkit.storage.remote.store import Replaced, Store
from tests.faults import proxy
from tests.faults.proxy import Rule


def test_repeated_requests_leave_random_generators_alone(s3, s3_proxy, tmp_path):
    """A run with faults draws the same random numbers as one without."""
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for kind in (proxy.ERROR, proxy.SLOW_DOWN, proxy.DROPPED, proxy.LOST):
        s3_proxy.set(Rule(kind, nth=1, method="PUT"), Rule(kind, nth=1, method="GET"), Rule(kind, nth=1, method="HEAD"))
        store = Store(s3.url())

        store.put("objects/a", path)
        store.write("manifest.json", b"{}")

        assert store.read("manifest.json")[0] == b"{}"

    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert s3_proxy.counts.keys() == {proxy.ERROR, proxy.SLOW_DOWN, proxy.DROPPED, proxy.LOST}


@pytest.mark.parametrize(
    "kind",
    [
        proxy.DROPPED, proxy.LOST, proxy.DELAYED, proxy.GONE, proxy.SHORT_REQUEST, proxy.SHORT_RESPONSE, proxy.ERROR,
        proxy.SLOW_DOWN,
    ],
)  # fmt: skip
def test_each_operation_survives_a_fault_of_its_first_request(s3, s3_proxy, tmp_path, kind):
    """Its result is that without the fault; a conditional write whose answer is lost knows that it has succeeded."""
    path, copy = tmp_path / "file", tmp_path / "copy"
    path.write_bytes(b"12345")
    store = Store(s3.url())

    def struck(operation, *arguments, **options):
        s3_proxy.set(Rule(kind, nth=1, seconds=0.3))
        return operation(*arguments, **options)

    first = struck(store.write, "manifest.json", b"1", replaces="new")
    second = struck(store.write, "manifest.json", b"2", replaces=first)
    found = struck(store.read, "manifest.json")
    struck(store.put, "objects/a", path)
    struck(store.get, "objects/a", copy)
    names = struck(store.names)
    exists = struck(store.exists, "objects/a"), struck(store.exists, "objects/b")
    struck(store.delete, "objects/a")

    assert found == (b"2", second) and second != first
    assert copy.read_bytes() == b"12345"
    assert names == ["manifest.json", "objects/a"] and exists == (True, False)
    assert s3.objects() == {"run/manifest.json": b"2"}
    assert s3_proxy.counts[kind] >= 8


def test_a_conditional_write_finds_what_another_run_has_written(s3, s3_proxy):
    """Also if the server has answered with an error before."""
    store = Store(s3.url())
    version = store.write("lease.json", b"1", replaces="new")
    s3.put("run/lease.json", b"another")
    s3_proxy.set(Rule(proxy.SLOW_DOWN, nth=1))

    with pytest.raises(Replaced):
        store.write("lease.json", b"2", replaces=version)
    with pytest.raises(Replaced):
        store.write("lease.json", b"2", replaces="new")

    assert s3.read("run/lease.json") == b"another"
