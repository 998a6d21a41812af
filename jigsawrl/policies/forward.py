"""The predicted future of a state under simple rules, coarse and fast: what the look-ahead scores candidates by.

Workers are taken in at most BLOCKS blocks. All engines of a rollout go on as one, at the pace of the slowest; a phase
is what binds it for how long, in a few pieces. Blocks are shared as the interference table likes best. Whatever
becomes ready starts on the blocks that nobody uses, or beside others if there are none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jigsawrl.graph.interference import SIGNATURES, Signature, company, mix_freely, side_by_side
from jigsawrl.graph.lanes import Lane, Segment
from jigsawrl.policies.state import Migrate, Phase, Pipeline, Place, Start, State

BLOCKS = 8
EVENTS = 128
"""A future is followed for so many events at most, divided by the pipelines in it."""

SLOWEST = 8.0
"""A pipeline that stands still for a while is not thought to stand still for ever."""
LATE = 10.0
"""A second late weighs as much as so many seconds more for all."""

Piece = tuple[Signature, float]


@dataclass(slots=True)
class Course:
    """A pipeline on its way: the pieces of its phase that are left, last first, or none while it waits."""

    pipeline: Pipeline
    step: int
    phase: Phase
    pieces: list[Piece]
    blocks: Place = ()
    left: float = 0.0
    """Of the piece at hand, alone on whole workers."""
    speed: float = 1.0
    whole: float = 0.0
    """Seconds of the whole phase, alone."""
    bytes: float = 0.0
    due: float = float("inf")
    at_first: float = 0.0
    """Seconds of work that were left of it when the future began."""

    def copy(self) -> Course:
        return Course(
            self.pipeline,
            self.step,
            self.phase,
            list(self.pieces),
            self.blocks,
            self.left,
            self.speed,
            self.whole,
            self.bytes,
            self.due,
            self.at_first,
        )

    @property
    def part_left(self) -> float:
        """Of its phase."""
        if not self.pieces:
            return 1.0
        rest = self.left + sum(seconds for _, seconds in self.pieces[:-1])
        return rest / self.whole if self.whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """Where a future leads: the time it was followed to, and the solo seconds of work left then."""

    now: float
    left: dict[str, float]
    done: float
    late: float
    """Seconds by which pipelines will miss their times if they go on at this pace, all together."""

    def makespan(self, since: float) -> float:
        """When all would be done at this rate; exact where nothing is left."""
        if not self.left:
            return self.now
        rate = max(1.0, self.done / max(self.now - since, 1e-9))
        return self.now + max(max(self.left.values()), sum(self.left.values()) / rate)

    def score(self, since: float) -> float:
        """The less the better."""
        return self.makespan(since) + LATE * self.late


class Forward:
    """One future of one state. Copy before each candidate; what is done to it is done for good."""

    def __init__(self, state: State) -> None:
        self.workers = len(state.alive)
        self.blocks = min(BLOCKS, self.workers)
        self.size = self.workers / self.blocks
        self.capacity = state.device_bytes
        self.table = state.table
        most = company(state.table) - 1
        self.crowds = (most,) if mix_freely(state.table) else (0, most)
        """Company that a phase is put to by the rules, what is tried first first."""
        self.since = self.now = state.now
        self.late = 0.0
        self.held = [
            max(state.held[int(block * self.size) : int((block + 1) * self.size)])
            for block in range(self.blocks)
        ]
        self.on_block: list[tuple[str, ...]] = [()] * self.blocks
        self.order: tuple[str, ...] = ()
        """Who goes first; those not named, longest remaining work first."""
        self.strict = False
        """Whether nobody overtakes one who finds no room."""
        self.divide = False
        """Whether those who wait together divide what is free, instead of the first taking it all."""
        self.courses: dict[str, Course] = {}
        for pipeline in state.pipelines.values():
            if pipeline.status != "done":
                course = Course(pipeline, pipeline.step, pipeline.phase, [], due=pipeline.due)
                self.courses[pipeline.name] = course
                if pipeline.status == "running":
                    self._take_over(course, state.running(pipeline))
                course.at_first = self._left(course)
        self.at_first = sum(course.at_first for course in self.courses.values())

    def copy(self) -> Forward:
        other = Forward.__new__(Forward)
        other.workers, other.blocks, other.size = self.workers, self.blocks, self.size
        other.capacity, other.table, other.crowds = self.capacity, self.table, self.crowds
        other.since, other.now, other.late, other.at_first = self.since, self.now, self.late, self.at_first
        other.held, other.on_block = list(self.held), list(self.on_block)
        other.order, other.strict, other.divide = self.order, self.strict, self.divide
        other.courses = {name: course.copy() for name, course in self.courses.items()}
        return other

    def _take_over(self, course: Course, lanes: list[Lane]) -> None:
        """A running phase: its longest lane on the blocks of all."""
        longest = max(lanes, key=Lane.left_in_all)
        first = (SIGNATURES[longest.segment.kind], longest.left)
        pieces = [first, *coarse(longest.segments[longest.index + 1 :])]
        whole = sum(segment.seconds for segment in longest.segments)
        self._run(course, pieces, self._blocks_of(w for lane in lanes for w in lane.workers), whole)
        outlook, span = course.pipeline.outlook, len(longest.workers)
        if course.phase == "training":
            course.bytes = outlook.memory(1, course.pipeline.tp, span).training
        else:
            course.bytes = outlook.memory(len(lanes), span, self.workers).rollout

    def _blocks_of(self, workers: Iterable[int]) -> Place:
        return tuple(sorted({int(worker / self.size) for worker in workers}))

    # What may be done first

    def start(self, start: Start) -> None:
        """A phase starts where a policy would put it."""
        workers = [worker for place in start.places for worker in place]
        course = self.courses[start.pipeline]
        self._start(course, self._blocks_of(workers), len(start.places), len(start.places[0]))

    def gather(self, action: Migrate, segments: tuple[Segment, ...]) -> None:
        """A tail goes on elsewhere, after its prefixes are run again."""
        course = self.courses[action.pipeline]
        self._leave(course)
        pieces = coarse(segments)
        self._run(course, pieces, self._blocks_of(action.workers), course.whole)

    def _start(self, course: Course, blocks: Place, engines: int, span: int) -> None:
        outlook = course.pipeline.outlook
        if course.phase == "rollout":
            pieces = outlook.kept(
                ("coarse", engines, span), lambda: coarse(outlook.engine(engines, span).segments)
            )
            course.bytes = outlook.memory(engines, span, self.workers).rollout
        else:
            gang = engines * span
            pieces = outlook.kept(("coarse", gang), lambda: coarse(outlook.training(gang)))
            course.bytes = outlook.memory(1, course.pipeline.tp, gang).training
        for block in blocks:
            self.held[block] += course.bytes
        self._run(course, pieces, blocks, sum(seconds for _, seconds in pieces))

    def _run(self, course: Course, pieces: list[Piece], blocks: Place, whole: float) -> None:
        course.pieces = pieces[::-1] or [("host", 0.0)]
        course.left, course.blocks, course.whole = course.pieces[-1][1], blocks, whole
        for block in blocks:
            self.on_block[block] += (course.pipeline.name,)

    def _leave(self, course: Course) -> None:
        name = course.pipeline.name
        for block in course.blocks:
            self.on_block[block] = tuple(other for other in self.on_block[block] if other != name)

    # The rules

    def follow(self, until: float) -> Prospect:
        """Rolls on to a time, or until every pipeline is done."""
        self._pace()
        for _ in range(max(8, EVENTS // max(1, len(self.courses)))):
            running = [course for course in self.courses.values() if course.pieces]
            if not running:
                break
            elapsed = min(course.left / course.speed for course in running)
            if self.now + elapsed > until:
                elapsed = until - self.now
            self.now += elapsed
            freed = False
            for course in running:
                course.left -= course.speed * elapsed
                if course.left <= 1e-9:
                    freed |= self._end_piece(course)
            if self.now >= until:
                break
            if freed:
                self._start_what_fits()
            self._pace()
        return self._prospect()

    def _end_piece(self, course: Course) -> bool:
        """On to the next piece; True if the phase is over."""
        course.pieces.pop()
        if course.pieces:
            course.left = course.pieces[-1][1]
            return False
        self._leave(course)
        for block in course.blocks:
            self.held[block] -= course.bytes
        course.bytes = 0.0
        if course.phase == "rollout":
            course.phase = "training"
        elif course.step == course.pipeline.steps:
            self.late += max(0.0, self.now - course.due)
            del self.courses[course.pipeline.name]
        else:
            course.phase, course.step = "rollout", course.step + 1
        return True

    def _start_what_fits(self) -> None:
        waiting = [course for course in self.courses.values() if not course.pieces]
        if len(waiting) > 1:
            waiting.sort(key=self._rank)
        for number, course in enumerate(waiting):
            blocks = self._room(course, len(waiting) - number if self.divide else 0)
            if blocks:
                workers = int(len(blocks) * self.size)
                tp = min(course.pipeline.tp, workers)
                self._start(course, blocks, max(1, workers // tp), tp)
            elif self.strict:
                return

    def _rank(self, course: Course) -> tuple[int, int, float]:
        name = course.pipeline.name
        place = self.order.index(name) if name in self.order else len(self.order)
        return -course.pipeline.outlook.shape.priority, place, -self._left(course)

    def _room(self, course: Course, among: int) -> Place:
        """Blocks that nobody uses, if they are at least half; else those where there is not yet a crowd.

        If the free ones are divided among some, one part of them.
        """
        tp = course.pipeline.tp
        width = max(1, round(tp / self.size))
        for crowd in self.crowds:
            found = [b for b in range(self.blocks) if self._crowd(b) <= crowd]
            if crowd == 0 and among:
                found = found[: max(width, len(found) // among)]
            found = found[: len(found) // width * width]
            if not found or (crowd == 0 and not among and 2 * len(found) < self.blocks):
                continue
            workers = max(tp, int(len(found) * self.size))
            sizes = course.pipeline.outlook.memory(max(1, workers // tp), tp, workers)
            needed = sizes.rollout if course.phase == "rollout" else sizes.training
            if all(self.held[b] + needed <= self.capacity for b in found):
                return tuple(found)
        return ()

    def _crowd(self, block: int) -> int:
        """Who is there and does not wait for a host just now."""
        return sum(self.courses[name].pieces[-1][0] != "host" for name in self.on_block[block])

    def _pace(self) -> None:
        """Every course goes as fast as the slowest of its blocks."""
        for course in self.courses.values():
            course.speed = 1.0
        for crowd in set(self.on_block):
            if len(crowd) > 1:
                courses = [self.courses[name] for name in crowd]
                speeds = side_by_side(self.table, tuple([course.pieces[-1][0] for course in courses]))
                for course, speed in zip(courses, speeds, strict=True):
                    if speed < course.speed:
                        course.speed = speed

    # Where it leads

    def _solo(self, course: Course) -> float:
        """Seconds of the phase alone on all workers."""
        outlook, tp = course.pipeline.outlook, course.pipeline.tp
        if course.phase == "rollout":
            return outlook.rollout_seconds(max(1, self.workers // tp), tp)
        return outlook.training_seconds(self.workers)

    def _left(self, course: Course) -> float:
        """Seconds of all its work that is left, alone on all workers."""
        outlook = course.pipeline.outlook
        rest = outlook.training_seconds(self.workers) if course.phase == "rollout" else 0.0
        steps = course.pipeline.steps - course.step
        return course.part_left * self._solo(course) + rest + steps * outlook.solo_seconds(self.workers)

    def _prospect(self) -> Prospect:
        left = {name: self._left(course) for name, course in self.courses.items()}
        late = self.late
        for name, course in self.courses.items():
            if course.due < float("inf"):
                made = max(course.at_first - left[name], 1e-9)
                pace = min((self.now - self.since) / made, SLOWEST)
                late += max(0.0, self.now + max(1.0, pace) * left[name] - course.due)
        done = self.at_first - sum(left.values())
        return Prospect(self.now, left, done, late)


def coarse(segments: tuple[Segment, ...]) -> list[Piece]:
    """What binds a phase, and for how long in all, in the order in which it first does."""
    pieces: dict[Signature, float] = {}
    for segment in segments:
        if segment.seconds > 0:
            signature = SIGNATURES[segment.kind]
            pieces[signature] = pieces.get(signature, 0.0) + segment.seconds
    return list(pieces.items())
