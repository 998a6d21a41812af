"""The scheduler: hears what drivers say, asks the policy, and carries out what it answers.

One process, messages only. Everything it believes is in `World`; everything that happened is in the event log.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jigsawrl.errors import JigsawError
from jigsawrl.graph.interference import Interference
from jigsawrl.graph.lanes import Lane
from jigsawrl.policies.state import (
    Action,
    Event,
    Migrate,
    Pause,
    Phase,
    Place,
    Policy,
    Resize,
    Resume,
    Start,
    Wait,
    Woken,
)
from jigsawrl.runtime.control import Control
from jigsawrl.runtime.cores import go_on, part_of, stop
from jigsawrl.runtime.family import Family, how_it_ended
from jigsawrl.runtime.member import RETRIES, Member
from jigsawrl.runtime.messages import (
    Asks,
    At,
    Began,
    Ends,
    FromDriver,
    Gather,
    Go,
    Logged,
    Made,
    Over,
    Says,
    Stop,
    ToDriver,
)
from jigsawrl.runtime.watch import Watch
from jigsawrl.runtime.world import World
from jigsawrl.telemetry.events import EventLog, now

if TYPE_CHECKING:
    from jigsawrl.telemetry.progress import Progress

TICK_S = 0.5
"""Longest wait for anything, so that whatever was missed is looked at again."""


@dataclass(slots=True)
class Work:
    """What the scheduler itself cost."""

    messages: int = 0
    decisions: int = 0
    seconds: float = 0.0
    """Of a core, from the first decision on, display and log included."""


@dataclass(slots=True)
class Scheduler:
    members: dict[str, Member]
    policy: Policy
    cores: list[tuple[int, ...]]
    """Of each worker."""
    table: Interference
    device_bytes: float
    store: Path
    log: EventLog
    progress: Progress
    resume: bool
    control: Control
    admit: Callable[[dict[str, Any]], Member]
    """Makes a member of what somebody submits, or refuses it."""
    world: World = field(init=False)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    watch: Watch = field(init=False)
    work: Work = field(default_factory=Work)
    wakes: list[float] = field(default_factory=list)
    started: float = field(default_factory=now)
    stopping: bool = False
    first_decision: float | None = None
    """When all who come at the start were there."""

    def __post_init__(self) -> None:
        self.world = World(self.table, len(self.cores), self.device_bytes)
        self.watch = Watch(self.progress, len(self.cores))
        self.selector.register(self.control, selectors.EVENT_READ, ("", "control"))

    def run(self) -> None:
        """Until every pipeline has ended, one way or another. Nothing is left running, whatever happens."""
        with interrupts() as pressed:
            try:
                self.watch.show(self.world, self.members, at_once=True)
                while any(member.ended is None for member in self.members.values()):
                    if pressed() > 1:
                        raise KeyboardInterrupt("stopped at once; go on with --resume")
                    if pressed() and not self.stopping:
                        self._stop_all()
                    self._turn()
                self.watch.show(self.world, self.members, at_once=True)
            finally:
                if self.first_decision is not None:
                    self.work.seconds += time.process_time()
                for member in self.members.values():
                    if member.family is not None:
                        member.family.kill()

    def _turn(self) -> None:
        """Waits for something to happen, hears all of it, and decides once."""
        self._start_who_is_due()
        ready: dict[str, set[str]] = {}
        for key, _ in self.selector.select(self._patience()):
            name, what = key.data
            ready.setdefault(name, set()).add(what)
        self.watch.pass_time(self.world, now())
        self.world.advance(now())
        events: list[Event] = []
        if ready.pop("", None):
            self.control.serve(lambda request: self._asked_from_outside(request, events))
        for name, what in ready.items():
            member = self.members[name]
            if "line" in what and member.family is not None:
                events += self._listen(member.family.line, member)
            if "process" in what or member.ends is not None:
                events += self._look_after(member)
        if self.wakes and self.wakes[0] <= now():
            self.wakes = [at for at in self.wakes if at > now()]
            events.append(Woken())
        if events and self._everyone_is_there():
            self._decide(events)
        self._let_go()
        self.watch.show(self.world, self.members)
        if ready:
            self.log.flush()

    def _patience(self) -> float:
        due = [
            m.arrival + self.started for m in self.members.values() if m.family is None and m.ended is None
        ]
        return max(0.0, min([TICK_S, *(at - now() for at in [*due, *self.wakes])]))

    def _everyone_is_there(self) -> bool:
        """Pipelines that come at the start are set up before the first of them runs."""
        return all(m.began or m.ended or m.arrival > 0 for m in self.members.values())

    # Processes

    def _start_who_is_due(self) -> None:
        for member in self.members.values():
            due = self.started + member.arrival <= now()
            if member.family is None and member.ended is None and due and not self.stopping:
                self._start_family(member, self.resume)

    def _start_family(self, member: Member, resume: bool) -> None:
        member.ends, member.asked = None, None
        member.family = Family(member.config, member.out, resume, self.store, len(self.cores))
        self.selector.register(member.family.line, selectors.EVENT_READ, (member.name, "line"))
        for sentinel in member.family.sentinels:
            self.selector.register(sentinel, selectors.EVENT_READ, (member.name, "process"))

    def _forget(self, family: Family) -> None:
        """Nothing more is heard of it."""
        for each in (family.line.fileno(), *family.sentinels):
            self.selector.unregister(each)

    def _look_after(self, member: Member) -> list[Event]:
        """Notices who has ended, and what that means."""
        family = member.family
        if family is None or (member.ends is None and not family.dead()):
            return []
        events = self._listen(family.line, member)  # its last words
        ends = member.ends
        if ends is not None and ends.how in ("finished", "interrupted"):
            self._forget(family)
            family.wait()
            how = "cancelled" if member.cancelled and ends.how == "interrupted" else ends.how
            return [*events, self._end(member, how, ends.reason)]
        dead = family.dead()
        reason = ends.reason if ends else how_it_ended(dead[0])
        if ends is not None and ends.how == "died" and dead:
            reason = how_it_ended(dead[0])
        self._forget(family)
        family.kill()
        if ends is not None and ends.refused:
            return [*events, self._end(member, "failed", reason)]
        return [*events, *self._recover(member, reason)]

    def _recover(self, member: Member, reason: str) -> list[Event]:
        """From its last step, or not at all if that keeps failing."""
        member.deaths += 1
        self.log.emit("died", pipeline=member.name, reason=reason, deaths=member.deaths)
        if member.deaths > RETRIES:
            return [self._end(member, "failed", f"it died {member.deaths} times in a row; last, {reason}")]
        if self.stopping:
            return [self._end(member, "interrupted", reason)]
        first = reason.splitlines()[0] if reason else "for no known reason"
        self.progress.message(f"{member.name}: {first}; it goes on from step {member.done}")
        if member.name in self.world.pipelines:
            self.world.drop(member.name)
            self.world.pipelines[member.name].status = "done"
        self._start_family(member, resume=True)
        return []

    def _end(self, member: Member, how: str, reason: str) -> Event:
        member.ended, member.reason, member.family = how, reason, None
        member.finished_at = now()
        self.log.emit(how, pipeline=member.name, step=member.done, reason=reason)
        if how == "failed":
            self.progress.message(f"{member.name}: failed: {reason}")
        if member.name in self.world.pipelines:
            return self.world.leave(member.name)
        return Woken()

    def _stop_all(self) -> None:
        self.stopping = True
        self.progress.message("stopping: steps are finished and saved; press Ctrl-C again to stop at once")
        for member in self.members.values():
            if member.family is not None:
                for engine in range(len(self.cores)):
                    go_on(member.family.pid(engine))
                self._tell(member, Stop())
                if member.held and member.asked is not None:  # a rollout that it has made is still trained on
                    member.held = False
                    self._could_start(member, *member.asked)
                    self.wakes = [now(), *self.wakes]
            elif member.ended is None:
                self._end(member, "interrupted", "before it began")

    # Messages

    def _tell(self, member: Member, message: ToDriver) -> None:
        assert member.family is not None
        with suppress(OSError):  # its end will be noticed
            member.family.line.send(message)

    def _listen(self, line: Connection, member: Member) -> list[Event]:
        events: list[Event] = []
        with suppress(EOFError, OSError):  # its end will be noticed
            while member.ends is None and line.poll(0):
                for message in line.recv():
                    self.work.messages += 1
                    events += self._hear(member, message)
        return events

    def _hear(self, member: Member, message: FromDriver) -> list[Event]:
        match message:
            case Began(steps, done):
                self.progress.start(member.name, steps, done)
                return self._began(member, steps, done)
            case Asks(phase, step):
                return self._asked(member, phase, step)
            case At(-1, substage):
                member.training = substage
            case At(engine, substage, samples):
                return self.world.at(member.name, engine, substage, samples)
            case Over():
                return self._over(member, message)
            case Made(step, values):
                member.made(step)
                self.progress.update(member.name, step, values)
            case Says(text):
                self.progress.message(f"{member.name}: {text}")
            case Logged(events):
                for event in events:
                    self.log.write(event)
            case Ends():
                member.ends = message
        return []

    def _began(self, member: Member, steps: int, done: int) -> list[Event]:
        member.done, again = done, member.began
        member.began = True
        self.log.emit("recovered" if again else "arrived", pipeline=member.name, step=done)
        if done >= steps:
            return []
        arrived = self.world.arrive(member.name, member.outlook, steps, again)
        return [arrived, *self._could_start(member, "rollout", done + 1)]

    def _could_start(self, member: Member, phase: Phase, step: int) -> list[Event]:
        """The policy hears of it; not of a pipeline that somebody wants to wait."""
        ready = self.world.ask(member.name, phase, step)
        if member.held:
            self.world.pipelines[member.name].status = "done"
            return []
        return [ready]

    def _asked(self, member: Member, phase: Phase, step: int) -> list[Event]:
        """Its driver waits; if the phase was started before it asked, it may go at once."""
        member.asked = (phase, step)
        pipeline = self.world.pipelines[member.name]
        if pipeline.status == "running" and (pipeline.phase, pipeline.step) == (phase, step):
            self._go(member)
            return []
        if pipeline.status == "ready" and (pipeline.phase, pipeline.step) == (phase, step):
            return []
        return self._could_start(member, phase, step)

    def _over(self, member: Member, over: Over) -> list[Event]:
        self.log.keep(
            "phase",
            pipeline=member.name,
            phase=over.phase,
            step=over.step,
            t0=member.since,
            t1=now(),
            foreseen=member.foreseen,
            busy=list(over.busy),
        )
        member.learn(over, now() - member.since)
        member.training = None
        events = self.world.over(member.name)
        self.world.forecast(member.name, member.outlook)
        if over.phase == "rollout":
            return [*events, *self._could_start(member, "training", over.step)]
        if over.step < self.world.pipelines[member.name].steps:
            return [*events, *self._could_start(member, "rollout", over.step + 1)]
        return [*events, self.world.leave(member.name)]

    # What people ask for while it runs

    def _asked_from_outside(self, request: dict[str, Any], events: list[Event]) -> dict[str, Any]:
        if request["do"] == "submit":
            if self.stopping:
                raise JigsawError("it is stopping")
            member = self.admit(request)
            if member.name in self.members:
                raise JigsawError(f"there is a pipeline {member.name} already; choose another --name")
            member.arrival = now() - self.started
            self.members[member.name] = member
            self.log.emit("submitted", pipeline=member.name)
            self.progress.message(f"{member.name}: submitted")
        else:
            name = str(request["pipeline"])
            if name not in self.members:
                raise JigsawError(f"there is no pipeline {name}; there are {', '.join(self.members)}")
            events += self._told_to(self.members[name], str(request["do"]))
        return {"pipelines": {name: member.ended or member.standing for name, member in self.members.items()}}

    def _told_to(self, member: Member, what: str) -> list[Event]:
        """Pause, resume or cancel. Whatever it is at now is finished: a phase, or with `cancel` a step."""
        if member.ended is not None:
            raise JigsawError(f"{member.name} has ended: {member.ended}")
        if what == "cancel":
            member.cancelled, member.held = True, False
            if member.family is None:
                return [self._end(member, "cancelled", "before it began")]
            self._tell(member, Stop())
        elif what == "pause":
            member.held = True
        elif what == "resume":
            member.held = False
        else:
            raise JigsawError(f"{what}: not understood")
        self.log.emit(what, pipeline=member.name, step=member.done)
        self.progress.message(f"{member.name}: {what}")
        pipeline = self.world.pipelines.get(member.name)
        if pipeline is None or member.asked is None or pipeline.status == "running":
            return []
        return self._could_start(member, *member.asked)

    # Decisions

    def _decide(self, events: list[Event]) -> None:
        self.work.decisions += 1
        if self.first_decision is None:
            self.first_decision = now()
            self.work.seconds -= time.process_time()
        for action in self.policy.decide(self.world.state(), events):
            self.log.keep("action", action=type(action).__name__.lower(), **asdict(action))
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Migrate():
                self._gather(action)
            case Pause(lane) | Resume(lane):
                self._pause(lane, isinstance(action, Pause))
            case Resize(lane, share):
                self.world.lanes.resize(lane, share)
                self._place(lane)
            case Wait(until):
                self.wakes = sorted([*self.wakes, until])

    def _start(self, action: Start) -> None:
        member = self.members[action.pipeline]
        self.world.start(action)
        pipeline = self.world.pipelines[action.pipeline]
        for lane in pipeline.lanes:
            self._place(lane)
        member.since, member.alone = now(), True
        for each in self.world.lanes.lanes.values():
            if any(len(self.world.lanes.on_worker[worker]) > 1 for worker in each.workers):
                self.members[each.pipeline].alone = False
        member.foreseen = max(
            lane.left_in_all() for lane in map(self.world.lanes.lanes.get, pipeline.lanes) if lane
        )
        self.log.keep(
            "predicted",
            pipeline=member.name,
            phase=pipeline.phase,
            step=pipeline.step,
            seconds=member.foreseen,
        )
        if member.asked == (pipeline.phase, pipeline.step):
            self._go(member)

    def _go(self, member: Member) -> None:
        pipeline = self.world.pipelines[member.name]
        engines = sorted({w for key in pipeline.lanes for w in self.world.lanes.lanes[key].workers})
        member.asked = None
        where = [0] * len(self.cores)
        for key in pipeline.lanes:
            lane = self.world.lanes.lanes[key]
            for worker, actors in self._who_runs_where(lane.phase, lane.workers).items():
                for actor in actors:
                    where[actor] = worker
        assert member.family is not None
        threads = [
            len(member.family.pinned.get(actor, self.cores[actor])) for actor in range(len(self.cores))
        ]
        self._tell(member, Go(tuple(engines), tuple(where), tuple(threads)))

    def _gather(self, action: Migrate) -> None:
        self.world.gather(action)
        for lane in self.world.pipelines[action.pipeline].lanes:
            self._place(lane)
        self._tell(self.members[action.pipeline], Gather(tuple(place[0] for place in action.places)))

    def _place(self, key: int) -> None:
        """Pins the actors of a lane to its workers' cores, to as many of them as its share is."""
        lane = self.world.lanes.lanes[key]
        family = self.members[lane.pipeline].family
        if family is None:
            return
        for worker, engines in self._who_runs_where(lane.phase, lane.workers).items():
            cores = self.cores[worker]
            others = [
                self.world.lanes.lanes[other].share
                for other in self.world.lanes.on_worker[worker]
                if other < key
            ]
            chosen = part_of(cores, lane.share, round(sum(others) * len(cores)))
            for engine in engines:
                family.pin(engine, chosen)

    def _who_runs_where(self, phase: str, workers: Place) -> dict[int, list[int]]:
        """A rollout's engine is that of its worker. All actors train, wherever the gang was put."""
        if phase == "rollout":
            return {worker: [worker] for worker in workers}
        where: dict[int, list[int]] = {}
        for actor in range(len(self.cores)):
            where.setdefault(actor if actor in workers else workers[actor % len(workers)], []).append(actor)
        return where

    def _pause(self, key: int, paused: bool) -> None:
        lane = self.world.lanes.lanes[key]
        self.world.lanes.pause(key, paused)
        member = self.members[lane.pipeline]
        if member.family is None:
            return
        for engine in self._actors_of(lane):
            (stop if paused else go_on)(member.family.pid(engine))
            (member.paused.add if paused else member.paused.discard)(engine)

    def _let_go(self) -> None:
        """Nobody stands still whose lane is gone: it was done, or taken elsewhere, before it was to go on."""
        for member in self.members.values():
            if member.paused and member.family is not None:
                lanes = [self.world.lanes.lanes[key] for key in self.world.pipelines[member.name].lanes]
                held = {engine for lane in lanes if lane.paused for engine in self._actors_of(lane)}
                for engine in member.paused - held:
                    go_on(member.family.pid(engine))
                member.paused &= held

    def _actors_of(self, lane: Lane) -> list[int]:
        where = self._who_runs_where(lane.phase, lane.workers)
        return [engine for engines in where.values() for engine in engines]


@contextmanager
def interrupts() -> Iterator[Callable[[], int]]:
    """How often Ctrl-C was pressed (or SIGTERM came) inside."""
    count = 0

    def note(number: int, frame: object) -> None:
        nonlocal count
        count += 1

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: count
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
