"""Jobs that take turns in two real pools: steps an hour against each of them alone, and what a switch costs.

Two workers of one core each are two pools: one rolls out, the other trains. A synchronous job alone leaves one of
them idle at any time (solo disaggregation). Under `rollmux` the jobs of a group have permits for a pool in turn. All
runs are real, with the command that people use. A job's epochs are chosen so that its rollout and its training are as
long as wanted, by a first run that measures both; what came of it is in the table. A step has few samples, so that an
epoch is short beside a rollout and the two can be made alike.

`vs solo` is the group's steps an hour over the mean of its jobs' steps an hour alone, on the same two workers: 2
would be perfect for a balanced pair. Time counts from the first permit to the release of the last. `swapping` is a
group on workers whose memory holds one job's training state, so that a permit begins with waking up. Switches are
timed by themselves: cold, a new process that loads its model; warm, the same actor that wakes up from the store.

A group needs both cores, a job alone mostly one: whatever else runs on the machine costs the group more. `at work` is
the part of the permits' time in which their processes had a core, first of solo and then of the group.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from common import SHAPES, Spread, arguments, claim, clean_stdout, figure, report, say
from rich.table import Table

from jigsawrl.config import RunConfig
from jigsawrl.config.pipelines import load_mix
from jigsawrl.config.runfile import checked
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.pipeline.actor_process import actor_main
from jigsawrl.pipeline.calls import Inbox, ProcessHandle
from jigsawrl.pipeline.generating import Generating
from jigsawrl.pipeline.pooled import RolloutActor, TrainingActor
from jigsawrl.pipeline.warmup import prepare_base
from jigsawrl.runtime.launch import member_of, own_config
from jigsawrl.store.store import Store

LIMIT_S = 900.0
PHASES = ("rollout", "training")
POOLS = {"rollout": 1, "training": 1}
MEASURED = 8
"""Steps of the run that measures phases."""
MOST_EPOCHS = 40
GROUPS: dict[str, dict[str, float]] = {
    "balanced pair": {"a": 1.0, "b": 1.0},
    "unbalanced pair": {"a": 0.5, "b": 1.0},
    "three jobs": {"a": 1.0, "b": 1.0, "c": 1.0},
}
"""Of each job: how many times as long as its rollout its training is to be."""
TIMES = {"balanced pair": 4, "unbalanced pair": 3, "three jobs": 3}


@dataclass(frozen=True, slots=True)
class Log:
    """What the event log of a run says of its permits."""

    permits: list[dict[str, Any]]
    swaps: list[dict[str, Any]]
    syncs: list[dict[str, Any]]

    @classmethod
    def read(cls, out: Path) -> Log:
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        spans = [event for event in events if event["event"] == "substage"]
        return cls(
            [event for event in events if event["event"] == "phase"],
            [span for span in spans if span["substage"] == "swap"],
            [span for span in spans if span["substage"] == "sync"],
        )

    def of(self, name: str) -> list[dict[str, Any]]:
        return [permit for permit in self.permits if permit["pipeline"] == name]

    def steps_an_hour(self, name: str | None = None) -> float:
        """Of one job, or of all, while they ran."""
        permits = self.permits if name is None else self.of(name)
        made = sum(permit["phase"] == "training" for permit in permits)
        return 3600 * made / (max(p["t1"] for p in permits) - min(p["t0"] for p in permits))

    def seconds(self, name: str, phase: str) -> float:
        """That a permit for it was held; the first step, in which much is set up, does not count."""
        return statistics.median(
            p["t1"] - p["t0"] for p in self.of(name) if p["phase"] == phase and p["step"] > 1
        )

    def at_work(self) -> float:
        """Part of the time of permits in which their processes had a core; the rest is messages, and others' work."""
        held = sum(permit["t1"] - permit["t0"] for permit in self.permits)
        return sum(max(permit["busy"]) for permit in self.permits) / held


class Bench:
    """Run files in a folder, all with one model that is made already."""

    def __init__(self, folder: Path, seed: int, tokens: int) -> None:
        self.folder, self.seed, self.tokens = folder, seed, tokens
        self.count = 0
        tiny = self.settings(1, 1) | {
            "model": {"path": "tiny", "tiny": {**SHAPES["0.3M"], "warmup_steps": 2}}
        }
        self.base = prepare_base(checked({**tiny, "name": "base"}), folder, lambda text: None)

    def settings(self, steps: int, epochs: int) -> dict[str, Any]:
        """A run file's. All samples are as long as they may be, so that steps take as long as each other."""
        return {
            "seed": self.seed,
            "steps": steps,
            "task": {"kind": "arithmetic", "max_number": 9, "size": 100},
            "rollout": {
                "prompts_per_step": 2,
                "samples": 2,
                "max_tokens": self.tokens,
                "ignore_eos": True,
            },
            "algorithm": {"epochs": epochs},
            "trainer": {"lr": 1e-5},
            "checkpoint": {"every": 1000},
            "telemetry": {"tensorboard": False},
        }

    def config(self, name: str) -> RunConfig:
        return checked({**self.settings(1, 1), "name": name, "model": {"path": str(self.base)}})

    def run(self, policy: str, epochs: dict[str, int], steps: int, **mix: Any) -> Log:
        self.count += 1
        folder = self.folder / f"{self.count}-{policy}"
        file = self.write(folder, epochs, steps, policy=policy, **mix)
        command = [sys.executable, "-m", "jigsawrl", "run", str(file), "--out", str(folder / "out"), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0:
            raise RuntimeError(f"{policy} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return Log.read(folder / "out")

    def write(self, folder: Path, epochs: dict[str, int], steps: int, **mix: Any) -> Path:
        folder.mkdir()
        for name, count in epochs.items():
            run = {**self.settings(steps, count), "model": {"path": str(self.base)}}
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))
        runs = {name: {"run": f"{name}.yaml"} for name in epochs}
        (folder / "mix.yaml").write_text(
            yaml.safe_dump({"workers": 2, "pools": POOLS, **mix, "pipelines": runs})
        )
        return folder / "mix.yaml"

    def epochs(self) -> float:
        """So many make a training as long as a rollout."""
        few, more = 2, 6
        log = self.run("serial", {"few": few, "more": more}, MEASURED)
        each = (log.seconds("more", "training") - log.seconds("few", "training")) / (more - few)
        fixed = log.seconds("few", "training") - few * each
        rollout = (log.seconds("few", "rollout") + log.seconds("more", "rollout")) / 2
        return max(1.0, (rollout - fixed) / max(each, 1e-6))

    def tight(self, epochs: dict[str, int]) -> float:
        """GB that hold the training of one job and not the state of another beside it."""
        file = self.write(self.folder / "tight", epochs, 1)
        mix, worker = load_mix(file), cpu_worker(1, 2)
        members = [
            member_of(mix, each, own_config(mix, each, "cpu"), self.folder, worker, None) for each in epochs
        ]
        return max(member.outlook.memory(1, 1, 1).training for member in members) / 1e9


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        bench = Bench(Path(scratch), options.seed, 192 if options.quick else 384)
        steps = 12
        even = bench.epochs()
        say(f"{even:.1f} epochs make a training as long as a rollout")
        groups = {"balanced pair": GROUPS["balanced pair"]} if options.quick else GROUPS
        table = Table(title="two pools of one core", caption="medians, in brackets the quartiles")
        for column in (
            "group",
            "rollout s",
            "training s",
            "solo steps/h",
            "group steps/h",
            "vs solo",
            "at work %",
        ):
            table.add_column(column, justify="left" if column == "group" else "right")
        gains: dict[str, list[float]] = {}
        details: dict[str, Any] = {}
        for name, shape in groups.items():
            epochs = {job: min(MOST_EPOCHS, max(1, round(part * even))) for job, part in shape.items()}
            sides: dict[str, dict[str, Any]] = {name: {}}
            if name == "balanced pair" and not options.quick:
                sides["balanced pair, swapping"] = {"memory": bench.tight(epochs)}
            times = 1 if options.quick else TIMES[name]
            solo: list[Log] = []
            together: dict[str, list[Log]] = {side: [] for side in sides}
            for repetition in range(times):
                solo.append(bench.run("serial", epochs, steps))
                for side, mix in sides.items():
                    together[side].append(bench.run("rollmux", epochs, steps, **mix))
                    say(
                        f"repetition {repetition + 1}, {side}: {gain(together[side][-1], solo[-1]):.2f} times solo"
                    )
            for side, runs in together.items():
                gains[side] = [gain(one, other) for one, other in zip(runs, solo, strict=True)]
                table.add_row(*row(side, list(epochs), solo, runs, gains[side]))
                details[side] = counted(runs, epochs)
        console.print(table)
        waits = switches(bench, 1 if options.quick else 3)
        console.print(shown(waits))
        warmer = min(each["cold"] / each["warm"] for each in waits.values())
        claims = {
            "vs_solo_balanced_pair": claim(Spread.of(gains["balanced pair"]).median, at_least=1.6),
            "warm_over_cold": claim(warmer, at_least=10.0),
        }
        report(
            console,
            "rollmux_real",
            options.seed,
            claims,
            quick=options.quick,
            vs_solo=gains,
            groups=details,
            switches=waits,
        )


def gain(together: Log, solo: Log) -> float:
    names = {permit["pipeline"] for permit in solo.permits}
    return together.steps_an_hour() / statistics.mean(solo.steps_an_hour(name) for name in names)


def row(side: str, names: list[str], solo: list[Log], together: list[Log], gains: list[float]) -> list[str]:
    """Seconds are those alone; `at work` is that of solo and of the group."""
    phases = [
        " ".join(figure(statistics.median(log.seconds(name, phase) for log in solo)) for name in names)
        for phase in PHASES
    ]
    alone = [statistics.mean(log.steps_an_hour(name) for name in names) for log in solo]
    work = [figure(100 * statistics.median(log.at_work() for log in logs)) for logs in (solo, together)]
    rates = [str(Spread.of(alone)), str(Spread.of([log.steps_an_hour() for log in together]))]
    return [side, *phases, *rates, str(Spread.of(gains)), " ".join(work)]


def counted(together: list[Log], epochs: dict[str, int]) -> dict[str, Any]:
    """What the timelines of these runs have."""
    swaps = [swap for log in together for swap in log.swaps]
    verbs = sorted({swap["verb"] for swap in swaps})
    return {
        "epochs": epochs,
        "permits": [len(log.permits) for log in together],
        "crossings": [len(log.syncs) for log in together],
        "crossing_seconds": statistics.median(
            span["t1"] - span["t0"] for log in together for span in log.syncs
        ),
        "at_work": [log.at_work() for log in together],
        "bytes_crossing": max(span["bytes"] for log in together for span in log.syncs),
        "swaps": {verb: sum(swap["verb"] == verb for swap in swaps) for verb in verbs},
        "swap_seconds": {
            verb: statistics.median(swap["t1"] - swap["t0"] for swap in swaps if swap["verb"] == verb)
            for verb in verbs
        },
    }


# Switches

SIDES: dict[str, type[Generating]] = {"training": TrainingActor, "rollout": RolloutActor}
NAME = "switched"
WAKES = 5


def switches(bench: Bench, times: int) -> dict[str, dict[str, float]]:
    """Seconds until an actor can run, on the median: from nothing, and from its sleep."""
    found: dict[str, dict[str, list[float]]] = {side: {"cold": [], "warm": []} for side in SIDES}
    for number in range(times):
        store = Store.create(bench.folder / f"spill-{number}", 1 << 30)
        actors: dict[str, ProcessHandle] = {}
        for side, kind in SIDES.items():
            began = time.perf_counter()
            actors[side] = started(bench, kind)
            load(actors[side], side, store)
            found[side]["cold"].append(time.perf_counter() - began)
        for side, actor in actors.items():
            for _ in range(WAKES):
                actor.call("sleep", store.root, NAME)
                began = time.perf_counter()
                actor.call("wake_up", store.root, NAME)
                load(actor, side, store)
                found[side]["warm"].append(time.perf_counter() - began)
            actor.close()
        store.destroy()
    return {
        side: {how: statistics.median(each) for how, each in ways.items()} for side, ways in found.items()
    }


def load(actor: ProcessHandle, side: str, store: Store) -> None:
    """The weights that others have published, or publishes them."""
    actor.call("take_weights" if side == "rollout" else "publish_weights", store.root, NAME, 0)


def started(bench: Bench, kind: type[Generating]) -> ProcessHandle:
    """An actor in a new process, with its model."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, bench.config(NAME), bench.base, "cpu", 0, 1, "")
    process = context.Process(target=actor_main, args=arguments, kwargs={"make": kind}, daemon=True)
    process.start()
    theirs.close()
    handle = ProcessHandle(ours, process, 0, Inbox())
    handle.call("ready")
    return handle


def shown(waits: dict[str, dict[str, float]]) -> Table:
    table = Table(title="until an actor can run, seconds")
    for column in ("actor", "cold", "warm", "cold / warm"):
        table.add_column(column, justify="left" if column == "actor" else "right")
    for name, each in waits.items():
        table.add_row(name, figure(each["cold"]), figure(each["warm"]), figure(each["cold"] / each["warm"]))
    return table


if __name__ == "__main__":
    main()
