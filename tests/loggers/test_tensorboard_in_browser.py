"""The curves of a run in TensorBoard's page, opened in a browser."""

import ctypes
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits
from tests.loggers.served import fetch, serve
from tests.tiny import train

CHROMIUM = shutil.which("chromium")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SCREENSHOT = Path(__file__).parents[2] / "docs" / "images" / "tensorboard.png"
PR_SET_CHILD_SUBREAPER = 36
NUM_EPOCHS = 12


@pytest.fixture
def adopts_orphans() -> Iterator[None]:
    """Adopt the browser's orphaned processes, so that this process can find and end them."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    yield
    assert prctl(PR_SET_CHILD_SUBREAPER, 0) == 0


@contextmanager
def browse(address: str) -> Iterator[Any]:
    """Open a page in Chromium, which is always closed at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 640})
            page.goto(address)
            yield page
        finally:
            browser.close()


def fit(logdir: Path) -> dl.SupervisedRunner:
    data = {key: Digits(train=key == "train") for key in ("train", "valid")}
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loaders = {
        key: dl.TensorLoader(each.images.float() / 255, each.targets, batch_size=64, shuffle=key == "train")
        for key, each in data.items()
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    callbacks = [dl.AccuracyCallback("logits", "targets", topk=(1,))]
    options = {"callbacks": callbacks, "num_epochs": NUM_EPOCHS, "logdir": logdir}
    return train(model, optimizer=optimizer, loaders=loaders, **options)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install --no-install-recommends chromium")
@pytest.mark.usefixtures("adopts_orphans")
def test_browser_shows_the_curves_of_every_loader(tmp_path: Path) -> None:
    """The page shows tags, runs and last values; even after an exception no process is left."""
    pytest.importorskip("playwright", reason="needs the Python package playwright")
    metrics = fit(tmp_path).epoch_metrics

    with suppress(KeyboardInterrupt), serve(tmp_path / "tensorboard") as address:
        for loader in metrics:
            fetch(address, loader, "loss", num_points=NUM_EPOCHS)  # it has read the files
        with browse(f"{address}#timeseries") as page:
            page.get_by_label("Toggle settings side pane").click()
            tags = page.get_by_role("combobox", name="Filter tags")
            tags.fill("^(accuracy|loss)$")
            tags.press("Escape")  # closes the list of suggestions
            for tag in ("accuracy", "loss"):
                card = page.locator("metrics-filtered-view-component scalar-card", has_text=tag)
                for loader, values in metrics.items():
                    last = f"{float(np.float32(values[tag])):.4g}"
                    row = re.compile(rf"\b{loader}\b.*\b{re.escape(last)}\b.*\b{NUM_EPOCHS}\b", re.DOTALL)
                    card.locator("tb-data-table-content-row", has_text=row).wait_for()
            if "RUNNERKIT_WRITE_SCREENSHOTS" in os.environ:
                SCREENSHOT.parent.mkdir(exist_ok=True)
                page.screenshot(path=SCREENSHOT)
            raise KeyboardInterrupt
    assert page.is_closed()
