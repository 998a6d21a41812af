"""What the scheduler thinks: news of pipelines in, actions out. Pure, so every decision can be made again.

The same news at the same times give the same actions, whoever brings them: a run, or its log (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jigsawrl.graph.interference import Interference
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.state import (
    Action,
    Confine,
    Event,
    Migrate,
    Pause,
    Phase,
    Policy,
    Resize,
    Resume,
    Start,
    Wait,
    Woken,
)
from jigsawrl.runtime.company import Company, after
from jigsawrl.runtime.layout import Layout
from jigsawrl.runtime.learning import BETWEEN_S, Followed, Learned, Seen
from jigsawrl.runtime.messages import At, Began, Loads, Over
from jigsawrl.runtime.rooms import Rooms
from jigsawrl.runtime.world import World


@dataclass(frozen=True, slots=True)
class Lost:
    """Its processes died with what they were at. It may begin again."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing more comes of it."""


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody wants it to wait, or to go on."""

    wait: bool


@dataclass(frozen=True, slots=True)
class Due:
    """The time that a `Wait` named has come. Of no pipeline."""


News = Loads | Began | At | Over | Lost | Gone | Held | Due
_ALL: tuple[type[News], ...] = (Loads, Began, At, Over, Lost, Gone, Held, Due)
_KINDS: dict[str, Callable[..., News]] = {kind.__name__: kind for kind in _ALL}


def written(name: str, news: News) -> list[Any]:
    """As it stands in the log."""
    return [name, type(news).__name__, *(getattr(news, each) for each in news.__slots__)]


def written_action(action: Action) -> dict[str, Any]:
    """Likewise."""
    fields = {each: getattr(action, each) for each in action.__slots__}
    return {"action": type(action).__name__.lower(), **fields}


def read(entry: list[Any]) -> tuple[str, News]:
    """What `written` wrote."""
    name, kind, *fields = entry
    values = [tuple(value) if isinstance(value, list) else value for value in fields]
    return name, _KINDS[kind](*values)


@dataclass(slots=True)
class Thought:
    """What is known of a pipeline besides its place in the world."""

    learned: Learned
    layout: Layout
    """Where its actors live."""
    held: bool = False
    could: tuple[Phase, int] | None = None
    """Phase and step that it could start, or has started."""
    asked: float = 0.0
    """When its phase could have started."""
    since: float = 0.0
    """When its phase started."""
    foreseen: float = 0.0
    """Seconds alone that its running phase was foreseen to take."""
    alone: bool = True
    """Whether nobody else was on its workers while its phase ran."""


@dataclass(slots=True)
class Mind:
    policy: Policy
    table: Interference
    workers: int
    device_bytes: float
    units: int = 1
    """Parts of a worker that can be held apart."""
    rollout_workers: int | None = None
    """The first ones, that run rollouts only while the others train; None: all run both."""
    world: World = field(init=False)
    thoughts: dict[str, Thought] = field(default_factory=dict)
    rooms: Rooms = field(init=False)
    loading: list[str] = field(default_factory=list)
    """Pipelines that wait for room to be set up."""
    events: list[Event] = field(default_factory=list)
    """That nothing was decided on yet."""
    felt: list[Followed] = field(default_factory=list)
    """Phases that the table does not know of yet."""
    felt_at: float = float("-inf")
    """When the table last followed."""

    def __post_init__(self) -> None:
        first = self.rollout_workers
        self.world = World(self.table, self.workers, self.device_bytes, self.units, first)
        self.rooms = Rooms(self.world, first)

    def join(self, name: str, outlook: Outlook, layout: Layout | None = None) -> None:
        """It may begin from now on; without a layout it may use all workers, with a rank on each."""
        layout = layout or self.world.layout
        if self.rollout_workers is not None:  # each has engines of its own there
            shape = replace(outlook.shape, base="")
            outlook = Outlook(shape, outlook.costs, outlook.hardware, outlook.forecast)
        self.thoughts[name] = Thought(Learned(outlook), layout)
        self.rooms.join(name, outlook, layout.rollout)

    def hear(self, name: str, news: News) -> None:
        match news:
            case Due():
                self.events.append(Woken())
            case Loads():
                self.loading.append(name)
            case Began(steps, done):
                self._began(name, steps, done)
            case At(-1):
                pass  # of interest to people only
            case At(engine, substage, samples):
                self.events += self.world.at(name, engine, substage, samples)
            case Over():
                self._over(name, news)
            case Held(wait):
                self._held(name, wait)
            case Lost():
                self._lost(name)
            case Gone():
                self._forget(name)
                gone = self.world.leave(name) if name in self.world.pipelines else Woken()
                self.events.append(gone)

    def indifferent(self) -> bool:
        """Whether it makes no difference what engines are at: only shares are left to choose, and workers are shared
        by turns whatever they are."""
        return self.world.by_turns and self.world.settled()

    def decide(self, everyone: bool = True) -> list[Action]:
        """What to do, as if it were done. Where not everyone is there who should be, only to set them up.

        Who waits to be set up gets the next room that comes free.
        """
        actions = self._load()
        if self.loading or not everyone:
            return actions
        events, self.events = self.events, []
        chosen = self._chosen(events)
        for action in chosen:
            match action:
                case Start():
                    self._start(action)
                case Migrate():
                    self.world.gather(action)
                case Pause(lane) | Resume(lane):
                    self.world.lanes.pause(lane, isinstance(action, Pause))
                case Resize(lane, share):
                    self.world.lanes.resize(lane, share)
                case Confine(lane, confined):
                    self.world.lanes.confine(lane, confined)
        return [*actions, *self.rooms.sleep(), *chosen]

    def _chosen(self, events: list[Event]) -> list[Action]:
        """What the policy does; but nobody sleeps for room that comes sooner by itself. Who would have to wait for it
        is not there, as far as the policy knows."""
        pipelines = self.world.pipelines
        waits: dict[str, float] = {}
        while True:
            for name in waits:
                pipelines[name].status = "done"
            chosen = self.policy.decide(self.world.state(), events)
            for name in waits:
                pipelines[name].status = "ready"
            later = self.rooms.later([action for action in chosen if isinstance(action, Start)])
            if not later:
                return [*chosen, *(Wait(until) for until in sorted(set(waits.values())))]
            waits |= later

    def _load(self) -> list[Action]:
        actions: list[Action] = []
        while self.loading and (given := self.rooms.load(self.loading[0])):
            actions += given
            self.loading.pop(0)
        return actions

    def runs(self, name: str) -> tuple[Phase, int] | None:
        """Phase and step that a pipeline may be at now."""
        pipeline = self.world.pipelines.get(name)
        return (pipeline.phase, pipeline.step) if pipeline and pipeline.status == "running" else None

    def _began(self, name: str, steps: int, done: int) -> None:
        self.rooms.coming.discard(name)
        if done < steps:
            again = name in self.world.pipelines
            thought = self.thoughts[name]
            arrived = self.world.arrive(name, thought.learned.outlook, steps, again, thought.layout)
            self.events.append(arrived)
            self._could_start(name, "rollout", done + 1)

    def _could_start(self, name: str, phase: Phase, step: int) -> None:
        """The policy hears of it; not of a pipeline that somebody wants to wait."""
        thought = self.thoughts[name]
        thought.could, thought.asked = (phase, step), self.world.lanes.now
        ready = self.world.ask(name, phase, step)
        if thought.held:
            self.world.pipelines[name].status = "done"
        else:
            self.events.append(ready)

    def _held(self, name: str, wait: bool) -> None:
        thought, pipeline = self.thoughts[name], self.world.pipelines.get(name)
        thought.held = wait
        if pipeline is None or thought.could is None:
            return
        if wait and pipeline.status == "ready":
            pipeline.status = "done"
        elif not wait and pipeline.status == "done":
            self._could_start(name, *thought.could)

    def _over(self, name: str, over: Over) -> None:
        thought = self.thoughts[name]
        now = self.world.lanes.now
        on_each, onward = self._on_each(name, over), self.world.onward.get(name)
        ended = now if over.went_on is None else over.went_on
        self.events += self.world.over(name)
        company = self.world.company.pop(name, Company())
        seen = Seen(over, ended - thought.since, thought.alone, self.world.by_turns, company, on_each)
        followed = thought.learned.ended(seen, now)
        if followed is not None:
            self.world.forecast(name, thought.learned.outlook)
            self._feel(followed, now)
        if over.went_on is not None and onward is not None:
            self._went_on(name, over, onward)
            thought.since = ended
        elif over.phase == "rollout":
            self._could_start(name, "training", over.step)
        elif over.step < self.world.pipelines[name].steps:
            self._could_start(name, "rollout", over.step + 1)
        else:
            thought.could = None
            self.events.append(self.world.leave(name))

    def _went_on(self, name: str, over: Over, onward: tuple[Start, Start]) -> None:
        """With its next phase, on the same workers."""
        phase: Phase = "training" if over.phase == "rollout" else "rollout"
        step = over.step + (phase == "rollout")
        self.thoughts[name].could = (phase, step)
        self.world.ask(name, phase, step)
        self._start(onward[phase == "training"])

    def _on_each(self, name: str, over: Over) -> int:
        """Actors that shared a worker of the phase that is over."""
        if over.phase == "rollout":
            return 1
        lanes = self.world.lanes.lanes
        workers = {worker for key in self.world.pipelines[name].lanes for worker in lanes[key].workers}
        return max(1, len(over.busy) // max(1, len(workers)))

    def _feel(self, phase: Followed, now: float) -> None:
        """The table follows phases that were in company, a few at a time: what was reckoned with it is void then."""
        if phase.company.crowds and not phase.company.unclear and phase.alone is not None:
            self.felt.append(phase)
        if self.felt and now - self.felt_at > BETWEEN_S:
            self.felt_at = now
            self.world.lanes.use(self.followed_table())

    def followed_table(self) -> Interference:
        """The table, with all that was seen so far."""
        for phase in self.felt:
            if phase.alone is not None:
                self.table = after(self.table, phase.company, phase.present, phase.took, phase.alone)
        self.felt.clear()
        return self.table

    def _forget(self, name: str) -> None:
        self.thoughts[name].could = None
        self.rooms.leave(name)
        if name in self.loading:
            self.loading.remove(name)

    def _lost(self, name: str) -> None:
        self._forget(name)
        if name in self.world.pipelines:
            self.world.drop(name)
            self.world.pipelines[name].status = "done"

    def _start(self, action: Start) -> None:
        world, thought = self.world, self.thoughts[action.pipeline]
        world.start(action)
        thought.since, thought.alone = world.lanes.now, True
        pipeline = world.pipelines[action.pipeline]
        self.rooms.wakes(pipeline.name, pipeline.phase)
        lanes = [world.lanes.lanes[key] for key in pipeline.lanes]
        thought.foreseen = max(lane.left_in_all() for lane in lanes)
        shared = {key for there in world.lanes.on_worker if len(there) > 1 for key in there}
        for key in shared:
            self.thoughts[world.lanes.lanes[key].pipeline].alone = False
