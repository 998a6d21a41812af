"""A pipeline's processes as the core meets them: a driver, its engines and its gang, in simulated time.

They know what they really do and hold. What they are told and what they say takes time; whatever the core has wrong
shows here: a phase that runs twice or too early, samples that nobody has, more bytes than a worker has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.state import Place
from jigsawrl.scheduler.events import (
    DriverBegan,
    LoadRequest,
    PhaseDone,
    SchedulerEvent,
    StateAsleep,
    SubstageChanged,
)
from jigsawrl.scheduler.state import GANG
from jigsawrl.telemetry.events import Substage

if TYPE_CHECKING:
    from soak.core.world import World

FRESH_S = 1.0
"""For so long a driver goes on as it was told where its permit covers what follows."""
SAMPLES = 8


class Wrong(Exception):
    """What must not happen, has: `about` names it in a word."""

    def __init__(self, about: str, what: str) -> None:
        super().__init__(f"{about}: {what}")
        self.about = about


@dataclass(slots=True, eq=False)
class Engine:
    """An engine at work, or the gang."""

    number: int
    workers: Place
    bytes: float
    left: list[tuple[float, Substage | None, int]]
    """Seconds, and then what it is at, with how many samples."""
    due: float = 0.0
    stands: bool = False
    alarm: int = 0
    """What was set before the last change does not count."""
    samples: int = SAMPLES


@dataclass(frozen=True, slots=True)
class Permit:
    """What a driver is told."""

    phase: PhaseId
    generates: bool
    seats: tuple[tuple[int, Place, float], ...]
    """Engine, workers and bytes."""
    seconds: float
    covers: tuple[Permit, ...] = ()
    """What it may go on with by itself, in turn."""


@dataclass(slots=True, eq=False)
class Running:
    permit: Permit
    engines: list[Engine]
    since: float


@dataclass(slots=True, eq=False)
class Driver:
    world: World
    name: str
    incarnation: int
    steps: int
    alive: bool = True
    hangs: bool = False
    stops: bool = False
    """Whether it ends when its step is done."""
    set_up: bool = False
    awake: set[str | None] = field(default_factory=set)
    """Kinds of memory that its state is in."""
    running: dict[PhaseId, Running] = field(default_factory=dict)
    ended: set[PhaseId] = field(default_factory=set)
    """Phases that it has done."""
    sleepy: list[str | None] = field(default_factory=list)
    covers: tuple[Permit, ...] = ()
    asked: float = 0.0
    heard_free: float = 0.0
    """When the last message to it arrives."""
    said_free: float = 0.0
    slow: float = 0.0
    twice: int = 0
    """Messages to come that arrive twice."""

    # What it says

    def say(self, event: SchedulerEvent) -> None:
        self.world.say(self, event)

    def last_words(self) -> None:
        """It dies while messages are on their way, perhaps that a phase has ended: its samples are lost with it."""
        for id, running in self.running.items():
            self.slow = 20.0 * self.world.some(id, "last")
            for engine in running.engines:
                self.say(SubstageChanged(engine.number, "decode", SAMPLES, (id.kind, id.index)))
            if self.world.some(id, "ended") < 0.5:
                self.say(PhaseDone(id.kind, id.index, (1.0,), 1, empty=True))

    def start(self) -> None:
        if self.alive:
            self.say(LoadRequest())

    def load(self) -> None:
        """There is room."""
        if self.alive:
            self.awake = {memory.kind for memory in self.world.core.memory.of(self.name)}
            self.world.check_memory(f"{self.name} is set up")
            self.world.after(self.world.some(self.name, "set up") * 5, self.begin)

    def begin(self) -> None:
        if not self.alive:
            return
        self.set_up = True
        done = self.world.saved(self.name)
        self.say(DriverBegan(self.steps, done))
        self._end_if_done()

    # What it is told

    def permit(self, permit: Permit) -> None:
        if self.alive:
            self.asked, self.covers = self.world.now, permit.covers
            self._run(permit)

    def sleep(self, kind: str | None) -> None:
        if self.alive:
            self.sleepy.append(kind)
            self._fall_asleep()

    def _fall_asleep(self) -> None:
        kinds = {
            None,
            *("rollout" if each.permit.generates else "training" for each in self.running.values()),
        }
        for kind in [each for each in self.sleepy if not self.running or each not in kinds]:
            self.sleepy.remove(kind)
            self.world.after(self.world.some(self.name, "asleep") * 3, self._slept, kind)

    def _slept(self, kind: str | None) -> None:
        if self.alive and not self.hangs:
            self.awake.discard(kind)
            self.say(StateAsleep(kind))

    def _run(self, permit: Permit) -> None:
        id, world = permit.phase, self.world
        if id in self.running or id in self.ended:
            raise Wrong("twice", f"{id} is told to run again")
        world.check_needs(self, id)
        again = id in world.journal[self.name] or (
            PhaseId(self.name, "training", id.index) in world.journal[self.name] and id.kind == "rollout"
        )
        own = [
            Engine(number, place, size, self._course(permit, number, again))
            for number, place, size in permit.seats
        ]
        self.running[id] = Running(permit, own, world.now)
        self.awake |= {
            memory.kind for memory in world.core.memory.of(self.name) if world.holds(memory, permit)
        }
        world.check_memory(f"{id} begins")
        for engine in own:
            self._go(id, engine)

    def _course(self, permit: Permit, number: int, again: bool) -> list[tuple[float, Substage | None, int]]:
        if again:  # it was done by processes before these
            return [(0.0, None, 0)]
        world, id = self.world, permit.phase
        seconds = permit.seconds * world.wrong[self.name] * (0.5 + world.some(id, number))
        if not permit.generates:
            if world.some(id, "told") < 0.5:
                return [(seconds, None, 0)]
            return [(0.3 * seconds, "grad", 0), (0.7 * seconds, None, 0)]
        course: list[tuple[float, Substage | None, int]] = [(0.1 * seconds, "decode", SAMPLES)]
        if world.some(id, "tools") < 0.3:
            course += [(0.2 * seconds, "tool", 0), (0.1 * seconds, "decode", SAMPLES)]
        return [*course, (0.5 * seconds, "tail", 2), (0.3 * seconds, None, 0)]

    # What its engines do

    def _go(self, id: PhaseId, engine: Engine) -> None:
        engine.alarm += 1
        engine.due = self.world.now + (engine.left[0][0] if engine.left else 0.0)
        if not engine.stands:
            self.world.at(engine.due, self._next, id, engine, engine.alarm)

    def _next(self, id: PhaseId, engine: Engine, alarm: int) -> None:
        if not self.alive or self.hangs or engine.alarm != alarm or engine.stands or id not in self.running:
            return
        _, substage, engine.samples = engine.left.pop(0)
        running = self.running[id]
        gang = engine.number == GANG
        if not gang or self.world.some(id, "told") >= 0.5:
            self.say(SubstageChanged(engine.number, substage, engine.samples, (id.kind, id.index)))
        if engine.left:
            self._go(id, engine)
            return
        running.engines.remove(engine)
        if not running.engines:
            self._done(running)

    def stand(self, id: PhaseId, numbers: set[int]) -> None:
        """These of its engines stand still from now on, and no others."""
        for engine in self.running[id].engines if id in self.running else ():
            stands = engine.number in numbers
            if stands and not engine.stands:
                _, substage, samples = engine.left[0]
                engine.left[0] = (max(0.0, engine.due - self.world.now), substage, samples)
            if stands != engine.stands:
                engine.stands = stands
                self._go(id, engine)

    def gather(self, id: PhaseId, seats: tuple[tuple[int, Place, float], ...]) -> None:
        """Survivors go on elsewhere; an engine that had none before has some again."""
        running = self.running.get(id)
        if not self.alive or running is None:
            return
        left = sum(engine.samples for engine in running.engines)
        seconds = max((sum(each[0] for each in engine.left) for engine in running.engines), default=0.0)
        gone = {engine.number for engine in running.engines} - {number for number, _, _ in seats}
        for number in sorted(gone):
            self.say(SubstageChanged(number, None, 0, (id.kind, id.index)))
        for engine in running.engines:
            engine.alarm += 1
        running.engines = [Engine(number, place, size, [(seconds, None, 0)]) for number, place, size in seats]
        for engine in running.engines:
            engine.samples = max(1, left // len(seats))
            self.say(SubstageChanged(engine.number, "tail", engine.samples, (id.kind, id.index)))
            self._go(id, engine)
        self.world.check_memory(f"{id} is gathered")

    # What ends

    def _done(self, running: Running) -> None:
        id, world = running.permit.phase, self.world
        del self.running[id]
        self.ended.add(id)
        if id.kind != "rollout" and id not in world.journal[self.name]:
            world.journal[self.name].add(id)
        follows = self._follows(id)
        seconds = world.now - running.since
        lengths = (
            tuple(50 + int(200 * world.some(id, n)) for n in range(4)) if running.permit.generates else ()
        )
        engines = len(running.permit.seats)
        self.say(
            PhaseDone(
                id.kind,
                id.index,
                (0.8 * seconds,) * max(1, engines),
                engines if running.permit.generates else 0,
                lengths,
                1.0,
                0.0,
                world.clock if follows else None,
                not world.learns[self.name],
            )
        )
        if follows:
            self._run(follows)
        else:
            self._fall_asleep()
            self._end_if_done()

    def _follows(self, id: PhaseId) -> Permit | None:
        """What it goes on with unasked: its training, and the next step for as long as its permit is fresh."""
        if not self.covers or self.sleepy or self.stops or (id.index >= self.steps and id.kind == "training"):
            return None
        if id.kind == "training" and self.world.now - self.asked >= FRESH_S:
            return None
        which = 1 if id.kind == "training" else 0
        covered = self.covers[which]
        index = id.index + (id.kind == "training")
        return Permit(
            PhaseId(self.name, covered.phase.kind, index), covered.generates, covered.seats, covered.seconds
        )

    def _end_if_done(self) -> None:
        done = self.world.saved(self.name) >= self.steps
        if done or (self.stops and not self.running):
            self.world.after(0.01, self.world.exit, self)
