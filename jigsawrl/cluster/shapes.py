"""Groups as they could be: some jobs on so many nodes of two pools, judged by memory, promises and price.

Planning is conservative: with every response at the token limit (`level` 1), as the paper has it, and the most that
jobs can wait for each other; or with phases at a quantile of what they were seen to take and the waits that are
likely, against a typical step alone. Then it is also known how fast a group goes on, and what that is worth.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers
from itertools import islice

from jigsawrl.cluster.jobs import Job
from jigsawrl.cluster.pools import Cluster, Pair
from jigsawrl.cluster.rounds import SLACK, Places, Turn, Verdict, judged, keeps, lateness, likely
from jigsawrl.cluster.seats import apart, seatings

START_STEPS = 3
"""Steps' worth of its promise that a job keeps back for the waits when it, or another, enters or leaves a group."""
RESERVE = 0.01
"""See `Standing.reserve`."""
MOST_BOUND = 3.0
"""A job that is far ahead of its promise is not slowed down more than that."""
LEAST_BOUND = 0.5
"""Below 1 a job can share with nobody, and is let alone."""
TIGHTER, LOOSER = 0.005, 0.04
"""Relative changes of a bound for which nothing is planned anew."""
TAIL_SHARE = 0.25
"""Of a node that a rollout's tail stays on, while the next rollout starts on the rest."""
EFFICIENCY = 2.0
"""Dollars that a job costs alone for one that it costs in a group, on the mean: what is left to do is paid for so."""
TRIED = 1
"""Ways to put jobs onto so many nodes that are judged, where plans need not be the cheapest."""
KEPT = 200_000
"""Judged sets of jobs that are remembered."""


_VERSIONS = numbers(1)


@dataclass(slots=True)
class Standing:
    """A job, and how it stands to its promise."""

    job: Job
    pair: Pair
    """Where a step alone costs least."""
    alone: float
    """Planned seconds of a step alone there."""
    left: float
    """Planned seconds alone that are still to do."""
    allowed: float
    """Seconds that are left to do them in."""
    reserve: float = 0.0
    """Part of what is left that is kept back, where durations are not limits and may drift."""
    bound: float = 0.0
    """Slowdown that a group may be planned with. The promise is about the whole job: what it is ahead may be used."""
    came: int = 0
    """As the how manieth."""
    overtaken: int = 0
    """Jobs that came later, and got nodes while it waited."""
    preempted: int = 0
    """How often it had to leave its nodes to a job of higher priority."""
    version: int = 0
    """A number that no other standing has or had; another one whenever its bound or its durations change."""

    def bound_after(self, lost: float) -> float:
        """The slowdown that it may be planned with once it has lost so many seconds."""
        spare = self.allowed - lost - START_STEPS * self.alone - self.reserve * self.left
        return spare / max(self.left, 1e-9)

    def bind(self) -> None:
        """Follows what is left and allowed, if that changes the bound by more than a little."""
        bound = min(max(LEAST_BOUND, self.bound_after(0.0)), MOST_BOUND)
        if self.bound and -TIGHTER < bound / self.bound - 1 < LOOSER:
            return
        self.bound, self.version = bound, next(_VERSIONS)


@dataclass(frozen=True, slots=True)
class Shape:
    """A group on paper."""

    pair: Pair
    training_nodes: int
    rollout_nodes: int
    turns: tuple[Turn, ...]
    places: tuple[tuple[int, ...], ...]
    """Of each turn: which of the rollout nodes."""
    verdict: Verdict
    price: float
    """Dollars an hour."""
    cost: float
    """The price, less what the work is worth that gets done in an hour, where that is known."""

    @property
    def shared(self) -> bool:
        """Whether both phases use the same nodes."""
        return self.pair[0] == self.pair[1]

    def slowdown(self, name: str) -> float:
        """As planned."""
        for turn, seconds in zip(self.turns, self.verdict.seconds, strict=True):
            if turn.name == name:
                return seconds / turn.alone
        raise KeyError(name)


@dataclass(slots=True)
class Shapes:
    """Finds shapes of groups. Asked the same again, it answers from memory."""

    cluster: Cluster
    level: float
    """Quantile of durations to plan with; 1: every response at the token limit."""
    largest: int
    """Jobs in a group, at most."""
    judged: int = 0
    """Sets of jobs that were judged, and not known."""
    partitions: dict[tuple[int, ...], tuple[float, list[Shape]] | None] = field(default_factory=dict)
    """The cheapest ones that were found, by the jobs' versions."""
    _kept: dict[tuple[int, ...], Shape | None] = field(default_factory=dict)
    _turns: dict[tuple[int, Pair, int, bool], Turn] = field(default_factory=dict)

    @property
    def surely(self) -> bool:
        """Whether plans are to hold in the worst case."""
        return self.level >= 1

    @property
    def alone_level(self) -> float:
        """A job is planned to take what it takes at the quantile, against what it typically takes alone."""
        return 1.0 if self.surely else 0.5

    def standing(self, job: Job, allowed: float | None = None) -> Standing:
        """As it stands at its arrival. A deadline, in so many seconds, may allow less than its SLO."""
        _, alone, pair = min(self._alone(job))
        left = alone * job.steps
        most = left * job.max_slowdown
        seconds = most if allowed is None else min(most, allowed)
        standing = Standing(job, pair, alone, left, seconds, 0.0 if self.surely else RESERVE)
        standing.bind()
        return standing

    def pairs(self, job: Job) -> list[Pair]:
        """Where it could run."""
        return [p for p in self.cluster.pairs if p[0] in job.rollout and p[1] in job.training]

    def _alone(self, job: Job) -> Iterator[tuple[float, float, Pair]]:
        """Dollars and seconds of a step in each place."""
        for pair in self.pairs(job):
            seconds = sum(each.at(self.alone_level) for each in job.durations(*pair, job.training_nodes))
            yield seconds * self.price(pair, *widths(job, pair)), seconds, pair

    def price(self, pair: Pair, rollout_nodes: int, training_nodes: int) -> float:
        training = training_nodes * self.cluster.pools[pair[1]].price
        return (
            training if pair[0] == pair[1] else training + rollout_nodes * self.cluster.pools[pair[0]].price
        )

    def worth(self, standing: Standing) -> float:
        """Dollars that an hour of its work alone will have cost in the end."""
        return self.price(standing.pair, *widths(standing.job, standing.pair)) / EFFICIENCY

    def turn(self, standing: Standing, pair: Pair, training_nodes: int, shares: bool) -> Turn:
        """A job's planned phases in such a group; `shares`: with others."""
        key = standing.version, pair, training_nodes, shares
        found = self._turns.get(key)
        if found is None:
            if len(self._turns) >= KEPT:
                self._turns.clear()
            found = self._turns[key] = self._turn(standing, pair, training_nodes, shares)
        return found

    def _turn(self, standing: Standing, pair: Pair, training_nodes: int, shares: bool) -> Turn:
        job = standing.job
        rollout, training = (each.at(self.level) for each in job.durations(*pair, training_nodes))
        warm = (job.warm_rollout, job.warm_training) if shares else (0.0, 0.0)
        tail = 0.0 if self.surely or not shares else job.tail * (1 - TAIL_SHARE)
        return Turn(
            job.name,
            rollout + warm[0],
            rollout * (1 - tail) + warm[0],
            training + warm[1],
            sum(warm),
            standing.alone,
            standing.alone * standing.bound,
        )

    def isolated(self, standing: Standing) -> Iterator[Shape]:
        """A group of its own, in each place where it may be; the cheapest step first."""
        job = standing.job
        found = []
        for pair in self.pairs(job):
            rollout_nodes, training_nodes = widths(job, pair)
            places = (tuple(range(job.rollout_nodes)),)
            shape = self.judge(pair, training_nodes, rollout_nodes, [standing], places)
            if shape is not None:
                found.append(shape)
        yield from sorted(found, key=lambda each: each.price * each.verdict.seconds[0])

    def holds(self, pair: Pair, training_nodes: int, jobs: Sequence[Job], places: Places) -> bool:
        """Residency: whether the host memory of every node holds the state of all jobs pinned to it."""
        training = sum([job.training_gb * job.training_nodes / training_nodes for job in jobs])
        if training > self.cluster.pools[pair[1]].host_gb:
            return False
        held: dict[int, float] = {}
        for job, nodes in zip(jobs, places, strict=True):
            for node in nodes:
                held[node] = held.get(node, training if pair[0] == pair[1] else 0.0) + job.rollout_gb
        return max(held.values()) <= self.cluster.pools[pair[0]].host_gb

    def judge(
        self,
        pair: Pair,
        training_nodes: int,
        rollout_nodes: int,
        standings: Sequence[Standing],
        places: Places,
        forced: bool = False,
    ) -> Shape | None:
        """These jobs on these nodes, if memory holds them and all promises are kept (`forced`: or not kept)."""
        shares, shared = len(standings) > 1, pair[0] == pair[1]
        turns = tuple([self.turn(each, pair, training_nodes, shares) for each in standings])
        if shares and self.surely and not forced and not keeps(turns, places, shared):
            return None
        if not self.holds(pair, training_nodes, [each.job for each in standings], places):
            return None
        if shares:
            verdict = (judged if self.surely else likely)(turns, places, shared)
            if not forced and lateness(turns, verdict) > 1 + 10 * SLACK:
                return None
        else:
            alone = standings[0].job.durations(*pair, training_nodes)
            verdict = Verdict("as-ready", (sum(each.at(self.alone_level) for each in alone),))
            most = max(standings[0].bound, 1.0) * standings[0].alone
            if verdict.seconds[0] > most * (1 + SLACK) and not forced:
                return None
        price = self.price(pair, rollout_nodes, training_nodes)
        cost = price if self.surely else price - self._done(standings, verdict)
        return Shape(pair, training_nodes, rollout_nodes, turns, tuple(places), verdict, price, cost)

    def _most_done(
        self, standings: Sequence[Standing], turns: Sequence[Turn], places: Places
    ) -> float | None:
        """What the work of an hour is worth if all have rollout nodes of their own (`places`); None where someone is
        late even so. 0 where plans are to hold in the worst case."""
        if self.surely:
            return 0.0 if not places or keeps(turns, places, shared=False) else None
        if not places:
            return sum([self.worth(each) for each in standings])
        verdict = likely(turns, places, shared=False)
        return None if lateness(turns, verdict) > 1 + 10 * SLACK else self._done(standings, verdict)

    def _done(self, standings: Sequence[Standing], verdict: Verdict) -> float:
        """What the work is worth that is done in an hour."""
        done = zip(standings, verdict.seconds, strict=True)
        return sum([self.worth(each) * each.alone / seconds for each, seconds in done])

    def without(
        self, shape: Shape, standings: Mapping[str, Standing], names: Container[str], forced: bool = False
    ) -> Shape | None:
        """The others on the nodes they have; rollout nodes that nobody uses are left out."""
        placed = zip(shape.turns, shape.places, strict=True)
        stay = {turn.name: nodes for turn, nodes in placed if turn.name not in names}
        used = sorted({node for nodes in stay.values() for node in nodes})
        count = shape.training_nodes if shape.shared else len(used)
        number = {node: node if shape.shared else place for place, node in enumerate(used)}
        return self.judge(
            shape.pair,
            shape.training_nodes,
            count,
            [standings[name] for name in stay],
            [tuple(number[node] for node in nodes) for nodes in stay.values()],
            forced,
        )

    def best(self, standings: Sequence[Standing]) -> Shape | None:
        """The cheapest group of just these jobs; None where there is none."""
        key = tuple(sorted([each.version for each in standings]))
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self.judged += 1
            self._kept[key] = self._best(standings)
        return self._kept[key]

    def _best(self, standings: Sequence[Standing]) -> Shape | None:
        if len(standings) > self.largest:
            return None
        if len(standings) == 1:
            return next(self.isolated(standings[0]), None)
        found: Shape | None = None
        pairs = self.pairs(standings[0].job)
        for each in standings[1:]:
            pairs = [pair for pair in pairs if pair in self.pairs(each.job)]
        for pair in pairs:
            for training_nodes in sorted({widths(each.job, pair)[1] for each in standings}):
                most = found.cost if found else float("inf")
                found = self._fitting(standings, pair, training_nodes, most) or found
        return found

    def _fitting(
        self, standings: Sequence[Standing], pair: Pair, training_nodes: int, below: float
    ) -> Shape | None:
        """With as many rollout nodes as cost least, for less than that."""
        turns = [self.turn(each, pair, training_nodes, True) for each in standings]
        if sum([each.training / each.limit for each in turns]) > 1 + SLACK:
            return None
        if any(each.step > each.limit * (1 + SLACK) for each in turns):
            return None
        shared = pair[0] == pair[1]
        needs = [each.job.rollout_nodes for each in standings]
        most = training_nodes if shared else sum(needs)
        parts = [each.hold / each.limit for each in turns]
        booked = sum([part * need for part, need in zip(parts, needs, strict=True)])
        worth = self._most_done(standings, turns, () if shared else apart(needs))
        if worth is None:
            return None  # not even with rollout nodes for everyone
        found: Shape | None = None
        for count in range(most if shared else max(*needs, int(booked - 1e-6) + 1), most + 1):
            if self.price(pair, count, training_nodes) - worth >= below:
                break
            for places in islice(seatings(needs, parts, count), None if self.surely else TRIED):
                shape = self.judge(pair, training_nodes, count, standings, places)
                if shape is not None:
                    if shape.cost < below:
                        found, below = shape, shape.cost
                    break
        return found


def widths(job: Job, pair: Pair) -> tuple[int, int]:
    """Nodes of a group of its own: for rollouts and for training."""
    if pair[0] == pair[1]:
        both = max(job.rollout_nodes, job.training_nodes)
        return both, both
    return job.rollout_nodes, job.training_nodes
