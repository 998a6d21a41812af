"""Small clusters and jobs to tell stories with."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.permits import Order, Permits, Phase
from jigsawrl.cluster.pools import Cluster, Pool
from jigsawrl.cluster.rounds import Places, Turn, runners_of
from jigsawrl.graph.hardware import hardware_named


def two_pools(rollout: int | None = None, training: int | None = None, host_gb: float = 1000.0) -> Cluster:
    """Rollout nodes for $1 an hour, training nodes for $3."""
    return Cluster(
        {
            "roll": Pool("roll", hardware_named("h20"), 8, rollout, host_gb, 1.0, "rollout"),
            "train": Pool("train", hardware_named("h800"), 8, training, host_gb, 3.0, "training"),
        }
    )


def one_pool(nodes: int | None = None) -> Cluster:
    """Nodes for $3 an hour that run both phases."""
    return Cluster({"both": Pool("both", hardware_named("h800"), 8, nodes, 1000.0, 3.0, "both")})


def job(name: str, rollout: float = 100.0, training: float = 100.0, **wishes: object) -> Job:
    """A job with fixed phases that may be on any pool, 200 steps long, with 100 GB on each node."""
    pools = ("roll", "train", "both")
    settings = {"steps": 200, "rollout_gb": 100.0, "training_gb": 100.0, "max_slowdown": 1.5, **wishes}
    return Job(
        name,
        {pool: Duration.fixed(rollout) for pool in pools if pool != "train"},
        {pool: Duration.fixed(training) for pool in pools if pool != "roll"},
        **settings,  # type: ignore[arg-type]
    )


def turn(name: str, rollout: float, training: float, hold: float | None = None, limit: float = 1e9) -> Turn:
    hold = rollout if hold is None else hold
    return Turn(name, rollout, hold, training, 0.0, rollout + training, limit)


def play(
    turns: Sequence[Turn],
    places: Places,
    shared: bool,
    order: Order,
    rounds: int = 80,
    rng: random.Random | None = None,
) -> dict[str, float]:
    """Mean seconds of everyone's step when the permits are played with these durations, the start left out.

    With `rng`, phases are up to 15 % shorter or longer.
    """
    permits = Permits()
    every = frozenset(f"r{node}" for nodes in places for node in nodes)
    seats = {
        each.name: (frozenset(f"r{node}" for node in nodes), every if shared else frozenset({"t"}))
        for each, nodes in zip(turns, places, strict=True)
    }
    permits.seated(order, seats, runners_of(turns, places, shared, 0.0))
    by_name = {each.name: each for each in turns}
    numbers = itertools.count()
    ends: list[tuple[float, int, str, Phase | None]] = []
    ended: dict[str, list[float]] = {name: [] for name in by_name}
    for name in by_name:
        permits.ask(name, "rollout")
    now = 0.0
    while min(map(len, ended.values())) < rounds:
        for name, phase in permits.granted(now):
            mine = by_name[name]
            uneven = 1.0 if rng is None else rng.uniform(0.85, 1.15)
            seconds = uneven * (mine.rollout if phase == "rollout" else mine.training)
            if phase == "rollout" and mine.hold < mine.rollout:
                heapq.heappush(ends, (now + uneven * mine.hold, next(numbers), name, None))
            heapq.heappush(ends, (now + seconds, next(numbers), name, phase))
        now, _, name, ending = heapq.heappop(ends)
        if ending is None:
            permits.tail(name)
            continue
        permits.release(name, now)
        permits.ask(name, "training" if ending == "rollout" else "rollout")
        if ending == "training":
            ended[name].append(now)
    skip = rounds // 4
    return {name: (each[-1] - each[skip]) / (len(each) - 1 - skip) for name, each in ended.items()}
