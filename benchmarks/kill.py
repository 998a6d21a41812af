"""Processes of real runs are killed at random moments, and what the runs have learned is compared to a quiet one's.

Two pipelines, one of them with slow tools, run beside each other on two workers, under one policy after the other.
Drivers, actors and the scheduler get a SIGKILL, up to a dozen in each run, at any moment: while processes are set up,
in the middle of a step, while a pipeline recovers. A killed scheduler is followed by `--resume`. Only what a run is
allowed to give up on is spared: a pipeline that has died too often in a row without a step in between.

A sample is lost if a step of the final metrics has fewer than it should, and doubled if it has more, or if the step
is there twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import arguments, at_least_one, claim, clean_stdout, figure, report, say
from rich.table import Table

from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime.member import RETRIES

KILLS, QUICK_KILLS = 100, 10
MOST_KILLS = 12
"""Of one run; then it is left in peace."""
LONGEST_PAUSE = 2.0
"""Seconds from when there is somebody to kill."""
IN_SETUP = 0.2
"""Part of the schedulers that are killed before there are any drivers."""
STEPS = 10
GROUPS, SAMPLES = 8, 4
TIMEOUT = 120.0
"""Seconds after which a run that is left in peace is taken to hang."""
POLL_S = 0.02
ROLES = ("driver", "actor", "scheduler")

SUMS: dict[str, Any] = {
    "steps": STEPS,
    "deterministic": True,
    "model": {
        "tiny": {
            "layers": 2,
            "hidden": 64,
            "heads": 4,
            "kv_heads": 2,
            "warmup_steps": 40,
            "warmup_noise": 0.3,
        }
    },
    "task": {"kind": "arithmetic", "max_number": 6, "size": 49},
    "rollout": {"prompts_per_step": GROUPS, "samples": SAMPLES, "max_tokens": 6},
    "trainer": {"lr": 1e-3},
    "checkpoint": {"every": 3},
    "telemetry": {"tensorboard": False},
}
CALC: dict[str, Any] = {
    **SUMS,
    "task": {
        "kind": "calculator",
        "max_number": 9,
        "size": 32,
        "latency": 0.05,
        "latency_jitter": 0.02,
        "max_turns": 3,
    },
    "rollout": {"prompts_per_step": GROUPS, "samples": SAMPLES, "max_tokens": 16, "stop": ["]"]},
}
PIPELINES = {"a": SUMS, "b": CALC}


@dataclass(frozen=True, slots=True)
class Learned:
    """What a pipeline has learned, and from how many samples in each row of its metrics."""

    rows: list[dict[str, float]]
    weights: bytes
    samples: list[tuple[int, int]]


@dataclass(slots=True)
class Run:
    """One run and what was done to it."""

    policy: str
    kills: list[str] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)
    """Steps of all pipelines that were done when each came."""
    seconds: float = 0.0
    exit_code: int = 0
    equal: bool = False
    lost: int = 0
    doubled: int = 0
    left_behind: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "kills": self.kills,
            "steps_done": self.moments,
            "seconds": round(self.seconds, 2),
            "exit_code": self.exit_code,
            "equal": self.equal,
            "lost_samples": self.lost,
            "doubled_samples": self.doubled,
            "left_behind": self.left_behind,
        }


def write_mix(folder: Path) -> Path:
    """JSON is YAML too."""
    for name, run in PIPELINES.items():
        (folder / f"{name}.yaml").write_text(json.dumps(run))
    entries = {name: {"run": f"{name}.yaml"} for name in PIPELINES}
    (folder / "mix.yaml").write_text(json.dumps({"workers": 2, "pipelines": entries}))
    return folder / "mix.yaml"


def start(mix: Path, out: Path, policy: str, resume: bool) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "jigsawrl",
        "run",
        str(mix),
        f"policy={policy}",
        "--out",
        str(out),
        "--json",
    ]
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, *(["--resume"] if resume else [])], stdout=log, stderr=log, start_new_session=True
        )


def processes(session: int) -> dict[int, str]:
    """Drivers and actors of a run by their names, and whoever else is in its session."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if int(fields[3]) == session and fields[0] != "Z":
            found[int(stat.parent.name)] = head.partition("(")[2]
    return found


class Victims:
    """Who may be killed. Knows how often each pipeline has died since it last got any further."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.strikes: Counter[str] = Counter()
        self.furthest: Counter[str] = Counter()

    def forget(self) -> None:
        """A new scheduler has counted nothing yet."""
        self.strikes.clear()
        self.furthest.clear()

    def present(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether there are drivers."""
        return any(name.startswith("driver:") for name in processes(process.pid).values())

    def kill(self, role: str, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
        """False: there is nobody of that kind who may be killed now."""
        if role == "scheduler":
            process.kill()
            return True
        self._look()
        spared = {name for name in PIPELINES if self.strikes[name] >= RETRIES}
        there = sorted(
            (name, pid)
            for pid, name in processes(process.pid).items()
            if name.startswith(role) and name.partition(":")[2] not in spared
        )
        if not there:
            return False
        name, pid = rng.choice(there)
        self.strikes[name.partition(":")[2]] += 1
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def steps_done(self) -> int:
        return sum(len(rows_of(self.out / name)) for name in PIPELINES)

    def _look(self) -> None:
        for name in PIPELINES:
            step = max((row["step"] for row in rows_of(self.out / name)), default=0)
            if step > self.furthest[name]:
                self.furthest[name], self.strikes[name] = int(step), 0


def rows_of(out: Path) -> list[dict[str, float]]:
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def learned(out: Path) -> Learned:
    rows = rows_of(out)
    model = out / "model" / "model.safetensors"
    return Learned(
        [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows],
        model.read_bytes() if model.exists() else b"",
        [(int(row["step"]), round(row["perf/tokens"] / row["response_length/mean"])) for row in rows],
    )


def one_run(mix: Path, out: Path, policy: str, kills: int, rng: random.Random) -> Run:
    """Killed up to so many times, then let alone until it ends."""
    run, victims, began = Run(policy), Victims(out), time.monotonic()
    process = start(mix, out, policy, resume=False)
    while len(run.kills) < kills:
        role = rng.choice(ROLES)
        if role != "scheduler" or rng.random() > IN_SETUP:
            while not victims.present(process) and not ends_within(process, POLL_S):
                pass
        if ends_within(process, rng.uniform(0, LONGEST_PAUSE)):
            break
        run.moments.append(victims.steps_done())
        while not (killed := victims.kill(role, process, rng)) and not ends_within(process, POLL_S):
            pass
        if not killed:
            run.moments.pop()
            break
        run.kills.append(role)
        if role == "scheduler":
            process.wait()
            run.left_behind += left_behind(process.pid)
            process = start(mix, out, policy, resume=True)
            victims.forget()
    if not ends_within(process, TIMEOUT):
        process.kill()
        process.wait()
    run.seconds, run.exit_code = time.monotonic() - began, process.returncode
    run.left_behind += left_behind(process.pid)
    return run


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def left_behind(session: int) -> int:
    """Processes of a session whose scheduler is gone; they have a few seconds to notice."""
    deadline = time.monotonic() + 10
    while processes(session) and time.monotonic() < deadline:
        time.sleep(0.005)
    return len(processes(session))


def judge(run: Run, out: Path, undisturbed: dict[str, Learned]) -> None:
    run.equal = run.exit_code == 0
    for name, expected in undisturbed.items():
        found = learned(out / name)
        run.equal &= (found.rows, found.weights) == (expected.rows, expected.weights)
        made: Counter[int] = Counter()
        for step, samples in found.samples:
            made[step] += samples
        wanted = Counter(dict.fromkeys(range(1, STEPS + 1), GROUPS * SAMPLES))
        run.lost += (wanted - made).total()
        run.doubled += (made - wanted).total()
    if not run.equal:
        say(f"{run.policy}: not equal; the end of its log:\n{out.with_suffix('.log').read_text()[-2000:]}")


def table_of(runs: list[Run]) -> Table:
    table = Table(
        title="Runs whose processes were killed", title_justify="left", title_style="bold", box=None
    )
    table.add_column("policy")
    for name in (*ROLES, "seconds", "equal", "lost", "doubled", "left behind"):
        table.add_column(name, justify="right")
    for run in runs:
        counts = Counter(run.kills)
        table.add_row(
            run.policy,
            *(str(counts[role]) for role in ROLES),
            figure(run.seconds),
            "yes" if run.equal else "no",
            str(run.lost),
            str(run.doubled),
            str(run.left_behind),
        )
    return table


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--kills", type=at_least_one, help=f"in all; {KILLS} if not given, {QUICK_KILLS} with --quick"
    )
    options = parser.parse_args()
    wanted = options.kills or (QUICK_KILLS if options.quick else KILLS)
    rng = random.Random(options.seed)
    runs: list[Run] = []
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-kill-") as folder:
        mix = write_mix(Path(folder))
        quiet = one_run(mix, Path(folder, "undisturbed"), "concurrent", 0, rng)
        undisturbed = {name: learned(Path(folder, "undisturbed", name)) for name in PIPELINES}
        judge(quiet, Path(folder, "undisturbed"), undisturbed)
        policies = sorted(POLICIES)
        while (left := wanted - sum(len(run.kills) for run in runs)) > 0:
            policy = policies[len(runs) % len(policies)]
            out = Path(folder, f"run-{len(runs)}")
            runs.append(one_run(mix, out, policy, min(left, MOST_KILLS), rng))
            judge(runs[-1], out, undisturbed)
            say(f"{policy}: {len(runs[-1].kills)} kills, {runs[-1].seconds:.0f} s")
        console.print(table_of(runs))
        moments = [moment for run in runs for moment in run.moments]
        console.print(
            f"kills came after {min(moments)} to {max(moments)} of {STEPS * len(PIPELINES)} steps, "
            f"{statistics.median(moments):g} in the median; undisturbed, a run takes {figure(quiet.seconds)} s, "
            f"most of it to start"
        )
        claims = {
            "runs_equal": claim(float(quiet.equal and all(run.equal for run in runs)), at_least=1),
            "lost_samples": claim(sum(run.lost for run in [quiet, *runs]), at_most=0),
            "doubled_samples": claim(sum(run.doubled for run in [quiet, *runs]), at_most=0),
            "left_behind": claim(sum(run.left_behind for run in [quiet, *runs]), at_most=0),
        }
        killed = Counter(role for run in runs for role in run.kills)
        report(
            console,
            "kill",
            options.seed,
            claims,
            kills=dict(killed),
            undisturbed_s=round(quiet.seconds, 2),
            runs=[run.as_json() for run in runs],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
