"""What a decision costs as a machine grows, and whether it is worth it: 8 to 1,024 workers, simulated.

A quarter as many pipelines as workers, drawn from the traced workloads, on H100s. Batches and the widths of engines
are as traced. One decision is what the policy is asked once, for all events of a moment.
`growth_exponent` is the slope of the logarithm of the median decision over the logarithm of the number of workers.
Throughput is held against no control at all (`concurrent`). Above 128 workers that is simulated as cells of 128 with
their part of the pipelines, and the mean of the cells' times counts, as if their work were divided evenly: all of it
at once would be simulated for hours. With `--quick` the largest machine has 128 workers, and the
claims are about that one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from common import arguments, claim, clean_stdout, figure, report, say
from rich.console import Console
from rich.table import Table
from timed import Timed

from jigsawrl.graph.hardware import hardware_named
from jigsawrl.graph.interference import H200
from jigsawrl.graph.profile import load_profile
from jigsawrl.policies.named import POLICIES
from jigsawrl.simulator.jobs import Job, job_of
from jigsawrl.simulator.simulation import Simulation

WORKERS, WORKERS_QUICK = (8, 16, 32, 64, 128, 256, 512, 1024), (8, 16, 32, 64, 128)
SHARE = 4
"""Workers for each pipeline."""
STEPS = 2
"""Of a pipeline."""
CELL = 128
"""Workers on which no control is simulated at once."""


def timed(jobs: Sequence[Job], workers: int) -> tuple[float, list[float]]:
    """Simulated seconds under `jigsaw`, and the milliseconds of each decision: only this knows how one is timed."""
    policy = Timed(POLICIES["jigsaw"])
    outcome = Simulation(policy, jobs, hardware_named("h100"), workers, H200).run()
    return outcome.seconds, policy.milliseconds


@dataclass(frozen=True, slots=True)
class Row:
    """One size of machine."""

    workers: int
    pipelines: int
    decisions: int
    median_ms: float
    p99_ms: float
    longest_ms: float
    seconds: float
    """Simulated, until all work is done."""
    real_seconds: float


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console:
        rows = [measured(workers, options.seed) for workers in (WORKERS_QUICK if options.quick else WORKERS)]
        largest = rows[-1]
        say(f"{largest.workers} workers under concurrent")
        uncontrolled = run_concurrent(jobs_on(largest.workers, options.seed), largest.workers)
        print_rows(console, rows)
        claims = {
            "decision_ms_p99_at_1024": claim(largest.p99_ms, at_most=50),
            "growth_exponent": claim(exponent(rows), at_most=1.1),
            "throughput_vs_concurrent_at_1024": claim(uncontrolled / largest.seconds, at_least=1.05),
        }
        report(
            console,
            "scale_sim",
            options.seed,
            claims,
            quick=options.quick,
            rows=[asdict(row) for row in rows],
            concurrent_seconds=uncontrolled,
        )


def measured(workers: int, seed: int) -> Row:
    say(f"{workers} workers")
    jobs = jobs_on(workers, seed)
    started = time.perf_counter()
    seconds, decisions = timed(jobs, workers)
    return Row(
        workers,
        len(jobs),
        len(decisions),
        statistics.median(decisions),
        float(np.quantile(decisions, 0.99)),
        max(decisions),
        seconds,
        time.perf_counter() - started,
    )


def jobs_on(workers: int, seed: int) -> list[Job]:
    profile, hardware = load_profile("h100-traces"), hardware_named("h100")
    workloads = random.Random(f"{seed} {workers}").choices(sorted(profile.workloads), k=workers // SHARE)
    return [
        job_of(profile, workload, hardware, name=f"{number}:{workload}", steps=STEPS, seed=seed)
        for number, workload in enumerate(workloads)
    ]


def run_concurrent(jobs: Sequence[Job], workers: int) -> float:
    cells = max(1, workers // CELL)
    return statistics.fmean(run_cell(jobs[cell::cells], workers // cells) for cell in range(cells))


def run_cell(jobs: Sequence[Job], workers: int) -> float:
    return Simulation(POLICIES["concurrent"], jobs, hardware_named("h100"), workers, H200).run().seconds


def exponent(rows: Sequence[Row]) -> float:
    """The slope of log median decision over log workers."""
    sizes, medians = np.log([row.workers for row in rows]), np.log([row.median_ms for row in rows])
    return float(np.polyfit(sizes, medians, 1)[0])


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="decisions of jigsaw", caption="one decision: all events of a moment")
    for column in (
        "workers",
        "pipelines",
        "decisions",
        "median ms",
        "p99 ms",
        "longest ms",
        "simulated s",
        "real s",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (row.median_ms, row.p99_ms, row.longest_ms, row.seconds, row.real_seconds)
        table.add_row(str(row.workers), str(row.pipelines), str(row.decisions), *map(figure, numbers))
    console.print(table)


if __name__ == "__main__":
    main()
