"""Runners that write the files of Catalyst 21.12 beside their own."""

from __future__ import annotations

from runnerkit import supervised, train
from runnerkit.callback import ICallback
from runnerkit.catalyst.files import CatalystFilesCallback

__all__ = ["Runner", "SelfSupervisedRunner", "SupervisedRunner"]


class Runner(train.Runner):
    """A :class:`.Runner` with a :class:`CatalystFilesCallback`."""

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        return {**super().get_callbacks(stage), "_catalyst_files": CatalystFilesCallback()}


class SupervisedRunner(Runner, supervised.SupervisedRunner):
    """A :class:`.SupervisedRunner` that writes Catalyst's files too."""


class SelfSupervisedRunner(Runner, supervised.SelfSupervisedRunner):
    """A :class:`.SelfSupervisedRunner` that writes Catalyst's files too."""
