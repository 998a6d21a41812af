"""What a run file leaves open is decided when the run starts, kept in its folder, and stays when the run goes on."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from jigsawrl.config.runfile import read_run_file, validated
from jigsawrl.config.settings import RunConfig
from jigsawrl.telemetry import jsonl

RESOLVED = "config.yaml"
"""In a run folder: the run file with everything that was left open."""


def as_started(
    config: RunConfig, folder: Path, events: Path, resume: bool, say: Callable[[str], None]
) -> RunConfig:
    """A run with nothing left open: as its folder has it where the run goes on, else as of today.

    A folder from before dates were kept has that of its first event.
    """
    before = kept_in(folder) if resume else None
    if before is None:
        return dated(config, datetime.date.today())
    config = continued(config, before)
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
    return config.model_copy(update={"rollout": rollout.model_copy(update=changes)})


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
