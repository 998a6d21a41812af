"""Random commands and kills to live runs: whatever finishes has learned what it learns alone, bit for bit.

    python tests/soak/commands.py --minutes 1 --seed 7

Every round is one run of a few small pipelines on the CPU. Commands of users, garbage on the socket, SIGTERM and
SIGKILL come in an order that follows from the seed; when they come depends on the machine. In the end pipelines that
were cancelled have stayed cancelled, all others are equal to the same pipeline alone, every command was answered
within a bound, the log can be replayed, and no process and nothing in shared memory is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))

from mixes import CALC, SUMS, Command, command_of, events, learned, poll, result, start, write_mix

from jigsawrl.config.reserved import RESERVED
from jigsawrl.errors import JigsawError
from jigsawrl.runtime.control import ask
from jigsawrl.runtime.replay import replayed
from jigsawrl.runtime.requests import take_back

PIPELINES: dict[str, dict[str, Any]] = {
    "sums": SUMS | {"steps": 60},
    "calc": CALC | {"steps": 16},
    "more": SUMS | {"steps": 30, "seed": 3, "checkpoint": {"every": 5}},
    "lora": SUMS | {"steps": 10, "model": SUMS["model"] | {"lora": {"rank": 4}}},
    "late": SUMS | {"steps": 6, "seed": 9},
}
FIRST = ("sums", "calc", "more")
"""In the run file; the others are submitted."""
POLICIES = ("jigsaw", "concurrent", "serial", "rollmux", "rlix")
ANSWER_S = 30.0
"""Longest time to an answer, on a busy machine."""
END_S = 240.0
"""Longest time that a run may take for what is left of it."""
SET_UP_S = 10.0
"""Longest wait for a first step."""
MOST_DEATHS = 2
"""Of one pipeline in a session; more in a row would make it fail, as they should."""
GARBAGE = (
    b"",
    b"{",
    b"[" * 200_000,
    b'{"do": ' * 50_000,
    b'{"do": "pause", "pipeline": "\xff"}',
    b'{"do": "submit", "name": "late", "entry": []}',
    b"x" * (2 << 20),
)


class Wrong(Exception):
    """What must never happen has happened."""


def check(condition: object, what: str) -> None:
    if not condition:
        raise Wrong(what)


@dataclass
class Round:
    """One run, and what users believe of it."""

    number: int
    draw: random.Random
    folder: Path
    alone: dict[str, Any]
    done: Counter[str]
    """What was done, in all rounds."""
    cancelled: set[str] = field(default_factory=set)
    submitted: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)
    """Steps that a pipeline had made when it was seen to be cancelled."""
    deaths: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    run: Command = field(init=False)
    file: Path = field(init=False)
    out: Path = field(init=False)
    found: dict[str, Any] = field(default_factory=dict)

    def play(self, until: float) -> None:
        policy = self.draw.choice(POLICIES)
        first = self.draw.sample(FIRST, self.draw.randint(1, len(FIRST)))
        self.file = write_mix(self.folder, policy, **PIPELINES)
        mix = json.loads(self.file.read_text())
        mix["pipelines"] = {name: entry for name, entry in mix["pipelines"].items() if name in first}
        self.file.write_text(json.dumps(mix))
        self.out = self.folder / "out"
        self.submitted = set(first)
        print(f"round {self.number}: {', '.join(first)} under {policy}", flush=True)
        self.run = start(self.file, self.out)
        try:
            self._listens()
            self._is_at_work()
            for _ in range(self.draw.randint(6, 30)):
                time.sleep(self.draw.choice((0.0, 0.05, 0.3, 1.0)))
                if self.run.process.poll() is not None:
                    self._resume("the run had ended")
                getattr(self, self.draw.choices(list(MOVES), list(MOVES.values()))[0])()
                if time.monotonic() > until:
                    break
            self._end()
        finally:
            self.run.kill_all()
            self.run.process.wait()

    # Commands

    def _ask(self, **request: Any) -> dict[str, Any] | None:
        """None where it was refused."""
        began = time.monotonic()
        try:
            answer = ask(self.out, **request)
        except JigsawError as error:
            check("gave no answer" not in str(error), f"{request}: {error}")
            check("could not be carried out" not in str(error), f"{request}: {error}")
            answer = None
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        check(took < ANSWER_S, f"{request} was answered after {took:.1f} s")
        self._note(f"{request['do']}{'' if answer else ', refused'}")
        return answer

    def submit(self) -> None:
        name = self.draw.choice(list(PIPELINES))
        if self._submit(name):
            self.submitted.add(name)

    def _submit(self, name: str, **terms: Any) -> bool:
        entry = {"run": str(self.folder / f"{name}.yaml"), "steps": None, "priority": 0}
        return self._ask(do="submit", name=name, entry=entry | {"max_slowdown": None} | terms) is not None

    def submit_another(self) -> None:
        """Of a name that is taken, or that nobody can have."""
        name = self.draw.choice([*sorted(self.submitted), *sorted(RESERVED)])
        other = self.folder / "late.yaml"
        entry = {"run": str(other), "steps": 2, "priority": 1}
        check(self._ask(do="submit", name=name, entry=entry) is None, f"{name} was submitted twice")

    def cancel(self) -> None:
        name = self.draw.choice(list(PIPELINES))
        if self._ask(do="cancel", pipeline=name):
            self.cancelled.add(name)

    def pause(self) -> None:
        name = self.draw.choice(list(PIPELINES))
        if self._ask(do="pause", pipeline=name):
            self.paused.add(name)

    def resume(self) -> None:
        name = self.draw.choice(sorted(self.paused) or list(PIPELINES))
        if name in self.cancelled:
            return
        if self._ask(do="resume", pipeline=name):
            self.paused.discard(name)

    def garbage(self) -> None:
        try:
            where = json.loads((self.out / "control.json").read_text())["socket"]
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
                one.settimeout(ANSWER_S)
                one.connect(f"\0{where}")
                one.sendall(self.draw.choice(GARBAGE))
                if self.draw.random() < 0.7:
                    one.shutdown(socket.SHUT_WR)
                    one.recv(65536)
        except TimeoutError:
            raise Wrong("garbage was neither answered nor closed") from None
        except OSError:
            pass
        self._note("garbage")

    # Kills

    def kill_one(self) -> None:
        """A driver or an actor."""
        found = {pid: command_of(pid) for pid in self.run.alive()}
        some = [(pid, name) for pid, name in found.items() if name.startswith(("driver:", "actor"))]
        some = [(pid, name) for pid, name in some if self.deaths[name.partition(":")[2]] < MOST_DEATHS]
        if some:
            pid, name = self.draw.choice(sorted(some))
            for each in PIPELINES:  # one of a shared process takes all of its pipelines along
                self.deaths[each] += 1
            self._kill(pid)
            self._note(f"SIGKILL of a{'n actor' if name.startswith('actor') else ' driver'}")

    def kill_scheduler(self) -> None:
        self._kill(self.run.process.pid)
        self.run.process.wait()
        self._note("SIGKILL of the scheduler")
        poll(lambda: not self.run.alive(), lambda: f"left: {self.run.alive()}", 60.0)
        self._resume("killed")

    def kill_all(self) -> None:
        for pid in self.run.alive():
            self._kill(pid)
        self.run.process.wait()
        self._note("SIGKILL of everything")
        poll(lambda: not self.run.alive(), lambda: f"left: {self.run.alive()}", 60.0)
        self._resume("killed")

    def terminate(self) -> None:
        """With a command in the middle."""
        self.run.signal(signal.SIGTERM)
        self._note("SIGTERM")
        if self.draw.random() < 0.5:
            getattr(self, self.draw.choice(("cancel", "pause", "submit", "resume")))()
        self.run.process.wait(END_S)
        if not (
            self.run.written / "stdout"
        ).read_text():  # it came before anything was set up, or at the very end
            poll(lambda: not self.run.alive(), lambda: f"left: {self.run.alive()}", 60.0)
            self._resume("stopped at once")
            return
        self._ended()
        if self.cancelled and self.draw.random() < 0.3:
            name = self.draw.choice(sorted(self.cancelled))
            if self.found[name]["ended"] == "cancelled":
                take_back(self.out, name)
                self.cancelled.discard(name)
                self.rows.pop(name, None)
                self._note("taken back")
        self._resume("stopped")

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    # The run

    def _note(self, what: str) -> None:
        self.done[what] += 1

    def _listens(self) -> None:
        def ready() -> bool:
            found = self.out / "control.json"
            ours = found.exists() and json.loads(found.read_text())["pid"] == self.run.process.pid
            return ours or self.run.process.poll() is not None

        poll(ready, "it does not listen", 60.0)

    def _ended(self) -> None:
        """A session is over, and says how its pipelines ended."""
        try:
            code = self.run.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise Wrong("it does not end") from None
        said = (self.run.written / "stdout").read_text()
        check(said, f"it ended with {code} and said:\n{self.run.said()[-3000:]}")
        self.found = json.loads(said)["pipelines"]
        for name, each in self.found.items():
            how = each["ended"]
            check(how in ("finished", "cancelled", "interrupted"), f"{name}: {how}: {each['reason']}")
            if how == "cancelled":
                check(name in self.cancelled, f"{name} ended as cancelled, and nobody had cancelled it")
                self._stays(name)
        check(
            self.submitted <= self.found.keys(), f"{self.submitted} were accepted, {[*self.found]} are there"
        )
        poll(lambda: not self.run.alive(), lambda: f"left behind: {self.run.alive()}", 30.0)

    def _stays(self, name: str) -> None:
        metrics = self.out / name / "metrics.jsonl"
        rows = len(learned(self.out / name)) if metrics.exists() else 0
        check(self.rows.setdefault(name, rows) == rows, f"{name} was cancelled and made more steps")

    def _resume(self, why: str) -> None:
        self._note("--resume")
        self.deaths.clear()
        self.run = start(self.file, self.out, "--resume")
        if self.draw.random() < 0.7:
            self._listens()
        if self.draw.random() < 0.6:
            self._is_at_work()

    def _is_at_work(self) -> None:
        """Waits a while for a step, so that not everything happens during set-up; all may be paused or over."""

        def made() -> int:
            return sum(path.read_bytes().count(b"\n") for path in self.out.glob("*/metrics.jsonl"))

        before, until = made(), time.monotonic() + SET_UP_S
        while made() == before and self.run.process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)

    def _end(self) -> None:
        """Nothing more is asked, so all that is left is done."""
        for _ in range(20):
            if self.run.process.poll() is None:
                self._listens()
                for name in sorted(self.paused - self.cancelled):
                    if self._ask(do="resume", pipeline=name):
                        self.paused.discard(name)
            self._ended()
            if all(each["ended"] in ("finished", "cancelled") for each in self.found.values()):
                break
            self._resume("not all had ended")
        else:
            raise Wrong(f"it does not come to an end: {self.found}")
        for name, each in self.found.items():
            if each["ended"] == "finished":
                check(
                    result(self.out / name) == self.alone[name],
                    f"{name} has not learned what it learns alone",
                )
                self._note("finished, as alone")
            else:
                self._note("cancelled, and stayed so")
        check(all(each.same for each in replayed(self.out)), "the log does not replay")
        check(events(self.out, "end"), "the log has no end")
        self.run.assert_nothing_is_left()


MOVES = {
    "submit": 5,
    "submit_another": 3,
    "cancel": 2,
    "pause": 4,
    "resume": 4,
    "garbage": 2,
    "kill_one": 4,
    "kill_scheduler": 1,
    "kill_all": 1,
    "terminate": 1.5,
}


def learn_alone(folder: Path) -> dict[str, Any]:
    """What each pipeline learns by itself."""

    def learn(name: str) -> Any:
        own = folder / f"alone-{name}"
        alone = start(write_mix(own, "serial", **{name: PIPELINES[name]}), own / "out")
        code, _ = alone.answer(END_S)
        check(code == 0, f"{name} alone ended with {code}: {alone.said()}")
        return result(own / "out" / name)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PIPELINES, pool.map(learn, PIPELINES), strict=True))


def options(what: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    return parser.parse_args()


def again(given: argparse.Namespace) -> str:
    """How to have the same once more."""
    program = Path(sys.argv[0]).name
    return f"again: python tests/soak/{program} --seed {given.seed} --minutes {given.minutes:g}"


def main() -> int:
    given = options(__doc__ or "")
    began = time.monotonic()
    until = began + 60 * given.minutes
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    done: Counter[str] = Counter()
    slowest, number = 0.0, 0
    print(f"seed {given.seed}, {given.minutes:g} minutes, in {folder}", flush=True)
    alone = learn_alone(folder)
    while number == 0 or time.monotonic() < until:
        own = folder / f"round-{number}"
        draw = random.Random(f"{given.seed}/{number}")
        one = Round(number, draw, own, alone, done)
        try:
            one.play(until)
        except (Wrong, AssertionError, JigsawError, OSError) as error:
            print(f"round {number} of seed {given.seed}: {type(error).__name__}: {error}\nsee {own}")
            print(again(given))
            return 1
        slowest, number = max(slowest, one.slowest), number + 1
        shutil.rmtree(own)
    shutil.rmtree(folder)
    print(
        f"\n{number} rounds in {(time.monotonic() - began) / 60:.1f} minutes; slowest answer {slowest:.2f} s"
    )
    for what, count in sorted(done.items()):
        print(f"{count:6}  {what}")
    print(again(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
