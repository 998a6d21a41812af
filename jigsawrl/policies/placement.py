"""Many pipelines in groups: each group of pipelines has a group of workers for itself, and is planned for by itself.

A phase gains little by very many workers, and everybody on all of them is slowed by everybody. So workers are halved,
and halved again, as long as all work is predicted to end sooner by that: pipelines go to either half, longest work
first. What runs stays where it is; who waits goes back to where it was, unless work is divided much better otherwise.
A decision then looks at one group, and costs no more on a large cluster than on a small one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from jigsawrl.graph.interference import merely_divided
from jigsawrl.graph.lanes import Lanes
from jigsawrl.policies.state import Action, Migrate, Pipeline, Place, Start, State
from jigsawrl.policies.trials import FEW_PIPELINES

BETTER = 0.9
"""Part of the predicted time above which another division than the present one is not worth it."""

LEAST_WORKERS = 32
"""Of a group. With groups of 16 the simulated work of 16 pipelines on 64 and of 32 on 128 GPUs, two draws each, took
3 % less to 20 % more time; 24 traced jobs on 8 GPUs took 8 % longer in groups than all together, on 32 GPUs 5 %."""


@dataclass(frozen=True, slots=True)
class Member:
    """A pipeline, and the first and the last worker that it runs on, or ran on before."""

    pipeline: Pipeline
    first: int
    last: int
    runs: bool

    def alone(self, width: int) -> float:
        """Seconds until it is done, alone on so many workers."""
        return self.pipeline.steps_left * self.pipeline.outlook.solo_seconds(max(width, self.pipeline.tp))

    def straddles(self, edge: int) -> bool:
        return self.first < edge <= self.last


@dataclass(frozen=True, slots=True)
class Group:
    """Workers, and the pipelines that have them for themselves."""

    workers: Place
    members: tuple[Member, ...]

    @property
    def names(self) -> set[str]:
        return {member.pipeline.name for member in self.members}

    @property
    def seconds(self) -> float:
        """Until all is done: at least as long as the longest takes alone, or as the workers are kept busy."""
        width = len(self.workers)
        return max(
            [
                sum([m.pipeline.busy_left(width) for m in self.members]),
                *[m.alone(width) for m in self.members],
            ]
        )


def many(state: State, pipelines: Sequence[Pipeline]) -> bool:
    """Whether pipelines are placed in groups: they are more than are planned for to the end, ask for alike, and may
    use all workers in whole engines."""
    workers = sum(state.alive)
    return (
        len(pipelines) > FEW_PIPELINES
        and not merely_divided(state.table)
        and not any(p.apart or p.outlook.shape.whole or p.outlook.shape.base for p in pipelines)
        and all(p.due == float("inf") and len(p.rollout_home) > workers - p.tp for p in pipelines)
        and len({p.outlook.shape.priority for p in pipelines}) == 1
    )


def groups(state: State, names: Set[str]) -> list[Group]:
    """Those with any of these pipelines, of a division of all workers that are alive."""
    members = tuple(_member(state, p) for p in state.pipelines.values() if p.at_work or p.lanes)
    workers = tuple(worker for worker, lives in enumerate(state.alive) if lives)
    return list(_divided(Group(workers, members), names))


def _member(state: State, pipeline: Pipeline) -> Member:
    lanes = state.lanes_of(pipeline)
    ends = [w for lane in lanes for w in (lane.workers[0], lane.workers[-1])] or pipeline.ran_on
    return Member(pipeline, min(ends, default=-1), max(ends, default=-1), bool(lanes))


def _divided(group: Group, names: Set[str]) -> Iterator[Group]:
    halves = _halves(group)
    if halves and _longest(halves) < group.seconds * _worth(group, halves[1].workers[0]):
        for half in halves:
            if not names.isdisjoint(half.names):
                yield from _divided(half, names)
    else:
        yield group


def _worth(group: Group, edge: int) -> float:
    """Part of the time of all together that halves may take: what is divided now stays so while that is not much
    worse, and what is not now, while that is not much better."""
    if any(member.straddles(edge) for member in group.members):
        return BETTER
    return 1 / BETTER if any(member.last >= 0 for member in group.members) else 1.0


def _halves(group: Group) -> list[Group]:
    """Both halves with their pipelines; none where that cannot be."""
    members = group.members
    if len(members) < 2:
        return []
    tp = max(member.pipeline.tp for member in members)
    width = len(group.workers) // 2 // tp * tp
    if width < LEAST_WORKERS or not all(_fits(member.pipeline, width) for member in members):
        return []
    edge = group.workers[width]
    if any(member.runs and member.straddles(edge) for member in members):
        return []
    kept = _dealt(group, width, [m for m in members if m.last >= 0 and not m.straddles(edge)])
    if BETTER * _longest(kept) <= _least(group, width):
        return kept
    anew = _dealt(group, width, [member for member in members if member.runs])
    return anew if _longest(anew) < BETTER * _longest(kept) else kept


def _longest(halves: Sequence[Group]) -> float:
    return max(half.seconds for half in halves)


def _least(group: Group, width: int) -> float:
    """Seconds that halves take at least."""
    busy = sum([member.pipeline.busy_left(width) for member in group.members])
    return max([busy / 2, *[member.alone(width) for member in group.members]])


def _dealt(group: Group, width: int, staying: list[Member]) -> list[Group]:
    """Halves: some stay where they are, the others go, longest work first, to the side with less of it."""
    edge = group.workers[width]
    sides = [[m for m in staying if m.last < edge], [m for m in staying if m.last >= edge]]
    work = [sum([member.pipeline.busy_left(width) for member in side]) for side in sides]
    kept = set(map(id, staying))
    others = [member for member in group.members if id(member) not in kept]
    for member in sorted(others, key=lambda m: (-m.pipeline.busy_left(width), m.pipeline.name)):
        side = int(work[1] < work[0])
        sides[side].append(member)
        work[side] += member.pipeline.busy_left(width)
    return [Group(group.workers[:width], tuple(sides[0])), Group(group.workers[width:], tuple(sides[1]))]


def _fits(pipeline: Pipeline, width: int) -> bool:
    """Whether so many workers have room for either phase."""
    sizes = pipeline.outlook.memory(width // pipeline.tp, pipeline.tp, width)
    return max(sizes.rollout, sizes.training) <= pipeline.outlook.hardware.device_bytes


# A group as a state of its own


def part_of(state: State, group: Group) -> State:
    """What a policy would see if there were nothing but this group, with its workers numbered from zero."""
    number = {worker: place for place, worker in enumerate(group.workers)}
    lanes = Lanes(state.table, len(number), state.now)
    lanes.on_worker = [state.lanes.on_worker[worker] for worker in group.workers]
    for member in group.members:
        for lane in state.lanes_of(member.pipeline):
            lanes.lanes[lane.id] = replace(lane, workers=tuple([number[worker] for worker in lane.workers]))
    pipelines = {m.pipeline.name: _within(m.pipeline, group.workers) for m in group.members}
    held = [state.held[worker] for worker in group.workers]
    return State(state.now, lanes, pipelines, state.device_bytes, held, [True] * len(number), state.survivors)


def _within(pipeline: Pipeline, workers: Place) -> Pipeline:
    usable = sum([worker <= pipeline.rollout_home[-1] for worker in workers])
    home = tuple(range(usable // pipeline.tp * pipeline.tp))
    inside = replace(pipeline, rollout_home=home, phases={})
    inside.phases.update((id, replace(phase, pipeline=inside)) for id, phase in pipeline.phases.items())
    return inside


def on_its_workers(group: Group, action: Action) -> Action:
    """An action that was chosen for the group, with the names that workers have."""
    if isinstance(action, Start | Migrate):
        places = tuple(tuple([group.workers[worker] for worker in place]) for place in action.places)
        return replace(action, places=places)
    return action
