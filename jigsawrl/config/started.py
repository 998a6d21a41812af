"""What a run file leaves open is decided when the run starts, kept in its folder, and stays when the run goes on."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from jigsawrl.config.runfile import read_run_file, validated
from jigsawrl.config.settings import RunConfig
from jigsawrl.errors import JigsawError
from jigsawrl.surface import option
from jigsawrl.telemetry import jsonl

RESOLVED = "config.yaml"
"""In a run folder: the run file with everything that was left open."""


def as_started(
    config: RunConfig,
    folder: Path,
    events: Path,
    resume: bool,
    say: Callable[[str], None],
    ranks: int | None = None,
) -> RunConfig:
    """A run with nothing left open: as its folder has it where the run goes on, else as of today.

    `ranks`: those of a run whose file and folder do not name them; None: as many as its workers. A folder from before
    dates were kept has that of its first event.
    """
    before = kept_in(folder) if resume else None
    if before is None:
        return dated(ranked(config, ranks), datetime.date.today())
    if before.ranks is not None and config.ranks not in (None, before.ranks):
        raise JigsawError(
            f"{folder}: holds a run with other settings: ranks was {before.ranks}, is {config.ranks}; "
            f"resume it with the ranks it had, or choose another folder with {option('out')}"
        )
    config = continued(config, before if before.ranks or ranks is None else ranked(before, ranks))
    if config.rollout.date is not None:
        return config
    first = first_day(events)
    day, what = (first, "the day of its first event") if first else (datetime.date.today(), "today")
    say(f"{folder}: keeps no date for the chat template; from now on it is {day}, {what}")
    return dated(config, day)


def kept_in(folder: Path) -> RunConfig | None:
    """The run that a folder holds; None where it holds none."""
    resolved = folder / RESOLVED
    return validated(read_run_file(resolved)) if resolved.exists() else None


def continued(config: RunConfig, before: RunConfig) -> RunConfig:
    """A run that goes on: what its run file leaves open is as it was before."""
    rollout = config.rollout
    changes: dict[str, Any] = {}
    if "max_tokens" not in rollout.model_fields_set:
        changes["max_tokens"] = before.rollout.max_tokens
    if rollout.date is None:
        changes["date"] = before.rollout.date
    changed = config.model_copy(update={"rollout": rollout.model_copy(update=changes)})
    return ranked(changed, before.gang)


def ranked(config: RunConfig, ranks: int | None = None) -> RunConfig:
    """With this number of ranks, or as many as workers, unless the run file has one."""
    return config.model_copy(update={"ranks": config.ranks or ranks or config.workers})


def dated(config: RunConfig, day: datetime.date) -> RunConfig:
    """With this date, unless the run file has one."""
    if config.rollout.date is not None:
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"date": day})})


def first_day(events: Path) -> datetime.date | None:
    """The date, in local time, of the first event in a log; None where there is no such event."""
    if not events.is_file():
        return None
    for _, event in islice(jsonl.read(events), 1):
        if isinstance(event.get("t"), int | float):
            return datetime.datetime.fromtimestamp(event["t"]).date()
    return None
