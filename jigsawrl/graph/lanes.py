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

from jigsawrl.graph.fused import in_one_batch, most_demanding, speeds_with_fused
from jigsawrl.graph.interference import SIGNATURES, Interference, Occupant, Signature
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
    def occupies(self) -> bool:
        """Whether it takes a part of its workers now."""
        return not self.paused and SIGNATURES[self.segments[self.index].kind] not in ("host", "link")

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


@dataclass(slots=True)
class Sharing:
    """How lanes on one worker get along."""

    speeds: dict[int, float]
    """That the worker gives to each lane which feels others."""
    handed_out: float
    """Of the worker, in shares."""


class Lanes:
    """All lanes of a set of workers, and the clock."""

    def __init__(self, table: Interference, workers: int, now: float = 0.0) -> None:
        self.table = table
        self.now = now
        self.lanes: dict[int, Lane] = {}
        self.on_worker: list[Together] = [()] * workers
        self._touched: set[int] = set()
        self._known: dict[Mix, dict[tuple[Signature, float], float]] = {}
        """Speeds in mixes that there were before."""
        self._sharing: dict[Together, Sharing] = {}
        """Of workers where nothing has changed since it was reckoned."""
        self._crowds: dict[Together, int] = {}
        """How many of them do not wait for a host; forgotten when any lane goes on."""

    def copy(self) -> Lanes:
        self._settle()
        other = Lanes.__new__(Lanes)
        other.table, other.now, other._known = self.table, self.now, self._known
        other.lanes = {key: lane.copy() for key, lane in self.lanes.items()}
        other.on_worker = list(self.on_worker)
        other._touched, other._sharing, other._crowds = set(), {}, {}
        return other

    def use(self, table: Interference) -> None:
        """Another table from now on."""
        self.table, self._known = table, {}
        self._sharing.clear()
        self._touched.update(range(len(self.on_worker)))

    def add(self, lane: Lane) -> None:
        """Starts a lane with its current segment."""
        lane.left = lane.segment.seconds
        lane.mark(self.now)
        self.lanes[lane.id] = lane
        for worker in lane.workers:
            self._sharing.pop(self.on_worker[worker], None)
            self.on_worker[worker] += (lane.id,)
        self._touched.update(lane.workers)

    def remove(self, lane_id: int) -> Lane:
        lane = self.lanes.pop(lane_id)
        for worker in lane.workers:
            self._sharing.pop(self.on_worker[worker], None)
            self.on_worker[worker] = tuple([key for key in self.on_worker[worker] if key != lane_id])
        self._crowds.clear()
        self._touched.update(lane.workers)
        return lane

    def resize(self, lane_id: int, share: float) -> None:
        lane = self.lanes[lane_id]
        if lane.share != share:
            lane.share = share
            self._touched.update(lane.workers)

    def confine(self, lane_id: int, confined: bool) -> None:
        self.lanes[lane_id].confined = confined

    def pause(self, lane_id: int, paused: bool) -> None:
        lane = self.lanes[lane_id]
        if lane.paused != paused:
            lane.paused = paused
            self._touched.update(lane.workers)

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
        lane.segments, lane.index, lane.left = segments, 0, segments[0].seconds
        lane.mark(self.now)
        self._crowds.clear()
        self._touched.update(lane.workers)

    def proceed(self, lane: Lane) -> bool:
        """On to the lane's next sub-stage; False, and the lane is gone, if that was the last."""
        before = lane.occupies
        if lane.index + 1 == len(lane.segments):
            self.remove(lane.id)
            return False
        signature = SIGNATURES[lane.segment.kind]
        lane.index += 1
        lane.left = lane.segment.seconds
        lane.mark(self.now)
        self._crowds.clear()
        if before != lane.occupies or signature != SIGNATURES[lane.segment.kind]:
            self._touched.update(lane.workers)
        return True

    def crowd(self, worker: int) -> int:
        """Lanes on the worker that do not wait for a host just now: others may run beside those that do.

        Those in one batch count as one.
        """
        there = self.on_worker[worker]
        if there not in self._crowds:
            lanes = [self.lanes[key] for key in there]
            self._crowds[there] = len(
                {self._batch(lane) or lane.id for lane in lanes if SIGNATURES[lane.segment.kind] != "host"}
            )
        return self._crowds[there]

    def _batch(self, lane: Lane) -> str:
        return in_one_batch(SIGNATURES[lane.segment.kind], lane.phase, lane.base) if lane.base else ""

    def occupants(self, worker: int) -> list[Lane]:
        """Lanes that take a part of the worker now."""
        return [lane for key in self.on_worker[worker] if (lane := self.lanes[key]).occupies]

    def handed_out(self, worker: int) -> float:
        """The sum of the occupants' shares."""
        self._settle()
        return self._shared(self.on_worker[worker]).handed_out

    def _settle(self) -> None:
        """New speeds for every lane on a worker where something changed."""
        if not self._touched:
            return
        crowds = {self.on_worker[worker] for worker in self._touched}
        self._touched.clear()
        for crowd in crowds:
            self._sharing.pop(crowd, None)
        for key in {key for crowd in crowds for key in crowd}:
            lane = self.lanes[key]
            lane.speed = 0.0 if lane.paused else 1.0
            for worker in lane.workers:
                speed = self._shared(self.on_worker[worker]).speeds.get(key, 1.0)
                if speed < lane.speed:
                    lane.speed = speed

    def _shared(self, there: Together) -> Sharing:
        sharing = self._sharing.get(there)
        if sharing is None:
            sharing = self._sharing[there] = self._reckon(there)
        return sharing

    def _reckon(self, there: Together) -> Sharing:
        ids, handed_out = [], 0.0
        mix: list[tuple[Signature, float]] = []
        bases: list[str] = []
        for key in there:
            lane = self.lanes[key]
            signature = SIGNATURES[lane.segment.kind]
            if not lane.paused and signature != "host":
                ids.append(key)
                mix.append((signature, lane.share))
                bases.append(self._batch(lane))
                handed_out += lane.share if signature != "link" else 0.0
        if any(bases):
            speeds = speeds_with_fused(mix, bases, _joined, self._speeds_of)
        else:
            speeds = self._speeds_of(tuple(mix))
        return Sharing(dict(zip(ids, speeds, strict=True)), handed_out)

    def _speeds_of(self, mix: Mix) -> tuple[float, ...]:
        """In any order the same: those that are alike are equally fast."""
        ordered = tuple(sorted(mix))
        known = self._known.get(ordered)
        if known is None:
            known = self._known[ordered] = dict(zip(ordered, self._speeds(ordered), strict=True))
        return tuple([known[one] for one in mix])

    def _speeds(self, mix: Mix) -> tuple[float, ...]:
        if len(mix) == 1 and mix[0][1] == 1.0:
            return (1.0,)
        crowd = [Occupant(signature, share) for signature, share in mix]
        return tuple(self.table.speed(one, crowd[:i] + crowd[i + 1 :]) for i, one in enumerate(crowd))


def _joined(mix: Sequence[tuple[Signature, float]]) -> tuple[Signature, float]:
    """Those in one batch have what any of them has."""
    return most_demanding([signature for signature, _ in mix]), min(1.0, sum(share for _, share in mix))
