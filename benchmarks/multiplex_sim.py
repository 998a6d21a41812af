"""Pairs and quads of traced workloads, simulated under every policy, against running them one after the other.

Each mix runs on 4 to 64 GPUs, with the batch kept as GPUs grow (what people do to finish sooner; the claims are over
this grid) and with the batch grown along. Every pipeline gets as many steps as make its time alone about as long as
the others', so that all have company until near the end; all arrive at once. Throughput is tokens generated and
trained on over the time until the last is done, so its ratio is that of the times. Slowdown is a pipeline's own time
over its time alone. Memory on devices and hosts counts, and so does the time of swaps and of moving tails.
"""

from __future__ import annotations

import itertools
import random
import statistics
from typing import Any

from common import arguments, claim, clean_stdout, figure, report, say
from rich.console import Console
from rich.table import Table

from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import hardware_named
from jigsawrl.graph.interference import H200
from jigsawrl.graph.profile import Profile, load_profile
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Policy
from jigsawrl.simulator.jobs import Job, job_of, refuse_jobs
from jigsawrl.simulator.simulation import Simulation
from jigsawrl.telemetry.report import report as measure
from jigsawrl.telemetry.timeline import read_spans

GPUS = (4, 8, 16, 32, 64)
LEVERS = {
    "fill": Jigsaw(shares=False, merge=False, lookahead=False, name="fill"),
    "fill + shares": Jigsaw(merge=False, lookahead=False, name="fill + shares"),
    "fill + shares + merge": Jigsaw(lookahead=False, name="fill + shares + merge"),
    "all (jigsaw)": Jigsaw(),
}
LONGEST_STEPS = 4
"""Steps of the pipeline whose steps are longest."""
MOST_STEPS = 60
Mix = tuple[str, ...]


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console:
        profile = load_profile("h100-traces")
        pairs, quads = mixes(profile, options.seed, 4 if options.quick else 16, 1 if options.quick else 5)
        gpus = (4, 16, 64) if options.quick else GPUS
        results: dict[str, Any] = {}
        for what, chosen in (("pairs", pairs), ("quads", quads)):
            for grown in (False,) if options.quick else (False, True):
                name = f"{what}, batch {'grown' if grown else 'kept'}"
                some = chosen[: max(1, len(chosen) // 4)] if grown else chosen
                results[name] = grid(profile, some, gpus, grown, options.seed, dict(POLICIES), name)
                print_grid(console, name, results[name], gpus)
        levers = grid(
            profile, pairs[:3], gpus, False, options.seed, {"serial": POLICIES["serial"], **LEVERS}, "levers"
        )
        print_grid(console, "one lever after the other (three pairs, batch kept)", levers, gpus)
        kept, quad = results["pairs, batch kept"], results["quads, batch kept"]
        claims = {
            "pairs_mean_vs_serial": claim(mean(kept, "jigsaw", "serial"), at_least=1.56),
            "pairs_max_vs_serial": claim(best(kept, "jigsaw", "serial"), at_least=1.85),
            "pairs_mean_vs_rollmux": claim(mean(kept, "jigsaw", "rollmux"), at_least=1.25),
            "pairs_mean_slowdown": claim(mean_slowdown(kept, "jigsaw"), at_most=1.5),
            "quads_mean_vs_serial": claim(mean(quad, "jigsaw", "serial"), at_least=1.0),
            "quads_max_vs_serial": claim(best(quad, "jigsaw", "serial"), at_least=1.0),
        }
        report(
            console, "multiplex_sim", options.seed, claims, quick=options.quick, grids=results, levers=levers
        )


def mixes(profile: Profile, seed: int, pairs: int, quads: int) -> tuple[list[Mix], list[Mix]]:
    """Drawn without repetition; a workload may be paired with itself, as sweeps do."""
    names = sorted(profile.workloads)
    rng = random.Random(seed)
    two = rng.sample(list(itertools.combinations_with_replacement(names, 2)), pairs)
    return two, [tuple(rng.choices(names, k=4)) for _ in range(quads)]


def grid(
    profile: Profile,
    chosen: list[Mix],
    gpus: tuple[int, ...],
    grown: bool,
    seed: int,
    policies: dict[str, Policy],
    title: str,
) -> list[dict[str, Any]]:
    rows = []
    for count in gpus:
        say(f"{title}: {count} GPUs")
        for mix in chosen:
            try:
                jobs = make_jobs(profile, mix, count, grown, seed)
            except JigsawError as error:
                rows.append({"mix": mix, "gpus": count, "refused": str(error)})
                continue
            rows.append({"mix": mix, "gpus": count, "policies": run_all(jobs, count, policies)})
    return rows


def make_jobs(profile: Profile, mix: Mix, gpus: int, grown: bool, seed: int) -> list[Job]:
    hardware = hardware_named("h100")
    jobs = []
    for number, workload in enumerate(mix):
        measured = profile.workload(workload)
        prompts = measured.sequences // measured.samples
        jobs.append(
            job_of(
                profile,
                workload,
                hardware,
                name=f"{number}:{workload}",
                steps=1,
                seed=seed,
                prompts=prompts * gpus // measured.gpus if grown else prompts,
            )
        )
    refuse_jobs(jobs, hardware, gpus)
    alone = [solo(job, gpus) for job in jobs]
    steps = [min(MOST_STEPS, max(1, round(LONGEST_STEPS * max(alone) / each))) for each in alone]
    return [with_steps(job, count) for job, count in zip(jobs, steps, strict=True)]


def with_steps(job: Job, steps: int) -> Job:
    from dataclasses import replace

    return replace(job, shape=replace(job.shape, steps=steps))


def solo(job: Job, gpus: int) -> float:
    return Simulation(POLICIES["serial"], [job], hardware_named("h100"), gpus, H200).run().seconds


def run_all(jobs: list[Job], gpus: int, policies: dict[str, Policy]) -> dict[str, Any]:
    alone = {job.shape.name: solo(job, gpus) for job in jobs}
    rows = {}
    for name, policy in policies.items():
        outcome = Simulation(policy, jobs, hardware_named("h100"), gpus, H200).run()
        seen = measure(read_spans(outcome.log), gpus, start=0.0, end=outcome.seconds)
        slowdowns = [outcome.finished[p] / alone[p] for p in alone]
        rows[name] = {
            "seconds": short(outcome.seconds),
            "tokens_per_second": short(sum(outcome.tokens.values()) / outcome.seconds),
            "slowdown": short(statistics.mean(slowdowns)),
            "slowdown_max": short(max(slowdowns)),
            "mfu": short(flops(jobs) / (outcome.seconds * gpus * hardware_named("h100").flops)),
            "bubbles": {cause: round(lost / seen.worker_seconds, 3) for cause, lost in seen.bubbles.items()},
        }
    return rows


def short(value: float) -> float:
    """Five digits are enough for a record."""
    return float(f"{value:.5g}")


def flops(jobs: list[Job]) -> float:
    """Of all steps: forward for every generated token and every log-prob, forward and backward for training."""
    total = 0.0
    for job in jobs:
        shape = job.shape
        passes = 1 + 3 * shape.epochs + shape.old_logprobs + shape.reference
        for step in range(1, shape.steps + 1):
            tokens = float(job.lengths(step).sum()) + shape.prompt_tokens * shape.sequences
            total += passes * shape.model.flops(tokens, tokens / shape.sequences)
    return total


def ratios(rows: list[dict[str, Any]], policy: str, against: str) -> list[float]:
    return [
        row["policies"][against]["seconds"] / row["policies"][policy]["seconds"]
        for row in rows
        if "policies" in row
    ]


def mean(rows: list[dict[str, Any]], policy: str, against: str) -> float:
    return statistics.mean(ratios(rows, policy, against))


def best(rows: list[dict[str, Any]], policy: str, against: str) -> float:
    return max(ratios(rows, policy, against))


def mean_slowdown(rows: list[dict[str, Any]], policy: str) -> float:
    return statistics.mean(row["policies"][policy]["slowdown"] for row in rows if "policies" in row)


def print_grid(console: Console, title: str, rows: list[dict[str, Any]], gpus: tuple[int, ...]) -> None:
    done = [row for row in rows if "policies" in row]
    table = Table(title=title, caption=f"{len(done)} mixes; throughput against serial; means")
    for column in (
        "policy",
        *(f"{n} GPUs" for n in gpus),
        "mean",
        "max",
        "slowdown",
        "MFU %",
        "largest bubbles %",
    ):
        table.add_column(column, justify="left" if column in ("policy", "largest bubbles %") else "right")
    for policy in done[0]["policies"]:
        by_size = [
            figure(
                statistics.mean(ratios([row for row in done if row["gpus"] == n], policy, "serial") or [0])
            )
            for n in gpus
        ]
        cells = [row["policies"][policy] for row in done]
        bubbles = {
            cause: 100 * statistics.mean(cell["bubbles"][cause] for cell in cells)
            for cause in cells[0]["bubbles"]
        }
        largest = sorted(bubbles, key=lambda cause: -bubbles[cause])[:3]
        table.add_row(
            policy,
            *by_size,
            figure(mean(done, policy, "serial")),
            figure(best(done, policy, "serial")),
            figure(mean_slowdown(done, policy)),
            figure(100 * statistics.mean(cell["mfu"] for cell in cells)),
            ", ".join(f"{cause} {bubbles[cause]:.0f}" for cause in largest),
        )
    console.print(table)


if __name__ == "__main__":
    main()
