"""The paper's simulation of RollMux: 300 jobs over 580 hours, against the optimum, random and most-idle placement.

Phases are those of the paper's table (seconds, fixed): balanced, rollout-heavy and train-heavy jobs in three sizes,
and a mix of the three kinds; max_slowdown is uniform in 1 to 2. Where the paper is silent, this is assumed: every
job takes one node of 8 H20 for rollouts and one of 8 H800 for training, at the paper's prices; small, medium and
large jobs keep in host memory (2,048 GB a node) and need for a cold start what the paper measured for 7B, 14B and
32B; jobs come in bursts (gamma intervals of shape 0.3, each bringing one or more jobs) and last a log-normal time
(sigma 1) with the mean of the paper's other trace, 27.9 h; switches between resident jobs cost nothing, as the
table's phases are whole. A promise is about the whole job: its time from arrival to end, moves included, over its
time alone.

The optimum is that of a moment: the cheapest partition into groups of the jobs that are there then, moved for
nothing, by the same rules (at most 5 in a group, memory, promises as they stand). All sets that can be a group are
enumerated and CP-SAT proves the cheapest partition. Where the sets are too many, or CP-SAT is not done in time, a
proven lower bound stands in: CP-SAT's, or what all nodes would cost if they were busy all of the time. The claims are
about the cost at equally spaced moments over the optimum's: with mixed jobs that of one seed, and of ten seeds
from that one on (`--quick`: three) the mean and the worst. In all these traces every promise has to be kept.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from common import CORES, arguments, claim, clean_stdout, figure, report, say
from ortools.sat.python import cp_model
from rich.console import Console
from rich.table import Table

from jigsawrl.cluster.baselines import at_random, most_idle
from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.placing import Place, cheapest
from jigsawrl.cluster.pools import Cluster, Pool
from jigsawrl.cluster.regroup import possible_groups
from jigsawrl.cluster.scheduler import Scheduler, by_price
from jigsawrl.cluster.shapes import Shapes, Standing
from jigsawrl.cluster.simulation import ClusterSimulation, Outcome
from jigsawrl.graph.hardware import hardware_named

HOURS, JOBS, MEAN_HOURS = 580, 300, 27.9
GPUS, HOST_GB = 8, 2048.0
KINDS = ("balanced", "rollout-heavy", "train-heavy")
BALANCED = {"S": (50, 100), "M": (100, 200), "L": (200, 300)}
LONG = {"S": (100, 200), "M": (200, 400), "L": (400, 600)}
SHORT = {"S": (25, 50), "M": (50, 100), "L": (100, 200)}
KEPT = {"S": (275.7, 240.0, 38.8), "M": (445.4, 456.1, 60.4), "L": (490.3, 520.4, 81.7)}
"""GB on a rollout node and on a training node, and seconds of a cold start: 7B, 14B, 32B."""
MOST_SETS = 60_000
"""That are enumerated for one moment."""
PROOF_SECONDS = 30.0
GROWTH = (10, 100, 500, 1000, 2000, 5000, 10_000)
SEEDS, QUICK_SEEDS = 10, 3
DECISIONS = 20
NEWEST = 30


def main() -> None:
    options = arguments(__doc__).parse_args()
    seed = options.seed
    with clean_stdout() as console:
        jobs, hours = (60, 116) if options.quick else (JOBS, HOURS)
        every = 12 if options.quick else 20
        seeds = range(seed, seed + (QUICK_SEEDS if options.quick else SEEDS))
        kinds = () if options.quick else KINDS
        say(
            f"against the optimum: mixed, seeds {seeds[0]} to {seeds[-1]}; {', '.join(kinds) or 'no other mix'}"
        )
        with ProcessPoolExecutor(CORES, mp_context=get_context("spawn")) as processes:
            started = {
                each: processes.submit(over_optimum, trace(jobs, hours, each, KINDS), hours, every)
                for each in seeds
            }
            others = {
                kind: processes.submit(over_optimum, trace(jobs, hours, seed, (kind,)), hours, 40)
                for kind in kinds
            }
            by_seed = {each: future.result() for each, future in started.items()}
            against = {"mixed": by_seed[seed], **{kind: future.result() for kind, future in others.items()}}
        ratios = [each["over_optimum"] for each in by_seed.values()]
        played = [*against.values(), *by_seed.values()]
        mixed = trace(jobs, hours, seed, KINDS)
        policies = {"regrouping": against["mixed"]}
        for name, scheduler in {
            "paper's (no regrouping)": Scheduler(cluster(), regroup=False),
            "alone": Scheduler(cluster(), largest=1, regroup=False),
            "random": Scheduler(cluster(), regroup=False, choose=at_random(seed)),
            "most idle": Scheduler(cluster(), regroup=False, choose=most_idle),
        }.items():
            say(f"mixed: {name}")
            policies[name] = row(ClusterSimulation(scheduler, mixed, seed=seed, follow=False).run())
        growth = {}
        for count in GROWTH[:5] if options.quick else GROWTH:
            say(f"decisions with {count} jobs")
            growth[count] = decision_ms(count, seed)
        print_tables(console, against, by_seed, policies, growth)
        claims = {
            "cost_over_optimum_mixed": claim(against["mixed"]["over_optimum"], at_most=1.06),
            "cost_over_optimum_mixed_mean": claim(round(statistics.mean(ratios), 4), at_most=1.05),
            "cost_over_optimum_mixed_worst": claim(max(ratios), at_most=1.08),
            "slo_attainment": claim(min(each["slo_attainment"] for each in played), at_least=1.0),
            "cost_vs_random": claim(
                policies["random"]["dollars"] / against["mixed"]["dollars"], at_least=1.0
            ),
            "cost_vs_most_idle": claim(
                policies["most idle"]["dollars"] / against["mixed"]["dollars"], at_least=1.0
            ),
            "decision_ms_2000_jobs": claim(growth[2000]["p95"], at_most=100),
        }
        report(
            console,
            "rollmux_sim",
            seed,
            claims,
            quick=options.quick,
            mixes=against,
            mixed_by_seed=by_seed,
            policies=policies,
            decision_ms=growth,
        )


def cluster() -> Cluster:
    """The paper's two kinds, as many nodes as are asked for."""
    rollout, training = hardware_named("h20"), hardware_named("h800")
    return Cluster(
        {
            "h20": Pool("h20", rollout, GPUS, None, HOST_GB, GPUS * rollout.price, "rollout"),
            "h800": Pool("h800", training, GPUS, None, HOST_GB, GPUS * training.price, "training"),
        }
    )


def trace(count: int, hours: float, seed: int, kinds: Sequence[str]) -> list[Job]:
    rng = random.Random(f"{seed} {kinds}")
    jobs = []
    lengths = job_hours(rng, count)
    for number, arrival in enumerate(bursts(rng, count, hours)):
        size = rng.choice("SML")
        rollout, training = phases(rng, rng.choice(kinds), size)
        rollout_gb, training_gb, cold = KEPT[size]
        jobs.append(
            Job(
                f"job-{number}",
                {"h20": Duration.fixed(rollout)},
                {"h800": Duration.fixed(training)},
                max_slowdown=rng.uniform(1, 2),
                steps=max(1, round(lengths[number] * 3600 / (rollout + training))),
                rollout_gb=rollout_gb,
                training_gb=training_gb,
                cold_seconds=cold,
                arrival=arrival,
            )
        )
    return jobs


def phases(rng: random.Random, kind: str, size: str) -> tuple[float, float]:
    """Seconds of rollout and training."""
    if kind == "balanced":
        both = rng.uniform(*BALANCED[size])
        return both, both
    long, short = rng.uniform(*LONG[size]), rng.uniform(*SHORT[size])
    return (long, short) if kind == "rollout-heavy" else (short, long)


def bursts(rng: random.Random, count: int, hours: float) -> list[float]:
    """Arrivals: often several at once, then none for long; the last one at the end."""
    times: list[float] = []
    now = 0.0
    while len(times) < count:
        now += rng.gammavariate(0.3, 1 / 0.3)
        times += [now] * min(count - len(times), 1 + int(rng.expovariate(1 / 1.5)))
    return [each / times[-1] * hours for each in times]


def job_hours(rng: random.Random, count: int) -> list[float]:
    """How long jobs would take alone."""
    drawn = [rng.lognormvariate(0, 1) for _ in range(count)]
    return [each / statistics.mean(drawn) * MEAN_HOURS for each in drawn]


def row(outcome: Outcome) -> dict[str, Any]:
    return {
        "dollars": round(outcome.dollars),
        "dollars_per_hour": round(outcome.dollars_per_hour, 1),
        "slo_attainment": round(outcome.slo_attainment, 4),
        "slowdown": round(statistics.mean(each.slowdown for each in outcome.records.values()), 3),
        "peak_nodes": outcome.peak_nodes,
        "busy": {pool: round(part, 3) for pool, part in outcome.busy.items()},
        "moves": sum(each.moves for each in outcome.records.values()),
    }


def over_optimum(jobs: list[Job], hours: float, every: float) -> dict[str, Any]:
    """The whole trace, stopped now and then to look for the optimum."""
    scheduler = Scheduler(cluster())
    simulation = ClusterSimulation(scheduler, jobs)
    paid = best = 0.0
    how = dict.fromkeys(("optimal", "CP-SAT's bound", "bound of the load"), 0)
    for hour in range(round(every), round(hours), round(every)):
        simulation.run(hour * 3600)
        standings = [each for group in scheduler.groups.values() for each in group.standings.values()]
        if standings:
            cost, proof = optimum(scheduler, standings)
            how[proof] += 1
            paid, best = paid + scheduler.price, best + cost
    return {**row(simulation.run()), "over_optimum": round(paid / best, 4), "moments": how}


def optimum(scheduler: Scheduler, standings: Sequence[Standing]) -> tuple[float, str]:
    """Dollars an hour of the cheapest partition, and what proves it.

    It judges sets with a memory of its own: what the scheduler knows, and so how far it looks, does not change.
    """
    rules = scheduler.shapes
    found = possible_groups(Shapes(rules.cluster, rules.level, rules.largest), standings, MOST_SETS)
    if len(found) > MOST_SETS:
        return load_bound(scheduler), "bound of the load"
    model = cp_model.CpModel()
    chosen = {mask: model.new_bool_var("") for mask in found}
    for k in range(len(standings)):
        model.add_exactly_one(variable for mask, variable in chosen.items() if mask >> k & 1)
    model.minimize(sum(round(100 * found[mask].price) * variable for mask, variable in chosen.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = PROOF_SECONDS
    proved = solver.solve(model) == cp_model.OPTIMAL
    return solver.best_objective_bound / 100, "optimal" if proved else "CP-SAT's bound"


def load_bound(scheduler: Scheduler) -> float:
    """If every node were busy all of the time, and every job just kept its promise, or was alone if it cannot."""
    pools = scheduler.shapes.cluster.pools
    return sum(
        (turn.rollout * pools["h20"].price + turn.training * pools["h800"].price) / max(turn.limit, turn.step)
        for group in scheduler.groups.values()
        for turn in group.shape.turns
    )


def among_newest(scheduler: Scheduler, standing: Standing) -> Place | None:
    """Fills a cluster fast: only the newest groups are looked at."""
    groups = list(scheduler.groups.values())[-NEWEST:]
    return cheapest(scheduler.shapes, groups, scheduler.nodes, standing)


def decision_ms(count: int, seed: int) -> dict[str, float]:
    """Of arrivals and departures, regrouping included, with so many jobs there.

    Processor time, which does not depend on what else runs on the machine; beside it the mean by the clock.
    """
    rng = random.Random(seed)
    jobs = trace(count + DECISIONS, HOURS, seed, KINDS)
    scheduler = Scheduler(cluster(), regroup=False, choose=among_newest)
    for job in jobs[:count]:
        scheduler.arrive(job)
    scheduler.regroup, scheduler.choose = True, by_price
    taken, wall = [], []
    for job in jobs[count:]:
        for decide in (
            lambda job=job: scheduler.arrive(job),
            lambda: scheduler.depart(rng.choice(list(scheduler.home))),
        ):
            start, cpu = time.perf_counter(), time.process_time()
            decide()
            taken.append(1e3 * (time.process_time() - cpu))
            wall.append(1e3 * (time.perf_counter() - start))
    taken.sort()
    return {
        "mean": round(statistics.mean(taken), 2),
        "p95": round(taken[math.ceil(0.95 * len(taken)) - 1], 2),
        "max": round(taken[-1], 2),
        "wall_mean": round(statistics.mean(wall), 2),
    }


def print_tables(
    console: Console,
    against: dict[str, Any],
    by_seed: dict[int, dict[str, Any]],
    policies: dict[str, Any],
    growth: dict[int, dict[str, float]],
) -> None:
    table = Table(title="against the optimum of the moment")
    for column in (
        "mix",
        "cost / optimum",
        "paper",
        "SLO",
        "$/h",
        "moments: optimal, CP-SAT's bound, load's bound",
    ):
        table.add_column(column, justify="left" if column == "mix" else "right")
    paper = {"mixed": "1.06", "balanced": "1.12", "rollout-heavy": "1.10", "train-heavy": "1.01"}
    for name, each in against.items():
        moments = ", ".join(str(count) for count in each["moments"].values())
        cells = (f"{each['over_optimum']:.3f}", paper[name], f"{each['slo_attainment']:.1%}")
        table.add_row(name, *cells, figure(each["dollars_per_hour"]), moments)
    console.print(table)
    table = Table(title="mixed, seed by seed")
    for column in ("seed", "cost / optimum", "SLO", "dollars", "moves", "moments"):
        table.add_column(column, justify="right")
    for number, each in by_seed.items():
        moments = ", ".join(str(count) for count in each["moments"].values())
        cells = (f"{each['over_optimum']:.3f}", f"{each['slo_attainment']:.1%}", f"{each['dollars']:,}")
        table.add_row(str(number), *cells, str(each["moves"]), moments)
    console.print(table)
    table = Table(title="mixed")
    for column in ("placement", "dollars", "SLO", "mean slowdown", "peak nodes", "moves"):
        table.add_column(column, justify="left" if column == "placement" else "right")
    for name, each in policies.items():
        peak = ", ".join(f"{count} {pool}" for pool, count in each["peak_nodes"].items())
        cells = (f"{each['dollars']:,}", f"{each['slo_attainment']:.1%}", f"{each['slowdown']:.2f}", peak)
        table.add_row(name, *cells, str(each["moves"]))
    console.print(table)
    table = Table(
        title="milliseconds of a decision, regrouping included (paper: 41.9 at 100 jobs, 591 at 2,000)"
    )
    for column in ("jobs", "mean", "p95", "max", "mean by the clock"):
        table.add_column(column, justify="right")
    for count, each in growth.items():
        table.add_row(f"{count:,}", *(figure(each[key]) for key in ("mean", "p95", "max", "wall_mean")))
    console.print(table)


if __name__ == "__main__":
    main()
