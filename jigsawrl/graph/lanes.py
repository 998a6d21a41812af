"""Sub-stages running on workers: how far each has come, and which ends next.

A lane is a row of sub-stages, one after the other, on the same workers: an engine's prefill, decode, tail and tool
waits, or the log-probs, gradients, optimizer step and weight sync of a training gang. Lanes that share a worker slow
each other down as the interference table says; a gang goes at the pace of its slowest worker. The simulator runs
lanes with durations that turned out, the look-ahead with predicted ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jigsawrl.graph.interference import SIGNATURES, Interference, Occupant
from jigsawrl.telemetry.events import Substage

INSTANT = 1e-9
"""Seconds below which a sub-stage counts as done."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sub-stage of a lane: its kind, and its seconds alone on whole workers."""

    kind: Substage
    seconds: float
    sequences: int = 0
    tokens: float = 0.0


@dataclass(slots=True)
class Lane:
    """`left` is what remains of the current segment, in seconds alone on whole workers."""

    id: int
    pipeline: str
    step: int
    phase: str
    workers: tuple[int, ...]
    share: float
    segments: tuple[Segment, ...]
    index: int = 0
    left: float = 0.0
    speed: float = 0.0
    paused: bool = False
    started: float = 0.0
    """When the current segment began."""

    @property
    def segment(self) -> Segment:
        return self.segments[self.index]

    @property
    def occupies(self) -> bool:
        """Whether it takes a part of its workers now."""
        return not self.paused and SIGNATURES[self.segment.kind] not in ("host", "link")

    def left_in_all(self) -> float:
        return self.left + sum(segment.seconds for segment in self.segments[self.index + 1 :])


class Lanes:
    """All lanes of a set of workers, and the clock."""

    def __init__(self, table: Interference, workers: int, now: float = 0.0) -> None:
        self.table = table
        self.now = now
        self.lanes: dict[int, Lane] = {}
        self.on_worker: list[list[int]] = [[] for _ in range(workers)]
        self._known: dict[tuple, float] = {}

    def copy(self) -> Lanes:
        other = Lanes.__new__(Lanes)
        other.table, other.now, other._known = self.table, self.now, self._known
        other.lanes = {key: replace(lane) for key, lane in self.lanes.items()}
        other.on_worker = [list(ids) for ids in self.on_worker]
        return other

    def add(self, lane: Lane) -> None:
        """Starts a lane with its current segment."""
        lane.left = lane.segment.seconds
        lane.started = self.now
        self.lanes[lane.id] = lane
        for worker in lane.workers:
            self.on_worker[worker].append(lane.id)
        self._recompute(lane.workers)

    def remove(self, lane_id: int) -> Lane:
        lane = self.lanes.pop(lane_id)
        for worker in lane.workers:
            self.on_worker[worker].remove(lane_id)
        self._recompute(lane.workers)
        return lane

    def resize(self, lane_id: int, share: float) -> None:
        lane = self.lanes[lane_id]
        if lane.share != share:
            lane.share = share
            self._recompute(lane.workers)

    def pause(self, lane_id: int, paused: bool) -> None:
        lane = self.lanes[lane_id]
        if lane.paused != paused:
            lane.paused = paused
            self._recompute(lane.workers)

    def next_end(self) -> float:
        """When the next sub-stage ends; infinity if none runs."""
        soonest = float("inf")
        for lane in self.lanes.values():
            if lane.speed > 0 and lane.left < soonest * lane.speed:
                soonest = lane.left / lane.speed
        return self.now + soonest

    def advance(self, until: float) -> list[Lane]:
        """Moves the clock; lanes whose sub-stage ended by then. They wait for `proceed`."""
        elapsed = until - self.now
        self.now = until
        ended = []
        for lane in self.lanes.values():
            lane.left -= lane.speed * elapsed
            if lane.left <= INSTANT and lane.speed > 0:
                lane.left = 0.0
                ended.append(lane)
        return ended

    def proceed(self, lane: Lane) -> bool:
        """On to the lane's next sub-stage; False, and the lane is gone, if that was the last."""
        before = lane.occupies
        if lane.index + 1 == len(lane.segments):
            self.remove(lane.id)
            return False
        signature = SIGNATURES[lane.segment.kind]
        lane.index += 1
        lane.left, lane.started = lane.segment.seconds, self.now
        if before != lane.occupies or signature != SIGNATURES[lane.segment.kind]:
            self._recompute(lane.workers)
        return True

    def occupants(self, worker: int) -> list[Lane]:
        """Lanes that take a part of the worker now."""
        return [lane for key in self.on_worker[worker] if (lane := self.lanes[key]).occupies]

    def _recompute(self, workers: Iterable[int]) -> None:
        """Speeds of every lane that touches one of these workers."""
        touched = {key for worker in workers for key in self.on_worker[worker]}
        for key in touched:
            lane = self.lanes[key]
            if lane.paused:
                lane.speed = 0.0
            elif not lane.occupies:
                lane.speed = 1.0
            else:
                lane.speed = self._pace(lane)

    def _pace(self, lane: Lane) -> float:
        slowest, seen = 1.0, set()
        own = (SIGNATURES[lane.segment.kind], lane.share)
        for worker in lane.workers:
            ids = self.on_worker[worker]
            if len(ids) == 1:
                others: tuple = ()
            else:
                others = tuple(
                    (SIGNATURES[other.segment.kind], other.share)
                    for key in ids
                    if key != lane.id and (other := self.lanes[key]).occupies
                )
            if others in seen:
                continue
            seen.add(others)
            pace = self._known.get((own, others))
            if pace is None:
                pace = self.table.speed(Occupant(*own), [Occupant(*other) for other in others])
                self._known[own, others] = pace
            slowest = min(slowest, pace)
        return slowest
