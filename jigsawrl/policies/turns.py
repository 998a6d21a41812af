"""Taking turns where it gains little to go at once: the first is done sooner, and the two fall out of step."""

from __future__ import annotations

from jigsawrl.graph.interference import SIGNATURES, Signature, undisturbed
from jigsawrl.graph.lanes import Lane
from jigsawrl.policies.shares import BRIEF
from jigsawrl.policies.state import State


def out_of_turn(state: State, apart: set[int]) -> set[int]:
    """Lanes that had better stand still for another pipeline's on the same workers; `apart` have no part in it.

    Two that move data over a link are each half as fast. So one goes first, and the other's turn comes when the first
    keeps its workers busy again. With arithmetic it is nearly the same, if what goes first moves data next. The
    shortest goes first, and who has waited for as long as it needs.
    """
    if undisturbed(state.table):
        return set()
    waiting: set[int] = set()
    turns: dict[tuple[int, Signature], str] = {}

    def rank(lane: Lane) -> tuple[int, bool, float, int]:
        waited = waits_long(lane, state.now)
        return -state.pipelines[lane.pipeline].outlook.shape.priority, not waited, lane.left, lane.id

    for lane in sorted(state.lanes.lanes.values(), key=rank):
        signature = state.table.known(lane.signature)
        if signature not in ("link", "compute") or lane.id in apart or lane.segment.seconds < BRIEF:
            continue
        places = [(worker, signature) for worker in lane.workers]
        if any(turns.get(place, lane.pipeline) != lane.pipeline for place in places):
            waiting.add(lane.id)
        elif signature == "link" or frees_workers_next(lane):
            turns.update(dict.fromkeys(places, lane.pipeline))
    return waiting


def waits_long(lane: Lane, now: float) -> bool:
    """Whether it stands still for longer than it needs: then it goes first."""
    return lane.paused and now - lane.started > lane.left


def frees_workers_next(lane: Lane) -> bool:
    """Whether its next sub-stage leaves its workers to others."""
    following = lane.segments[lane.index + 1 : lane.index + 2]
    return any(SIGNATURES[segment.kind] in ("link", "host") for segment in following)
