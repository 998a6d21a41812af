"""Many small pipelines that compute all the time, really run on 2 cores, under several policies, and their memory.

8, 24 and 64 pipelines (`--quick`: 24, for a few minutes) of ten steps of 400 samples of up to 4 tokens, with a model
of 0.3M parameters: a sweep, as people start one. Nobody waits for a tool, so nothing is won by going at once; all
that can be won is that both cores are busy until the end, and that what waits takes no memory. Two workers are one
core each. `serial` counts with the faster of two workers with one thread and one worker with two (with `--quick`,
two workers are the only way). Throughput is tokens over the time from the first phase to the end of the last
pipeline; the time of the whole command, with the start of processes, is beside it. Memory is the PSS of all processes
of a run, sampled every second. Repetitions are interleaved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from common import SHAPES, Spread, arguments, claim, clean_stdout, figure, report, say
from four_pipelines import WARM_UP
from rich.console import Console
from rich.table import Table
from scheduler_load import watch_memory

from jigsawrl.config.runfile import checked
from jigsawrl.pipeline.warmup import prepare_base

REPETITIONS, REPETITIONS_QUICK = {8: 3, 24: 3, 64: 1}, {24: 1}
"""By the number of pipelines."""
SIDES = {
    "serial, 2 workers": ("serial", 2),
    "serial, 1 worker": ("serial", 1),
    "concurrent": ("concurrent", 2),
    "jigsaw": ("jigsaw", 2),
}
WHOLE = "jigsaw"
STEPS, PROMPTS, SAMPLES, TOKENS = 10, 50, 8, 4
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of so many pipelines."""

    seconds: float
    """From the first phase."""
    whole_seconds: float
    """Of the command."""
    tokens: int
    gigabytes: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Sweep:
    """Run files in a folder, which differ in their seeds, and one model that is warm already."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.count = folder, seed, 0
        self.run_file: dict[str, Any] = {
            "task": {"kind": "arithmetic", "max_number": 9, "size": 100},
            "rollout": {"prompts_per_step": PROMPTS, "samples": SAMPLES, "max_tokens": TOKENS},
            "trainer": {"lr": 3e-4},
            "steps": STEPS,
            "checkpoint": {"every": 1000},
            "telemetry": {"tensorboard": False},
        }
        shape = {**SHAPES["0.3M"], "warmup_steps": WARM_UP["0.3M"]}
        tiny = {**self.run_file, "name": "base", "seed": seed, "model": {"path": "tiny", "tiny": shape}}
        home = folder / "model"
        home.mkdir()
        self.run_file["model"] = {"path": str(prepare_base(checked(tiny), home, lambda text: None))}

    def mix(self, pipelines: int) -> Path:
        names = [f"sums-{number}" for number in range(pipelines)]
        for number, name in enumerate(names):
            run = {**self.run_file, "seed": self.seed * 1000 + number}
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(run))
        file = self.folder / f"mix-{pipelines}.yaml"
        file.write_text(yaml.safe_dump({"pipelines": {name: {"run": f"{name}.yaml"} for name in names}}))
        return file

    def run(self, pipelines: int, policy: str, workers: int) -> Run:
        self.count += 1
        out = self.folder / f"{self.count}-{policy}"
        settings = (f"policy={policy}", f"workers={workers}")
        command = [sys.executable, "-m", "jigsawrl", "run", str(self.mix(pipelines)), *settings]
        started = time.perf_counter()
        with memory_watched() as memory:
            done = subprocess.run(
                [*command, "--out", str(out), "--json"], capture_output=True, text=True, timeout=LIMIT_S
            )
        if done.returncode != 0:
            raise RuntimeError(f"{policy} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        result = json.loads(done.stdout)
        tokens = sum(each["tokens"] for each in result["pipelines"].values())
        whole = time.perf_counter() - started
        return Run(result["seconds"], whole, tokens, max(memory, default=0.0))


@contextmanager
def memory_watched() -> Iterator[list[float]]:
    """Gigabytes of all processes that came from this one, one figure a second."""
    found: list[float] = []
    done = threading.Event()
    watcher = threading.Thread(target=watch_memory, args=(found, done), daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def main() -> None:
    options = arguments(__doc__).parse_args()
    repetitions = REPETITIONS_QUICK if options.quick else REPETITIONS
    sides = [side for side in SIDES if not (options.quick and side == "serial, 1 worker")]
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        sweep = Sweep(Path(scratch), options.seed)
        runs = {count: measured(sweep, count, times, sides) for count, times in repetitions.items()}
        print_runs(console, runs)
        claims = {
            "many_vs_best_worst": claim(min(over_best(each) for each in runs.values()), at_least=1.2),
        }
        report(
            console,
            "many",
            options.seed,
            claims,
            quick=options.quick,
            over_best={count: over_best(each) for count, each in runs.items()},
            runs={
                count: {side: [asdict(run) for run in found] for side, found in each.items()}
                for count, each in runs.items()
            },
        )


def measured(sweep: Sweep, pipelines: int, repetitions: int, sides: list[str]) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for repetition in range(repetitions):
        for side in sides:
            run = sweep.run(pipelines, *SIDES[side])
            runs[side].append(run)
            what = f"{pipelines} pipelines, repetition {repetition + 1}, {side}"
            say(f"{what}: {figure(run.seconds)} s, {figure(run.gigabytes)} GB")
    return runs


def speed(runs: list[Run]) -> float:
    return Spread.of([run.tokens_per_second for run in runs]).median


def over_best(runs: dict[str, list[Run]]) -> float:
    """Throughput of the whole policy over that of the best other side."""
    return speed(runs[WHOLE]) / max(speed(found) for side, found in runs.items() if side != WHOLE)


def print_runs(console: Console, runs: dict[int, dict[str, list[Run]]]) -> None:
    table = Table(title="many pipelines, 2 cores", caption="medians, in brackets the quartiles")
    for column in ("pipelines", "policy", "seconds", "with start", "tokens/s", "GB", "over the better"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for count, sides in runs.items():
        for side, each in sides.items():
            table.add_row(
                str(count),
                side,
                str(Spread.of([run.seconds for run in each])),
                figure(Spread.of([run.whole_seconds for run in each]).median),
                figure(speed(each)),
                figure(Spread.of([run.gigabytes for run in each]).median),
                figure(over_best(sides)) if side == WHOLE else "",
            )
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
