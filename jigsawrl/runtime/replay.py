"""A run's log through the scheduler core again: it hears what was heard then, and must decide the same."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jigsawrl.config.pipelines import PipelineConfig, checked_mix
from jigsawrl.config.runfile import read_run_file, validated
from jigsawrl.config.started import RESOLVED
from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.profile import Workload, table_on
from jigsawrl.policies.named import policy_of
from jigsawrl.policies.state import Swap
from jigsawrl.runtime.first_outlook import first_outlook
from jigsawrl.runtime.launch import known_before
from jigsawrl.runtime.requests import Requests
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import read, read_action, written_action
from jigsawrl.scheduler.layout import Layout
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.events import EVENTS_FILE


@dataclass(slots=True)
class Decision:
    """The actions of one moment, as they were decided then and as they would be decided now."""

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
    again: Again | None = None
    for number, (_, event) in enumerate(jsonl.read(path), 1):
        try:
            kind, ended = event["event"], None
            starts = kind in ("start", "resume") and "hardware" in event
            if again is not None and (starts or kind in ("submitted", "turn")):
                ended = again.closed()
            if starts:
                again = Again(run, event)
            elif again is not None:
                again.take(event)
            elif kind == "turn":
                raise ValueError("a decision before the run started")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise JigsawError(f"{path}, line {number} cannot be replayed ({error!r})") from error
        if ended is not None:
            yield ended
    if again is None:
        raise JigsawError(f"{run}: is not the run of several pipelines; there is nothing to replay")
    if (last := again.closed()) is not None:
        yield last


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


class Again:
    """A scheduler core as that of the run was when it started, and what was heard and done last."""

    def __init__(self, run: Path, start: dict[str, Any]) -> None:
        self.run, self.start = run, start
        self.worker = Hardware(**start["hardware"])
        self.asked = checked_mix(read_run_file(run / RESOLVED))
        pools, known = self.asked.pools, known_before(self.asked.profile)
        self.core = SchedulerCore(
            policy_of(start["policy"], self.asked.order),
            table_on(self.worker, known),
            start["workers"],
            self.worker.device_bytes,
            start.get("units", 1),
            start.get("rollout_workers", pools.rollout if pools else None),
        )
        self.turn: dict[str, Any] | None = None
        """What was heard last; what was done about it is still being read."""
        self.actions: list[dict[str, Any]] = []
        layouts = start.get("layouts", {})
        for name in start["pipelines"]:
            self.join(name, layouts.get(name), known.workloads.get(name) if known else None)

    def join(
        self,
        name: str,
        layout: list[list[int]] | None,
        known: Workload | None = None,
        *,
        submitted: bool = False,
    ) -> None:
        """Joins a pipeline. A log without its layout is from before ranks and workers could differ."""
        asked, usual = self.asked, self.core.state.layout
        entry = asked.pipelines.get(name) or PipelineConfig(**Requests(self.run).submitted[name])
        config = validated(read_run_file(self.run / name / RESOLVED))
        rollout = asked.pools.homes(entry, ranks=1).rollout if asked.pools else usual.rollout
        own = replace(usual, rollout=rollout) if layout is None else Layout(*map(tuple, layout))
        given = (config, entry, self.worker, self.start["workers"], known, own.ranks_on_each)
        awaited = entry.arrival <= 0 and not submitted
        self.core.join(name, first_outlook(name, *given), own, awaited=awaited)

    def take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "action":
                self.actions.append({k: v for k, v in event.items() if k not in ("t", "event")})
            case "submitted":
                self.join(event["pipeline"], event.get("layout"), submitted=True)
            case "turn":
                self.turn = event

    def closed(self) -> Decision | None:
        """Hears what was heard last, and does what was done; None where nothing was decided, neither then nor now."""
        turn, actions, self.turn, self.actions = self.turn, self.actions, None, []
        if turn is None:
            return None
        self.core.hear(turn["at"], [read(entry) for entry in turn["heard"]])
        was = [self._as_now(action) for action in actions]
        done = [action for each in was if not isinstance(action := read_action(each), Swap)]
        chosen = self.core.decide(done if was or turn["decides"] else None)
        if not (turn["decides"] or self.core.decided):
            return None
        now = (jsonl.decode(jsonl.encode(written_action(action))) for action in chosen)
        return Decision(turn["at"], was, [each for each in now if each])

    def _as_now(self, action: dict[str, Any]) -> dict[str, Any]:
        """The action as it would be written today: older logs name no phase, and call `auto_continue` otherwise."""
        if action["action"] != "start" or "phase" in action:
            return action
        phase = self.core.state.pipelines[action["pipeline"]].current.id
        return {
            "action": "start",
            "pipeline": phase.pipeline,
            "phase": phase.kind,
            "step": phase.index,
            "places": action["places"],
            "share": action["share"],
            "auto_continue": action["onward"],
        }
