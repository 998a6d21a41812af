"""Groups as they could be: some jobs on so many nodes of two pools, judged by memory, promises and price.

Planning is conservative: with every response at the token limit (`level` 1), as the paper has it, or with phases at a
quantile of what they were seen to take, against a typical step alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from itertools import count as numbers

from jigsawrl.cluster.jobs import Job
from jigsawrl.cluster.pools import Cluster, Pair
from jigsawrl.cluster.rounds import SLACK, Places, Turn, Verdict, judged, keeps

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
    version: int = 0
    """A number that no other standing has or had; another one whenever its bound or its durations change."""

    def bind(self) -> None:
        """Follows what is left and allowed, if that changes the bound by more than a little."""
        spare = self.allowed - START_STEPS * self.alone - self.reserve * self.left
        bound = min(max(LEAST_BOUND, spare / max(self.left, 1e-9)), MOST_BOUND)
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
    _kept: dict[tuple[int, ...], Shape | None] = field(default_factory=dict)
    _turns: dict[tuple[int, Pair, int, bool], Turn] = field(default_factory=dict)

    @property
    def alone_level(self) -> float:
        """A job is planned to take what it takes at the quantile, against what it typically takes alone."""
        return 1.0 if self.level >= 1 else 0.5

    def standing(self, job: Job, allowed: float | None = None) -> Standing:
        """As it stands at its arrival. A deadline, in so many seconds, may allow less than its SLO."""
        _, alone, pair = min(self._alone(job))
        left = alone * job.steps
        most = left * job.max_slowdown
        seconds = most if allowed is None else min(most, allowed)
        standing = Standing(job, pair, alone, left, seconds, 0.0 if self.level >= 1 else RESERVE)
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
        tail = 0.0 if self.level >= 1 or not shares else job.tail * (1 - TAIL_SHARE)
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
        if shares and not forced and not keeps(turns, places, shared):
            return None
        if not self.holds(pair, training_nodes, [each.job for each in standings], places):
            return None
        if shares:
            verdict = judged(turns, places, shared)
        else:
            alone = standings[0].job.durations(*pair, training_nodes)
            verdict = Verdict("as-ready", (sum(each.at(self.alone_level) for each in alone),))
            most = max(standings[0].bound, 1.0) * standings[0].alone
            if verdict.seconds[0] > most * (1 + SLACK) and not forced:
                return None
        price = self.price(pair, rollout_nodes, training_nodes)
        return Shape(pair, training_nodes, rollout_nodes, turns, tuple(places), verdict, price)

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
                most = found.price if found else float("inf")
                shape = self._narrowest(standings, pair, training_nodes, most)
                found = shape or found
        return found

    def _narrowest(
        self, standings: Sequence[Standing], pair: Pair, training_nodes: int, below: float
    ) -> Shape | None:
        """With the fewest rollout nodes, for less than a price."""
        turns = [self.turn(each, pair, training_nodes, True) for each in standings]
        if sum([each.training / each.limit for each in turns]) > 1 + SLACK:
            return None
        if any(each.step > each.limit * (1 + SLACK) for each in turns):
            return None
        shared = pair[0] == pair[1]
        widest = max([each.job.rollout_nodes for each in standings])
        most = training_nodes if shared else sum([each.job.rollout_nodes for each in standings])
        parts = [each.hold / each.limit for each in turns]
        booked = sum([part * each.job.rollout_nodes for part, each in zip(parts, standings, strict=True)])
        needs = [each.job.rollout_nodes for each in standings]
        if not shared and not keeps(turns, _apart(needs), shared):
            return None  # not even with rollout nodes for everyone
        for count in range(most if shared else max(widest, int(booked - 1e-6) + 1), most + 1):
            if self.price(pair, count, training_nodes) >= below:
                return None
            for places in _assignments(needs, parts, count):
                shape = self.judge(pair, training_nodes, count, standings, places)
                if shape is not None:
                    return shape
        return None


def _apart(needs: Sequence[int]) -> list[tuple[int, ...]]:
    """Everyone on nodes of its own."""
    ends = list(accumulate(needs))
    return [tuple(range(end - need, end)) for need, end in zip(needs, ends, strict=True)]


def widths(job: Job, pair: Pair) -> tuple[int, int]:
    """Nodes of a group of its own: for rollouts and for training."""
    if pair[0] == pair[1]:
        both = max(job.rollout_nodes, job.training_nodes)
        return both, both
    return job.rollout_nodes, job.training_nodes


def _assignments(
    needs: Sequence[int], parts: Sequence[float], count: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ways to put jobs onto rollout nodes that are not busy for more than all of the time; each way once."""
    busy = [0.0] * count

    def place(number: int, used: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if number == len(needs):
            if used == count:
                yield ()
            return
        need, part = needs[number], parts[number]
        for nodes in combinations(range(min(count, used + need)), need):
            fresh = [node for node in nodes if node >= used]
            if fresh != list(range(used, used + len(fresh))):
                continue  # the same but for the names of nodes
            if any(busy[node] + part > 1 + SLACK for node in nodes):
                continue
            for node in nodes:
                busy[node] += part
            for rest in place(number + 1, used + len(fresh)):
                yield (nodes, *rest)
            for node in nodes:
                busy[node] -= part

    yield from place(0, 0)
