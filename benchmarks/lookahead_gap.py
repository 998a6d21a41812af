"""How far the look-ahead is from the best that could be done, and how long it thinks.

Makespans of `jigsaw` and `greedy` in the simulator against the optimum that CP-SAT proves, on random small problems:
2 to 4 pipelines of 1 to 3 steps on 2 to 4 workers (`optimum.py` says what they are made of). They are of a kind that
CP-SAT expresses exactly: what is foreseen happens, every phase may run on any number of workers, memory is what is
scarce, and what fits in memory does not slow each other down. Interference, tool waits and moving tails are left out:
with speeds that depend on what runs beside, no solver proves an optimum. That both models are the same problem is
checked on every instance, both ways: the simulator plays CP-SAT's schedule in exactly its time, and no policy is
faster than it. Only instances whose optimum was proven within the time limit count.

Decisions are timed around `decide`, in a simulation of 16 traced pipelines on 64 H100s.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np
from common import arguments, claim, clean_stdout, figure, report, say
from optimum import FREE, WORKER, Instance, Replay, draw, solve
from rich.console import Console
from rich.table import Table

from jigsawrl.graph.hardware import hardware_named
from jigsawrl.graph.interference import H200
from jigsawrl.graph.profile import load_profile
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Action, Event, Policy, State
from jigsawrl.simulator.setup import job_of
from jigsawrl.simulator.simulation import Simulation

COMPARED = ("jigsaw", "greedy", "serial", "concurrent")
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


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console:
        wanted, limit = (40, 2.0) if options.quick else (200, 20.0)
        rows, drawn = compare(options.seed, wanted, limit, options.threads or 1)
        print_worst(console, rows, drawn)
        gaps = {policy: [row.gap(policy) for row in rows] for policy in COMPARED}
        print_gaps(console, gaps)
        thought = think(options.seed, 2 if options.quick else 4)
        console.print(
            f"{len(thought)} decisions for {PIPELINES} pipelines on {GPUS} workers: median "
            f"{figure(float(np.median(thought)))} ms, longest {figure(max(thought))} ms"
        )
        claims = {
            "mean_gap": claim(statistics.mean(gaps["jigsaw"]), at_most=0.03),
            "worst_gap": claim(max(gaps["jigsaw"]), at_most=0.15),
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
            rows=[asdict(row) for row in rows],
        )


def compare(seed: int, wanted: int, limit: float, threads: int) -> tuple[list[Row], int]:
    """So many instances with a proven optimum, and how many it took."""
    rows: list[Row] = []
    drawn = 0
    while len(rows) < wanted:
        row = measured(draw(seed * 1_000_000 + drawn), limit, threads)
        drawn += 1
        if row is not None:
            rows.append(row)
        if drawn % 20 == 0:
            say(f"{drawn} instances, {len(rows)} proven")
    return rows, drawn


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


class Timed:
    """A policy, and the milliseconds that each of its decisions took."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.milliseconds: list[float] = []

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        started = time.perf_counter()
        actions = self.policy.decide(state, events)
        self.milliseconds.append(1000 * (time.perf_counter() - started))
        return actions


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


def print_worst(console: Console, rows: list[Row], drawn: int) -> None:
    table = Table(
        title="where jigsaw loses most",
        caption=f"of {len(rows)} instances proven optimal, of {drawn} drawn",
    )
    for column in ("seed", "workers", "pipelines", "phases", "optimum s", *(f"{p} gap %" for p in COMPARED)):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: -row.gap("jigsaw"))[:WORST]:
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


if __name__ == "__main__":
    main()
