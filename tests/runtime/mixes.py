"""Small mixes of two pipelines, run for real: in this process, where all share one fork server, or as a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jigsawrl.config.pipelines import load_mix
from jigsawrl.runtime.launch import Outcome, run_mix
from jigsawrl.store import folders
from jigsawrl.telemetry.progress import Progress
from jigsawrl.telemetry.runreport import run_report

Results = dict[str, tuple[list[dict[str, float]], bytes]]
"""What each pipeline has learned: its metrics but the times, and its final weights."""

STEPS = 3
PATIENCE_S = 60.0
MARK = "JIGSAWRL_TEST_MARK"
"""In the environment of every process that belongs to a started command, or to runs of this process."""
HERE = uuid.uuid4().hex
os.environ[MARK] = HERE

SUMS: dict[str, Any] = {
    "steps": STEPS,
    "deterministic": True,
    "model": {
        "tiny": {
            "layers": 2,
            "hidden": 64,
            "heads": 4,
            "kv_heads": 2,
            "warmup_steps": 20,
            "warmup_noise": 0.3,
        }
    },
    "task": {"kind": "arithmetic", "max_number": 6, "size": 49},
    "rollout": {"prompts_per_step": 8, "samples": 4, "max_tokens": 6},
    "trainer": {"lr": 1e-3},
    "checkpoint": {"every": 2},
    "telemetry": {"tensorboard": False},
}
CALC: dict[str, Any] = {
    **SUMS,
    "task": {
        "kind": "calculator",
        "max_number": 9,
        "size": 32,
        "latency": 0.02,
        "latency_jitter": 0.02,
        "max_turns": 3,
    },
    "rollout": {"prompts_per_step": 8, "samples": 4, "max_tokens": 16, "stop": ["]"]},
    "algorithm": {"epochs": 2, "minibatches": 2},
}


def write_mix(
    folder: Path, policy: str = "concurrent", *, prompt: bool = False, **runs: Mapping[str, Any]
) -> Path:
    """A run file with these pipelines by name; JSON is YAML too. `prompt`: whoever has a deadline asks before each
    phase, so its steps are heard of when they are made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, run in runs.items():
        (folder / f"{name}.yaml").write_text(json.dumps(run))
    terms = {"deadline": 3600.0} if prompt else {}
    entries = {name: {"run": f"{name}.yaml", **terms} for name in runs}
    mix = {"workers": 2, "policy": policy, "pipelines": entries}
    (folder / "mix.yaml").write_text(json.dumps(mix))
    return folder / "mix.yaml"


class Watching(Progress):
    """Shows nothing, and calls back when a pipeline has made a step."""

    def __init__(self, on_step: Callable[[str, int], None] = lambda *_: None) -> None:
        super().__init__(json=True)
        self.on_step = on_step
        self.said: list[str] = []

    def update(self, name: str, step: int, values: Mapping[str, float]) -> None:
        self.on_step(name, step)

    def message(self, text: str) -> None:
        self.said.append(text)


def run_here(
    file: Path, out: Path, on_step: Callable[[str, int], None] = lambda *_: None, resume: bool = False
) -> Outcome:
    return run_mix(load_mix(file), out, resume, Watching(on_step))


def learned(out: Path) -> list[dict[str, float]]:
    """The metrics of a pipeline that must be equal between two runs: all but the times."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows_of(out)
    ]


def rows_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def result(out: Path) -> tuple[list[dict[str, float]], bytes]:
    """All that a pipeline has learned, bit by bit."""
    return learned(out), (out / "model" / "model.safetensors").read_bytes()


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (out / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def assert_figures_agree(out: Path, found: dict[str, Any]) -> None:
    """What `--json` said of a run is what its report says, and both are what its log says when it is added up here:
    sessions from their first phase on, pipelines from their arrival."""
    made = run_report(out)
    spent, sessions = 0.0, [[]]  # type: ignore[var-annotated]
    for event in (json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()):
        if event["event"] in ("start", "resume") and "pipeline" not in event:
            sessions.append([])
        elif "pipeline" in event:
            sessions[-1].append(event)
    clocks: list[tuple[float, float, float]] = []  # first phase, last event, time of the run before
    for session in sessions:
        if began := [event["t"] for event in session if event["event"] == "predicted"]:
            last = max(event["t"] for event in session)
            clocks.append((began[0], last, spent))
            spent += last - began[0]

    def clock(t: float) -> float:
        first, last, before = max(each for each in clocks if each[0] <= t) if t > clocks[0][0] else clocks[0]
        return before + min(max(t, first), last) - first

    assert found["seconds"] == made.report.seconds == pytest.approx(spent, abs=0.2)
    assert found["tokens_per_second"] == made.report.tokens_per_second
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(tokens_of(out))
    for pipeline in made.report.pipelines:
        each, name = found["pipelines"][pipeline.name], pipeline.name
        own = [event for session in sessions for event in session if event["pipeline"] == name]
        arrived = min(event["t"] for event in own if event["event"] == "arrived")
        steps = [event for event in own if event["event"] == "step"]
        last = next(session for session in reversed(sessions) if any(each in steps for each in session))
        ends = [each for each in last if each["event"] in ("finished", "cancelled")]
        ended = max(each["t"] for each in ends if each["pipeline"] == name)
        for figure in ("seconds", "tokens", "tokens_per_second", "reward_first", "reward_last"):
            assert each[figure] == getattr(pipeline, figure)
        told = {event["event"]: event["t"] for event in own if event["event"] in ("pause", "resume")}
        paused = clock(told["resume"]) - clock(told["pause"]) if "pause" in told else 0.0
        assert each["seconds"] == pytest.approx(clock(ended) - clock(arrived) - paused, abs=0.2)
        assert each["tokens"] == sum(row["perf/tokens"] for row in rows_of(out / name))


def tokens_of(out: Path) -> float:
    return sum(row["perf/tokens"] for path in out.glob("*/metrics.jsonl") for row in rows_of(path.parent))


# Commands


@dataclass(frozen=True)
class Command:
    """`jigsaw run` in a process group of its own."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    written: Path
    """Where its stdout and stderr go."""

    def said(self) -> str:
        """On stderr, so far."""
        return (self.written / "stderr").read_text()

    def signal(self, number: int, group: bool = False) -> None:
        """To the command, or to its whole group; nothing where it has ended."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def end(self, timeout: float = PATIENCE_S) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {timeout} s\n{self.said()}") from None
        return self.process.returncode, (self.written / "stdout").read_text(), self.said()

    def answer(self, timeout: float = PATIENCE_S) -> tuple[int, dict[str, Any]]:
        """Exit code, and each pipeline's part of what it printed."""
        code, out, err = self.end(timeout)
        assert out, err
        return code, json.loads(out)["pipelines"]

    def kill_all(self) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def alive(self) -> dict[int, str]:
        """Its processes that are still there, user code included, and the state of each."""
        return marked(self.mark)

    def named(self, name: str) -> list[int]:
        """Drivers and actors by the name that `ps` shows."""
        return [pid for pid in self.alive() if command_of(pid) == name]

    def wait_for(self, done: Callable[[], object], what: str) -> None:
        def over() -> bool:
            return bool(done()) or self.process.poll() is not None

        poll(over, f"{what} did not come")
        assert done(), f"{what} did not come; it ended with {self.end()}"

    def wait_for_step(self, name: str, step: int = 1) -> None:
        metrics = self.out / name / "metrics.jsonl"
        self.wait_for(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= step, f"step {step} of {name}"
        )

    def assert_nothing_is_left(self, store: bool = True) -> None:
        """No process of it, running or stopped; with `store`, nothing in shared memory either."""
        poll(lambda: not self.alive(), lambda: f"left behind: {self.alive()}", 10.0)
        if store:
            assert stores_of(self.out) == []


def start(file: Path, out: Path, *options: str) -> Command:
    mark = uuid.uuid4().hex
    written = file.parent / mark
    written.mkdir()
    with (written / "stdout").open("wb") as stdout, (written / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "jigsawrl", "run", str(file), "--out", str(out), "--json", *options],
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, MARK: mark},
        )
    return Command(process, mark, out, written)


def poll(done: Callable[[], object], what: str | Callable[[], str], seconds: float = PATIENCE_S) -> None:
    """Looks again and again; an AssertionError where it takes too long."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.005)  # leaves the cores to those who are waited for


def states() -> Iterable[tuple[int, str]]:
    """Every process that is no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            yield int(stat.parent.name), state


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def named(name: str) -> int:
    """The driver or actor of this name that was started by this process."""
    (found,) = [pid for pid in grandchildren() if command_of(pid) == name]
    return found


def grandchildren() -> list[int]:
    """Of this process: whoever its fork server has started, and their user code, orphans too."""
    parents = {pid: parent_of(pid) for pid, _ in states()}
    children = {pid for pid, parent in parents.items() if parent == os.getpid()}
    found = marked(HERE).keys() - children
    while more := {pid for pid, parent in parents.items() if parent in children | found} - found:
        found |= more
    return sorted(found)


def assert_nothing_is_left(out: Path) -> None:
    """Of runs in this process: no process but the fork server, and nothing in shared memory."""
    poll(
        lambda: not grandchildren(),
        lambda: f"left behind: {[command_of(pid) for pid in grandchildren()]}",
        10.0,
    )
    assert stores_of(out) == []


def marked(mark: str) -> dict[int, str]:
    """Processes with this mark, and their states."""
    return {pid: state for pid, state in states() if mark.encode() in environment(pid)}


def stores_of(out: Path) -> list[Path]:
    """Stores of runs in this folder."""
    found = []
    for record in folders.place_for_stores().glob("jigsawrl-*/store.json"):
        if Path(json.loads(record.read_text())["spill"]).is_relative_to(out.absolute()):
            found.append(record.parent)
    return found
