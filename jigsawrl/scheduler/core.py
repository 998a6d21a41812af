"""The scheduler core: what happened goes in, what to do about it comes out. Pure, so every decision can be repeated.

The same events at the same times give the same actions, whether a run, a simulation or a log (`jigsaw replay`) brings
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from jigsawrl.graph.interference import Interference
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.graph import SYNCHRONOUS, PhaseGraph
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.named import reordered
from jigsawrl.policies.state import (
    Action,
    Change,
    Confine,
    Migrate,
    Pause,
    Phase,
    PhaseReady,
    Pipeline,
    PipelineArrived,
    PipelineLeft,
    PipelineStatus,
    Policy,
    Resize,
    Resume,
    Start,
    SubstageEnded,
    TimerDue,
    Wait,
    WorkerGone,
    WorkerReturned,
)
from jigsawrl.scheduler.colocation import Followed, after
from jigsawrl.scheduler.events import (
    DriverBegan,
    Heard,
    LoadRequest,
    PhaseDone,
    PipelineGone,
    PipelineHeld,
    PipelineLost,
    Sent,
    StateAsleep,
    SubstageChanged,
    TurnsReordered,
)
from jigsawrl.scheduler.invariants import check_actions, check_state
from jigsawrl.scheduler.layout import Layout
from jigsawrl.scheduler.learning import BETWEEN_S, Learned, Seen
from jigsawrl.scheduler.memory import MemoryAdmission
from jigsawrl.scheduler.state import SchedulerState

CHECKED_LANES = 256
"""With fewer lanes the state is checked after every call, with n times as many after every n-th: a check looks at all
of them, and would take longer than all else."""


@dataclass(slots=True)
class PipelineBelief:
    """What is known of a pipeline, whether its processes live or not."""

    learned: Learned
    graph: PhaseGraph
    awaited: bool
    """Whether no phase starts anywhere before it is set up."""
    held: bool = False
    """Whether a user wants it to wait."""
    incarnation: int = 0
    """How often its processes were lost: what those before have sent is ignored."""


class SchedulerCore:
    """Decides what runs where: pipelines `join`, and `handle` takes events and gives actions."""

    def __init__(
        self,
        policy: Policy,
        table: Interference,
        workers: int,
        device_bytes: float,
        units: int = 1,
        rollout_workers: int | None = None,
        checked: bool = False,
    ) -> None:
        """A worker has `units` that can be held apart. The first `rollout_workers` only generate while the others
        only train; None: all do both. `checked`: the whole state is checked after every call, as tests and
        simulations do; a large one now and then."""
        self.policy = policy
        self.checked = checked
        self.calls = 0
        self.state = SchedulerState(table, workers, device_bytes, units, rollout_workers)
        self.memory = MemoryAdmission(self.state)
        self.beliefs: dict[str, PipelineBelief] = {}
        self.changes: list[Change] = []
        """Changes that the policy was not asked about yet."""
        self.waits: set[float] = set()
        """Times to come at which the policy is asked again."""
        self.decided = False
        """Whether the last call decided anything, be it to do nothing."""
        self.ended: list[tuple[Phase, PhaseDone]] = []
        """Phases that ended in the last call."""
        self.begun: list[Phase] = []
        """Phases that started in the last call."""
        self.unfollowed: list[Followed] = []
        """Phases that the interference table does not know of yet."""
        self.followed_at = float("-inf")
        """When the table was last corrected."""

    def join(
        self,
        name: str,
        outlook: Outlook,
        layout: Layout | None = None,
        *,
        graph: PhaseGraph = SYNCHRONOUS,
        awaited: bool = True,
    ) -> None:
        """The pipeline may begin from now on; without a layout it may use all workers, with a rank on each."""
        layout = self.state.layouts[name] = layout or self.state.layout
        if self.state.apart:  # each has engines of its own there
            shape = replace(outlook.shape, base="")
            outlook = Outlook(shape, outlook.costs, outlook.hardware, outlook.forecast)
        self.beliefs[name] = PipelineBelief(Learned(outlook), graph, awaited)
        self.memory.join(name, outlook, layout.rollout)

    def handle(self, now: float, events: Iterable[Heard]) -> list[Action]:
        """What to do now. It counts as done: what comes of it is heard later."""
        self.hear(now, events)
        actions = self.decide()
        self.calls += 1
        if self.checked and self.calls % (1 + len(self.state.uses) // CHECKED_LANES) == 0:
            check_state(self)
        return actions

    def hear(self, now: float, events: Iterable[Heard]) -> None:
        self.ended, self.begun = [], []
        self.state.advance(now)
        self.waits = {until for until in self.waits if until > self.state.now}
        for name, event in events:
            self._hear(name, event)

    def decide(self, taken: Sequence[Action] | None = None) -> list[Action]:
        """Pipelines that wait to be set up get the next room that comes free, before any phase starts.

        Where a log says what was `taken`, that is done instead of what the policy chooses: one choice that differs
        does not make all later ones differ.
        """
        everyone = self.everyone_is_there()
        self.decided = bool(self.memory.loading) or (everyone and bool(self.changes))
        if not self.decided:
            return []
        actions: list[Action] = [*self.memory.load()]
        if not everyone or (self.memory.loading and not self.state.stands_still()):
            return actions
        changes, self.changes = self.changes, []
        chosen = self._chosen(changes)
        done = chosen if taken is None else list(taken)
        roomy = self.memory.has_room_for_more([action for action in done if isinstance(action, Start)])
        for action in done:
            if isinstance(action, Start):
                self.state.cover(action, roomy)
            self._apply(action)
        return [*actions, *self.memory.sleep(), *chosen]

    # Who may go on

    def everyone_is_there(self) -> bool:
        """Whether all pipelines that come at the start are set up."""
        return not any(belief.awaited for belief in self.beliefs.values())

    def permitted(self) -> list[Phase]:
        """Phases that run, once the states that made room for them are asleep."""
        return [] if self.memory.swapping else self.state.running()

    def may_load(self, name: str) -> bool:
        """Whether there is room for the pipeline's state now."""
        return not self.memory.swapping and self.memory.is_awake(name)

    def indifferent(self) -> bool:
        """Whether it makes no difference which sub-stage engines are at: workers are time-sliced in any case, no
        phase waits to start, none is paused, and no pipeline has an SLO, so only shares are left to choose."""
        pipelines = self.state.pipelines.values()
        shapes = [pipeline.outlook.shape for pipeline in pipelines]
        return self.state.time_sliced and not (
            any(phase.status == "ready" for pipeline in pipelines for phase in pipeline.phases.values())
            or any(lane.paused for lane in self.state.lanes.lanes.values())
            or any(shape.deadline is not None or shape.max_slowdown is not None for shape in shapes)
        )

    # What is heard

    def _hear(self, name: str, event: object) -> None:
        match event:
            case Sent(incarnation, sent):
                if incarnation == self.beliefs[name].incarnation:
                    self._hear(name, sent)
            case TimerDue():
                self.changes.append(event)
            case TurnsReordered(order):
                self.policy = reordered(self.policy, order)
            case LoadRequest():
                if name not in self.memory.loading and name not in self.memory.coming:
                    self.memory.loading.append(name)
            case DriverBegan(steps, done):
                self._began(name, steps, done)
            case SubstageChanged():
                self._substage(name, event)
            case PhaseDone():
                self._done(name, event)
            case StateAsleep(phase):
                self.memory.swapping.discard((name, phase))
            case PipelineHeld(wait):
                self._hold(name, wait)
            case PipelineLost():
                self._lost(name)
            case PipelineGone():
                self._forget(name, "ended")
                self.beliefs[name].awaited = False
                self.changes.append(PipelineLeft(name))
            case WorkerGone(worker):
                self._worker_gone(worker)
                self.changes.append(event)
            case WorkerReturned(worker):
                self.state.alive[worker] = True
                self._settle()
                self.changes.append(event)

    def _began(self, name: str, steps: int, done: int) -> None:
        state, belief = self.state, self.beliefs[name]
        belief.awaited = False
        self.memory.coming.discard(name)
        if done >= steps:
            return
        before = state.pipelines.get(name)
        if before is not None and before.status != "recovering":
            return  # it was heard before
        pipeline = state.pipelines[name] = Pipeline(
            name,
            belief.learned.outlook,
            state.layouts[name].rollout,
            steps,
            arrived=state.now if before is None else before.arrived,
            graph=belief.graph,
            status="held" if belief.held else "active",
            made=done,
        )
        state.settle(pipeline)
        state.extend(pipeline)
        self.changes.append(PipelineArrived(name))
        self._unblock(pipeline)

    def _unblock(self, pipeline: Pipeline) -> None:
        """Makes phases ready for which all that they wait for has happened."""
        for phase in pipeline.phases.values() if pipeline.status == "active" else ():
            if phase.status == "blocked" and phase.home and self.state.free(phase):
                phase.status, phase.since, phase.asked = "ready", self.state.now, self.state.now
                self.changes.append(PhaseReady(phase.id))

    def _substage(self, name: str, event: SubstageChanged) -> None:
        pipeline = self.state.pipelines.get(name)
        for key in reversed(pipeline.lanes if pipeline else []):
            lane = self.state.lanes.lanes[key]
            named = event.phase is None or event.phase == (lane.phase, lane.step)
            if named and self.state.uses[key].engine == event.engine:
                was = self.state.advance_lane(key, event.substage, event.samples)
                if was is not None:
                    self.changes.append(SubstageEnded(name, key, was))
                return

    def _hold(self, name: str, wait: bool) -> None:
        """Phases that run are finished; others do not start before the pipeline goes on."""
        self.beliefs[name].held = wait
        pipeline = self.state.pipelines.get(name)
        if pipeline is not None and pipeline.status in ("active", "held"):
            pipeline.status = "held" if wait else "active"
            self._settle()

    def _done(self, name: str, done: PhaseDone) -> None:
        state, belief = self.state, self.beliefs[name]
        pipeline = state.pipelines.get(name)
        phase = pipeline.phases.get(PhaseId(name, done.phase, done.step)) if pipeline else None
        if pipeline is None or phase is None or phase.status != "running":
            return  # it was heard before, or its processes are gone
        ended = state.now if done.went_on is None else done.went_on
        gang = state.lanes.lanes[phase.lanes[0]].workers
        on_each = 1 if phase.generates else max(1, len(done.busy) // len(gang))
        colocation = state.colocations[phase.id]
        self.changes += [SubstageEnded(name, key, state.kind(key)) for key in phase.lanes]
        state.end(phase)
        self.ended.append((phase, done))
        seen = Seen(done, ended - phase.since, phase.alone, state.time_sliced, colocation, on_each)
        followed = belief.learned.ended(seen, state.now)
        if followed is not None:
            pipeline.outlook = belief.learned.outlook
            self._follow(followed)
        if done.went_on is not None and name in state.covered and pipeline.phases:
            self._went_on(pipeline, done.went_on)
        else:
            self._unblock(pipeline)
        if not pipeline.phases:
            pipeline.status = "ended"
            self.changes.append(PipelineLeft(name))

    def _went_on(self, pipeline: Pipeline, at: float) -> None:
        """Starts the next phase, which the permit covered, on the same workers."""
        phase = pipeline.current
        phase.asked = self.state.now
        self._start(replace(self.state.covered[pipeline.name][phase.kind], phase=phase.id))
        phase.since, phase.permitted = at, True

    def _follow(self, phase: Followed) -> None:
        """Corrects the interference table by co-located phases, several at a time: whatever was computed with it has
        to be computed again."""
        if phase.colocation.crowds and not phase.colocation.unclear and phase.alone is not None:
            self.unfollowed.append(phase)
        if self.unfollowed and self.state.now - self.followed_at > BETWEEN_S:
            self.followed_at = self.state.now
            self.state.lanes.use(self.followed_table())
            self.unfollowed.clear()

    def followed_table(self) -> Interference:
        """The interference table, corrected by all that was seen so far."""
        return reduce(after, self.unfollowed, self.state.lanes.table)

    def _forget(self, name: str, status: PipelineStatus) -> None:
        """The pipeline's processes are gone, with all that they held."""
        self.beliefs[name].incarnation += 1
        self.memory.leave(name)
        if name in self.state.pipelines:
            self.state.lose(self.state.pipelines[name])
            self.state.pipelines[name].status = status

    def _lost(self, name: str) -> None:
        if name in self.memory.coming:  # others may have the room that it was given
            self.changes.append(PipelineLeft(name))
        self._forget(name, "recovering")

    def _worker_gone(self, worker: int) -> None:
        """Pipelines with a phase there have lost their step; the others keep to what is left."""
        state = self.state
        state.alive[worker] = False
        for pipeline in state.pipelines.values():
            if any(worker in lane.workers for lane in state.lanes_of(pipeline)):
                self._lost(pipeline.name)
        self._settle()

    def _settle(self) -> None:
        """Pipelines keep to the workers that are there. A phase without any is not ready, nor is one of a pipeline
        that waits."""
        for pipeline in self.state.pipelines.values():
            if pipeline.status in ("active", "held"):
                self.state.settle(pipeline)
                waits = pipeline.status == "held"
                self.state.block(phase for phase in pipeline.phases.values() if waits or not phase.home)
                self._unblock(pipeline)

    # What is done

    def _chosen(self, changes: list[Change]) -> list[Action]:
        """What the policy does; but no state sleeps for room that comes sooner by itself. A pipeline that had better
        wait for it is hidden from the policy, which is asked again."""
        waits: dict[str, float] = {}
        try:
            while True:
                chosen = self.policy.decide(self.state, changes)
                check_actions(self, chosen)
                later = self.memory.later(chosen)
                if not later:
                    return [*chosen, *(Wait(until) for until in sorted({*waits.values()} - {float("inf")}))]
                waits |= later
                for name in later:
                    self.state.pipelines[name].hidden = True
        finally:
            for name in waits:
                self.state.pipelines[name].hidden = False

    def _apply(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Migrate():
                self.state.migrate(action)
            case Pause(lane) | Resume(lane):
                self.state.lanes.pause(lane, isinstance(action, Pause))
            case Resize(lane, share):
                self.state.lanes.resize(lane, share)
            case Confine(lane, confined):
                self.state.lanes.lanes[lane].confined = confined
            case Wait(until):
                self.waits.add(until)

    def _start(self, action: Start) -> None:
        state = self.state
        phase = state.start(action)
        self._unblock(phase.pipeline)
        self.begun.append(phase)
        self.memory.wakes(phase)
        for key in {key for there in state.lanes.on_worker if len(there) > 1 for key in there}:
            state.phase_of(state.lanes.lanes[key]).alone = False
