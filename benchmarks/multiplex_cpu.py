"""Four real pipelines on 2 cores under several policies: how much more is done when they share.

Two pipelines compute all the time; two are agents that wait 0.4 to 1.6 s for their tool in every turn. All run for
real, with the command that people use: drivers, actors and the scheduler are processes, models learn. Two workers are
one core each. `serial` counts with the faster of two workers with one thread and one worker with two (with `--quick`,
two workers are the only way). Throughput is tokens generated and trained on over the time from the first phase to the
end of the last pipeline; starting processes is not in it. Repetitions are interleaved. Slowdown is a pipeline's own
time over its time in the serial run.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from common import Spread, arguments, claim, clean_stdout, figure, report, say
from four_pipelines import Four, Run, alone
from rich.table import Table

SIDES = {
    "serial, 2 workers": ("serial", 2),
    "serial, 1 worker": ("serial", 1),
    "concurrent": ("concurrent", 2),
    "rollmux": ("rollmux", 2),
    "jigsaw": ("jigsaw", 2),
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        four = Four(Path(scratch), 0.06 if options.quick else 0.5, options.seed)
        sides = [side for side in SIDES if not (options.quick and side == "serial, 1 worker")]
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for repetition in range(1 if options.quick else 3):
            for side in sides:
                runs[side].append(four.run(*SIDES[side]))
                say(f"repetition {repetition + 1}, {side}: {figure(runs[side][-1].seconds)} s")
        serial = max((side for side in sides if "serial" in side), key=lambda side: speed(runs[side]).median)
        table = Table(title="four pipelines, 2 cores", caption="medians, in brackets the quartiles")
        for column in (
            "policy",
            "seconds",
            "tokens/s",
            "over serial",
            "slowdown mean",
            "worst",
            "scheduler %",
        ):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for side, each in runs.items():
            ratios = over(each, runs[serial])
            slowdowns = [slowdown(run, base) for run, base in zip(each, runs[serial], strict=True)]
            table.add_row(
                side,
                str(Spread.of([run.seconds for run in each])),
                str(speed(each)),
                str(Spread.of(ratios)),
                figure(statistics.mean(s for pair in slowdowns for s in pair.values())),
                figure(max(s for pair in slowdowns for s in pair.values())),
                figure(100 * statistics.median(run.scheduler_seconds / run.seconds for run in each)),
            )
        console.print(table)
        claims = {
            "vs_serial": claim(Spread.of(over(runs["jigsaw"], runs[serial])).median, at_least=1.5),
            "vs_concurrent": claim(Spread.of(over(runs["jigsaw"], runs["concurrent"])).median, at_least=1.0),
            "vs_rollmux": claim(Spread.of(over(runs["jigsaw"], runs["rollmux"])).median, at_least=1.0),
        }
        report(
            console,
            "multiplex_cpu",
            options.seed,
            claims,
            quick=options.quick,
            serial=serial,
            seconds={side: [run.seconds for run in each] for side, each in runs.items()},
            tokens_per_second={side: [run.tokens_per_second for run in each] for side, each in runs.items()},
            slowdown={
                name: statistics.median(
                    slowdown(run, base)[name] for run, base in zip(runs["jigsaw"], runs[serial], strict=True)
                )
                for name in runs["jigsaw"][0].finished
            },
        )


def speed(runs: list[Run]) -> Spread:
    return Spread.of([run.tokens_per_second for run in runs])


def over(runs: list[Run], others: list[Run]) -> list[float]:
    return [a.tokens_per_second / b.tokens_per_second for a, b in zip(runs, others, strict=True)]


def slowdown(run: Run, serial: Run) -> dict[str, float]:
    solo = alone(serial)
    return {name: run.finished[name] / solo[name] for name in solo}


if __name__ == "__main__":
    main()
