"""The predicted future of a state under simple rules, coarse and fast: what the look-ahead scores candidates by.

Workers are taken in at most BLOCKS blocks. All engines of a rollout go on as one, at the pace of the slowest; a phase
is what binds it for how long, in a few pieces. Blocks are shared as the interference table likes best. Whatever
becomes ready starts on the blocks that nobody uses, or beside others if there are none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from jigsawrl.graph.fused import most_demanding, speeds_with_fused
from jigsawrl.graph.interference import SIGNATURES, Signature, company, mix_freely, side_by_side
from jigsawrl.graph.lanes import Lane, Segment
from jigsawrl.policies.course import Alone, Course, Pieces, batch_of, coarse
from jigsawrl.policies.prospect import Prospect
from jigsawrl.policies.rule import Rule, Sparing, fewest
from jigsawrl.policies.state import Migrate, Phase, Pipeline, Place, Start, State

BLOCKS = 8
EVENTS = 128
"""A future is followed for so many events at most, divided by the pipelines in it; by two to the end of all work."""
SLOWEST = 8.0
"""A pipeline that stands still for a while is not thought to stand still for ever."""

Crowd = tuple[Course, ...]
"""Who shares a block."""


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
        self.block_of = [int(worker / self.size) for worker in range(self.workers)]
        self.speeds: dict[tuple[Signature, ...], tuple[float, ...]] = {}
        """Of what shares a block, as far as it was asked."""
        self.held = [
            max(state.held[int(block * self.size) : int((block + 1) * self.size)])
            for block in range(self.blocks)
        ]
        self.on_block: list[Crowd] = [()] * self.blocks
        self.rule = Rule()
        self.courses: dict[str, Course] = {}
        self.homes = {name: self._homes(pipeline) for name, pipeline in state.pipelines.items()}
        for pipeline in state.pipelines.values():
            if pipeline.status != "done":
                alone = self._alone(pipeline)
                course = Course(pipeline, alone, pipeline.step, pipeline.phase, due=pipeline.due)
                self.courses[pipeline.name] = course
                if pipeline.status == "running":
                    self._take_over(course, state.running(pipeline))
                course.at_first = course.work_left
        self.at_first = sum(course.at_first for course in self.courses.values())
        bases = [base for course in self.courses.values() if (base := course.pipeline.outlook.shape.base)]
        self.fuses = len(set(bases)) < len(bases)
        """Whether any two decode in one batch."""

    def copy(self) -> Forward:
        other = Forward.__new__(Forward)
        other.workers, other.blocks, other.size = self.workers, self.blocks, self.size
        other.capacity, other.table, other.crowds = self.capacity, self.table, self.crowds
        other.block_of, other.speeds, other.homes = self.block_of, self.speeds, self.homes
        other.since, other.now, other.late, other.at_first = self.since, self.now, self.late, self.at_first
        other.held = list(self.held)
        other.rule, other.fuses = self.rule, self.fuses
        other.courses = {name: course.copy() for name, course in self.courses.items()}
        other.on_block = [
            tuple([other.courses[course.pipeline.name] for course in there]) for there in self.on_block
        ]
        return other

    def _alone(self, pipeline: Pipeline) -> Alone:
        outlook, tp = pipeline.outlook, pipeline.tp
        if pipeline.apart:
            return Alone(pipeline.rollout_seconds(), pipeline.training_seconds(), pipeline.solo_seconds())
        return Alone(
            outlook.rollout_seconds(max(1, self.workers // tp), tp),
            outlook.training_seconds(self.workers),
            outlook.solo_seconds(self.workers),
        )

    def _homes(self, pipeline: Pipeline) -> dict[Phase, Place]:
        """Blocks that each of its phases may use, where those are not the same."""
        if not pipeline.apart:
            return {}
        return {
            "rollout": self._blocks_of(pipeline.rollout_home),
            "training": self._blocks_of(pipeline.trains_on),
        }

    def _take_over(self, course: Course, lanes: list[Lane]) -> None:
        """A running phase: its longest lane on the blocks of all."""
        longest = max(lanes, key=Lane.left_in_all)
        first = (SIGNATURES[longest.segment.kind], longest.left)
        pieces = (*coarse(longest.segments[longest.index + 1 :]), first)
        whole = sum(segment.seconds for segment in longest.segments)
        self._run(course, pieces, self._blocks_of(w for lane in lanes for w in lane.workers), whole)
        outlook, span = course.pipeline.outlook, len(longest.workers)
        if course.phase == "training":
            course.bytes = outlook.memory_trained(course.pipeline.tp, span).training
        else:
            course.bytes = outlook.memory(len(lanes), span, self.workers).rollout

    def _blocks_of(self, workers: Iterable[int]) -> Place:
        return tuple(sorted({self.block_of[worker] for worker in workers}))

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
        self._run(course, coarse(segments), self._blocks_of(action.workers), course.whole)

    def _start(self, course: Course, blocks: Place, engines: int, span: int) -> None:
        outlook = course.pipeline.outlook
        pieces, whole, course.bytes = outlook.kept(
            ("phase", course.phase, engines, span, self.workers),
            lambda: self._phase(course, engines, span),
        )
        for block in blocks:
            self.held[block] += course.bytes
        self._run(course, pieces, blocks, whole)

    def _phase(self, course: Course, engines: int, span: int) -> tuple[Pieces, float, float]:
        """Its pieces, its seconds in all, and its bytes on each worker, with so many engines over `span` workers."""
        outlook, gang = course.pipeline.outlook, engines * span
        if course.phase == "rollout":
            pieces = coarse(outlook.engine(engines, span).segments)
            bytes_ = outlook.memory(engines, span, self.workers).rollout
        else:
            pieces = coarse(outlook.training(gang))
            bytes_ = outlook.memory_trained(course.pipeline.tp, gang).training
        return pieces, sum(seconds for _, seconds in reversed(pieces)), bytes_

    def _run(self, course: Course, pieces: Pieces, blocks: Place, whole: float) -> None:
        course.begin(pieces or (("host", 0.0),))
        course.blocks, course.whole = blocks, whole
        for block in blocks:
            self.on_block[block] += (course,)

    def _leave(self, course: Course) -> None:
        for block in course.blocks:
            self.on_block[block] = tuple([other for other in self.on_block[block] if other is not course])

    def soonest(self) -> float:
        """When all work could be done if every pipeline had all workers to itself."""
        return self.now + max(course.work_left for course in self.courses.values())

    # The rules

    def follow(self, until: float) -> Prospect:
        """Rolls on to a time, or until every pipeline is done."""
        running, crowds = self._running(), self._crowds()
        self._pace(running, crowds)
        most = EVENTS // 2 if until == float("inf") else max(8, EVENTS // max(1, len(self.courses)))
        for _ in range(most):
            if not running:
                break
            elapsed = min([course.left / course.speed for course in running])
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
                running, crowds = self._running(), self._crowds()
            self._pace(running, crowds)
        return self._prospect()

    def _running(self) -> list[Course]:
        return [course for course in self.courses.values() if course.pieces]

    def _crowds(self) -> list[Crowd]:
        """Those who share blocks, each crowd once."""
        return [there for there in set(self.on_block) if len(there) > 1]

    def _end_piece(self, course: Course) -> bool:
        """On to the next piece; True if the phase is over."""
        if len(course.pieces) > 1:
            course.begin(course.pieces[:-1])
            return False
        course.pieces = ()
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
        """Where those on a block wait for a host just now, there is room as if they were not there."""
        crowd = [self._size(there) for there in self.on_block]
        if min(crowd) > self.crowds[-1] and not self.fuses:
            return
        waiting = [course for course in self.courses.values() if not course.pieces]
        if self.rule.put_off[0] and len(waiting) < len(self.courses):
            waiting = [c for c in waiting if not self.rule.puts_off(c.pipeline.name, self.now)]
        if len(waiting) > 1:
            waiting.sort(key=self._rank)
        for number, course in enumerate(waiting):
            if self.rule.sparing:
                blocks = self._spared(course, crowd, self.rule.sparing)
            else:
                blocks = self._room(course, crowd, len(waiting) - number if self.rule.divide else 0)
            if blocks:
                workers = int(len(blocks) * self.size)
                tp = min(course.pipeline.tp, workers)
                self._start(course, blocks, max(1, workers // tp), tp)
                for block in blocks:
                    crowd[block] = self._size(self.on_block[block])
            elif self.rule.strict:
                return

    def _size(self, there: Crowd) -> int:
        """How many disturb each other there: those in one batch count as one."""
        if not self.fuses:
            return sum([course.signature != "host" for course in there])
        busy = [course for course in there if course.signature != "host"]
        return len({batch_of(course) or course.pipeline.name for course in busy})

    def _joins(self, course: Course, block: int) -> bool:
        """Whether its rollout would be in others' batch there."""
        if not self.fuses or course.phase != "rollout":
            return False
        base = course.pipeline.outlook.shape.base
        return bool(base) and any(batch_of(other) == base for other in self.on_block[block])

    def _rank(self, course: Course) -> tuple[int, int, float]:
        name = course.pipeline.name
        order = self.rule.order
        place = order.index(name) if name in order else len(order)
        return -course.pipeline.outlook.shape.priority, place, -course.work_left

    def _room(self, course: Course, crowd: list[int], among: int) -> Place:
        """Blocks that nobody uses, if they are at least half; else those where there is not yet a crowd.

        If the free ones are divided among some, one part of them.
        """
        tp = course.pipeline.tp
        width = max(1, round(tp / self.size))
        mine = self._mine(course)
        half = len(mine)
        if self.rule.parts and course.phase == "rollout":
            part = dict(self.rule.parts)[course.pipeline.name]
            mine = [block for block in self._blocks_of(part) if block in mine]
        for most in self.crowds[-1:] if self.rule.parts else self.crowds:
            found = [block for block in mine if crowd[block] <= most or self._joins(course, block)]
            if most == 0 and among:
                found = found[: max(width, len(found) // among)]
            found = found[: len(found) // width * width]
            if not found or (most == 0 and not among and 2 * len(found) < half):
                continue
            workers = max(tp, int(len(found) * self.size))
            sizes = course.pipeline.outlook.memory(max(1, workers // tp), tp, workers)
            needed = sizes.rollout if course.phase == "rollout" else sizes.training
            if max([self.held[block] for block in found]) + needed <= self.capacity:
                return tuple(found)
        return ()

    def _mine(self, course: Course) -> Collection[int]:
        """Blocks that its phase may use."""
        home = self.homes[course.pipeline.name].get(course.phase)
        return range(self.blocks) if home is None else home

    def _spared(self, course: Course, crowd: list[int], sparing: Sparing) -> Place:
        """As few blocks as the time to spare allows, those with most room; fewer where it does not fit on so many."""
        most = self.crowds[-1]
        found = [b for b in self._mine(course) if crowd[b] <= most or self._joins(course, b)]
        choices = self._choices(course)
        count = len(choices)
        if not choices:
            return ()
        if sparing.trainings or course.phase == "rollout":
            spare = sparing.until - self.now - course.work_left
            count = fewest([seconds for _, seconds, _ in choices], sparing.part * spare) + 1
        found.sort(key=lambda block: (self.held[block], block))
        for blocks, _, needed in reversed(choices[:count]):
            if blocks <= len(found) and self.held[found[blocks - 1]] + needed <= self.capacity:
                return tuple(sorted(found[:blocks]))
        return ()

    def _choices(self, course: Course) -> tuple[tuple[int, float, float], ...]:
        """Blocks that its phase may take, from few to all, its seconds alone on so many, and its bytes on each."""
        tp, all_blocks = course.pipeline.tp, len(self._mine(course))
        width = max(1, round(tp / self.size))

        def choices() -> Iterator[tuple[int, float, float]]:
            for blocks in range(width, all_blocks + 1, width):
                workers = max(tp, int(blocks * self.size))
                _, seconds, needed = self._phase(course, workers // tp, tp)
                if needed <= self.capacity:
                    yield blocks, seconds, needed

        key = ("choices", course.phase, self.workers, all_blocks)
        return course.pipeline.outlook.kept(key, lambda: tuple(choices()))

    def _pace(self, running: list[Course], crowds: list[Crowd]) -> None:
        """Every course goes as fast as the slowest of its blocks."""
        for course in running:
            course.speed = 1.0
        for there in crowds:
            signatures = tuple([course.signature for course in there])
            if self.fuses:
                bases = [batch_of(course) for course in there]
                speeds = speeds_with_fused(signatures, bases, most_demanding, self._speeds)
            else:
                speeds = self._speeds(signatures)
            for course, speed in zip(there, speeds, strict=True):
                if speed < course.speed:
                    course.speed = speed

    def _speeds(self, signatures: tuple[Signature, ...]) -> tuple[float, ...]:
        speeds = self.speeds.get(signatures)
        if speeds is None:
            speeds = self.speeds[signatures] = side_by_side(self.table, signatures)
        return speeds

    # Where it leads

    def _prospect(self) -> Prospect:
        left = {name: course.work_left for name, course in self.courses.items()}
        late = self.late
        for name, course in self.courses.items():
            if course.due < float("inf"):
                made = max(course.at_first - left[name], 1e-9)
                pace = min((self.now - self.since) / made, SLOWEST)
                late += max(0.0, self.now + max(1.0, pace) * left[name] - course.due)
        done = self.at_first - sum(left.values())
        return Prospect(self.now, left, done, late)
