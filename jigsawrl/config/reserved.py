"""Names that no pipeline and no job can have, because a run folder holds something else under them.

The folder of a run of several pipelines holds a folder for each of them, under its name, beside the run's own files.
Files whose names begin with a dot need no entry here: no pipeline's name does.
"""

from __future__ import annotations

from collections.abc import Iterable

RESERVED = frozenset(
    {
        "config.yaml",
        "control.json",
        "events.jsonl",
        "metrics.jsonl",
        "output.log",
        "picture.svg",
        "profile.json",
        "report.html",
        "report.json",
        "requests.json",
        "store",
        "submitted.json",
        "submitted.yaml",
        "timeline.json",
    }
)
"""Everything that a run, a cluster, or a report of either writes into a run folder."""


def is_reserved(name: str) -> bool:
    """Whether a run folder holds something else under this name, also where case makes no difference."""
    return name.casefold() in RESERVED


def refusal(name: str) -> str:
    """Says why a pipeline or a job cannot have a reserved name."""
    return f"{name!r} is the name of one of a run folder's own files; choose another"


def alike(name: str, others: Iterable[str]) -> str | None:
    """Another name that some file systems take for the same one: it differs in case only."""
    return next((other for other in others if other != name and other.casefold() == name.casefold()), None)
