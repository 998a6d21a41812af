"""The inter-group scheduler: at every arrival, departure, failure and drift, the cheapest that keeps all promises.

    arrive    direct packing (adds nothing), rollout scaling (adds rollout nodes), or a new group
    depart    nodes that nobody uses are given back; what is left is packed closer where that pays
    fail      jobs of a broken node are placed anew, from their last step
    measured  a job whose phases take longer or shorter than planned; its group is judged anew

Where nodes are few, jobs wait; who comes later overtakes only so often. A job that finds no room otherwise gets nodes
from jobs of lower priority, which wait again.

Pure: no clock, no I/O; the same calls give the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from jigsawrl.cluster.groups import Decision, Group, named, roomiest
from jigsawrl.cluster.jobs import Job
from jigsawrl.cluster.placing import Place, cheapest
from jigsawrl.cluster.pools import Cluster, Nodes
from jigsawrl.cluster.regroup import EFFORT, EFFORT_OF_FEW, Choice, Regrouping, better, moving_seconds
from jigsawrl.cluster.shapes import Shape, Shapes, Standing
from jigsawrl.cluster.together import regroupings
from jigsawrl.cluster.waiting import goes_before, held_back, outranked, outranked_beside

LARGEST = 5
"""Jobs in a group; the paper finds nothing in more."""
ROUNDS = 6
"""Regroupings after one event, at most."""
ROOMY = 24
"""Groups that are looked at besides those that have changed."""
Placing = Callable[["Scheduler", Standing], Place | None]


@dataclass(frozen=True, slots=True)
class Changes:
    """What is no longer as it was."""

    groups: frozenset[int]
    moved: frozenset[str]
    """Jobs that start cold on other nodes, from their last step."""
    preempted: frozenset[str]
    """Jobs that have left their nodes to others, and wait again; later they start cold, from their last step."""


class Scheduler:
    """Groups, the nodes they rent, and the jobs that wait for nodes."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        level: float = 1.0,
        largest: int = LARGEST,
        regroup: bool = True,
        choose: Placing | None = None,
        first_group: int = 0,
    ) -> None:
        self.shapes = Shapes(cluster, level, largest)
        self.nodes = Nodes(cluster)
        self.groups: dict[int, Group] = {}
        self.home: dict[str, int] = {}
        """The group of each job that has nodes."""
        self.waiting: dict[str, Standing] = {}
        self.regroup = regroup
        self.choose = choose or by_price
        self.founded = first_group
        """Numbers of groups up to here were given."""
        self._changed: set[int] = set()
        self._moved: set[str] = set()
        self._preempted: set[str] = set()
        self._came = 0

    @property
    def price(self) -> float:
        """Dollars an hour of all rented nodes."""
        return sum(group.shape.price for group in self.groups.values())

    def standing(self, name: str) -> Standing:
        home = self.home.get(name)
        return self.waiting[name] if home is None else self.groups[home].standings[name]

    def changes(self) -> Changes:
        """Since this was last asked."""
        found = Changes(frozenset(self._changed), frozenset(self._moved), frozenset(self._preempted))
        self._changed, self._moved, self._preempted = set(), set(), set()
        return found

    def arrive(
        self, job: Job, allowed: float | None = None, overtaken: int = 0, preempted: int = 0
    ) -> list[Decision]:
        """A new job; `allowed`: seconds until its deadline. The first decision is its own.

        Who was here before, under an earlier scheduler, has been `overtaken` and `preempted` so often.
        """
        standing = self.shapes.standing(job, allowed)
        self._came += 1
        standing.came, standing.overtaken, standing.preempted = self._came, overtaken, preempted
        found = self._admit(standing)
        if self._preempted:
            found += self._admitted()
        return [*found, *self._improved({self.home.get(job.name)}, {job.name})]

    def depart(self, name: str) -> list[Decision]:
        """A job that is done, or withdrawn."""
        if name in self.waiting:
            del self.waiting[name]
            return []
        group = self.groups[self.home[name]]
        self._without(group, {name})
        return [*self._admitted(), *self._improved({group.number})]

    def fail(self, node: str) -> list[Decision]:
        """A broken node: whoever was on it is placed elsewhere."""
        group = next((g for g in self.groups.values() if node in (*g.rollout_nodes, *g.training_nodes)), None)
        self.nodes.fail(node)
        if group is None:
            return []
        hurt = {name for name, (rollout, training) in group.seats().items() if node in rollout | training}
        standings = [group.standings[name] for name in hurt]
        self._without(group, hurt)
        self._moved |= hurt
        return [decision for each in sorted(standings, key=self._rank) for decision in self._admit(each)]

    def repair(self, node: str) -> list[Decision]:
        """It can be rented again."""
        self.nodes.repair(node)
        return self._admitted()

    def progress(self, name: str, left: float, allowed: float) -> None:
        """How much a job still has to do (seconds alone), and in what time."""
        standing = self.standing(name)
        standing.left, standing.allowed = left, allowed
        standing.bind()

    def measured(self, name: str, job: Job) -> list[Decision]:
        """The same job with other durations: what they are now. Its group is kept, if that is possible."""
        standing = self.standing(name)
        alone = self.shapes.standing(job).alone
        more = standing.left * (alone / standing.alone - 1)
        standing.left += more
        if job.deadline is None:
            standing.allowed += job.max_slowdown * more
        standing.job, standing.alone, standing.bound = job, alone, 0.0
        standing.bind()
        if name not in self.home:
            return []
        return self.relieve(name)

    def reconsider(self, first: Collection[int | None] = (), new: Collection[str] = ()) -> list[Decision]:
        """Packs as many groups at once as there is effort for: these, then those with most room.

        By now jobs that got ahead of their promises may be slowed down more. For plans that hold in the worst case:
        in others jobs are ahead and behind by chance.
        """
        found: list[Decision] = []
        effort = EFFORT_OF_FEW // max(1, len(self.home))
        if self.regroup and self.shapes.surely and effort >= len(self.home):
            changed = {self.home[name] for name in new if name in self.home} | self.groups.keys() & first
            for plan in regroupings(self.shapes, self.groups, self.nodes, sorted(changed), new, effort):
                found += self._regrouped(plan)
        return found

    def relieve(self, name: str) -> list[Decision]:
        """Judges a job's group anew. If promises are not kept there any more, someone has to leave it."""
        group = self.groups[self.home[name]]
        kept = self.shapes.without(group.shape, group.standings, ())
        if kept is not None:
            self._become(group, kept, group.standings)
            return self._improved({group.number})
        others = [each for each in self.groups.values() if each is not group]
        crowded = len(group.standings) > 1
        for standing in sorted(group.standings.values(), key=lambda each: each.job.name != name):
            if crowded and self.shapes.without(group.shape, group.standings, {standing.job.name}) is not None:
                within = (standing.allowed - moving_seconds(standing)) / max(standing.left, 1e-9)
                place = cheapest(self.shapes, others, self.nodes, standing, within)
                if place is not None and place.shape.slowdown(standing.job.name) <= within:
                    return [self._leaves(group, standing, place)]
        forced = self.shapes.without(group.shape, group.standings, (), forced=True)
        assert forced is not None
        standing = group.standings[name]
        place = cheapest(self.shapes, others, self.nodes, standing)
        if place is not None and crowded:
            elsewhere = place.shape.slowdown(name) * standing.left + moving_seconds(standing)
            if elsewhere < forced.slowdown(name) * standing.left:  # late in any case, but less
                return [self._leaves(group, standing, place)]
        self._become(group, forced, group.standings)
        return []

    def _leaves(self, group: Group, standing: Standing, place: Place) -> Decision:
        """A job goes to a place in another group."""
        self._without(group, {standing.job.name})
        self._moved.add(standing.job.name)
        return replace(self._settled(standing, place), how="moved")

    def _admit(self, standing: Standing) -> list[Decision]:
        """Gives a job nodes, if need be those of less important ones; else it waits."""
        name = standing.job.name
        held = held_back(self.shapes, self.nodes, self.waiting.values(), standing)
        place = None if held else self.choose(self, standing)
        freed = self._freed(standing) if place is None and not held else []
        if freed:
            place = self.choose(self, standing)
        if place is None:
            self.waiting[name] = standing
            why = "others wait for longer" if held else "no room in any group, no free nodes"
            return [Decision(name, "waits", None, (), (), 0.0, None, why)]
        self.waiting.pop(name, None)
        for each in self.waiting.values():
            each.overtaken += goes_before(each, standing)
        standing.overtaken = 0
        why = f"{name} is more important"
        gone = [Decision(each.job.name, "preempted", None, (), (), 0.0, None, why) for each in freed]
        return [self._settled(standing, place), *gone]

    def _freed(self, standing: Standing) -> list[Standing]:
        """Those that leave their nodes to a more important job, and wait again; nobody if that is no help."""
        around = self.shapes, self.nodes, list(self.groups.values()), standing
        found: list[Standing] = []
        for group in outranked(*around):
            found += group.standings.values()
            self._without(group, set(group.standings))
        if not found and (beside := outranked_beside(*around)) is not None:
            group, gone = beside
            found += gone
            self._without(group, {each.job.name for each in gone})
        for each in found:
            each.preempted += 1
            self.waiting[each.job.name] = each
            self._preempted.add(each.job.name)
            self._moved.discard(each.job.name)
        return found

    def _admitted(self) -> list[Decision]:
        """Those that waited and now have room: by priority, deadline, what their tenants have, and arrival."""
        found: list[Decision] = []
        for standing in sorted(self.waiting.values(), key=self._rank):
            if standing.job.name in self.waiting:
                found += [each for each in self._admit(standing) if each.how != "waits"]
        return found

    def _rank(self, standing: Standing) -> tuple[float, float, float, float, str]:
        job = standing.job
        urgent = standing.allowed - standing.left if job.deadline is not None else float("inf")
        paid = [  # dollars an hour of its tenant's jobs, each with an equal part of its group
            group.shape.price / len(group.standings)
            for group in self.groups.values()
            for each in group.standings.values()
            if each.job.tenant == job.tenant
        ]
        return -job.priority, urgent, sum(paid), job.arrival, job.name

    def _settled(self, standing: Standing, place: Place) -> Decision:
        """Puts a job where it was decided."""
        name = standing.job.name
        if name in self._preempted:
            self._preempted.remove(name)
            self._moved.add(name)
        group = self._founded(place.shape) if place.group is None else place.group
        beside = list(group.standings)
        self._become(group, place.shape, {**group.standings, name: standing})
        rollout, training = group.nodes_of(name)
        return Decision(
            name,
            place.how,
            group.number,
            tuple(sorted(rollout)),
            tuple(sorted(training)),
            place.added,
            place.shape.slowdown(name),
            _why(place, standing.job, beside),
            dict(place.passed_over),
            tuple(beside),
        )

    def _become(self, group: Group, shape: Shape, standings: dict[str, Standing]) -> None:
        """Rents or gives back nodes until the group has this shape. Who is on a node stays there."""
        before = group.seats()
        self.nodes.give_back(group.training_nodes[shape.training_nodes :])
        kept = group.training_nodes[: shape.training_nodes]
        group.training_nodes = (*kept, *self.nodes.rent(shape.pair[1], shape.training_nodes - len(kept)))
        group.rollout_nodes = group.training_nodes if shape.shared else self._renamed(group, shape)
        group.shape = shape
        group.standings = {turn.name: standings[turn.name] for turn in shape.turns}
        group.measure(self.shapes.cluster)
        after = group.seats()
        self._moved |= {name for name in before if name in after and before[name] != after[name]}
        self._changed.add(group.number)
        self.home |= dict.fromkeys(group.standings, group.number)

    def _renamed(self, group: Group, shape: Shape) -> tuple[str, ...]:
        """Names for a shape's rollout nodes: those the jobs have now where possible, others rented."""
        names = named(group, shape)
        spare = [name for name in group.rollout_nodes if name not in names]
        for node, name in enumerate(names):
            if name is None:
                names[node] = spare.pop(0) if spare else self.nodes.rent(shape.pair[0], 1)[0]
        self.nodes.give_back(spare)
        return tuple(name for name in names if name is not None)

    def _without(self, group: Group, names: set[str]) -> None:
        """Takes jobs out of a group; the last one takes the group with it."""
        for name in names:
            del self.home[name]
        if names >= group.standings.keys():
            self._dissolve(group)
            return
        shape = self.shapes.without(group.shape, group.standings, names, forced=True)
        assert shape is not None
        self._become(group, shape, group.standings)

    def _dissolve(self, group: Group) -> None:
        self.nodes.give_back({*group.training_nodes, *group.rollout_nodes})
        del self.groups[group.number]
        self._changed.add(group.number)

    def _founded(self, shape: Shape) -> Group:
        """A new group, still without jobs and nodes."""
        group = Group(self.founded, shape, {}, (), ())
        self.founded += 1
        self.groups[group.number] = group
        return group

    def _improved(self, numbers: set[int | None], new: Collection[str] = ()) -> list[Decision]:
        """Packs groups closer together as long as that pays: these first, then those with most room."""
        if not self.regroup:
            return []
        found: list[Decision] = []
        until, done = self.shapes.looked + EFFORT, 0
        roomy = [group.number for group in roomiest(self.groups.values(), ROOMY)]
        queue = deque(dict.fromkeys([*sorted(self.groups.keys() & numbers), *roomy]))
        while queue and self.shapes.looked < until and done < ROUNDS:
            group = self.groups.get(queue.popleft())
            plan = better(self.shapes, self.groups, self.nodes, group, until) if group else None
            if plan is not None:
                found += self._regrouped(plan)
                done += 1
                queue.extendleft({self.home[name] for shape, _ in plan.choices for name in shape.seats})
        return [*found, *self.reconsider(numbers, new)]

    def _regrouped(self, plan: Regrouping) -> list[Decision]:
        """Gives groups their new shapes, those that shrink first: their nodes are there for the others."""
        saved, keepers = plan.saved, [keeper for _, keeper in plan.choices]
        before = {name: nodes for group in plan.groups for name, nodes in group.seats().items()}
        standings = {name: each for group in plan.groups for name, each in group.standings.items()}
        for group in plan.groups:
            if group not in keepers:
                self._dissolve(group)
        for shape, keeper in sorted(plan.choices, key=_growth):
            self._become(keeper or self._founded(shape), shape, standings)
        why = f"groups {', '.join(str(group.number) for group in plan.groups)} cost ${saved:,.2f}/h less so"
        found = []
        for name, nodes in before.items():
            group = self.groups[self.home[name]]
            if group.nodes_of(name) != nodes:
                self._moved.add(name)
                rollout, training = (tuple(sorted(each)) for each in group.nodes_of(name))
                added, slowdown = -saved / max(1, len(before)), group.shape.slowdown(name)
                found.append(Decision(name, "moved", group.number, rollout, training, added, slowdown, why))
        return found


def _growth(choice: Choice) -> float:
    """How much more a shape costs than the group that takes it."""
    shape, keeper = choice
    return shape.price - (0.0 if keeper is None else keeper.shape.price)


def by_price(scheduler: Scheduler, standing: Standing) -> Place | None:
    """Where it adds least. Who could not keep its promise alone after a move starts alone, if there are nodes: a
    group in which it is faster than that may not last."""
    groups = scheduler.groups.values()
    place = cheapest(scheduler.shapes, () if standing.bound < 1 else groups, scheduler.nodes, standing)
    return place or cheapest(scheduler.shapes, groups, scheduler.nodes, standing)


NOT_THERE = {
    "busy": "without time for it",
    "slowdown": "in which someone would be late",
    "full": "with as many jobs as may be",
    "memory": "without host memory for it",
    "pool": "on nodes that it cannot use",
}
"""Why a job did not go to other groups."""
BARELY = 1.01


def _why(place: Place, job: Job, beside: Sequence[str]) -> str:
    names = ", ".join(beside)
    if place.how == "packed":
        return f"beside {names}: no node is added"
    if place.how == "scaled":
        return f"beside {names} with rollout nodes of its own: ${place.added:,.2f}/h more"
    passed = sorted(place.passed_over.items())
    reasons = [f"{count} {'group' if count == 1 else 'groups'} {NOT_THERE[why]}" for why, count in passed]
    if job.max_slowdown < BARELY:
        reasons = ["it may not become slower"]
    return "; ".join([f"a group of its own: ${place.added:,.2f}/h more", *reasons])
