"""The result of one check of `runnerkit doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "note", "BROKEN"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: "note" marks facts that may be of interest but do not affect a run.
        path: relative to the logdir.
    """

    verdict: Verdict
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:6}  {self.path}: {self.text}"
