"""Puts actors where the scheduler's lanes are, on as much of a worker as their share is."""

from __future__ import annotations

from collections.abc import Mapping

from jigsawrl.policies.state import Phase
from jigsawrl.runtime.member import Member
from jigsawrl.runtime.messages import PhasePermit, Seats
from jigsawrl.runtime.shares import Sharer, Shares, Units
from jigsawrl.scheduler.state import SchedulerState

COVERS_S = 1.0
"""Seconds for which a permit covers further steps where nothing else could be decided: pipelines with phases of
milliseconds would keep the scheduler busy."""


def place(state: SchedulerState, members: Mapping[str, Member], shares: Shares) -> None:
    """Actors get the parts of workers that their lanes have; those of paused lanes are stopped, and no others."""
    ways = [ways_of(state, worker, members, shares) for worker in state.workers]
    for member in members.values():
        if member.family is None:
            continue
        seated: set[int] = set()
        still: set[int] = set()
        for lane in state.lanes_of(state.pipelines[member.name]) if member.name in state.pipelines else ():
            seats = state.seats(lane)
            for actor, worker in seats.items():
                member.family.hold(actor, *ways[worker][lane.id])
            seated |= seats.keys()
            if lane.paused:
                still |= seats.keys()
        if member.name not in state.covered:
            member.family.keep(seated)
        for actor in still ^ member.paused:
            member.family.stand(actor, actor in still)
        member.paused = still


def ways_of(
    state: SchedulerState, worker: int, members: Mapping[str, Member], shares: Shares
) -> dict[int, tuple[Units, bool]]:
    """The units of each lane on a worker, and whether it is to leave room to the others."""
    lanes = [state.lanes.lanes[key] for key in sorted(state.lanes.on_worker[worker])]
    those = [
        Sharer(
            lane.share,
            rollout=lane.phase == "rollout",
            works=lane.occupies,
            base=lane.base,
            exact=members[lane.pipeline].config.deterministic,
            confined=lane.confined,
        )
        for lane in lanes
    ]
    ways = zip(shares.parts(worker, those), shares.yielding(those), strict=True)
    return {lane.id: way for lane, way in zip(lanes, ways, strict=True)}


def permit_for(
    member: Member, phase: Phase, state: SchedulerState, shares: Shares, prompt: bool
) -> PhasePermit:
    """The permit of a phase that may run now. `prompt`: whether changes of its sub-stages are to be sent at once."""
    assert member.family is not None
    lanes = [state.lanes.lanes[key] for key in phase.lanes]
    seats = {actor: worker for lane in lanes for actor, worker in state.seats(lane).items()}
    held = {actor: units for actor, (units, _) in member.family.held.items()}
    lives = state.layouts[member.name].lives
    threads = [shares.threads(held.get(actor, shares.workers[home])) for actor, home in enumerate(lives)]
    others = None if state.apart else min(seats.values())
    where = [seats.get(actor, home if others is None else others) for actor, home in enumerate(lives)]
    own = Seats(tuple(sorted(seats)), tuple(where), tuple(threads))
    training = training_after(member, state, shares) if phase.kind == "rollout" else None
    return PhasePermit(phase.id, own, prompt, training, 0.0 if training is None else COVERS_S)


def training_after(member: Member, state: SchedulerState, shares: Shares) -> Seats | None:
    """Seats of the training after a rollout, where the permit covers it. Its actors are put there now: those that do
    not generate have nothing else to do."""
    covered = state.covered.get(member.name)
    if covered is None:
        return None
    assert member.family is not None
    (place,) = covered["training"].places
    seats = dict(sorted(state.layouts[member.name].seats(place).items()))
    for actor, worker in seats.items():
        member.family.hold(actor, shares.workers[worker])
    threads = tuple(shares.threads(shares.workers[worker]) for worker in seats.values())
    return Seats(tuple(seats), tuple(seats.values()), threads)
