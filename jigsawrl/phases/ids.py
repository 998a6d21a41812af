"""How a phase instance is named."""

from __future__ import annotations

from typing import NamedTuple

PhaseKind = str
"""`rollout`, `training`, and whatever other kinds a pipeline's graph has."""


class PhaseId(NamedTuple):
    """One phase of one pipeline: the rollout of step 7 of `math`, or its training on it."""

    pipeline: str
    kind: str
    index: int  # type: ignore[assignment]  # of a tuple's own method by this name there is no use

    def __str__(self) -> str:
        return f"{self.kind} {self.index} of {self.pipeline}"
