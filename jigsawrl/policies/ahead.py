"""Where an order of permits leads, as far as it can be foreseen: whose phase goes next in pools that do nothing else.

Nothing runs beside anything else there, so a future is a row of whole phases, each as long as it is foreseen to be.
It is followed for some phases; what is left then takes at least as long as the busiest workers have work, or as the
longest pipeline by itself. (`forward` follows what shares workers, in pieces of phases, and so not as far.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jigsawrl.cluster.need import ROLLOUT, TRAINING, Runner, in_the_way
from jigsawrl.policies.starts import engine_bytes
from jigsawrl.policies.state import Phase, Pipeline, State

EVENTS = 64
"""A future is followed until so many phases have ended, or until all work is done."""
LATE = 10.0
"""A second late weighs as much as so many seconds more for all."""
RESERVE = 0.1
"""Part of the time until a pipeline is due that is kept for what takes longer than foreseen."""


@dataclass(slots=True, eq=False)
class Course:
    """A pipeline on its way, in whole phases."""

    name: str
    number: int
    """In the order in which they came."""
    seconds: dict[Phase, float]
    workers: dict[Phase, int]
    """That each phase takes, whole; as bits."""
    phase: Phase
    steps: int
    """That are left, with the one it is at."""
    left: float | None
    """Seconds of the running phase; None while it waits."""
    holds: int
    """Workers that are its alone now."""
    since: float
    """When its phase became ready."""
    turns: dict[Phase, float]
    """When each of its phases last started."""
    due: float

    @property
    def takes(self) -> int:
        """Workers of the phase it is in."""
        return self.workers[self.phase]

    @property
    def step_seconds(self) -> float:
        return self.seconds["rollout"] + self.seconds["training"]

    @property
    def work_left(self) -> float:
        """Seconds of all its work, if it never waited."""
        now = self.seconds[self.phase] if self.left is None else self.left
        after = self.seconds["training"] if self.phase == "rollout" else 0.0
        return now + after + (self.steps - 1) * self.step_seconds

    def spare(self, now: float) -> float:
        """Seconds that it may wait in each of its steps, and still be done when it is due."""
        return (self.due - now - self.work_left) / self.steps

    def runner(self, now: float) -> Runner:
        """As one that needs to be done with this step by a time."""
        spare = self.spare(now)
        seconds = self.seconds["rollout"], self.seconds["training"]
        left = self.work_left - (self.steps - 1) * self.step_seconds
        runner = Runner(
            self.name,
            (self.workers["rollout"], self.workers["training"]),
            seconds,
            seconds,
            self.step_seconds + spare,
            now + left + spare,
            ROLLOUT if self.phase == "rollout" else TRAINING,
        )
        if self.left is not None:
            runner.ends, runner.held = now + self.left, self.holds
        return runner

    def begin(self, now: float) -> None:
        self.left, self.holds = self.seconds[self.phase], self.takes
        self.turns = {**self.turns, self.phase: now}

    def end(self, now: float) -> None:
        """On to its next phase, for which it waits."""
        self.left, self.holds, self.since = None, 0, now
        self.steps -= self.phase == "training"
        self.phase = "training" if self.phase == "rollout" else "rollout"


def courses_of(state: State, pipelines: Sequence[Pipeline]) -> list[Course]:
    """In the order in which they came, those that run or could."""
    ready = {pipeline.name for pipeline in state.ready() if pipeline.home}
    there = [p for p in pipelines if p.status == "running" or p.name in ready]
    roomy = fit_together(state)
    return [
        Course(
            pipeline.name,
            number,
            {"rollout": pipeline.rollout_seconds(), "training": pipeline.training_seconds()},
            {"rollout": bits(pipeline.rollout_home), "training": bits(pipeline.trains_on)},
            pipeline.phase,
            pipeline.steps - pipeline.step + 1,
            max((lane.left_in_all() for lane in state.running(pipeline)), default=None),
            bits(held_by(state, pipeline, roomy)),
            pipeline.since,
            pipeline.turns,
            with_reserve(pipeline.due, state.now),
        )
        for number, pipeline in enumerate(sorted(there, key=lambda p: (p.arrived, p.name)))
    ]


def with_reserve(due: float, now: float) -> float:
    """When to be done so that some of the time is left."""
    return due - RESERVE * (due - now) if now < due < float("inf") else due


def held_by(state: State, pipeline: Pipeline, roomy: bool) -> Iterable[int]:
    """Workers that nobody else may use: those of its running phase, until each has nothing more to do for it if there
    is room for others beside its state."""
    if pipeline.status != "running":
        return ()
    return {w for lane in state.running(pipeline) for w in lane.workers} if roomy else pipeline.home


def fit_together(state: State) -> bool:
    """Whether a worker has room for the engines of all pipelines at once."""
    needed = sum(engine_bytes(each.outlook, 1, each.tp) for each in state.unfinished())
    return needed <= state.device_bytes


def bits(workers: Iterable[int]) -> int:
    return sum(1 << worker for worker in workers)


# Orders


@dataclass(frozen=True, slots=True)
class Order:
    """Who goes first, by rank at a time. `in_turn`: a worker rather waits than lets someone overtake whose turn it
    is; `kept_free`: than that it starts what is in the way of somebody who comes soon and cannot wait."""

    rank: Callable[[Course, float], float]
    in_turn: bool = False
    kept_free: bool = False


def last_turn(course: Course) -> float:
    return course.turns.get(course.phase, float("-inf"))


ROUND_ROBIN = Order(lambda course, now: last_turn(course), in_turn=True)
LONGEST_WAIT = Order(lambda course, now: course.since)
MOST_WORK = Order(lambda course, now: -course.work_left)
SHORTEST = Order(lambda course, now: course.seconds[course.phase])
BY_NEED = Order(lambda course, now: course.spare(now), kept_free=True)


def orders(courses: Iterable[Course]) -> tuple[Order, ...]:
    """By which one may go on, whatever the usual order is."""
    promised = any(course.due < float("inf") for course in courses)
    return (LONGEST_WAIT, MOST_WORK, SHORTEST, *((BY_NEED,) if promised else ()))


def starting(courses: Sequence[Course], order: Order, now: float) -> tuple[Course, ...]:
    """Whose phases start now. Nobody takes a worker that somebody before it waits for."""
    waiting = [course for course in courses if course.left is None]
    taken = 0
    for course in courses:
        taken |= course.holds
    starts = []
    for course in sorted(waiting, key=lambda each: (order.rank(each, now), each.number)):
        if order.in_turn and not has_turn(course, courses):
            continue
        if not taken & course.takes:
            if order.kept_free and _in_the_way(course, courses, now):
                continue
            starts.append(course)
        taken |= course.takes
    if not starts and order.in_turn and len(waiting) == len(courses):
        return starting(courses, LONGEST_WAIT, now)  # nobody's turn is waited for when all wait
    return tuple(starts)


def _in_the_way(course: Course, courses: Sequence[Course], now: float) -> bool:
    takes = course.takes
    busy = [
        other.runner(now)
        for other in courses
        if other.left is not None
        and takes & other.workers["training" if other.phase == "rollout" else "rollout"]
    ]
    return bool(busy) and in_the_way(course.runner(now), busy, now)


def has_turn(course: Course, courses: Iterable[Course]) -> bool:
    """Whether, of all who have this phase on its workers, its last turn is the longest ago."""
    phase = course.phase
    mine = (last_turn(course), course.number)
    return all(
        mine <= (other.turns.get(phase, float("-inf")), other.number)
        for other in courses
        if other.workers[phase] & course.takes
    )


# Futures


def score(courses: Sequence[Course], now: float, first: Iterable[Course], order: Order) -> float:
    """When all work would be done if these started now, and then everyone by this order; more if someone is late."""
    names = {course.name for course in first}
    since, late = now, 0.0
    at_first = {course.name: course.work_left for course in courses}
    going = [replace(course) for course in courses]
    starts: Iterable[Course] = [course for course in going if course.name in names]
    for _ in range(EVENTS):
        for course in starts:
            course.begin(now)
        running = [(course.left, course) for course in going if course.left is not None]
        if not running:
            break
        elapsed = min(left for left, _ in running)
        now += elapsed
        for left, course in running:
            course.left = left - elapsed
            if course.left <= 1e-9:
                course.end(now)
                if course.steps == 0:
                    late += max(0.0, now - course.due)
                    going.remove(course)
        starts = starting(going, order, now)
    for course in going:
        if course.due < float("inf"):
            made = max(at_first[course.name] - course.work_left, 1e-9)
            pace = max(1.0, (now - since) / made)
            late += max(0.0, now + pace * course.work_left - course.due)
    return now + least_left(going) + LATE * late


def least_left(courses: Sequence[Course]) -> float:
    """Seconds that all their work takes at least."""
    busy: dict[int, float] = {}
    for course in courses:
        training = course.steps * course.seconds["training"]
        rollout = (course.steps - (course.phase == "training")) * course.seconds["rollout"]
        done = 0.0 if course.left is None else course.seconds[course.phase] - course.left
        work: dict[Phase, float] = {"rollout": rollout, "training": training}
        work[course.phase] -= done
        for phase, seconds in work.items():
            busy[course.workers[phase]] = busy.get(course.workers[phase], 0.0) + seconds
    alone = [course.work_left for course in courses]
    return max([*busy.values(), *alone], default=0.0)
