"""Small clusters and jobs to tell stories with."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.pools import Cluster, Pool
from jigsawrl.cluster.rounds import jobs_of
from jigsawrl.graph.hardware import hardware_named
from jigsawrl.phases.roll_forward import roll_forward
from jigsawrl.phases.rounds import Places, Turn
from jigsawrl.phases.turns import ORDERS, ROLLOUT, OrderName, PhasedJob


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
    order: OrderName,
    rounds: int = 80,
    rng: random.Random | None = None,
) -> dict[str, float]:
    """Mean seconds of each job's step when the order is rolled forward with these durations, the start left out.

    With `rng`, phases are up to 15 % shorter or longer.
    """
    ended: dict[str, list[float]] = {each.name: [] for each in turns}

    def stretch(job: PhasedJob) -> float:
        return 1.0 if rng is None else rng.uniform(0.85, 1.15)

    jobs = jobs_of(turns, places, shared, 0.0)
    for now, jobs_ended, _ in roll_forward(jobs, ORDERS[order], float("inf"), stretch=stretch):
        for job in jobs_ended:
            if job.phase == ROLLOUT:
                ended[job.name].append(now)
        if min(map(len, ended.values())) >= rounds:
            break
    skip = rounds // 4
    return {name: (each[-1] - each[skip]) / (len(each) - 1 - skip) for name, each in ended.items()}
