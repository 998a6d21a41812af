"""The predicted future of a state under simple rules, coarse and fast: what the look-ahead scores candidates by.

Workers are taken in at most BLOCKS blocks, and all engines of a rollout go on as one lane, at the pace of the
slowest. Whatever becomes ready starts on the blocks that nobody uses, or beside others if there are none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jigsawrl.graph.interference import SIGNATURES, best_shares
from jigsawrl.graph.lanes import Lane, Lanes, Segment
from jigsawrl.policies.state import Migrate, Phase, Pipeline, Place, Start, State

BLOCKS = 8
CROWD = 2
"""Phases that the rules put side by side on a block."""
EVENTS = 48
"""A future is followed for so many events at most."""


@dataclass(slots=True)
class Course:
    """A pipeline on its way through the future."""

    pipeline: Pipeline
    step: int
    phase: Phase
    running: bool
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """Where a future leads: the time it was followed to, and the solo seconds of work left then."""

    now: float
    left: dict[str, float]
    done: float

    def makespan(self, since: float) -> float:
        """When all would be done at this rate; exact where nothing is left."""
        if not self.left:
            return self.now
        rate = max(1.0, self.done / max(self.now - since, 1e-9))
        return self.now + max(max(self.left.values()), sum(self.left.values()) / rate)


class Forward:
    """One future of one state. Copy before each candidate; what is done to it is done for good."""

    def __init__(self, state: State) -> None:
        self.workers = len(state.lanes.on_worker)
        self.blocks = min(BLOCKS, self.workers)
        self.size = self.workers / self.blocks
        self.capacity = state.device_bytes
        self.lanes = Lanes(state.lanes.table, self.blocks, state.now)
        self.lanes._known = state.lanes._known
        self.since = state.now
        self.done = 0.0
        self.held = [
            max(state.held[worker] for worker in self._workers_of(block)) for block in range(self.blocks)
        ]
        self.courses: dict[str, Course] = {}
        for pipeline in state.pipelines.values():
            if pipeline.status == "done":
                continue
            course = Course(pipeline, pipeline.step, pipeline.phase, pipeline.status == "running")
            self.courses[pipeline.name] = course
            if course.running:
                self._take_over(state, course)

    def _workers_of(self, block: int) -> range:
        return range(int(block * self.size), int((block + 1) * self.size))

    def block_of(self, worker: int) -> int:
        return int(worker / self.size)

    def _take_over(self, state: State, course: Course) -> None:
        """All running lanes of a phase as one."""
        lanes = state.running(course.pipeline)
        longest = max(lanes, key=Lane.left_in_all)
        blocks = tuple(sorted({self.block_of(worker) for lane in lanes for worker in lane.workers}))
        lane = replace(longest, workers=blocks, paused=all(lane.paused for lane in lanes))
        left = lane.left
        self.lanes.add(lane)
        lane.left = left
        course.bytes = 0.0  # stays where it is; giving it back is not foreseen
        self.done -= (1 - self._part_left(lane)) * self._solo(course)

    def copy(self) -> Forward:
        other = Forward.__new__(Forward)
        other.workers, other.blocks, other.size = self.workers, self.blocks, self.size
        other.capacity, other.since, other.done = self.capacity, self.since, self.done
        other.lanes = self.lanes.copy()
        other.held = list(self.held)
        other.courses = {name: replace(course) for name, course in self.courses.items()}
        return other

    # Candidates

    def start(self, start: Start) -> None:
        """A phase starts where a policy would put it."""
        workers = [worker for place in start.places for worker in place]
        blocks = tuple(sorted({self.block_of(worker) for worker in workers}))
        self._start(self.courses[start.pipeline], blocks, len(start.places), len(start.places[0]))

    def gather(self, action: Migrate, segments: tuple[Segment, ...]) -> None:
        """A tail goes on, after its prefixes are run again, on one worker."""
        course = self.courses[action.pipeline]
        key = next(key for key, lane in self.lanes.lanes.items() if lane.pipeline == action.pipeline)
        old = self.lanes.remove(key)
        lane = replace(old, workers=(self.block_of(action.worker),), segments=segments, index=0)
        self.lanes.add(lane)
        assert course.running

    def _start(self, course: Course, blocks: Place, engines: int, span: int) -> None:
        outlook = course.pipeline.outlook
        if course.phase == "rollout":
            segments = outlook.engine(engines, span).segments
            course.bytes = outlook.memory(engines, span, self.workers).rollout
        else:
            segments = outlook.training(engines * span)
            course.bytes = outlook.memory(1, course.pipeline.tp, engines * span).training
        for block in blocks:
            self.held[block] += course.bytes
        key = max(self.lanes.lanes, default=0) + 1
        lane = Lane(key, course.pipeline.name, course.step, course.phase, blocks, 1.0, segments)
        course.running = True
        self.lanes.add(lane)
        self._skip_empty(lane)

    def _skip_empty(self, lane: Lane) -> None:
        while lane.left <= 0 and self.lanes.proceed(lane):
            pass

    # The rules

    def follow(self, until: float) -> Prospect:
        """Rolls on to a time, or until every pipeline has made its steps."""
        self._divide()
        for _ in range(EVENTS):
            if not self.courses:
                break
            end = self.lanes.next_end()
            if end > until:
                self.lanes.advance(until) if until < float("inf") else None
                break
            for lane in self.lanes.advance(end):
                self._end(lane)
            self._start_what_fits()
            self._divide()
        return self._prospect()

    def _end(self, lane: Lane) -> None:
        while (goes_on := self.lanes.proceed(lane)) and lane.left <= 0:
            pass
        if goes_on:
            return
        course = self.courses[lane.pipeline]
        for block in lane.workers:
            self.held[block] -= course.bytes
        course.running = False
        self.done += self._solo(course)
        if course.phase == "rollout":
            course.phase = "training"
        elif course.step == course.pipeline.steps:
            del self.courses[lane.pipeline]
        else:
            course.phase, course.step = "rollout", course.step + 1

    def _start_what_fits(self) -> None:
        for course in self.courses.values():
            if not course.running:
                blocks = self._room(course)
                if blocks:
                    workers = int(len(blocks) * self.size)
                    tp = min(course.pipeline.tp, workers)
                    self._start(course, blocks, max(1, workers // tp), tp)

    def _room(self, course: Course) -> Place:
        """Blocks that nobody uses; else those where there is not yet a crowd."""
        width = max(1, round(course.pipeline.tp / self.size))
        outlook, tp = course.pipeline.outlook, course.pipeline.tp
        for crowd in range(CROWD):
            found = [b for b in range(self.blocks) if len(self.lanes.on_worker[b]) <= crowd]
            found = found[: len(found) // width * width]
            if not found:
                continue
            workers = max(tp, int(len(found) * self.size))
            sizes = outlook.memory(max(1, workers // tp), tp, workers)
            needed = sizes.rollout if course.phase == "rollout" else sizes.training
            if all(self.held[b] + needed <= self.capacity for b in found):
                return tuple(found)
        return ()

    def _divide(self) -> None:
        """Shares as the interference table likes them best."""
        shares: dict[int, float] = {}
        for worker in range(self.blocks):
            lanes = self.lanes.occupants(worker)
            if len(lanes) < 2:
                continue
            signatures = tuple(SIGNATURES[lane.segment.kind] for lane in lanes)
            split = best_shares(self.lanes.table, signatures, (1.0,) * len(lanes))
            for lane, share in zip(lanes, split, strict=True):
                shares[lane.id] = min(share, shares.get(lane.id, 1.0))
        for lane in list(self.lanes.lanes.values()):
            self.lanes.resize(lane.id, shares.get(lane.id, 1.0))

    # Where it leads

    def _solo(self, course: Course) -> float:
        """Seconds of the phase alone on all workers."""
        outlook, tp = course.pipeline.outlook, course.pipeline.tp
        if course.phase == "rollout":
            return outlook.rollout_seconds(max(1, self.workers // tp), tp)
        return outlook.training_seconds(self.workers)

    def _part_left(self, lane: Lane) -> float:
        return lane.left_in_all() / max(sum(segment.seconds for segment in lane.segments), 1e-9)

    def _prospect(self) -> Prospect:
        left: dict[str, float] = {}
        done = self.done
        going = {lane.pipeline: lane for lane in self.lanes.lanes.values()}
        for name, course in self.courses.items():
            solo = self._solo(course)
            part = 1.0
            if name in going:
                lane = going[name]
                part = self._part_left(lane)
                done += (1 - part) * solo
            step = course.pipeline.outlook.solo_seconds(self.workers)
            rest = (
                0.0 if course.phase == "training" else course.pipeline.outlook.training_seconds(self.workers)
            )
            steps = course.pipeline.steps - course.step
            left[name] = part * solo + rest + steps * step
        return Prospect(self.lanes.now, left, done)
