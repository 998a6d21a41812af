"""Random submissions, cancellations and kills to a live cluster: whatever finishes has learned what it learns alone.

    python tests/soak/clusters.py --minutes 1 --seed 7

Every round is one cluster on two cores, with a few jobs of seconds. In the end every job that was accepted has
finished, equal to the same job alone, or was cancelled by somebody, and no process and nothing in memory is left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cluster"))

from commands import ANSWER_S, Wrong, again, check, options
from local_cluster import JOB, LocalCluster, learned, poll

from jigsawrl.api import launch
from jigsawrl.config.reserved import RESERVED
from jigsawrl.config.runfile import checked
from jigsawrl.daemon.admission import submit
from jigsawrl.daemon.ledger import Ledger
from jigsawrl.errors import JigsawError
from jigsawrl.telemetry.progress import Progress

JOBS: dict[str, dict[str, Any]] = {
    "a": {"steps": 16},
    "b": {"steps": 10, "seed": 4},
    "c": {"steps": 6, "seed": 8, "checkpoint": {"every": 1000}},
}
MOST_DEATHS = 2
"""Of the runs of a cluster; more in a row would make a job fail, as they should."""


@dataclass
class Round:
    number: int
    draw: random.Random
    cluster: LocalCluster
    alone: dict[str, Any]
    done: Counter[str]
    accepted: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    deaths: int = 0
    slowest: float = 0.0

    def play(self, until: float) -> None:
        print(f"round {self.number}", flush=True)
        self.cluster.folder.mkdir()
        try:
            self.cluster.start()
            for _ in range(self.draw.randint(6, 20)):
                time.sleep(self.draw.choice((0.0, 0.3, 1.0, 2.0)))
                getattr(self, self.draw.choices(list(MOVES), list(MOVES.values()))[0])()
                if time.monotonic() > until:
                    break
            self._end()
        finally:
            self.cluster.kill_all()

    def _told(self, what: str, command: Any, *arguments: Any) -> bool:
        """Whether it was not refused."""
        began = time.monotonic()
        try:
            command(*arguments)
            taken = True
        except JigsawError:
            taken = False
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        check(took < ANSWER_S, f"{what} was answered after {took:.1f} s")
        self.done[what if taken else f"{what}, refused"] += 1
        return taken

    def submit(self) -> None:
        name = self.draw.choice(list(JOBS))
        file = self.cluster.write_job(name, **JOBS[name])
        taken = self._told("submit", submit, self.cluster.out, file, None, None, {"max_slowdown": 1000})
        check(taken, f"{name} was refused")
        self.accepted.add(name)

    def submit_another(self) -> None:
        name = self.draw.choice([*sorted(self.accepted), *sorted(RESERVED)])
        file = self.cluster.write_job("other", steps=2)
        taken = self._told("submit", submit, self.cluster.out, file, name, 2, {"max_slowdown": 3})
        check(not taken, f"{name} was submitted twice")

    def cancel(self) -> None:
        name = self.draw.choice(list(JOBS))
        ledger = Ledger(self.cluster.out)
        if self._told("cancel", ledger.ask_to_cancel, name):
            self.cancelled.add(name)
        ledger.close()

    def kill_run(self) -> None:
        """A process of a group's run."""
        assert self.cluster.daemon is not None
        some = [pid for pid in self.cluster.alive() if pid != self.cluster.daemon.pid]
        if some and self.deaths < MOST_DEATHS:
            self.deaths += 1
            with suppress(ProcessLookupError):
                os.kill(self.draw.choice(sorted(some)), signal.SIGKILL)
            self.done["SIGKILL of a run's process"] += 1

    def kill_daemon(self) -> None:
        self._restart(signal.SIGKILL)

    def terminate(self) -> None:
        self._restart(signal.SIGTERM)

    def kill_all(self) -> None:
        for pid in self.cluster.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.done["SIGKILL of everything"] += 1
        self.cluster.end()
        self.cluster.start()

    def _restart(self, number: signal.Signals) -> None:
        self.cluster.signal(number)
        self.done[f"{number.name} of the daemon"] += 1
        self.cluster.end()
        self.cluster.start()

    def _end(self) -> None:
        if not self.accepted:
            self.submit()
        self.cluster.signal(signal.SIGTERM)
        self.cluster.end()
        self.cluster.start("--until-done")
        code = self.cluster.end()
        states = self.cluster.states()
        check(code == 0, f"it ended with {code}: {states}\n{self.cluster.said()[-3000:]}")
        check(set(states) == self.accepted, f"{self.accepted} were accepted, {states} are there")
        for name, state in states.items():
            if state == "finished":
                equal = learned(self.cluster.out / "jobs" / name) == self.alone[name]
                check(equal, f"{name} has not learned what it learns alone")
            else:
                check(state == "cancelled" and name in self.cancelled, f"{name} is {state}")
            self.done["finished, as alone" if state == "finished" else "cancelled"] += 1
        poll(lambda: not self.cluster.stores(), lambda: f"left: {self.cluster.stores()}", 10.0)


MOVES = {
    "submit": 5,
    "submit_another": 2,
    "cancel": 1,
    "kill_run": 2,
    "kill_daemon": 1,
    "kill_all": 1,
    "terminate": 1,
}


def learn_alone(folder: Path) -> dict[str, Any]:
    found = {}
    for name, settings in JOBS.items():
        run = checked({**JOB, **settings, "name": name, "device": "cpu"})
        launch(run, folder / f"alone-{name}", False, Progress(json=True))
        found[name] = learned(folder / f"alone-{name}")
    return found


def main() -> int:
    given = options(__doc__ or "")
    until = time.monotonic() + 60 * given.minutes
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    done: Counter[str] = Counter()
    slowest, number = 0.0, 0
    print(f"clusters, seed {given.seed}, {given.minutes:g} minutes, in {folder}", flush=True)
    alone = learn_alone(folder)
    while number == 0 or time.monotonic() < until:
        own = folder / f"round-{number}"
        one = Round(number, random.Random(f"{given.seed}/{number}"), LocalCluster(own), alone, done)
        try:
            one.play(until)
        except (Wrong, AssertionError, JigsawError, OSError) as error:
            print(f"round {number} of seed {given.seed}: {type(error).__name__}: {error}\nsee {own}")
            print(again(given))
            return 1
        slowest, number = max(slowest, one.slowest), number + 1
        shutil.rmtree(own)
    shutil.rmtree(folder)
    print(f"\n{number} clusters; slowest answer {slowest:.2f} s")
    for what, count in sorted(done.items()):
        print(f"{count:6}  {what}")
    print(again(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
