"""Trainings that may follow their rollouts without asking, where nothing else could be decided anyway."""

from __future__ import annotations

from dataclasses import replace

from jigsawrl.graph.interference import merely_divided
from jigsawrl.policies.state import Start, State


def going_on(state: State, starts: list[Start]) -> list[Start]:
    """The same starts; with leave to go on where all run at once, by turns, and nobody waits or is in a hurry."""
    if not starts or not merely_divided(state.table):
        return starts
    begins = {start.pipeline for start in starts}
    pipelines = state.unfinished()
    free = not (
        any(lane.paused for lane in state.lanes.lanes.values())
        or any(p.status == "ready" and p.name not in begins for p in pipelines)
        or any(p.apart or p.due < float("inf") for p in pipelines)
    )
    rollouts = {name for name in begins if state.pipelines[name].phase == "rollout"}
    return [replace(start, onward=True) if free and start.pipeline in rollouts else start for start in starts]
