"""How far the look-ahead is from the best that could be done, and how long it thinks.

Makespans of `jigsaw` and `greedy` in the simulator against the optimum that CP-SAT proves, on random small problems:
2 to 4 pipelines of 1 to 3 steps on 2 to 4 workers (`optimum.py` says what they are made of). They are of a kind that
CP-SAT expresses exactly: what is foreseen happens, every phase may run on any number of workers, memory is what is
scarce, and what fits in memory does not slow each other down. Interference, tool waits and moving tails are left out:
with speeds that depend on what runs beside, no solver proves an optimum. That both models are the same problem is
checked on every instance, both ways: the simulator plays CP-SAT's schedule in exactly its time, and no policy is
faster than it. Only instances whose optimum was proven within the time limit count.

The worst of a few hundred instances hangs on which they are. So the mean and the worst are those over ten seeds, from
`--seed` on, each with instances of its own, in as many processes as there are cores; those of the first seed alone
stand beside them.

Decisions are timed around `decide`, in a simulation of 16 traced pipelines on 64 H100s.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from common import CORES, arguments, claim, clean_stdout, figure, report, say
from optimum import FREE, WORKER, Instance, Replay, draw, solve
from rich.console import Console
from rich.table import Table
from timed import Timed

from jigsawrl.graph.hardware import hardware_named
from jigsawrl.graph.interference import H200
from jigsawrl.graph.profile import load_profile
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Policy
from jigsawrl.simulator.jobs import job_of
from jigsawrl.simulator.simulation import Simulation

COMPARED = ("jigsaw", "greedy", "serial", "concurrent")
SEEDS, SEEDS_QUICK = 10, 4
PIPELINES, GPUS = 16, 64
WORST = 10
"""Instances that the table shows."""
TOGETHER = 1e-5
"""Seconds by which the simulator's sums may be off."""


@dataclass(frozen=True, slots=True)
class Row:
    """One instance."""

    seed: int
    workers: int
    pipelines: int
    phases: int
    optimum: int
    makespans: dict[str, float]

    def gap(self, policy: str) -> float:
        return max(0.0, self.makespans[policy] / self.optimum - 1)


@dataclass(frozen=True, slots=True)
class Found:
    """So many instances of a seed with a proven optimum, and how many it took."""

    seed: int
    rows: list[Row]
    drawn: int

    def as_json(self) -> dict[str, float]:
        found: dict[str, float] = {"seed": self.seed, "instances": len(self.rows), "drawn": self.drawn}
        for policy in ("jigsaw", "greedy"):
            gaps = [row.gap(policy) for row in self.rows]
            found |= {f"{policy}_mean_gap": statistics.mean(gaps), f"{policy}_worst_gap": max(gaps)}
        return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console:
        wanted, limit = (40, 2.0) if options.quick else (200, 20.0)
        seeds = range(options.seed, options.seed + (SEEDS_QUICK if options.quick else SEEDS))
        founds = of_all(seeds, wanted, limit, options.threads or 1)
        rows = [row for found in founds for row in found.rows]
        drawn = sum(found.drawn for found in founds)
        print_worst(console, rows, drawn)
        gaps = {policy: [row.gap(policy) for row in rows] for policy in COMPARED}
        print_gaps(console, gaps)
        print_seeds(console, founds)
        thought = think(options.seed, 2 if options.quick else 4)
        console.print(
            f"{len(thought)} decisions for {PIPELINES} pipelines on {GPUS} workers: median "
            f"{figure(float(np.median(thought)))} ms, longest {figure(max(thought))} ms"
        )
        first = [row.gap("jigsaw") for row in founds[0].rows]
        claims = {
            "mean_gap": claim(statistics.mean(gaps["jigsaw"]), at_most=0.03),
            "worst_gap": claim(max(gaps["jigsaw"]), at_most=0.18),
            "mean_gap_one_seed": claim(statistics.mean(first), at_most=0.03),
            "worst_gap_one_seed": claim(max(first), at_most=0.18),
            "decision_ms_median": claim(float(np.median(thought)), at_most=2),
            "decision_ms_p99": claim(float(np.quantile(thought, 0.99)), at_most=20),
        }
        report(
            console,
            "lookahead_gap",
            options.seed,
            claims,
            quick=options.quick,
            greedy_mean_gap=statistics.mean(gaps["greedy"]),
            greedy_worst_gap=max(gaps["greedy"]),
            instances=len(rows),
            instances_drawn=drawn,
            decisions=len(thought),
            seeds=[found.as_json() for found in founds],
            rows_one_seed=[asdict(row) for row in founds[0].rows],
            rows_worst=[asdict(row) for row in worst(rows)],
        )


def of_all(seeds: range, wanted: int, limit: float, threads: int) -> list[Found]:
    """Several seeds at a time, one for each process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, CORES // threads)) as pool:
        each = partial(compare, wanted=wanted, limit=limit, threads=threads)
        return pool.map(each, seeds, chunksize=1)


def compare(seed: int, wanted: int, limit: float, threads: int) -> Found:
    rows: list[Row] = []
    drawn = 0
    while len(rows) < wanted:
        row = measured(draw(seed * 1_000_000 + drawn), limit, threads)
        drawn += 1
        if row is not None:
            rows.append(row)
        if drawn % 20 == 0:
            say(f"seed {seed}: {drawn} instances, {len(rows)} proven")
    return Found(seed, rows, drawn)


def measured(instance: Instance, limit: float, threads: int) -> Row | None:
    """None if the optimum was not proven."""
    makespans = {policy: simulated(POLICIES[policy], instance) for policy in COMPARED}
    best = solve(instance, limit, round(min(makespans.values())), threads)
    if best is None or not best.proven:
        return None
    replayed = simulated(Replay(best), instance)
    assert abs(replayed - best.seconds) < TOGETHER, (
        f"{instance.seed}: replayed in {replayed}, not {best.seconds}"
    )
    for policy, seconds in makespans.items():
        assert seconds > best.seconds - TOGETHER, f"{instance.seed}: {policy} beats the optimum, {seconds}"
    phases = sum(2 * task.steps for task in instance.tasks)
    return Row(instance.seed, instance.workers, len(instance.tasks), phases, best.seconds, makespans)


def simulated(policy: Policy, instance: Instance) -> float:
    jobs = [task.job() for task in instance.tasks]
    return Simulation(policy, jobs, WORKER, instance.workers, FREE).run().seconds


def think(seed: int, steps: int) -> list[float]:
    """Milliseconds of every decision."""
    profile, hardware = load_profile("h100-traces"), hardware_named("h100")
    workloads = random.Random(seed).choices(sorted(profile.workloads), k=PIPELINES)
    jobs = [
        job_of(profile, workload, hardware, name=f"{number}:{workload}", steps=steps, seed=seed)
        for number, workload in enumerate(workloads)
    ]
    timed = Timed(POLICIES["jigsaw"])
    Simulation(timed, jobs, hardware, GPUS, H200, seed=seed).run()
    return timed.milliseconds


def worst(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.gap("jigsaw"))[:WORST]


def print_worst(console: Console, rows: list[Row], drawn: int) -> None:
    table = Table(
        title="where jigsaw loses most",
        caption=f"of {len(rows)} instances proven optimal, of {drawn} drawn",
    )
    for column in ("seed", "workers", "pipelines", "phases", "optimum s", *(f"{p} gap %" for p in COMPARED)):
        table.add_column(column, justify="right")
    for row in worst(rows):
        numbers = (row.seed, row.workers, row.pipelines, row.phases, row.optimum)
        table.add_row(*map(str, numbers), *(f"{100 * row.gap(policy):.1f}" for policy in COMPARED))
    console.print(table)


def print_gaps(console: Console, gaps: dict[str, list[float]]) -> None:
    table = Table(title="makespan over the optimum")
    for column in ("policy", "mean gap %", "median %", "p90 %", "worst %", "optimal"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, each in gaps.items():
        cells = (statistics.mean(each), *np.quantile(each, (0.5, 0.9)), max(each))
        hit = sum(gap < 1e-6 for gap in each)
        table.add_row(policy, *(f"{100 * cell:.1f}" for cell in cells), f"{hit} of {len(each)}")
    console.print(table)


def print_seeds(console: Console, founds: list[Found]) -> None:
    table = Table(title="jigsaw, one seed after the other")
    for column in ("seed", "mean gap %", "worst %", "instances", "drawn"):
        table.add_column(column, justify="right")
    for found in founds:
        gaps = [row.gap("jigsaw") for row in found.rows]
        percent = (f"{100 * statistics.mean(gaps):.1f}", f"{100 * max(gaps):.1f}")
        table.add_row(str(found.seed), *percent, str(len(gaps)), str(found.drawn))
    console.print(table)


if __name__ == "__main__":
    main()
