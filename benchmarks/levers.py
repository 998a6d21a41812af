"""What each lever of `jigsaw` earns: pairs and quads of traced workloads, simulated with levers left out and alone.

A cell is a number of pipelines on a number of H100s; in every cell at least 8 mixes are drawn, of workloads that fit
there. Every pipeline gets as many steps as make its time alone about as long as the others', and all arrive at once.
Lengths, and with them true durations, are drawn three times; every side gets the same three, and the figure of a mix
is the median of the three ratios. Throughput is the work over the time until the last pipeline is done, so its ratio
is that of the times.

Then settings that people have and in which a lever should matter: with and without it, over mixes that are drawn for
each setting. What looking ahead gains there is the time of the better of the sides that do not look ahead (with and
without merging), over the time of the whole policy; what merging gains is the time without it over the time with it.
Minor levers have no switch of their own: they are replaced by functions that do nothing.

At last many pipelines: 24 and 64 traced jobs on 8 and 32 GPUs. Host memory is not counted there: states of pipelines
that are far from their turn may lie on a disk.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from common import CORES, arguments, claim, clean_stdout, figure, report, say
from rich.console import Console
from rich.table import Table

from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import Hardware, hardware_named
from jigsawrl.graph.interference import CORES as DIVIDED
from jigsawrl.graph.interference import table_of
from jigsawrl.graph.profile import Profile, load_profile
from jigsawrl.policies import jigsaw, plans, rollmux
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Action, Change, Policy, State
from jigsawrl.simulator.jobs import Job, job_of, refuse_jobs
from jigsawrl.simulator.simulation import Simulation

CELLS = tuple(
    (what, count, workers)
    for what, count in (("pairs", 2), ("quads", 4))
    for workers in (1, 2, 4, 8, 16, 32, 64)
)
CELLS_QUICK = (("pairs", 2, 4), ("quads", 4, 16))
"""Pipelines and workers."""
MIXES, MIXES_QUICK = 8, 2
DRAWS = 3
LONGEST_STEPS, MOST_STEPS = 4, 60
"""Steps of the pipeline whose steps are longest, and of those that have many in the same time."""
MANY, MANY_QUICK = ((24, 8), (24, 32), (64, 8), (64, 32)), ((24, 8),)
"""Jobs and workers."""
MANY_STEPS = 30
"""At most, of a pipeline among many; the one whose steps are longest has one."""
TRIES = 400
"""Draws after which a cell has to do with the mixes it has."""

WHOLE, NO_CONTROL = "all (jigsaw)", "concurrent"
UNAHEAD = ("fill + shares", "without look-ahead")
"""Sides that do not look ahead."""
SIDES: dict[str, Policy] = {
    "serial": POLICIES["serial"],
    NO_CONTROL: POLICIES[NO_CONTROL],
    "rollmux": POLICIES["rollmux"],
    "fill": Jigsaw(shares=False, merge=False, lookahead=False),
    "fill + shares": Jigsaw(merge=False, lookahead=False),
    "without look-ahead": Jigsaw(lookahead=False),
    "without merge": Jigsaw(merge=False),
    "without shares": Jigsaw(shares=False),
    "without fill": Jigsaw(fill=False),
    WHOLE: Jigsaw(),
}
Mix = tuple[str, ...]


# Minor levers


@dataclass(frozen=True, slots=True)
class Without:
    """A policy, some functions of which do nothing."""

    policy: Policy
    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...]
    """Where they are, their names, and what stands there instead."""

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        with put_in_place(self.replaced):
            return self.policy.decide(state, changes)


@contextmanager
def put_in_place(replaced: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    before = [(where, name, getattr(where, name)) for where, name, _ in replaced]
    try:
        for where, name, instead in replaced:
            setattr(where, name, instead)
        yield
    finally:
        for where, name, original in before:
            setattr(where, name, original)


def nothing(*given: Any) -> list[Any]:
    return []


def nobody(*given: Any) -> set[int]:
    return set()


def all_workers(state: State, pipeline: Any, workers: int) -> int:
    return workers


MINOR: dict[str, Policy] = {
    "turns": Without(Jigsaw(), ((jigsaw, "out_of_turn", nobody),)),
    "balance": Without(Jigsaw(), ((jigsaw, "balanced", nothing),)),
    "narrow": Without(Jigsaw(), ((plans, "few_workers", all_workers),)),
    "plans.apart": Without(Jigsaw(), ((plans.Planner, "apart", nothing),)),
    "plans.orders": Without(
        Jigsaw(), ((plans.Planner, "orders", lambda planner, lengths: [planner.plan(planner.waiting)]),)
    ),
    "plans.variants": Without(Jigsaw(), ((plans.Planner, "variants", nothing),)),
    "plans.sparing": Without(Jigsaw(), ((plans.Planner, "sparing", nothing),)),
    "plans.putting_off": Without(Jigsaw(), ((plans.Planner, "putting_off", nothing),)),
}
GATHERING = {
    "rollmux": POLICIES["rollmux"],
    "gathering": Without(POLICIES["rollmux"], ((rollmux, "gathered", nothing),)),
}


# Mixes and settings


@dataclass(frozen=True, slots=True)
class Setting:
    """Where mixes run, and what they are made of."""

    name: str
    pipelines: int
    workers: int
    hardware: str = "h100"
    rollout_workers: int | None = None
    """In a pool of their own."""
    tp: int | None = None
    """Workers of an engine, where it is not as traced."""
    long_first: bool = False
    """Whether the first pipeline has four times the steps of the others."""
    spread: float = 0.0
    """Part of the longest time alone over which arrivals are spread."""
    only: str = ""
    """Part of the names of the workloads that are drawn."""
    divided: bool = False
    """Whether those who share a worker merely divide its time, as on GPUs without MPS and on cores."""
    many: bool = False
    """Whether host memory and the length of the longest pipeline do not matter."""

    @property
    def machine(self) -> Hardware:
        return hardware_named(self.hardware)

    def workloads(self, profile: Profile) -> list[str]:
        return sorted(name for name in profile.workloads if self.only in name)

    def jobs(self, profile: Profile, mix: Mix, draw: int) -> list[Job]:
        """With the same steps whatever the draw. A JigsawError where they do not fit."""
        first = [self.job(profile, workload, number, 0) for number, workload in enumerate(mix)]
        if not self.many:
            refuse_jobs(first, self.machine, self.workers, self.rollout_workers)
        alone = [self.solo(job) for job in first]
        most, longest = (MANY_STEPS, 1) if self.many else (MOST_STEPS, LONGEST_STEPS)
        steps = [min(most, max(1, round(longest * max(alone) / each))) for each in alone]
        if self.long_first:
            steps[0] *= 4
        arrivals = random.Random(draw).sample(range(len(mix)), len(mix))
        total = self.spread * longest * max(alone) / len(mix)
        jobs = [self.job(profile, workload, number, draw) for number, workload in enumerate(mix)]
        return [
            replace(job, shape=replace(job.shape, steps=count, arrival=total * place))
            for job, count, place in zip(jobs, steps, arrivals, strict=True)
        ]

    def job(self, profile: Profile, workload: str, number: int, draw: int) -> Job:
        tp = min(self.tp or profile.workload(workload).tp, self.rollout_workers or self.workers)
        name = f"{number}:{workload}"
        return job_of(profile, workload, self.machine, name=name, steps=1, seed=draw, tp=tp)

    def solo(self, job: Job) -> float:
        return self.seconds(POLICIES["serial"], [job])

    def seconds(self, policy: Policy, jobs: list[Job]) -> float:
        table = DIVIDED if self.divided else table_of(self.hardware)
        simulation = Simulation(
            policy, jobs, self.machine, self.workers, table, rollout_workers=self.rollout_workers
        )
        return simulation.run().seconds


def drawn(setting: Setting, profile: Profile, seed: int, count: int) -> list[Mix]:
    """Mixes that fit there; a workload may be beside itself, as in sweeps."""
    rng = random.Random(f"{seed} {setting.name}")
    names = setting.workloads(profile)
    found: list[Mix] = []
    for _ in range(TRIES):
        if len(found) == count:
            break
        mix = tuple(sorted(rng.choices(names, k=setting.pipelines)))
        try:
            setting.jobs(profile, mix, 0)
        except JigsawError:
            continue
        found.append(mix)
    return found


def measured(setting: Setting, sides: Sequence[str], given: tuple[Mix, int, int]) -> dict[str, list[float]]:
    """Seconds of every side with each draw of the durations."""
    mix, seed, draws = given
    profile = load_profile("h100-traces")
    known = {**SIDES, **MINOR, **GATHERING}
    jobs = [setting.jobs(profile, mix, seed * DRAWS + draw) for draw in range(draws)]
    return {side: [setting.seconds(known[side], each) for each in jobs] for side in sides}


@dataclass(frozen=True, slots=True)
class Result:
    """A setting, and of each of its mixes the seconds of every side."""

    setting: Setting
    mixes: list[Mix]
    rows: list[dict[str, list[float]]]

    def gains(self, side: str, over: Sequence[str]) -> list[float]:
        """Of every mix: how much faster a side is than the best of others."""
        return [
            min(
                statistics.median(a / b for a, b in zip(row[other], row[side], strict=True)) for other in over
            )
            for row in self.rows
        ]

    def mean(self, side: str, over: Sequence[str]) -> float:
        gains = self.gains(side, over)
        return math.exp(statistics.fmean(map(math.log, gains))) if gains else float("nan")

    def as_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting.name,
            "mixes": self.mixes,
            "seconds": [{side: [short(s) for s in each] for side, each in row.items()} for row in self.rows],
        }


def short(value: float) -> float:
    return float(f"{value:.5g}")


# What is run

IN_TURNS = Setting(
    "threes in pools of 16 and 8, time divided, engines of 1", 3, 24, rollout_workers=16, tp=1, divided=True
)
TAILS = Setting(
    "pairs of gsm8k in pools of 8 and 8, time divided, engines of 1",
    2,
    16,
    rollout_workers=8,
    tp=1,
    only="gsm8k",
    divided=True,
)
LOOKAHEAD_SETTINGS = (
    Setting("quads on 64, engines of 4", 4, 64),
    Setting("quads on 16, one is four times as long", 4, 16, long_first=True),
    Setting("quads on 32, arriving one after the other", 4, 32, spread=0.5),
    IN_TURNS,
    Setting("quads in pools of 8 and 8, time divided", 4, 16, rollout_workers=8, divided=True),
)
MERGE_SETTINGS = (
    Setting("quads on 64, engines of 4", 4, 64),
    Setting("quads on 8, engines of 1", 4, 8, tp=1),
    IN_TURNS,
    TAILS,
)
SETTINGS_QUICK = (IN_TURNS, TAILS)
MINOR_SETTINGS = (Setting("pairs on 16", 2, 16), Setting("quads on 8", 4, 8))
GATHERED = replace(IN_TURNS, name="threes in pools of 16 and 8, engines of 1", divided=False)


class Bench:
    """Runs settings in as many processes as there are cores."""

    def __init__(self, seed: int, count: int, draws: int, processes: ProcessPoolExecutor) -> None:
        self.seed, self.count, self.draws = seed, count, draws
        self.processes = processes
        self.profile = load_profile("h100-traces")

    def run(self, setting: Setting, sides: Iterable[str], count: int | None = None) -> Result:
        say(setting.name)
        mixes = drawn(setting, self.profile, self.seed, count or self.count)
        tasks = [(mix, self.seed, self.draws) for mix in mixes]
        rows = list(self.processes.map(partial(measured, setting, tuple(sides)), tasks))
        return Result(setting, mixes, rows)


def main() -> None:
    options = arguments(__doc__).parse_args()
    count, draws = (MIXES_QUICK, 1) if options.quick else (MIXES, DRAWS)
    with clean_stdout() as console, ProcessPoolExecutor(CORES, mp_context=get_context("spawn")) as processes:
        bench = Bench(options.seed, count, draws, processes)
        chosen = CELLS_QUICK if options.quick else CELLS
        cells = [bench.run(Setting(f"{what} on {workers}", n, workers), SIDES) for what, n, workers in chosen]
        print_cells(console, cells)
        ahead_in, merge_in = (SETTINGS_QUICK,) * 2 if options.quick else (LOOKAHEAD_SETTINGS, MERGE_SETTINGS)
        aheads = [bench.run(each, (*UNAHEAD, NO_CONTROL, WHOLE)) for each in ahead_in]
        merges = [bench.run(each, ("without merge", NO_CONTROL, WHOLE)) for each in merge_in]
        print_settings(console, aheads, merges)
        minor = [] if options.quick else [bench.run(each, (*MINOR, WHOLE)) for each in MINOR_SETTINGS]
        gathered = bench.run(GATHERED, GATHERING)
        print_minor(console, minor, gathered)
        many = [
            bench.run(
                Setting(f"{n} jobs on {workers}", n, workers, many=True),
                ("serial", NO_CONTROL, WHOLE),
                1 if options.quick else 2,
            )
            for n, workers in (MANY_QUICK if options.quick else MANY)
        ]
        print_many(console, many)
        report(
            console,
            "levers",
            options.seed,
            claims(cells, aheads, merges, many),
            quick=options.quick,
            cells=[each.as_json() for each in cells],
            lookahead=[each.as_json() for each in aheads],
            merge=[each.as_json() for each in merges],
            minor=[each.as_json() for each in (*minor, gathered)],
            many=[each.as_json() for each in many],
        )


def claims(
    cells: list[Result], aheads: list[Result], merges: list[Result], many: list[Result]
) -> dict[str, dict[str, Any]]:
    others = tuple(side for side in SIDES if side != WHOLE)
    over_concurrent = [gain for cell in cells for gain in cell.gains(WHOLE, (NO_CONTROL,))]
    mean = math.exp(statistics.fmean(map(math.log, over_concurrent)))
    worst = min(gain for cell in cells for gain in cell.gains(WHOLE, others))
    ahead = max(result.mean(WHOLE, UNAHEAD) for result in aheads)
    merge = max(result.mean(WHOLE, ("without merge",)) for result in merges)
    least = min(result.mean(WHOLE, ("serial", NO_CONTROL)) for result in many)
    return {
        "all_over_concurrent_mean": claim(mean, at_least=1.10),
        "all_over_best_of_levers_worst": claim(worst, at_least=0.97),
        "lookahead_somewhere": claim(ahead, at_least=1.10),
        "merge_somewhere": claim(merge, at_least=1.05),
        "many_sim_vs_best_worst": claim(least, at_least=1.05),
    }


# Tables


def print_cells(console: Console, cells: list[Result]) -> None:
    others = [side for side in SIDES if side not in (NO_CONTROL, WHOLE)]
    table = Table(
        title="throughput over no control (concurrent), geometric means",
        caption="worst: the whole policy over the best other side, on the mix where it is least",
    )
    table.add_column("mixes")
    for column in (*others, WHOLE, "worst"):
        table.add_column(column, justify="right")
    for cell in cells:
        means = [figure(cell.mean(side, (NO_CONTROL,))) for side in (*others, WHOLE)]
        worst = min(cell.gains(WHOLE, (*others, NO_CONTROL)))
        table.add_row(f"{len(cell.mixes)} {cell.setting.name}", *means, figure(worst))
    console.print(table)


def print_settings(console: Console, aheads: list[Result], merges: list[Result]) -> None:
    table = Table(title="what a lever gains where it should matter", caption="geometric means over the mixes")
    for column in ("lever", "setting", "mixes", "gain", "least", "most", "all over no control"):
        table.add_column(column, justify="left" if column in ("lever", "setting") else "right")
    for lever, results, over in (("look-ahead", aheads, UNAHEAD), ("merge", merges, ("without merge",))):
        for result in results:
            gains = result.gains(WHOLE, over)
            cells = [figure(each) for each in (result.mean(WHOLE, over), min(gains), max(gains))]
            cells.append(figure(result.mean(WHOLE, (NO_CONTROL,))))
            table.add_row(lever, result.setting.name, str(len(gains)), *cells)
    console.print(table)


def print_minor(console: Console, minor: list[Result], gathered: Result) -> None:
    table = Table(
        title="minor levers: what each gains, least and most",
        caption="balance acts on how a GPU is divided among rollouts, which is not simulated",
    )
    table.add_column("lever")
    for result in (*minor, gathered):
        table.add_column(result.setting.name, justify="right")
    for lever in MINOR:
        rows = [spread(result.gains(WHOLE, (lever,))) for result in minor]
        table.add_row(lever, *rows, "")
    table.add_row(
        "gathering (rollmux)", *("" for _ in minor), spread(gathered.gains("rollmux", ("gathering",)))
    )
    console.print(table)


def spread(gains: list[float]) -> str:
    return f"{statistics.fmean(gains):.3f} ({min(gains):.3f} .. {max(gains):.3f})"


def print_many(console: Console, many: list[Result]) -> None:
    table = Table(title="many pipelines: throughput over the better of serial and no control")
    for column in ("jobs", "over serial", "over concurrent", "over the better", "least"):
        table.add_column(column, justify="left" if column == "jobs" else "right")
    for result in many:
        both = ("serial", NO_CONTROL)
        cells = [result.mean(WHOLE, over) for over in (both[:1], both[1:], both)]
        table.add_row(result.setting.name, *map(figure, cells), figure(min(result.gains(WHOLE, both))))
    console.print(table)


if __name__ == "__main__":
    main()
