"""A group at work: `jigsaw run` in a process of its own, which ends with this one, on the cores of its nodes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jigsawrl import durable
from jigsawrl.config import text
from jigsawrl.config.started import RESOLVED
from jigsawrl.daemon.ledger import JobEntry
from jigsawrl.daemon.orders import Going, Places
from jigsawrl.errors import JigsawError
from jigsawrl.liveness import Watched, silent_s, was_silent
from jigsawrl.phases.turns import OrderName
from jigsawrl.processes import die_with_parent
from jigsawrl.runtime.control import ADDRESS, Question
from jigsawrl.runtime.start import SCHEDULER
from jigsawrl.store import folders, locks
from jigsawrl.telemetry import jsonl
from jigsawrl.underway import wait_until_gone

OUTPUT = "output.log"
RUN_FILE = "submitted.yaml"
"""In a job's folder: its run file as it was submitted."""
LAST_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Seats:
    """Where a group is."""

    rollout_nodes: tuple[str, ...]
    training_nodes: tuple[str, ...]
    """The same ones where both phases share their nodes."""
    places: Places = field(default_factory=dict)
    """None where they do."""
    order: OrderName | None = None
    """In which the jobs take turns; None where both phases share their nodes."""

    @property
    def shared(self) -> bool:
        return self.rollout_nodes == self.training_nodes

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.training_nodes if self.shared else self.rollout_nodes + self.training_nodes


@dataclass(slots=True)
class Run:
    number: int
    group: int
    seats: Seats
    out: Path
    process: subprocess.Popen[bytes]
    ended: int
    """A descriptor that can be read when the process has ended."""
    watched: Watched
    jobs: set[str]
    """That have not ended in it."""
    past: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    asked: list[Question] = field(default_factory=list)
    """That it has not answered yet."""
    stopping: bool = False
    """Whether it was told to stop."""
    places: dict[str, frozenset[str]] = field(default_factory=dict)
    """Rollout nodes of the jobs that ever were in it."""
    order: OrderName | None = None
    """That it was told last."""
    read: int = 0
    """Bytes of its events."""
    store: Path | None = None
    """What it remembers of its jobs; it outlives the run as long as this process likes."""

    silent: bool = False
    """Whether it was ended because it did not show that it was alive."""

    @property
    def going(self) -> Going:
        some = frozenset(self.jobs), frozenset(self.past), frozenset(self.leaving)
        return Going(self.number, self.group, self.seats.nodes, *some, self.stopping, self.places, self.order)

    def news(self) -> list[dict[str, Any]]:
        """Events since the last time; whole lines only."""
        try:
            with open(self.out / "events.jsonl", "rb") as file:
                file.seek(self.read)
                content = file.read()
        except FileNotFoundError:
            return []
        whole, _, _ = content.rpartition(b"\n")
        if not whole:
            return []
        self.read += len(whole) + 1
        self.hold_store()
        return [event for line in whole.splitlines() if (event := jsonl.decode(line)) is not None]

    def hold_store(self) -> None:
        """From its first event on there is one."""
        self.store = self.store or held_stores(self.out.parent).get(self.out.absolute())

    def listens(self) -> bool:
        """Not while it is being set up, and not when it has ended."""
        return (self.out / ADDRESS).exists()

    def rollout_nodes(self, job: str) -> int:
        """How many a job has."""
        return len(self.places.get(job, self.seats.rollout_nodes))

    def join(self, job: JobEntry, seats: Seats, folder: Path) -> None:
        _link(job, self.out, folder)
        self.jobs.add(job.name)  # whatever it answers: all of it ends together
        self.places |= {name: nodes for name, nodes in seats.places.items() if name == job.name}
        self._ask(do="submit", name=job.name, entry=entry_of(job, seats, folder))

    def leave(self, job: str) -> None:
        """After its step; it is saved."""
        self.leaving.add(job)
        self._ask(do="cancel", pipeline=job)

    def reorder(self, order: OrderName | None) -> None:
        self.order = order
        self._ask(do="order", order=order)

    def _ask(self, **request: Any) -> None:
        """Nobody waits for the answer here: a run that is being set up takes its time."""
        try:
            self.asked.append(Question(self.out, **request))
        except JigsawError:
            self.interrupt()

    def hear_answers(self) -> None:
        """Where it does not do what it was asked, it stops: all of it goes on in another run."""
        while answered := select.select(self.asked, [], [], 0)[0]:
            self.asked.remove(answered[0])
            try:
                answered[0].answer()
            except JigsawError:
                self.interrupt()

    def interrupt(self) -> None:
        """Steps are finished and saved."""
        self.stopping = True
        self.process.send_signal(signal.SIGINT)

    def stop_now(self) -> None:
        """Both signals count the same, and two of them say: at once."""
        self.interrupt()
        self.process.send_signal(signal.SIGTERM)

    def end_if_silent(self) -> None:
        """A run that is stopped, or hangs, is ended; its jobs go on in another."""
        if self.store is not None:
            self.watched.path = self.store / folders.BEAT
        if not self.silent and self.watched.is_silent():
            self.silent = True
            self.process.kill()
            # Those of it that are stopped as well end when they see that it is gone.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGCONT)

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def how_it_ended(self) -> str:
        """What it said last, or by which signal it was ended."""
        code = self.process.returncode
        if code == 0:
            return "all of its jobs are over"
        if self.silent:
            return was_silent("its run", self.watched.silence.limit_s)
        said = (self.out / OUTPUT).read_bytes()[-LAST_WORDS:].decode(errors="replace").strip().splitlines()
        told = [line.removeprefix("jigsaw: ") for line in said if line.startswith("jigsaw: ")]
        if code < 0:
            silent = [line for line in told if line.startswith(SCHEDULER)]
            return (silent or [f"its run was ended by {signal.Signals(-code).name}"])[-1]
        return (told or said or [f"its run ended with exit code {code}"])[-1]

    def close(self) -> None:
        os.close(self.ended)
        for question in self.asked:
            question.socket.close()


def job_folder(job: str, folder: Path) -> Path:
    """Everything of a job, in whatever runs it takes part."""
    return folder / "jobs" / job


def run_file(job: JobEntry, folder: Path) -> Path:
    return job_folder(job.name, folder) / RUN_FILE


def runs_folder(folder: Path) -> Path:
    return folder / "runs"


def run_folder(number: int, folder: Path) -> Path:
    return runs_folder(folder) / str(number)


def run_config(
    group: int, seats: Seats, jobs: Iterable[JobEntry], folder: Path, memory: float, link: float
) -> dict[str, Any]:
    """The run file of a group: `memory` in GB of each node, `link` in Gbit/s between rollout and training nodes."""
    config: dict[str, Any] = {
        "name": f"group-{group}",
        "policy": "rollmux",
        "workers": len(seats.nodes),
        "memory": memory,
        "pipelines": {job.name: entry_of(job, seats, folder) for job in jobs},
    }
    if not seats.shared:
        counts = {"rollout": len(seats.rollout_nodes), "training": len(seats.training_nodes)}
        config |= {"pools": {**counts, "link": link}, "order": seats.order}
    return config


def entry_of(job: JobEntry, seats: Seats, folder: Path) -> dict[str, Any]:
    """A job among the pipelines of its run."""
    entry: dict[str, Any] = {
        "run": str(run_file(job, folder).absolute()),
        "priority": job.terms.priority,
        "max_slowdown": job.terms.max_slowdown,
    }
    if job.name in seats.places:
        nodes = seats.places[job.name]
        entry["rollout_workers"] = [n for n, node in enumerate(seats.rollout_nodes) if node in nodes]
    return entry


def start(
    number: int,
    group: int,
    seats: Seats,
    jobs: Sequence[JobEntry],
    folder: Path,
    cores: Mapping[str, Sequence[int]],
    memory: float,
    link: float,
) -> Run:
    """A run of these jobs in a new folder; where one has made steps already, it goes on with the next."""
    out = run_folder(number, folder)
    out.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        _link(job, out, folder)
    config = out / RESOLVED
    durable.replace(config, text.dump(run_config(group, seats, jobs, folder, memory, link)).encode())
    own = {core for node in seats.nodes for core in cores[node]}

    def before() -> None:
        die_with_parent()
        os.sched_setaffinity(0, own)

    with (out / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jigsawrl", "run", str(config), "--out", str(out), "--resume", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a terminal is for whoever started it to pass on
            preexec_fn=before,
        )
    ended, names = os.pidfd_open(process.pid), {job.name for job in jobs}
    watched = Watched(None, silent_s(), pid=process.pid)
    run = Run(number, group, seats, out, process, ended, watched, names)
    run.places, run.order = dict(seats.places), seats.order
    return run


def held_stores(runs: Path) -> dict[Path, Path]:
    """Stores of the runs in this folder, dead or alive, by run. While this process lives, none is abandoned."""
    found = {Path(record.spill).parent: root for root, record in folders.stores()}
    return {out: root for out, root in found.items() if out.parent == runs.absolute() and locks.use(root)}


def _link(job: JobEntry, out: Path, folder: Path) -> None:
    """A run finds the job's folder under the job's name."""
    own = job_folder(job.name, folder)
    own.mkdir(parents=True, exist_ok=True)
    durable.replace(own / RUN_FILE, job.run.to_yaml().encode())
    link = out / job.name
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(own, out))


def wait_until_ended(numbers: Iterable[int], folder: Path) -> None:
    """Waits for whatever runs that were killed have left behind; a JigsawError if that does not end."""
    for number in numbers:
        wait_until_gone(run_folder(number, folder))
