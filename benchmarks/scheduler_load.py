"""What the scheduler costs: its part of a run of four pipelines, the messages it can take, the start of processes.

The part is the CPU time of the scheduler's process, display and log included, over the wall time of a real run of
four pipelines on 2 cores (`four_pipelines.py`). Phases are short, a tenth of a second to a few seconds, which is
hard on it; with models of 10M parameters instead of 0.3M they last seconds. Messages a second: four pretended drivers
end phases as fast as it answers, under the look-ahead policy and under `concurrent`, in one process on one core.
Starting: 12 processes from the fork server, until each has answered; and the memory of all processes of the run,
counted by PSS.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

from common import arguments, claim, clean_stdout, figure, report, say
from four_pipelines import Four
from rich.table import Table

from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.config.runfile import checked
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.interference import CORES
from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime.family import PRELOADED
from jigsawrl.runtime.first_outlook import first_outlook
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import DriverBegan, Heard, PhaseDone

PROCESSES = 12
PHASES = 2000


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        four = Four(Path(scratch), 0.1 if options.quick else 0.5, options.seed)
        say("a run of four pipelines")
        memory: list[float] = []
        done = threading.Event()
        watcher = threading.Thread(target=watch_memory, args=(memory, done), daemon=True)
        watcher.start()
        run = four.run("jigsaw")
        done.set()
        watcher.join()
        fraction = run.scheduler_seconds / run.seconds
        larger = None
        if not options.quick:
            say("a run of four larger pipelines")
            run_10m = Four(Path(scratch) / "larger", 0.03, options.seed, "10M").run("jigsaw")
            larger = run_10m.scheduler_seconds / run_10m.seconds
        say("messages")
        rates = {
            policy: messages_a_second(policy, 200 if options.quick else PHASES)
            for policy in ("concurrent", "jigsaw")
        }
        say("processes")
        first, others = start_processes()
        table = Table(title="the scheduler")
        table.add_column("what")
        table.add_column("figure", justify="right")
        table.add_row("part of the wall time of a run of four pipelines", f"{100 * fraction:.2f} %")
        if larger is not None:
            table.add_row("the same, models of 10M parameters", f"{100 * larger:.2f} %")
        for policy, rate in rates.items():
            table.add_row(f"messages a second on one core, {policy}", figure(rate))
        table.add_row("seconds until the first process is up (imports torch)", figure(first))
        table.add_row(f"seconds until {PROCESSES} more are up", figure(others))
        table.add_row("most memory of all processes of the run, GB by PSS", figure(max(memory, default=0.0)))
        console.print(table)
        claims = {"overhead_fraction": claim(fraction, at_most=0.01)}
        report(
            console,
            "scheduler_load",
            options.seed,
            claims,
            quick=options.quick,
            overhead_fraction_10m=larger,
            messages_per_second=rates,
            start_first_seconds=first,
            start_12_seconds=others,
            pss_gb=max(memory, default=0.0),
            run_seconds=run.seconds,
        )


def messages_a_second(policy: str, phases: int) -> float:
    """Of pretended drivers; a message is entered, the policy asked, its answer carried out."""
    worker = cpu_worker(1, 2)
    config = checked({"task": {"kind": "arithmetic"}, "rollout": {"max_tokens": 512}})
    outlook = first_outlook("p", config, PipelineConfig(run="none.yaml"), worker, 2, None)
    core = SchedulerCore(POLICIES[policy], CORES, 2, worker.device_bytes)
    names = [f"p{number}" for number in range(4)]
    for name in names:
        core.join(name, outlook)
    count, started, events = 0, time.perf_counter(), began(names, phases)
    while count < phases:
        core.handle(float(count), events)
        running = core.state.running()
        phase = running[count % len(running)]
        done = PhaseDone(phase.kind, phase.index, (1.0, 1.0), 2, (100,) * 64)
        events = [(phase.id.pipeline, done)]
        count += 1
    return count / (time.perf_counter() - started)


def began(names: list[str], steps: int) -> list[Heard]:
    return [(name, DriverBegan(steps, 0)) for name in names]


def answer(pipe: object) -> None:
    pipe.send(os.getpid())  # type: ignore[attr-defined]


def start_processes() -> tuple[float, float]:
    """Seconds until the first one answers, and until a dozen more do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    times = []
    for count in (1, PROCESSES):
        started = time.perf_counter()
        pipes, processes = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=answer, args=(theirs,))
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        times.append(time.perf_counter() - started)
        for process in processes:
            process.join()
    return times[0], times[1]


def watch_memory(found: list[float], done: threading.Event) -> None:
    """PSS of all processes that came from this one, every second."""
    while not done.wait(1.0):
        found.append(sum(pss(pid) for pid in descendants(os.getpid())) / 1e6)


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(each.parent.name)] = int(each.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return sorted(found - {root})


def pss(pid: int) -> int:
    """In kB; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
