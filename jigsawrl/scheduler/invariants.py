"""What must hold of every action before it is applied, and of the scheduler's state after every event. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.lanes import Lane
from jigsawrl.policies.state import (
    Action,
    Confine,
    Migrate,
    Pause,
    Phase,
    PhaseStatus,
    Pipeline,
    PipelineStatus,
    Place,
    Resize,
    Resume,
    Start,
    Swap,
    Wait,
)
from jigsawrl.scheduler.state import SchedulerState, predicted

if TYPE_CHECKING:
    from jigsawrl.scheduler.core import SchedulerCore

INVARIANTS = {
    1: "a phase starts once, when it is ready and its pipeline is active",
    2: "a phase starts after all that it needs has ended and all that it may not overtake has started",
    3: "a phase runs on living workers that its pipeline may use for it",
    4: "engines start on as many workers as the pipeline says and share none; a gang trains at one place",
    5: "what runs on a worker fits into its memory",
    6: "the shares of a worker add up to at most one",
    7: "an action names a lane that exists",
    8: "lanes that migrate together are of one rollout",
    9: "a wait ends in the future",
    10: "states are swapped by memory admission only",
    11: "a lane belongs to exactly one phase, which runs",
    12: "the bytes in use on a worker are those of its lanes",
    13: "a pipeline's window holds the phases of consecutive steps, as far as its graph allows",
    14: "a phase is in a status that its pipeline's status allows",
    15: "the states that are awake fit beside what runs, and what runs is awake",
    16: "while work is ready or to be set up, something runs, falls asleep, is set up, or a wait is due",
    17: "what nothing keeps from starting is ready",
}
"""Invariants by number. A violation names the one that does not hold."""
SLACK = 1e-9
"""Rounding error of sums of shares; of bytes, relative to a worker's memory."""


class InvariantViolated(Exception):
    """A bug of the policy, where its actions are checked or it leaves work waiting (16); else one of the core."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, what)
        self.number, self.what = number, what

    def __str__(self) -> str:
        return f"invariant {self.number} ({INVARIANTS[self.number]}): {self.what}"


def require(number: int, holds: bool, *what: object) -> None:
    """Raises an `InvariantViolated` that says `what`, put into words only then, unless it holds."""
    if not holds:
        raise InvariantViolated(number, " ".join(map(str, what)))


# Before actions are applied


def check_actions(core: SchedulerCore, actions: Iterable[Action]) -> None:
    """Raises `InvariantViolated` unless the policy may do all of this together."""
    state, actions = core.state, list(actions)
    gone: set[int] = set()
    started: set[object] = set()
    for action in actions:
        match action:
            case Start(id):
                require(1, id not in started, core.policy.name, "starts", id, "twice")
                started.add(id)
                _check_start(core, action)
            case Migrate():
                _check_migration(state, action)
                gone.update(action.lanes)
            case Pause(lane) | Resume(lane) | Resize(lane) | Confine(lane):
                require(7, lane in state.uses and lane not in gone, "there is no lane", lane, "for", action)
            case Wait(until):
                require(9, until > state.now, f"{until} is not later than {state.now}")
            case Swap():
                require(10, False, f"{core.policy.name} asks for {action}")
    _check_memory(state, actions)
    _check_shares(state, actions, gone)


def _check_start(core: SchedulerCore, start: Start) -> None:
    state, id = core.state, start.phase
    pipeline = state.pipelines.get(id.pipeline)
    phase = pipeline.phases.get(id) if pipeline else None
    if pipeline is None or phase is None:
        raise InvariantViolated(
            1, f"{core.policy.name} starts {id}, which is not in the window of any pipeline"
        )
    ready = phase.status == "ready" and pipeline.status == "active" and not pipeline.hidden
    require(1, ready, f"{core.policy.name} starts {id}, which is {phase.status} ({pipeline.status})")
    require(2, state.free(phase), f"{id} cannot start yet")
    for worker in start.workers:
        require(3, worker in phase.home and state.alive[worker], id, "on worker", worker)
    _check_places(phase, start.places, {phase.pipeline.tp})


def _check_places(phase: Phase, places: tuple[Place, ...], widths: set[int]) -> None:
    workers = [worker for place in places for worker in place]
    alike = {len(place) for place in places} == widths if phase.generates else len(places) == 1
    fits = bool(workers) and alike and len(workers) == len(set(workers))
    require(4, fits, phase.id, "at", places)


def _check_migration(state: SchedulerState, move: Migrate) -> None:
    for lane in move.lanes:
        require(7, lane in state.uses, f"there is no lane {lane} for {move}")
    phases = {state.phase_of(state.lanes.lanes[lane]).id for lane in move.lanes}
    alike = len(phases) == 1 and len(set(move.lanes)) == len(move.lanes)
    require(8, alike and {id.pipeline for id in phases} == {move.pipeline}, f"{move} is not of one rollout")
    phase = state.phase_of(state.lanes.lanes[move.lanes[0]])
    require(8, phase.generates, f"{move} is of {phase.id}")
    for worker in move.workers:
        require(3, worker in phase.home and state.alive[worker], f"{move} to worker {worker}")
    _check_places(phase, move.places, {len(move.places[0])})  # survivors may do with narrower engines


def _check_memory(state: SchedulerState, actions: list[Action]) -> None:
    more: dict[int, float] = {}
    for action in actions:
        for worker, size in _bytes(state, action):
            more[worker] = more.get(worker, 0.0) + size
    for worker, size in more.items():
        _check_room(state, worker, state.held[worker] + size)


def _bytes(state: SchedulerState, action: Action) -> Iterator[tuple[int, float]]:
    """Bytes by which an action changes what is in use on each worker."""
    if isinstance(action, Start | Migrate):
        needed = state.bytes_for(action)
        yield from ((worker, needed) for worker in action.workers)
    for key in state.leaves(action) if isinstance(action, Migrate) else ():
        yield from ((worker, -state.uses[key].bytes) for worker in state.lanes.lanes[key].workers)


def _check_room(state: SchedulerState, worker: int, held: float) -> None:
    size = state.device_bytes
    require(5, held <= size * (1 + SLACK), f"{held / 1e9:.3f} of {size / 1e9:.3f} GB on worker {worker}")


def _check_shares(state: SchedulerState, actions: list[Action], gone: set[int]) -> None:
    """Checks the workers on which a phase starts. What migrates loads its weights first and takes no share yet."""
    shares = {action.lane: action.share for action in actions if isinstance(action, Resize)}
    paused = {
        action.lane: isinstance(action, Pause) for action in actions if isinstance(action, Pause | Resume)
    }
    starts: dict[int, float] = {}
    for action in actions:
        if isinstance(action, Start):
            first = predicted(state.phase(action.phase), action.places)[0]
            for worker in action.workers if SIGNATURES[first.kind] not in ("host", "link") else ():
                starts[worker] = starts.get(worker, 0.0) + action.share

    def share(lane: Lane) -> float:
        works = not paused.get(lane.id, lane.paused) and SIGNATURES[lane.segment.kind] not in ("host", "link")
        return shares.get(lane.id, lane.share) if works and lane.id not in gone else 0.0

    for worker, new in starts.items():
        total = new + sum(share(state.lanes.lanes[key]) for key in state.lanes.on_worker[worker])
        require(6, total <= 1 + SLACK, round(total, 3), "of worker", worker)


# After every event


def check_state(core: SchedulerCore) -> None:
    """Raises `InvariantViolated` unless all that is believed is consistent."""
    state = core.state
    _check_lanes(state)
    for pipeline in state.pipelines.values():
        _check_window(state, pipeline)
    for worker, held in enumerate(state.held):
        if held > state.device_bytes:
            _check_room(state, worker, held)
    if core.decided and not core.memory.loading and core.everyone_is_there():
        for worker in range(len(state.held)):
            if (total := sum([lane.share for lane in state.lanes.occupants(worker)])) > 1 + SLACK:
                require(6, False, round(total, 3), "of worker", worker)
    _check_states(core)
    _check_progress(core)


def _check_lanes(state: SchedulerState) -> None:
    running = state.running()
    owned = [key for phase in running for key in phase.lanes]
    agree = len(owned) == len(state.uses) and state.uses.keys() == set(owned)
    require(11, agree, owned, "are owned,", list(state.uses), "in use")
    require(11, state.uses.keys() == state.lanes.lanes.keys(), "a lane is not in use")
    held = [0.0] * len(state.held)
    for phase in running:
        require(11, bool(phase.lanes), phase.id, "runs nowhere")
        for key in phase.lanes:
            lane, size = state.lanes.lanes[key], state.uses[key].bytes
            require(11, state.phase_of(lane) is phase, "lane", key, "of", phase.id)
            for worker in lane.workers:
                require(3, state.alive[worker], phase.id, "on worker", worker, "which is lost")
                held[worker] += size
    for worker, (is_held, lanes) in enumerate(zip(state.held, held, strict=True)):
        agree = abs(is_held - lanes) <= SLACK * state.device_bytes
        require(12, agree, is_held, "and", lanes, "of worker", worker)


ALLOWED: dict[PipelineStatus, tuple[PhaseStatus, ...]] = {
    "active": ("blocked", "ready", "running"),
    "held": ("blocked", "running"),
    "recovering": ("lost",),
    "ended": ("lost",),
}
"""What a phase of a pipeline in each status may be."""


def _check_window(state: SchedulerState, pipeline: Pipeline) -> None:
    steps = [id.index for id in pipeline.phases]
    reach = (steps[0] if steps else pipeline.made + 1) + pipeline.graph.ahead
    whole = pipeline.made == min(reach, pipeline.steps) or pipeline.status in ("recovering", "ended")
    require(13, whole and steps == sorted(steps), pipeline.name, steps, pipeline.made, pipeline.steps)
    for phase in pipeline.phases.values():
        free = state.free(phase)
        require(2, free or phase.status != "running", phase.id, "runs too early")
        waits = phase.status == "blocked" and pipeline.status == "active" and phase.home
        require(17, not (free and waits), phase.id, "is blocked by nothing")
        fits = phase.status in ALLOWED[pipeline.status]
        require(14, fits, phase.id, "is", phase.status, "in a pipeline that is", pipeline.status)


def _check_states(core: SchedulerCore) -> None:
    for phase in core.state.running():
        awake = all(phase.id.pipeline in memory.awake for memory in core.memory.of_phase(phase))
        require(15, awake, phase.id, "runs, and its state is asleep")
    for memory in core.memory.memories:
        crowd = core.memory.in_the_way(memory)
        require(15, crowd == [], crowd or "what runs", "does not fit on workers", memory.workers)


def _check_progress(core: SchedulerCore) -> None:
    """Checks that no work waits for ever. Where nothing was decided, a pipeline that was lost may yet be heard of."""
    comes = not core.decided and any(one.status == "recovering" for one in core.state.pipelines.values())
    lanes = core.state.lanes.lanes.values()
    moves = core.waits or (lanes and not core.state.stands_still())
    if comes or moves or core.memory.swapping or core.memory.coming or not core.everyone_is_there():
        return
    left = {phase.id.pipeline for phase in core.state.ready()} | {lane.pipeline for lane in lanes}
    left.update(core.memory.loading)
    require(16, not left, core.policy.name, "leaves", ", ".join(sorted(left)), "waiting for ever")
