"""What `runnerkit doctor` found in one place of a logdir."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "note", "BROKEN"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: "note" is what a person may want to know and a run gets along with.
        path: in the logdir.
    """

    verdict: Verdict
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:6}  {self.path}: {self.text}"
