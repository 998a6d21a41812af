"""The predicted future of a state under simple rules, coarse and fast: what the look-ahead scores candidates by.

Workers are taken in at most BLOCKS blocks. All engines of a rollout go on as one, at the pace of the slowest; a phase
is what binds it for how long, in a few pieces. Blocks are shared as the interference table likes best. Whatever
becomes ready starts on the blocks that nobody uses, or beside others if there are none.

Where workers belong to one phase at a time, `phases.roll_forward` does the same with a heap of ends. Here no end is
known before it comes: whatever starts or ends changes the speed of all that share its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from jigsawrl.graph.interference import (
    company,
    mix_freely,
    most_demanding,
    side_by_side,
    speeds_with_fused,
)
from jigsawrl.graph.lanes import Lane
from jigsawrl.phases.ids import PhaseKind
from jigsawrl.policies.course import Course, Pieces, batch_of, coarse
from jigsawrl.policies.prospect import SLOWEST, Prospect, lateness
from jigsawrl.policies.rule import Choice, Rule, Sparing, part_of, roomiest
from jigsawrl.policies.state import Migrate, Pipeline, Place, Start, State
from jigsawrl.policies.tails import moved_segments

BLOCKS = 8
EVENTS = 512
"""A future is followed for so many events at most, divided by the pipelines in it; by two to the end of all work.
With 128, sixteen pipelines were followed for eight events, and plans told apart by chance: 12 mixes of two to sixteen
pipelines on 16 to 64 workers gained 1.09 over `concurrent`, and gain 1.12."""

Crowd = tuple[Course, ...]
"""Who shares a block."""


class Forward:
    """One future of one state. Copy before each candidate; what is done to it is done for good."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.workers = len(state.alive)
        self.blocks = min(BLOCKS, self.workers)
        self.size = self.workers / self.blocks
        most = company(state.table) - 1
        self.crowds = (most,) if mix_freely(state.table) else (0, most)
        """Company that a phase is put to by the rules, what is tried first first."""
        self.speeds = partial(side_by_side, state.table)
        self.now = state.now
        self.late = 0.0
        self.held = [
            max(state.held[int(block * self.size) : int((block + 1) * self.size)])
            for block in range(self.blocks)
        ]
        self.on_block: list[Crowd] = [()] * self.blocks
        self.rule = Rule()
        self.courses = {pipeline.name: self._course(pipeline) for pipeline in state.unfinished()}
        for course in self.courses.values():
            if lanes := state.lanes_of(course.pipeline.current):
                self._take_over(course, lanes)
        self.at_first = {name: course.work_left for name, course in self.courses.items()}
        """Seconds of work that every pipeline had left when the future began."""
        bases = [base for course in self.courses.values() if (base := course.pipeline.outlook.shape.base)]
        self.fuses = len(set(bases)) < len(bases)
        """Whether any two decode in one batch."""

    def copy(self) -> Forward:
        other = copy(self)
        other.held = list(self.held)
        other.courses = {name: replace(course) for name, course in self.courses.items()}
        other.on_block = [
            tuple([other.courses[course.pipeline.name] for course in there]) for there in self.on_block
        ]
        return other

    def _course(self, pipeline: Pipeline) -> Course:
        """A pipeline that waits."""
        outlook, tp = pipeline.outlook, pipeline.tp
        if pipeline.apart:
            alone = {"rollout": pipeline.rollout_seconds(), "training": pipeline.training_seconds()}
            homes: dict[PhaseKind, Sequence[int]] = {
                "rollout": self._blocks_of(pipeline.rollout_home),
                "training": self._blocks_of(pipeline.trains_on),
            }
        else:
            alone = {
                "rollout": outlook.rollout_seconds(max(1, self.workers // tp), tp),
                "training": outlook.training_seconds(self.workers),
            }
            homes = dict.fromkeys(alone, range(self.blocks))
        return Course(pipeline, alone, homes, pipeline.step, pipeline.phase)

    def _take_over(self, course: Course, lanes: list[Lane]) -> None:
        """A running phase: its longest lane on the blocks of all."""
        longest = max(lanes, key=Lane.left_in_all)
        first = (longest.signature, longest.left)
        pieces = (*coarse(longest.segments[longest.index + 1 :]), first)
        whole = sum(segment.seconds for segment in longest.segments)
        self._run(course, pieces, self._blocks_of(w for lane in lanes for w in lane.workers), whole)
        course.bytes = self._bytes(course, len(lanes), len(longest.workers))

    def _blocks_of(self, workers: Iterable[int]) -> Place:
        return tuple(sorted({int(worker / self.size) for worker in workers}))

    # What may be done first

    def do(self, action: Start | Migrate) -> None:
        """A phase starts where a policy would put it; or a tail goes on elsewhere, after its prefixes are run
        again."""
        course, blocks = self.courses[action.pipeline], self._blocks_of(action.workers)
        if isinstance(action, Start):
            self._start(course, blocks, len(action.places), len(action.places[0]))
        else:
            self._leave(course)
            self._run(course, coarse(moved_segments(self.state, action)), blocks, course.whole)

    def _start(self, course: Course, blocks: Place, engines: int, span: int) -> None:
        key = ("phase", course.phase, engines, span, self.workers)
        kept = course.pipeline.outlook.kept
        pieces, whole, course.bytes = kept(key, lambda: self._phase(course, engines, span))
        for block in blocks:
            self.held[block] += course.bytes
        self._run(course, pieces, blocks, whole)

    def _phase(self, course: Course, engines: int, span: int) -> tuple[Pieces, float, float]:
        """Its pieces, its seconds in all, and its bytes on each worker, with so many engines over `span` workers."""
        outlook, rolls = course.pipeline.outlook, course.phase == "rollout"
        pieces = coarse(outlook.engine(engines, span).segments if rolls else outlook.training(engines * span))
        return pieces, sum(seconds for _, seconds in reversed(pieces)), self._bytes(course, engines, span)

    def _bytes(self, course: Course, engines: int, span: int) -> float:
        """That its phase holds on each worker."""
        outlook = course.pipeline.outlook
        if course.phase == "rollout":
            return outlook.memory(engines, span, self.workers).rollout
        return outlook.memory_trained(course.pipeline.tp, engines * span).training

    def _run(self, course: Course, pieces: Pieces, blocks: Place, whole: float) -> None:
        course.begin(pieces or (("host", 0.0),))
        course.blocks, course.whole = blocks, whole
        for block in blocks:
            self.on_block[block] += (course,)

    def _leave(self, course: Course) -> None:
        for block in course.blocks:
            self.on_block[block] = tuple([other for other in self.on_block[block] if other is not course])

    # The rules

    def follow(self, until: float) -> Prospect:
        """Rolls on to a time, or until every pipeline is done."""
        most = EVENTS // 2 if until == float("inf") else max(8, EVENTS // max(1, len(self.courses)))
        freed = True
        for _ in range(most):
            if freed:
                running = [course for course in self.courses.values() if course.pieces]
                crowds = [there for there in set(self.on_block) if len(there) > 1]
            if not running:
                break
            self._pace(running, crowds)
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
        return self._prospect()

    def _end_piece(self, course: Course) -> bool:
        """On to the next piece; True if the phase is over."""
        if len(course.pieces) > 1:
            course.begin(course.pieces[:-1])
            return False
        course.pieces = ()
        self._leave(course)
        for block in course.blocks:
            self.held[block] -= course.bytes
        if course.phase == "rollout":
            course.phase = "training"
        elif course.step == course.pipeline.steps:
            self.late += max(0.0, self.now - course.pipeline.due)
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
        if len(waiting) > 1:
            waiting.sort(key=self._rank)
        name, until = self.rule.put_off
        if self.now < until and len(waiting) < len(self.courses):
            waiting = [course for course in waiting if course.pipeline.name != name]
        for number, course in enumerate(waiting):
            part = part_of([each.work_left for each in waiting[number:]]) if self.rule.divide else 0.0
            if self.rule.sparing:
                blocks = self._spared(course, crowd, self.rule.sparing)
            else:
                blocks = self._room(course, crowd, part)
            if blocks:
                workers = int(len(blocks) * self.size)
                tp = min(course.pipeline.tp, workers)
                self._start(course, blocks, max(1, workers // tp), tp)
                for block in blocks:
                    crowd[block] = self._size(self.on_block[block])
            elif self.rule.strict:
                return

    def _rank(self, course: Course) -> tuple[int, int, float]:
        pipeline = course.pipeline
        return -pipeline.outlook.shape.priority, self.rule.rank(pipeline.name), -course.work_left

    def _size(self, there: Crowd) -> int:
        """How many disturb each other there: those in one batch count as one."""
        if not self.fuses:
            return sum([course.signature != "host" for course in there])
        busy = [course for course in there if course.signature != "host"]
        return len({batch_of(course) or course.pipeline.name for course in busy})

    def _joins(self, course: Course, block: int) -> bool:
        """Whether its rollout would be in others' batch there."""
        base = course.pipeline.outlook.shape.base if self.fuses and course.phase == "rollout" else ""
        return bool(base) and any(batch_of(other) == base for other in self.on_block[block])

    def _room(self, course: Course, crowd: list[int], part: float) -> Place:
        """Blocks that nobody uses, if they are at least half; else those where there is not yet a crowd.

        If the free ones are divided among some, a part of them.
        """
        tp, mine = course.pipeline.tp, course.homes[course.phase]
        width = max(1, round(tp / self.size))
        if self.rule.parts and course.phase == "rollout":
            kept = self._blocks_of(dict(self.rule.parts)[course.pipeline.name])
            mine = [block for block in kept if block in mine]
        for most in self.crowds[-1:] if self.rule.parts else self.crowds:
            found = [block for block in mine if crowd[block] <= most or self._joins(course, block)]
            if most == 0 and part:
                found = found[: max(1, round(len(found) * part / width)) * width]
            found = found[: len(found) // width * width]
            if not found or (most == 0 and not part and 2 * len(found) < len(mine)):
                continue
            sizes = course.pipeline.outlook.memory_trained(tp, max(tp, int(len(found) * self.size)))
            needed = sizes.rollout if course.phase == "rollout" else sizes.training
            if max([self.held[block] for block in found]) + needed <= self.state.device_bytes:
                return tuple(found)
        return ()

    def _spared(self, course: Course, crowd: list[int], sparing: Sparing) -> Place:
        """As few blocks as the time to spare allows, those with most room; fewer where it does not fit on so many."""
        mine, most = course.homes[course.phase], self.crowds[-1]
        found = [block for block in mine if crowd[block] <= most or self._joins(course, block)]
        choices = self._choices(course)
        if choices and (sparing.trainings or course.phase == "rollout"):
            choices = sparing.narrowed(choices, self.now, course.work_left)
        return tuple(roomiest(choices, found, self.held, self.state.device_bytes))

    def _choices(self, course: Course) -> Sequence[Choice]:
        """Blocks that its phase may take, from few to all, its seconds alone on so many, and its bytes on each."""
        tp, all_blocks = course.pipeline.tp, len(course.homes[course.phase])
        width = max(1, round(tp / self.size))

        def choices() -> Sequence[Choice]:
            counts = range(width, all_blocks + 1, width)
            engines = [max(tp, int(count * self.size)) // tp for count in counts]
            phases = [self._phase(course, each, tp)[1:] for each in engines]
            found = [(count, *phase) for count, phase in zip(counts, phases, strict=True)]
            return [each for each in found if each[2] <= self.state.device_bytes]

        return course.pipeline.outlook.kept(("choices", course.phase, self.workers, all_blocks), choices)

    def _pace(self, running: list[Course], crowds: list[Crowd]) -> None:
        """Every course goes as fast as the slowest of its blocks."""
        for course in running:
            course.speed = 1.0
        for there in crowds:
            signatures = tuple([course.signature for course in there])
            if self.fuses:
                bases = [batch_of(course) for course in there]
                speeds = speeds_with_fused(signatures, bases, most_demanding, self.speeds)
            else:
                speeds = self.speeds(signatures)
            for course, speed in zip(there, speeds, strict=True):
                if speed < course.speed:
                    course.speed = speed

    # Where it leads

    def _prospect(self) -> Prospect:
        left = {name: course.work_left for name, course in self.courses.items()}
        late, passed = self.late, self.now - self.state.now
        for name, course in self.courses.items():
            due = course.pipeline.due
            if due < float("inf"):
                made = self.at_first[name] - left[name]
                late += lateness(due, self.now, passed, made, left[name], SLOWEST)
        done = sum(self.at_first.values()) - sum(left.values())
        least = self.now + max((course.least_left for course in self.courses.values()), default=0.0)
        return Prospect(self.now, sorted(left.values()), max(1.0, done / max(passed, 1e-9)), late, least)
