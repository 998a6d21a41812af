"""Sub-stages running on workers: how far each has come, and which ends next.

A lane is a row of sub-stages, one after the other, on the same workers: an engine's prefill, decode, tail and tool
waits, or the log-probs, gradients, optimizer step and weight sync of a training gang. Lanes that share a worker slow
each other down as the interference table says; a gang goes at the pace of its slowest worker. The simulator runs
lanes with durations that turned out, the look-ahead with predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jigsawrl.graph.interference import (
    SIGNATURES,
    Interference,
    Occupant,
    Signature,
    in_one_batch,
    most_demanding,
    speeds_with_fused,
)
from jigsawrl.telemetry.events import Substage

Mix = tuple[tuple[Signature, float], ...]
"""What takes a part of a worker or of its links: what binds it, and its share."""
Together = tuple[int, ...]
"""Lanes on one worker, in the order they came."""
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
    """When the current segment began, or last changed its share."""
    left_then: float = 0.0
    base: str = ""
    """The frozen model whose engine its pipeline shares, if it does."""
    confined: bool = False
    """Whether it keeps to half of its workers. What that changes is not known: speeds are as if it did not."""

    @property
    def segment(self) -> Segment:
        return self.segments[self.index]

    @property
    def signature(self) -> Signature:
        """What binds it now."""
        return SIGNATURES[self.segments[self.index].kind]

    @property
    def occupies(self) -> bool:
        """Whether it takes a part of its workers now."""
        return not self.paused and self.signature not in ("host", "link")

    @property
    def batch(self) -> str:
        """The base in whose batch it is now; empty: it is in none with others."""
        return in_one_batch(self.signature, self.phase, self.base)

    def copy(self) -> Lane:
        return Lane(
            self.id,
            self.pipeline,
            self.step,
            self.phase,
            self.workers,
            self.share,
            self.segments,
            self.index,
            self.left,
            self.speed,
            self.paused,
            self.started,
            self.left_then,
            self.base,
            self.confined,
        )

    def mark(self, now: float) -> None:
        """From now on counts as one stretch of work."""
        self.started, self.left_then = now, self.left

    @property
    def part(self) -> float:
        """Of its segment that was done since the mark."""
        return (self.left_then - self.left) / self.segment.seconds if self.segment.seconds > 0 else 0.0

    def left_in_all(self) -> float:
        return self.left + sum([segment.seconds for segment in self.segments[self.index + 1 :]])


class Lanes:
    """All lanes of a set of workers, and the clock."""

    def __init__(self, table: Interference, workers: int, now: float = 0.0) -> None:
        self.table = table
        self.now = now
        self.lanes: dict[int, Lane] = {}
        self.on_worker: list[Together] = [()] * workers
        self._touched: set[int] = set()
        """Workers whose lanes may have other speeds than they had."""
        self._shared: dict[Together, dict[int, float]] = {(): {}}
        """The speeds that a worker with these lanes gives to those that feel others."""

    def use(self, table: Interference) -> None:
        """Another table from now on."""
        self.table = table
        self._touched.update(range(len(self.on_worker)))

    def add(self, lane: Lane) -> None:
        """Starts a lane with its current segment."""
        self.lanes[lane.id] = lane
        for worker in lane.workers:
            self.on_worker[worker] += (lane.id,)
        self._begin(lane)

    def remove(self, lane_id: int) -> None:
        lane = self.lanes.pop(lane_id)
        for worker in lane.workers:
            self.on_worker[worker] = tuple([key for key in self.on_worker[worker] if key != lane_id])
        self._touched.update(lane.workers)

    def resize(self, lane_id: int, share: float) -> None:
        self.lanes[lane_id].share = share
        self._touched.update(self.lanes[lane_id].workers)

    def pause(self, lane_id: int, paused: bool) -> None:
        self.lanes[lane_id].paused = paused
        self._touched.update(self.lanes[lane_id].workers)

    def next_end(self) -> float:
        """When the next sub-stage ends; infinity if none runs."""
        self._settle()
        soonest = float("inf")
        for lane in self.lanes.values():
            if lane.speed > 0 and lane.left < soonest * lane.speed:
                soonest = lane.left / lane.speed
        return self.now + soonest

    def seconds_left(self, lane: Lane) -> float:
        """Of all of it at the speed of now; infinity while it stands still."""
        self._settle()
        return lane.left_in_all() / lane.speed if lane.speed > 0 else float("inf")

    def advance(self, until: float) -> list[Lane]:
        """Moves the clock; lanes whose sub-stage ended by then. They wait for `proceed`."""
        self._settle()
        elapsed = until - self.now
        self.now = until
        ended = []
        least = math.ulp(until)  # no later point of time can be told from this one
        for lane in self.lanes.values():
            lane.left -= lane.speed * elapsed
            if lane.left <= max(INSTANT, lane.speed * least) and lane.speed > 0:
                lane.left = 0.0
                ended.append(lane)
        return ended

    def drift(self, until: float, least: float, untold: Collection[Substage] = ()) -> None:
        """Moves the clock where nothing ends by itself: what is overdue needs a `least` part of its time more.

        Of `untold` sub-stages nobody says when they end: they are over when they should be, if others follow.
        """
        self._settle()
        elapsed, self.now = until - self.now, until
        for lane in list(self.lanes.values()):
            spent = elapsed
            while (
                lane.segment.kind in untold
                and lane.index + 1 < len(lane.segments)
                and lane.left <= lane.speed * spent
            ):
                spent -= lane.left / lane.speed
                self.proceed(lane)
            lane.left = max(lane.left - lane.speed * spent, least * lane.segment.seconds, INSTANT)

    def replan(self, lane: Lane, segments: tuple[Segment, ...]) -> None:
        """Other sub-stages than were foreseen from here on; the first of them begins now."""
        lane.segments, lane.index = segments, 0
        self._begin(lane)

    def proceed(self, lane: Lane) -> bool:
        """On to the lane's next sub-stage; False, and the lane is gone, if that was the last."""
        if lane.index + 1 == len(lane.segments):
            self.remove(lane.id)
            return False
        lane.index += 1
        self._begin(lane)
        return True

    def _begin(self, lane: Lane) -> None:
        """The lane's current segment begins now."""
        lane.left = lane.segment.seconds
        lane.mark(self.now)
        self._touched.update(lane.workers)

    def crowd(self, worker: int) -> int:
        """Lanes on the worker that do not wait for a host just now: others may run beside those that do.

        Those in one batch count as one.
        """
        lanes = [self.lanes[key] for key in self.on_worker[worker]]
        return len({lane.batch or lane.id for lane in lanes if lane.signature != "host"})

    def occupants(self, worker: int) -> list[Lane]:
        """Lanes that take a part of the worker now."""
        return [lane for key in self.on_worker[worker] if (lane := self.lanes[key]).occupies]

    def _settle(self) -> None:
        """New speeds for every lane on a worker where something changed: those on its slowest worker."""
        if not self._touched:
            return
        changed = {self.on_worker[worker] for worker in self._touched}
        self._touched.clear()
        kept = {there: self._shared[there] for there in {*self.on_worker} - changed}
        self._shared = kept | {there: self._speeds_on(there) for there in changed}
        for key in {key for there in changed for key in there}:
            lane = self.lanes[key]
            speeds = [self._shared[self.on_worker[worker]].get(key, 1.0) for worker in lane.workers]
            lane.speed = 0.0 if lane.paused else min(1.0, *speeds)

    def _speeds_on(self, there: Together) -> dict[int, float]:
        lanes = [lane for key in there if not (lane := self.lanes[key]).paused and lane.signature != "host"]
        mix = [(lane.signature, lane.share) for lane in lanes]
        bases = [lane.batch for lane in lanes]
        fused = any(bases)
        speeds = speeds_with_fused(mix, bases, _joined, self._speeds_of) if fused else self._speeds_of(mix)
        return {lane.id: speed for lane, speed in zip(lanes, speeds, strict=True)}

    def _speeds_of(self, mix: Sequence[tuple[Signature, float]]) -> list[float]:
        """In any order the same: those that are alike are equally fast."""
        known = _speeds(self.table, tuple(sorted(mix)))
        return [known[one] for one in mix]


@lru_cache(maxsize=65536)
def _speeds(table: Interference, mix: Mix) -> dict[tuple[Signature, float], float]:
    """The speed of each kind of lane in a mix, sorted; one that is alone on whole workers has speed 1."""
    if len(mix) == 1 and mix[0][1] == 1.0:
        return {mix[0]: 1.0}
    return dict(zip(mix, table.speeds([Occupant(*one) for one in mix]), strict=True))


def _joined(mix: Sequence[tuple[Signature, float]]) -> tuple[Signature, float]:
    """Those in one batch have what any of them has."""
    return most_demanding([signature for signature, _ in mix]), min(1.0, sum(share for _, share in mix))
