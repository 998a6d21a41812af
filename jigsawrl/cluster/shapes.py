"""Groups as they could be: some jobs on so many nodes of two pools, judged by memory, promises and price.

Planning is conservative: with every response at the token limit (`level` 1), as the paper has it, and the most that
jobs can wait for each other; or with phases at a quantile of what they were seen to take and the waits that are
likely, against a typical step alone. Then it is also known how fast a group goes on, and what that is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count as numbers
from itertools import islice
from typing import TypeVar

from jigsawrl.cluster.jobs import Job
from jigsawrl.cluster.pools import Cluster, Pair
from jigsawrl.cluster.rounds import Verdict, judged, keeps, lateness, likely
from jigsawrl.cluster.seats import apart, seatings
from jigsawrl.phases.rounds import SLACK, Places, Turn

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
"""Answers of each kind that are remembered."""
Answer = TypeVar("Answer")
_VERSIONS = numbers(1)


class Memory(dict[tuple[object, ...], Answer]):
    """Answers that were worked out before, by what was asked; where they become too many, all are forgotten."""

    def answer(self, question: tuple[object, ...], work_out: Callable[[], Answer]) -> Answer:
        if question not in self:
            if len(self) >= KEPT:
                self.clear()
            self[question] = work_out()
        return self[question]


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


@dataclass(frozen=True)
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

    @cached_property
    def nodes(self) -> dict[str, int]:
        """How many it takes of each pool."""
        return {self.pair[0]: self.rollout_nodes, self.pair[1]: self.training_nodes}

    @cached_property
    def seats(self) -> dict[str, tuple[int, ...]]:
        """The rollout nodes of each job."""
        return {turn.name: nodes for turn, nodes in zip(self.turns, self.places, strict=True)}

    @cached_property
    def slowdowns(self) -> dict[str, float]:
        """How many times as long as alone each job is planned to take."""
        pairs = zip(self.turns, self.verdict.seconds, strict=True)
        return {turn.name: seconds / turn.alone for turn, seconds in pairs}

    def slowdown(self, name: str) -> float:
        return self.slowdowns[name]


@dataclass(slots=True)
class Shapes:
    """Finds shapes of groups. Asked the same again, it answers from memory."""

    cluster: Cluster
    level: float
    """Quantile of durations to plan with; 1: every response at the token limit."""
    largest: int
    """Jobs in a group, at most."""
    looked: int = 0
    """Sets of jobs that were judged, and not known, and ways to partition jobs that were looked at."""
    partitions: Memory[tuple[float, list[Shape]] | None] = field(default_factory=Memory)
    """The cheapest ones that were found, by the jobs' versions."""
    _best: Memory[Shape | None] = field(default_factory=Memory)
    _turns: Memory[Turn] = field(default_factory=Memory)

    @property
    def surely(self) -> bool:
        """Whether plans are to hold in the worst case."""
        return self.level >= 1

    def standing(self, job: Job, allowed: float | None = None) -> Standing:
        """As it stands at its arrival. A deadline, in so many seconds, may allow less than its SLO."""
        steps = [(self._alone(job, pair, job.training_nodes), pair) for pair in self.pairs(job)]
        alone, pair = min(
            steps, key=lambda each: (each[0] * self.price(each[1], *widths(job, each[1])), *each)
        )
        left = alone * job.steps
        most = left * job.max_slowdown
        seconds = most if allowed is None else min(most, allowed)
        standing = Standing(job, pair, alone, left, seconds, 0.0 if self.surely else RESERVE)
        standing.bind()
        return standing

    def pairs(self, *jobs: Job) -> list[Pair]:
        """Where all of them could run."""
        return [pair for pair in self.cluster.pairs if all(job.runs_on(*pair) for job in jobs)]

    def _alone(self, job: Job, pair: Pair, training_nodes: int) -> float:
        """Seconds of a step alone there: typical ones, where what is planned is a quantile, or the worst."""
        level = 1.0 if self.surely else 0.5
        return sum([each.at(level) for each in job.durations(*pair, training_nodes)])

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
        return self._turns.answer(
            (standing.version, pair, training_nodes, shares),
            lambda: self._planned(standing, pair, training_nodes, shares),
        )

    def _planned(self, standing: Standing, pair: Pair, training_nodes: int, shares: bool) -> Turn:
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
        job, places = standing.job, [tuple(range(standing.job.rollout_nodes))]
        shapes = [self.judge(pair, *widths(job, pair), [standing], places) for pair in self.pairs(job)]
        found = [each for each in shapes if each is not None]
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
        rollout_nodes: int,
        training_nodes: int,
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
            late = lateness(turns, verdict) > 1 + 10 * SLACK
        else:
            verdict = Verdict("as-ready", (self._alone(standings[0].job, pair, training_nodes),))
            late = verdict.seconds[0] > max(standings[0].bound, 1.0) * standings[0].alone * (1 + SLACK)
        if late and not forced:
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
        """The other jobs on the nodes they have, judged anew; rollout nodes that nobody uses are left out."""
        stay = {name: nodes for name, nodes in shape.seats.items() if name not in names}
        used = {node for nodes in stay.values() for node in nodes}
        left = range(shape.rollout_nodes) if shape.shared else sorted(used)
        number = {node: place for place, node in enumerate(left)}
        return self.judge(
            shape.pair,
            len(left),
            shape.training_nodes,
            [standings[name] for name in stay],
            [tuple(number[node] for node in nodes) for nodes in stay.values()],
            forced,
        )

    def best(self, standings: Sequence[Standing]) -> Shape | None:
        """The cheapest group of just these jobs; None where there is none."""
        versions = sorted([each.version for each in standings])
        return self._best.answer(tuple(versions), lambda: self._cheapest(standings))

    def _cheapest(self, standings: Sequence[Standing]) -> Shape | None:
        self.looked += 1
        if len(standings) > self.largest:
            return None
        if len(standings) == 1:
            return next(self.isolated(standings[0]), None)
        found: Shape | None = None
        for pair in self.pairs(*[each.job for each in standings]):
            for training_nodes in sorted({widths(each.job, pair)[1] for each in standings}):
                most = found.cost if found else float("inf")
                found = self._fitting(standings, pair, training_nodes, most) or found
        return found

    def _fitting(
        self, standings: Sequence[Standing], pair: Pair, training_nodes: int, below: float
    ) -> Shape | None:
        """With as many rollout nodes as cost least, for less than that."""
        turns = [self.turn(each, pair, training_nodes, True) for each in standings]
        busy = sum([each.training / each.limit for each in turns]) > 1 + SLACK
        if busy or any(each.step > each.limit * (1 + SLACK) for each in turns):
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
            tried = islice(seatings(needs, parts, count), None if self.surely else TRIED)
            shapes = (self.judge(pair, count, training_nodes, standings, places) for places in tried)
            shape = next(filter(None, shapes), None)
            if shape is not None and shape.cost < below:
                found, below = shape, shape.cost
        return found


def widths(job: Job, pair: Pair) -> tuple[int, int]:
    """Nodes of a group of its own: for rollouts and for training."""
    wider = max(job.rollout_nodes, job.training_nodes)
    return (wider, wider) if pair[0] == pair[1] else (job.rollout_nodes, job.training_nodes)
