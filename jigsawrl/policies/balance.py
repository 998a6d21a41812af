"""Who is ahead with a large model keeps to half of a worker, so that smaller ones beside it find room.

All work has ended when the last pipeline's has. Rollouts that mix on a GPU as they come do not slow each other alike:
what reads small weights waits behind what reads large ones. Of four pipelines that take as long as each other alone
(`benchmarks/gpu_multiplex.py`), those of 0.5B ended 3 to 5 s of 44 after the one of 1.5B. A large model's decode is
as fast alone on half of the processors (`jigsaw profile`), and leaves the others to the rest.

Who seems ahead may be far behind after one long answer, and would then end alone, which costs all of them more than
if it is done too soon. So whose lengths are uncertain makes room only if it is ahead by a cautious forecast too.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from jigsawrl.graph.lanes import Lane
from jigsawrl.policies.state import Confine, Pipeline, State

LARGER = 1.5
"""Times the bytes of weights. Smaller models gain nothing by making room for larger ones, or for their like."""
AHEAD, LEVEL = 0.95, 0.98
"""Parts of the work that another has left: with less than the first a rollout is confined, until it has more than the
second."""
CAUTIOUS = 0.75
"""Level of the forecast of who may be ahead."""


def balanced(state: State, leaving: Collection[int] = frozenset()) -> list[Confine]:
    """For rollouts that should be confined and are not, or are and should not be; `leaving` are moved or paused.

    Nobody is who shares an engine, or has a time by which it has to be done.
    """
    if state.table.holds_rollouts:
        return []
    lanes = state.lanes.lanes
    together = [{lanes[key].pipeline for key in there} for there in state.lanes.on_worker]

    @cache
    def work(name: str, level: float = 0.5) -> float:
        return state.left_alone(state.pipelines[name], level)

    def ahead(lane: Lane) -> bool:
        pipeline = state.pipelines[lane.pipeline]
        if lane.base or pipeline.due < float("inf"):
            return False
        beside = {name for worker in lane.workers for name in together[worker]}
        smaller = [name for name in beside if _makes_room_for(pipeline, state.pipelines[name])]
        part = LEVEL if lane.confined else AHEAD
        return any(work(lane.pipeline, CAUTIOUS) < part * work(name) for name in smaller)

    rollouts = [lane for key, lane in lanes.items() if lane.phase == "rollout" and key not in leaving]
    return [Confine(lane.id, not lane.confined) for lane in rollouts if ahead(lane) != lane.confined]


def _makes_room_for(pipeline: Pipeline, other: Pipeline) -> bool:
    mine, theirs = pipeline.outlook.shape, other.outlook.shape
    return mine.model.weight_bytes >= LARGER * theirs.model.weight_bytes and mine.priority <= theirs.priority
