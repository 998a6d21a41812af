"""One world: a scheduler core among drivers, workers, users and clocks that fail in every way that a program says.

Nothing here knows what the core should decide. After every call all invariants hold (the core is `checked`); what the
processes really do is checked where they do it; in the end every pipeline has ended, everything was trained once, and
the log gives the same actions again.
"""

from __future__ import annotations

import heapq
import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from soak.core.anything import Anything
from soak.core.driver import Driver, Permit, Wrong
from soak.core.kinds import GRAPHS, TABLES, predicted
from soak.core.program import ANYTHING, Program, Step

from jigsawrl.phases.ids import PhaseId
from jigsawrl.phases.turns import OrderName
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.starts import needs
from jigsawrl.policies.state import Action, Migrate, Phase, Policy, Start, Swap
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import (
    Heard,
    PipelineGone,
    PipelineHeld,
    PipelineLost,
    SchedulerEvent,
    Sent,
    TimerDue,
    TurnsReordered,
    WorkerGone,
    WorkerReturned,
    read,
    written,
    written_action,
)
from jigsawrl.scheduler.layout import Layout, layout_of
from jigsawrl.scheduler.memory import Memory
from jigsawrl.scheduler.state import GANG

HANG_S = 30.0
"""After which a driver that says nothing is declared dead."""
MOST_TURNS = 5_000
"""In which a program ends, or never."""
BATCH_S = 0.02
"""What happens within so many seconds is heard together."""


COUNTED = frozenset(kind.__name__ for kind in get_args(SchedulerEvent)) - {"Sent"}
"""Events by name."""


@dataclass(slots=True)
class World:
    program: Program
    core: SchedulerCore = field(init=False)
    now: float = 0.0
    offset: float = 0.0
    """Of the core's clock."""
    queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    count: int = 0
    inbox: list[Heard] = field(default_factory=list)
    hearing: list[Heard] = field(default_factory=list)
    """What the core was told last."""
    log: list[list[Any]] = field(default_factory=list)
    drivers: dict[str, Driver] = field(default_factory=dict)
    journal: dict[str, set[PhaseId]] = field(default_factory=dict)
    """Trainings and evaluations that are done for good."""
    wrong: dict[str, float] = field(default_factory=dict)
    learns: dict[str, bool] = field(default_factory=dict)
    loading: list[Driver] = field(default_factory=list)
    told: set[PhaseId] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    """Pipelines of which nothing more comes."""
    cancelled: set[str] = field(default_factory=set)
    owners: dict[int, PhaseId] = field(default_factory=dict)
    """The phase of each lane."""
    still: bool = False
    """Whether some engine stands still."""
    seen: Counter[str] = field(default_factory=Counter)
    """Events that changed something, and what else happened."""
    free: dict[str, float] = field(default_factory=dict)
    """When the last message of those who look after things arrives."""

    def __post_init__(self) -> None:
        self.core = make_core(self.program)

    # Time

    def at(self, time: float, do: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.queue, (time, self.count, do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, do, *args)

    @property
    def clock(self) -> float:
        return self.now + self.offset

    def some(self, *what: object) -> float:
        """A number from 0 to 1 that is the same whatever else happens."""
        return zlib.crc32(f"{self.program.seed} {what}".encode()) / 2**32

    def run(self) -> World:
        steps, turns = list(self.program.steps), 0
        left = steps[0][0] if steps else 0
        while True:
            while steps and (left <= 0 or not self._anything_comes()):
                self._happen(steps.pop(0))
                left = steps[0][0] if steps else 0
                if not steps:
                    self._calm()
            if not self._anything_comes() or (not steps and not self.left() and not self.queue):
                break
            self._pass_time()
            if self.inbox:
                left -= len(self.inbox)
                self._turn()
                turns += 1
                if turns > MOST_TURNS:
                    raise Wrong("for ever", f"after {turns} calls {self.left()} have not ended")
        self._check_end()
        return self

    def _anything_comes(self) -> bool:
        return bool(self.queue or self.inbox or self.core.waits)

    def _pass_time(self) -> None:
        due = min(self.core.waits, default=float("inf")) - self.offset
        soonest = self.queue[0][0] if self.queue else float("inf")
        if due < soonest:
            self.now = max(self.now, due + 2e-6)  # the log has microseconds
            self.hear("", TimerDue())
            return
        until = soonest + BATCH_S
        while self.queue and self.queue[0][0] <= until:
            time, _, do, args = heapq.heappop(self.queue)
            self.now = max(self.now, time)
            do(*args)

    # What the core hears

    def hear(self, name: str, event: SchedulerEvent, counts: bool = True) -> None:
        self.inbox.append((name, event))
        own = event.event if isinstance(event, Sent) else event
        stale = isinstance(event, Sent) and event.incarnation != self.core.beliefs[name].incarnation
        self.seen["ignored" if stale or not counts else type(own).__name__] += 1
        if stale:
            self.seen["late message of processes that are gone"] += 1

    def say(self, driver: Driver, event: SchedulerEvent) -> None:
        """What a driver says comes in its order, late perhaps, and perhaps twice."""
        delay = 0.05 * self.some(driver.name, self.count) + driver.slow
        if driver.slow:
            self.seen["slow message"] += 1
            driver.slow = 0.0
        sent = Sent(driver.incarnation, event)
        driver.said_free = max(driver.said_free, self.now + delay)
        self.at(driver.said_free, self._arrives, driver, sent, True)
        if driver.twice:
            driver.twice -= 1
            self.seen["message twice"] += 1
            driver.said_free += 0.2 * self.some(driver.name, self.count)
            self.at(driver.said_free, self._arrives, driver, sent, False)

    def _arrives(self, driver: Driver, sent: Sent, counts: bool) -> None:
        if not driver.alive and driver.name not in self.over and self.some(driver.name, "lost") < 0.6:
            self.seen["lost message"] += 1
            return
        self.hear(driver.name, sent, counts)
        if type(sent.event).__name__ == "LoadRequest" and driver.alive and counts:
            self.loading.append(driver)

    def _say_of(self, sender: str, name: str, event: SchedulerEvent) -> None:
        """What is said by others than drivers."""
        at = max(self.free.get(sender, 0.0), self.now + 0.3 * self.some(sender, self.count))
        self.free[sender] = at
        self.at(at, self.hear, name, event)

    # What happens

    def _happen(self, step: Step) -> None:
        _, what, *args = step
        if getattr(self, f"_{what}")(*args) is not False:
            self.seen[what] += 1

    def _join(
        self, name: str, kind: int, graph: str, steps: int, ranks: int, where: int, wrong: float, learns: bool
    ) -> None:
        awaited = self.now == 0.0 and not self.log
        self._enter("join", name, kind, graph, ranks, where, awaited)
        self.journal[name], self.wrong[name], self.learns[name] = set(), wrong, learns
        self._start(name, steps)

    def _enter(self, *entry: Any) -> None:
        self.log.append(list(entry))
        replay_entry(self.core, self.program, list(entry))

    def _start(self, name: str, steps: int) -> None:
        driver = Driver(self, name, self.core.beliefs[name].incarnation, steps)
        self.drivers[name] = driver
        self.after(self.some(name, "start") * 2, driver.start)

    def _living(self, name: str) -> Driver | None:
        driver = self.drivers.get(name)
        return driver if driver is not None and driver.alive and name not in self.over else None

    def _die(self, name: str, at_work: bool) -> bool:
        driver = self._living(name)
        if driver is None or (at_work and not driver.running):
            return False
        driver.last_words()
        self._kill(driver)
        return True

    def _kill(self, driver: Driver) -> None:
        driver.alive = False
        driver.running.clear()
        driver.awake.clear()
        self._say_of(f"watch {driver.name}", driver.name, Sent(driver.incarnation, PipelineLost()))

    def _hang(self, name: str) -> bool:
        driver = self._living(name)
        if driver is None or driver.hangs:
            return False
        driver.hangs = True
        self.after(HANG_S, self._declare, driver)
        return True

    def _declare(self, driver: Driver) -> None:
        if driver.alive:
            self._kill(driver)

    def _lose(self, worker: int) -> bool:
        """A worker dies, with the processes that run something there."""
        if not self.core.state.alive[worker] or any(
            isinstance(args[1], WorkerGone) for _, _, _, args in self.queue if len(args) == 2
        ):
            return False
        for driver in self.drivers.values():
            there = {w for each in driver.running.values() for engine in each.engines for w in engine.workers}
            if driver.alive and worker in there:
                self._kill(driver)
        self._say_of("workers", "", WorkerGone(worker))
        return True

    def _return(self, worker: int) -> bool:
        if self.core.state.alive[worker]:
            return False
        self._say_of("workers", "", WorkerReturned(worker))
        return True

    def _pause(self, name: str) -> bool:
        if self._living(name) is None:
            return False
        self._say_of("users", name, PipelineHeld(True))
        return True

    def _resume(self, name: str) -> bool:
        if name not in self.drivers or name in self.over:
            return False
        self._say_of("users", name, PipelineHeld(False))
        return True

    def _cancel(self, name: str, at_once: bool) -> bool:
        driver = self._living(name)
        if driver is None:
            return False
        self.cancelled.add(name)
        if at_once:
            self.exit(driver)
        else:
            driver.stops = True
            self._say_of("users", name, PipelineHeld(False))
            if not driver.running:
                self.after(0.01, self.exit, driver)
        return True

    def exit(self, driver: Driver) -> None:
        """Its processes have ended, and nothing more comes of the pipeline."""
        if driver.alive and driver.name not in self.over:
            driver.alive = False
            driver.running.clear()
            driver.awake.clear()
            self.over.add(driver.name)
            self._say_of(f"watch {driver.name}", driver.name, PipelineGone())

    def _jump(self, seconds: float) -> None:
        self.offset += seconds
        self.seen["clock back" if seconds < 0 else "clock on"] += 1

    def _slow(self, name: str, seconds: float) -> bool:
        driver = self._living(name)
        if driver is None:
            return False
        driver.slow = seconds
        return True

    def _twice(self, name: str) -> bool:
        driver = self._living(name)
        if driver is None:
            return False
        driver.twice = 4
        return True

    def _timer(self) -> None:
        self.hear("", TimerDue())

    def _reorder(self, order: OrderName) -> None:
        self.hear("", TurnsReordered(order))

    def _calm(self) -> None:
        """No more faults: whatever is left can be done now."""
        for worker in self.core.state.workers:
            self._say_of("workers", "", WorkerReturned(worker))
        for name in self.drivers:
            if name not in self.over:
                self._say_of("users", name, PipelineHeld(False))

    # What the core decides

    def _turn(self) -> None:
        events, self.inbox = self.inbox, []
        clock, self.hearing = round(self.clock, 6), events
        actions = self.core.handle(clock, events)
        self.log.append(["turn", clock, [written(each) for each in events], [*map(written_action, actions)]])
        for phase, _ in self.core.ended:
            self.told.discard(phase.id)
        for phase in self.core.begun:
            if phase.permitted:
                self.seen["covered"] += 1
                self.told.add(phase.id)
        self._restart()
        self._carry_out(actions)
        self._let_run()
        self.owners = {key: phase.id for phase in self.core.state.running() for key in phase.lanes}

    def _restart(self) -> None:
        """Processes that the core believes lost are started again."""
        for name, driver in list(self.drivers.items()):
            incarnation = self.core.beliefs[name].incarnation
            if name in self.over or incarnation == driver.incarnation:
                continue
            if driver.alive:
                driver.alive = False
                driver.running.clear()
                driver.awake.clear()
            self.loading = [each for each in self.loading if each is not driver]
            self.told = {id for id in self.told if id.pipeline != name}
            self._start(name, driver.steps)
            self.drivers[name].stops = driver.stops

    def _tell(self, driver: Driver, do: Callable[..., None], *args: Any) -> None:
        driver.heard_free = max(
            driver.heard_free, self.now + 0.05 * self.some(driver.name, "told", self.count)
        )
        self.at(driver.heard_free, do, *args)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self.seen[f"action {type(action).__name__}"] += 1
            match action:
                case Migrate(name):
                    phase = self._moved(action)
                    self._tell(
                        self.drivers[name],
                        self.drivers[name].gather,
                        phase.id,
                        self._seats(phase)[-len(action.places) :],
                    )
                case Swap(name, out=True, phase=kind):
                    self._tell(self.drivers[name], self.drivers[name].sleep, kind)
        lanes = self.core.state.lanes.lanes
        paused = [lane for lane in lanes.values() if lane.paused]
        if paused or self.still:
            self._stand(paused)

    def _moved(self, move: Migrate) -> Phase:
        """The phase whose tails move; it may have begun in this very turn, under an earlier permit."""
        begun = (phase for phase in self.core.begun if phase.generates and phase.id.pipeline == move.pipeline)
        owner = self.owners.get(move.lanes[0])
        return self.core.state.phase(owner) if owner else next(begun)

    def _stand(self, paused: list[Any]) -> None:
        self.still = bool(paused)
        state = self.core.state
        standing: dict[PhaseId, set[int]] = {}
        for lane in paused:
            standing.setdefault(state.phase_of(lane).id, set()).add(state.uses[lane.id].engine)
        for driver in self.drivers.values():
            for id in driver.running if driver.alive else ():
                driver.stand(id, standing.get(id, set()))

    def _let_run(self) -> None:
        for driver in [each for each in self.loading if self.core.may_load(each.name)]:
            self.loading.remove(driver)
            if driver.alive:
                self._tell(driver, driver.load)
        for phase in self.core.permitted():
            if phase.id not in self.told:
                self.told.add(phase.id)
                driver = self.drivers[phase.id.pipeline]
                self._tell(driver, driver.permit, self._permit(phase))

    def _seats(self, phase: Phase) -> tuple[tuple[int, tuple[int, ...], float], ...]:
        state = self.core.state
        return tuple(
            (state.uses[key].engine, state.lanes.lanes[key].workers, state.uses[key].bytes)
            for key in phase.lanes
        )

    def _permit(self, phase: Phase) -> Permit:
        covered = self.core.state.covered.get(phase.id.pipeline) if phase.generates else None
        covers = (
            tuple(self._covered(phase, covered[kind]) for kind in ("training", "rollout")) if covered else ()
        )
        return Permit(phase.id, phase.generates, self._seats(phase), max(phase.predicted, 1e-3), covers)

    def _covered(self, phase: Phase, start: Start) -> Permit:
        generates = start.phase.kind == "rollout"
        pipeline = phase.pipeline
        if generates:
            return Permit(start.phase, True, self._seats(phase), phase.predicted)
        training = pipeline.phases[start.phase]
        size = needs(training, start.places)
        seconds = pipeline.outlook.training_seconds(len(start.places[0]))
        return Permit(start.phase, False, ((GANG, start.places[0], size),), seconds)

    # What must hold of what is really done

    def left(self) -> list[str]:
        return sorted(self.drivers.keys() - self.over)

    def saved(self, name: str) -> int:
        """Steps of which all that lasts is done."""
        kinds = [spec.id.kind for spec in self._graph(name).phases_of(name, 1) if spec.id.kind != "rollout"]
        step = 0
        while all(PhaseId(name, kind, step + 1) in self.journal[name] for kind in kinds):
            step += 1
        return step

    def _graph(self, name: str) -> Any:
        return self.core.beliefs[name].graph

    def check_needs(self, driver: Driver, id: PhaseId) -> None:
        specs = self._graph(driver.name).phases_of(driver.name, id.index)
        spec = next(each for each in specs if each.id == id)
        done = self.journal[driver.name]
        for need in spec.needs:
            if need.index > 0 and need not in driver.ended and need not in done:
                if need.kind == "rollout" and PhaseId(need.pipeline, "training", need.index) in done:
                    continue
                raise Wrong("too early", f"{id} begins, and {need} has not ended")

    def holds(self, memory: Memory, permit: Permit) -> bool:
        return memory.kind is None or (memory.kind == "rollout") == permit.generates

    def check_memory(self, when: str) -> None:
        """What is really held on each worker fits: what runs, and what is awake beside it."""
        core = self.core
        held = [0.0] * self.program.workers
        for driver in self.drivers.values():
            for running in driver.running.values():
                for engine in running.engines:
                    for worker in engine.workers:
                        held[worker] += engine.bytes
        for memory in core.memory.memories:
            idle = sum(
                memory.states[name]
                for name, driver in self.drivers.items()
                if name in memory.states
                and memory.kind in driver.awake
                and not any(self.holds(memory, each.permit) for each in driver.running.values())
            )
            most = max(held[worker] for worker in memory.workers) + idle
            if most > memory.limit * (1 + 1e-6):
                raise Wrong("memory", f"{most / 1e9:.3f} of {memory.limit / 1e9:.3f} GB when {when}")

    def _check_end(self) -> None:
        if self.left():
            raise Wrong("for ever", f"{self.left()} have not ended, and nothing comes any more")
        for name, driver in self.drivers.items():
            if name not in self.cancelled and self.saved(name) < driver.steps:
                raise Wrong("lost", f"{name} ended after {self.saved(name)} of {driver.steps} steps")
        replay(self)


def make_core(program: Program) -> SchedulerCore:
    policy: Policy = Anything(program.seed) if program.policy == ANYTHING else POLICIES[program.policy]
    return SchedulerCore(
        policy,
        TABLES[program.table],
        program.workers,
        program.device_bytes,
        program.units,
        program.rollout_workers,
        checked=True,
    )


def replay_entry(core: SchedulerCore, program: Program, entry: list[Any]) -> list[Any] | None:
    """What a line of the log does to a core; the actions, if it decides."""
    match entry:
        case ["join", name, kind, graph, ranks, where, awaited]:
            known = predicted(kind, program.table)
            layout = _layout(program, ranks, where)
            core.join(name, known, layout, graph=GRAPHS[graph], awaited=awaited)
            return None
        case ["turn", at, heard, _]:
            return [*map(written_action, core.handle(at, [read(each) for each in heard]))]
    raise ValueError(f"{entry} is not of a log")


def _layout(program: Program, ranks: int, where: int) -> Layout:
    if program.rollout_workers is None:
        return layout_of(ranks, program.workers, where)
    everyone = tuple(range(program.workers))
    return Layout(everyone, everyone[program.rollout_workers :], everyone[:ranks])


def replay(world: World) -> None:
    """The log gives the same actions again."""
    core = make_core(world.program)
    core.checked = False
    for entry in world.log:
        line = json.loads(json.dumps(entry))
        found = replay_entry(core, world.program, line)
        if found is not None and json.loads(json.dumps(found)) != line[3]:
            raise Wrong("replay", f"{line[3]} was decided, and now {found}")
