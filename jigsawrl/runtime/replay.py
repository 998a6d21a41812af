"""A run's log through its policy again: what was heard then is heard now, and the decisions must be the same."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jigsawrl.config.pipelines import PipelineConfig, checked_mix
from jigsawrl.config.runfile import read_run_file, validated
from jigsawrl.config.started import RESOLVED
from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.profile import Workload, table_on
from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime.launch import known_before
from jigsawrl.runtime.layout import read_layout
from jigsawrl.runtime.learning import first_outlook
from jigsawrl.runtime.mind import Mind, read, written_action
from jigsawrl.runtime.requests import Requests
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.events import EVENTS_FILE


@dataclass(slots=True)
class Decision:
    """At one moment, as it was taken and as it would be taken again."""

    at: float
    was: list[dict[str, Any]]
    now: list[dict[str, Any]]

    @property
    def same(self) -> bool:
        return self.was == self.now


def replayed(run: Path) -> Iterator[Decision]:
    """Every decision of the run in this folder; a JigsawError where its log is not that of several pipelines."""
    path = run / EVENTS_FILE
    if not path.is_file():
        raise JigsawError(f"{run}: holds no {EVENTS_FILE}, so it is not the folder of a run")
    replay = _Replay(run)
    for number, (_, event) in enumerate(jsonl.read(path), 1):
        try:
            ended = replay.take(event)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise JigsawError(f"{path}, line {number} cannot be replayed ({error!r})") from error
        if ended is not None:
            yield ended
    if replay.again is None:
        raise JigsawError(f"{run}: is not the run of several pipelines; there is nothing to replay")
    if replay.open is not None:
        yield replay.open


def other_python(run: Path) -> str:
    """The version of Python that the run was made by, where it adds floats otherwise than this one; else nothing.

    From 3.12 on `sum` keeps what rounding loses: choices that are as good as each other may turn out otherwise.
    """
    events = (event for _, event in jsonl.read(run / EVENTS_FILE))
    made_by = next((str(event["python"]) for event in events if "python" in event), "")
    theirs, ours = (re.match(r"3\.(\d+)", each) for each in (made_by, platform.python_version()))
    if theirs is None or ours is None:
        return ""
    return made_by if (int(theirs[1]) >= 12) != (int(ours[1]) >= 12) else ""


@dataclass(slots=True)
class _Replay:
    """Takes the events of a log in its order."""

    run: Path
    again: Again | None = None
    open: Decision | None = None
    """The last one, whose actions are still being read."""

    def take(self, event: dict[str, Any]) -> Decision | None:
        """The decision before this event, if it is whole now."""
        kind, ended = event["event"], None
        if kind == "action" and self.open is not None:
            self.open.was.append({k: v for k, v in event.items() if k not in ("t", "event")})
        elif kind in ("start", "resume") and "hardware" in event:
            self.again = Again(self.run, event)
        elif kind == "submitted" and self.again is not None:
            self.again.join(event["pipeline"], event.get("layout"))
        elif kind == "turn":
            if self.again is None:
                raise ValueError("a decision before the run started")
            ended, self.open = self.open, self.again.turn(event)
        return ended


@dataclass(slots=True)
class Again:
    """A mind as that of the run was when it started."""

    run: Path
    start: dict[str, Any]
    mind: Mind = field(init=False)

    def __post_init__(self) -> None:
        worker = Hardware(**self.start["hardware"])
        policy = POLICIES[self.start["policy"]]
        asked = checked_mix(read_run_file(self.run / RESOLVED))
        known = known_before(asked.profile)
        table, units = table_on(worker, known), self.start.get("units", 1)
        first = self.start.get("rollout_workers", asked.pools.rollout if asked.pools else None)
        self.mind = Mind(policy, table, self.start["workers"], worker.device_bytes, units, first)
        layouts = self.start.get("layouts", {})
        for name in self.start["pipelines"]:
            self.join(name, layouts.get(name), known.workloads.get(name) if known else None)

    def join(self, name: str, layout: list[list[int]] | None, known: Workload | None = None) -> None:
        """Where the log does not tell its layout, it is from before ranks and workers could differ."""
        asked = checked_mix(read_run_file(self.run / RESOLVED))
        entry = asked.pipelines.get(name) or PipelineConfig(**Requests(self.run).submitted[name])
        config = validated(read_run_file(self.run / name / RESOLVED))
        worker = Hardware(**self.start["hardware"])
        usual = self.mind.world.layout
        rollout = asked.pools.homes(entry, ranks=1).rollout if asked.pools else usual.rollout
        own = replace(usual, rollout=rollout) if layout is None else read_layout(layout)
        given = (config, entry, worker, self.start["workers"], known, own.ranks_on_each)
        self.mind.join(name, first_outlook(name, *given), own)

    def turn(self, event: dict[str, Any]) -> Decision | None:
        """Hears what was heard; None where nothing was decided."""
        self.mind.world.advance(event["at"])
        for entry in event["heard"]:
            self.mind.hear(*read(entry))
        if not event["decides"]:
            return None
        made = (
            jsonl.decode(jsonl.encode(written_action(action)))
            for action in self.mind.decide(event["everyone"])
        )
        return Decision(event["at"], [], [each for each in made if each])
