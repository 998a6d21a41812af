"""Puts actors where the scheduler's lanes are, on as much of a worker as their share is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jigsawrl.runtime.member import Member
from jigsawrl.runtime.messages import Go
from jigsawrl.runtime.shares import Sharer, Shares, Units
from jigsawrl.runtime.world import World


def place(world: World, members: Mapping[str, Member], shares: Shares) -> None:
    """Actors of paused lanes stand still, and nobody else does."""
    exact = {name for name, member in members.items() if member.config.deterministic}
    ways = [ways_of(world, worker, shares, exact) for worker in world.workers]
    standing: dict[str, set[int]] = {name: set() for name in members}
    seated: dict[str, set[int]] = {name: set() for name in members}
    for key, lane in world.lanes.lanes.items():
        family = members[lane.pipeline].family
        if family is None:
            continue
        for actor, worker in world.seats(lane).items():
            family.hold(actor, *ways[worker][key])
            seated[lane.pipeline].add(actor)
            if lane.paused:
                standing[lane.pipeline].add(actor)
    for member in members.values():
        if member.family is not None and member.name not in world.onward:
            member.family.keep(seated[member.name])
        still = standing[member.name]
        if member.family is not None and member.paused != still:
            for actor in still - member.paused:
                member.family.stand(actor)
            for actor in member.paused - still:
                member.family.go_on(actor)
            member.paused = still


def ways_of(
    world: World, worker: int, shares: Shares, exact: Collection[str]
) -> dict[int, tuple[Units, bool]]:
    """The units of each lane on a worker, and whether it is to leave room to the others; `exact`: pipelines of which
    no bit may depend on it."""
    keys = sorted(world.lanes.on_worker[worker])
    lanes = [world.lanes.lanes[key] for key in keys]
    those = [
        Sharer(
            lane.share,
            rollout=lane.phase == "rollout",
            works=lane.occupies,
            base=lane.base,
            exact=lane.pipeline in exact,
            confined=lane.confined,
        )
        for lane in lanes
    ]
    ways = zip(shares.parts(worker, those), shares.yielding(those), strict=True)
    return dict(zip(keys, ways, strict=True))


def go_for(member: Member, world: World, shares: Shares, prompt: bool) -> Go:
    """What the driver is told of the phase that may run now; whether it must be prompt in what it tells."""
    assert member.family is not None
    lanes = [world.lanes.lanes[key] for key in world.pipelines[member.name].lanes]
    engines = sorted({actor for lane in lanes for actor in world.seats(lane)})
    seats = {actor: worker for lane in lanes for actor, worker in world.seats(lane).items()}
    held = {actor: units for actor, (units, _) in member.family.held.items()}
    lives = world.layouts[member.name].lives
    threads = [shares.threads(held.get(actor, shares.workers[home])) for actor, home in enumerate(lives)]
    others = None if world.apart else min(seats.values())
    where = [seats.get(actor, home if others is None else others) for actor, home in enumerate(lives)]
    return Go(tuple(engines), tuple(where), tuple(threads), prompt, training_after(member, world, shares))


def training_after(member: Member, world: World, shares: Shares) -> Go | None:
    """Of a rollout, where it may follow without asking. Its actors are put there now: those of them that do not
    generate have nothing else to do."""
    onward = world.onward.get(member.name)
    if onward is None:
        return None
    assert member.family is not None
    (place,) = onward[1].places
    seats = world.layouts[member.name].seats(place)
    units = {actor: shares.workers[worker] for actor, worker in sorted(seats.items())}
    for actor, each in units.items():
        member.family.hold(actor, each)
    threads = tuple(shares.threads(each) for each in units.values())
    return Go(tuple(units), tuple(seats[actor] for actor in units), threads, prompt=False)
