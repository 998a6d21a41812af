"""A cluster of this machine's cores, started as a command, and jobs of seconds for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jigsawrl.config.cluster import load_cluster_file
from jigsawrl.daemon.admission import submit
from jigsawrl.daemon.ledger import Ledger
from jigsawrl.daemon.status import document
from jigsawrl.store import folders
from jigsawrl.underway import is_under_way

PATIENCE_S = 90.0
MARK = "JIGSAWRL_TEST_MARK"
"""In the environment of every process that belongs to a started cluster."""
POOLS = """
pools:
  rollout: {kind: cpu, runs: rollout, nodes: 1}
  training: {kind: cpu, runs: training, nodes: 1}
"""
JOB: dict[str, Any] = {
    "steps": 16,
    "deterministic": True,
    "threads": 1,
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
    "checkpoint": {"every": 4},
    "telemetry": {"tensorboard": False},
}


def poll(done: Callable[[], object], what: Callable[[], str], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)  # leaves the cores to those who are waited for


@dataclass(slots=True)
class LocalCluster:
    """In a folder; started and killed as a test likes."""

    folder: Path
    pools: str = POOLS
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    daemon: subprocess.Popen[bytes] | None = None

    @property
    def out(self) -> Path:
        return self.folder / "cluster"

    def make(self) -> None:
        """Its folder, before it is first started."""
        (self.folder / "pools.yaml").write_text(self.pools)
        Ledger.make(self.out, load_cluster_file(self.folder / "pools.yaml")).close()

    def start(self, *options: str) -> None:
        self.make()
        command = [sys.executable, "-m", "jigsawrl", "cluster", "start", "pools.yaml", "--out", "cluster"]
        with (self.folder / "said").open("ab") as said:
            self.daemon = subprocess.Popen(
                [*command, *options],
                cwd=self.folder,
                stdout=said,
                stderr=said,
                start_new_session=True,
                env={**os.environ, **self.environment, MARK: self.mark},
            )
        self.wait_for(lambda: is_under_way(self.out), "the daemon")

    def jigsaw(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jigsawrl", *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60)

    def write_job(self, name: str, **settings: Any) -> Path:
        """Its run file."""
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps({**JOB, **settings}))
        return file

    def submit(self, name: str, max_slowdown: float = 1000, **settings: Any) -> None:
        submit(self.out, self.write_job(name, **settings), None, None, {"max_slowdown": max_slowdown})

    def status(self) -> dict[str, Any]:
        return document(self.out)

    def states(self) -> dict[str, str]:
        return {name: job["state"] for name, job in self.status()["jobs"].items()}

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def wait_for(self, done: Callable[[], object], what: str) -> None:
        poll(done, lambda: f"{what} did not come\n{self.said()}")

    def wait_for_step(self, job: str, step: int) -> None:
        self.wait_for(lambda: self.metrics(job) >= step, f"step {step} of {job}")

    def metrics(self, job: str) -> int:
        """Steps that it has written down."""
        try:
            return (self.out / "jobs" / job / "metrics.jsonl").read_text().count("\n")
        except FileNotFoundError:
            return 0

    def events(self, run: int, job: str, kind: str) -> list[dict[str, Any]]:
        """Of a job in one of the runs; whole lines only."""
        try:
            content = (self.out / "runs" / str(run) / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        found = (json.loads(line) for line in content.rpartition("\n")[0].splitlines())
        return [each for each in found if (each["event"], each.get("pipeline")) == (kind, job)]

    def steps(self, run: int, job: str, kind: str) -> list[int]:
        """Of such events."""
        return [event["step"] for event in self.events(run, job, kind)]

    def saved(self, job: str) -> int:
        """The step of its newest checkpoint."""
        found = (self.out / "jobs" / job / "checkpoints").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in found), default=0)

    def stores(self) -> list[Path]:
        """Of its runs, in memory."""
        return [root for root, record in folders.stores() if record.spill.startswith(str(self.out))]

    def give_cores(self, count: int | None = None) -> None:
        """So many of this machine's are left to the daemon, or all."""
        assert self.daemon is not None
        os.sched_setaffinity(self.daemon.pid, sorted(os.sched_getaffinity(0))[:count])

    def signal(self, number: int) -> None:
        assert self.daemon is not None
        self.daemon.send_signal(number)

    def end(self) -> int:
        """Its exit code; nothing of it is left."""
        assert self.daemon is not None
        try:
            code = self.daemon.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.said()}") from None
        poll(lambda: not self.alive(), lambda: f"left behind: {self.alive()}", 10.0)
        return code

    def alive(self) -> list[int]:
        """Its processes, daemon and runs and all of theirs; no zombies."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def kill_all(self) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def learned(out: Path) -> tuple[list[dict[str, float]], bytes]:
    """All but the times, bit by bit."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figures = [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows]
    return figures, (out / "model" / "model.safetensors").read_bytes()
