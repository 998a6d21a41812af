"""What a cluster's folder remembers: jobs, groups, runs, what happened, and what it cost.

One SQLite file in WAL mode. Every change is one transaction, on the disk when it returns. Submitting processes add
jobs and ask for cancellations; all else is written by the one daemon.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jigsawrl import durable
from jigsawrl.cluster.groups import How
from jigsawrl.config.cluster import ClusterConfig, TermsConfig
from jigsawrl.config.settings import RunConfig
from jigsawrl.errors import JigsawError

FORMAT = 3
FILE = "cluster.db"
PATIENCE_S = 30.0
"""For another process to let go of the ledger; transactions take milliseconds."""
MOST_EVENTS = 100_000
"""That are kept, the last ones."""
TABLES = """
CREATE TABLE cluster (config TEXT, dollars REAL, groups INTEGER);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, name TEXT UNIQUE, run TEXT, terms TEXT, submitted REAL, cancel INTEGER DEFAULT 0,
    state TEXT DEFAULT 'submitted', reason TEXT DEFAULT '', step INTEGER DEFAULT 0, furthest INTEGER DEFAULT 0,
    deaths INTEGER DEFAULT 0, began INTEGER DEFAULT 0, spent REAL DEFAULT 0, grp INTEGER, planned REAL,
    rollout TEXT DEFAULT '[]', training TEXT DEFAULT '[]', ended REAL, overtaken INTEGER DEFAULT 0,
    preempted INTEGER DEFAULT 0, made REAL DEFAULT 0, counted INTEGER DEFAULT 0
);
CREATE TABLE groups (number INTEGER PRIMARY KEY, price REAL, rollout_nodes TEXT, training_nodes TEXT, jobs TEXT);
CREATE TABLE nodes (name TEXT PRIMARY KEY, broken INTEGER);
CREATE TABLE runs (number INTEGER PRIMARY KEY, grp INTEGER, nodes TEXT, started REAL, ended REAL, how TEXT);
CREATE TABLE events (number INTEGER PRIMARY KEY, at REAL, kind TEXT, job TEXT, grp INTEGER, text TEXT);
"""
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a row that is not as it was written may raise."""
JobState = Literal["submitted", "waiting", "running", "finished", "failed", "cancelled"]
OVER: tuple[JobState, ...] = ("finished", "failed", "cancelled")


@dataclass(slots=True)
class JobEntry:
    """A job, as far as it is."""

    name: str
    run: RunConfig
    terms: TermsConfig
    submitted: float
    """Unix seconds."""
    cancel: bool = False
    """Whether somebody wants it to end."""
    state: JobState = "submitted"
    reason: str = ""
    step: int = 0
    furthest: int = 0
    """The last step that it ever made."""
    deaths: int = 0
    """Of its runs in a row, without a step in between."""
    began: bool = False
    """Whether it was ever set up."""
    spent: float = 0.0
    """Seconds that count against its promise: waiting for nodes, and all since it was first set up."""
    group: int | None = None
    planned: float | None = None
    """Slowdown."""
    rollout: list[float] = field(default_factory=list)
    """Seconds of its last phases, on as many nodes as it asks for."""
    training: list[float] = field(default_factory=list)
    ended: float | None = None
    overtaken: int = 0
    """Jobs that came later, and got nodes while it waited."""
    preempted: int = 0
    """How often it had to leave its nodes to a job of higher priority."""
    made: float = 0.0
    """Seconds that its steps would have taken alone, each counted once."""
    counted: int = 0
    """The last step that is in them."""

    @property
    def steps(self) -> int:
        return self.run.steps

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def alone(self) -> float | None:
        """Measured seconds of a step by itself, of late; None before there are any."""
        if not self.rollout or not self.training:
            return None
        return sum(self.rollout) / len(self.rollout) + sum(self.training) / len(self.training)

    @property
    def slowdown(self) -> float | None:
        """So far."""
        return self.spent / self.made if self.made else None

    def count(self, step: int) -> None:
        """A step whose phases were the last ones is done, perhaps not for the first time."""
        if step > self.counted and self.rollout and self.training:
            self.made += self.rollout[-1] + self.training[-1]
            self.counted = step


@dataclass(frozen=True, slots=True)
class GroupEntry:
    number: int
    price: float
    """Dollars an hour."""
    rollout_nodes: tuple[str, ...]
    training_nodes: tuple[str, ...]
    jobs: tuple[str, ...]


class Ledger:
    def __init__(self, folder: Path) -> None:
        """Of a cluster that is there; a JigsawError where none is."""
        self.folder = folder
        if not (folder / FILE).is_file():
            raise JigsawError(f"{folder}: is no cluster's folder; 'jigsaw cluster start' makes one")
        try:
            self.db = _connect(folder)
            (version,) = self.db.execute("PRAGMA user_version").fetchone()
            if version != FORMAT:
                raise ValueError(f"it has format {version}, this jigsawrl has {FORMAT}")
            content = self.db.execute("SELECT config, dollars, groups FROM cluster").fetchone()
            self.config = ClusterConfig.model_validate_json(content[0])
        except (sqlite3.Error, RecursionError, *DAMAGED) as error:
            said = str(error).partition("\n")[0]
            raise JigsawError(f"{folder / FILE}: cannot be read ({said})") from None
        self.dollars: float = content[1]
        self.groups_founded: int = content[2]
        self._seen = -1

    @classmethod
    def make(cls, folder: Path, config: ClusterConfig) -> Ledger:
        """For a new cluster; a kill leaves all of it, or none."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists():
            aside = folder / f".{FILE}"
            aside.unlink(missing_ok=True)
            db = sqlite3.connect(aside, isolation_level=None)
            db.executescript(TABLES)
            db.execute(f"PRAGMA user_version = {FORMAT}")
            db.execute("INSERT INTO cluster VALUES (?, 0, 0)", [config.model_dump_json()])
            db.close()
            os.replace(aside, folder / FILE)
            durable.sync(folder)
        return cls(folder)

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """All that is written inside, or nothing of it."""
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield
            self.db.execute("COMMIT")
        except (sqlite3.OperationalError, UnicodeEncodeError) as error:
            raise JigsawError(f"{self.folder / FILE}: cannot be written ({error})") from None
        finally:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def changed(self) -> bool:
        """Whether another process has written since this was last asked."""
        (version,) = self.db.execute("PRAGMA data_version").fetchone()
        before, self._seen = self._seen, version
        return bool(before != version)

    # By whoever submits

    def submit(self, name: str, run: RunConfig, terms: TermsConfig) -> bool:
        """Whether the job is new: the same one, submitted again, is there already."""
        what = [name, run.model_dump_json(), terms.model_dump_json()]
        with self.change():
            same = "SELECT name, run, terms FROM jobs WHERE name = ? COLLATE NOCASE"
            if (found := self.db.execute(same, [name]).fetchone()) is None:
                values = [*what, time.time()]
                self.db.execute("INSERT INTO jobs (name, run, terms, submitted) VALUES (?, ?, ?, ?)", values)
                self.note("submitted", name, None, "")
                return True
        if list(found) != what:
            raise JigsawError(f"{self.folder}: there is a job {found[0]} already; choose another --name")
        return False

    def ask_to_cancel(self, name: str) -> None:
        with self.change():
            found = self.job(name)
            if found.over and found.state != "cancelled":
                raise JigsawError(f"{name} has ended: {found.state}")
            self.db.execute("UPDATE jobs SET cancel = 1 WHERE name = ?", [name])

    # By the daemon

    def save(self, job: JobEntry) -> None:
        """All but what submitting processes write."""
        values = {
            "state": job.state,
            "reason": job.reason,
            "step": job.step,
            "furthest": job.furthest,
            "deaths": job.deaths,
            "began": job.began,
            "spent": job.spent,
            "grp": job.group,
            "planned": job.planned,
            "rollout": json.dumps(job.rollout),
            "training": json.dumps(job.training),
            "ended": job.ended,
            "overtaken": job.overtaken,
            "preempted": job.preempted,
            "made": job.made,
            "counted": job.counted,
        }
        columns = ", ".join(f"{column} = ?" for column in values)
        self.db.execute(f"UPDATE jobs SET {columns} WHERE name = ?", [*values.values(), job.name])

    def save_groups(self, groups: Sequence[GroupEntry], founded: int) -> None:
        self.groups_founded = founded
        self.db.execute("UPDATE cluster SET groups = ?", [founded])
        self.db.execute("DELETE FROM groups")
        for each in groups:
            lists = map(json.dumps, (each.rollout_nodes, each.training_nodes, each.jobs))
            values = [each.number, each.price, *lists]
            self.db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?)", values)

    def save_broken(self, nodes: Sequence[str], broken: Collection[str]) -> None:
        """Which of all nodes cannot be used."""
        states = [(name, name in broken) for name in nodes]
        self.db.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?)", states)

    def save_dollars(self, dollars: float) -> None:
        self.dollars = dollars
        self.db.execute("UPDATE cluster SET dollars = ?", [dollars])

    def note(self, kind: str, job: str | None, group: int | None, text: str) -> None:
        """An event."""
        values = [time.time(), kind, job, group, text]
        new = self.db.execute("INSERT INTO events (at, kind, job, grp, text) VALUES (?, ?, ?, ?, ?)", values)
        self.db.execute("DELETE FROM events WHERE number <= ?", [(new.lastrowid or 0) - MOST_EVENTS])

    def begin_run(self, group: int, nodes: Sequence[str]) -> int:
        """Its number."""
        values = [group, json.dumps(nodes), time.time()]
        found = self.db.execute("INSERT INTO runs (grp, nodes, started) VALUES (?, ?, ?)", values)
        assert found.lastrowid is not None
        return found.lastrowid

    def end_run(self, number: int, how: str) -> None:
        self.db.execute("UPDATE runs SET ended = ?, how = ? WHERE number = ?", [time.time(), how, number])

    # By anybody

    def jobs(self) -> list[JobEntry]:
        """In the order of their submission."""
        return [_job(row) for row in self.db.execute("SELECT * FROM jobs ORDER BY number")]

    def asked(self) -> list[JobEntry]:
        """Jobs that are new to the daemon, or that somebody wants to end."""
        wanted = "state = 'submitted' OR (cancel AND ended IS NULL)"
        return [_job(row) for row in self.db.execute(f"SELECT * FROM jobs WHERE {wanted} ORDER BY number")]

    def count(self) -> int:
        """Jobs, all that there ever were."""
        (count,) = self.db.execute("SELECT COUNT(*) FROM jobs").fetchone()
        return int(count)

    def job(self, name: str) -> JobEntry:
        row = self.db.execute("SELECT * FROM jobs WHERE name = ?", [name]).fetchone()
        if row is None:
            names = [each for (each,) in self.db.execute("SELECT name FROM jobs ORDER BY number")]
            there = f"there are {', '.join(names)}" if names else "there are none"
            raise JigsawError(f"{self.folder}: there is no job {name}; {there}")
        return _job(row)

    def groups(self) -> list[GroupEntry]:
        rows = self.db.execute("SELECT * FROM groups ORDER BY number")
        return [
            GroupEntry(number, price, *(tuple(json.loads(each)) for each in lists))
            for number, price, *lists in rows
        ]

    def nodes(self) -> dict[str, bool]:
        """Whether each is broken."""
        return {name: bool(broken) for name, broken in self.db.execute("SELECT * FROM nodes")}

    def runs_under_way(self) -> list[int]:
        return [number for (number,) in self.db.execute("SELECT number FROM runs WHERE ended IS NULL")]

    def reasons(self) -> dict[str, str]:
        """Why each job is where it is, or waits: the scheduler's last word on it."""
        kinds = ", ".join(f"'{how}'" for how in get_args(How))
        rows = self.db.execute(
            f"SELECT job, text, MAX(number) FROM events WHERE kind IN ({kinds}) GROUP BY job"
        )
        return {job: text for job, text, _ in rows}

    def events(self, most: int = -1) -> list[dict[str, Any]]:
        """The last ones, or all."""
        rows = self.db.execute(
            "SELECT at, kind, job, grp, text FROM events ORDER BY number DESC LIMIT ?", [most]
        )
        found = [dict(zip(("at", "kind", "job", "group", "text"), row, strict=True)) for row in rows]
        return found[::-1]


@contextmanager
def undamaged(folder: Path) -> Iterator[None]:
    """A JigsawError where what is read inside turns out to be damaged."""
    try:
        yield
    except (sqlite3.DatabaseError, RecursionError, *DAMAGED) as error:
        said = str(error).partition("\n")[0][:200]
        raise JigsawError(
            f"{folder / FILE}: is damaged ({said}); put a copy of it there, or start a cluster in another folder"
        ) from None


def _connect(folder: Path) -> sqlite3.Connection:
    db = sqlite3.connect(folder / FILE, timeout=PATIENCE_S, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    return db


def _job(row: Sequence[Any]) -> JobEntry:
    _, name, run, terms, submitted, cancel, state, reason, step, furthest, deaths, began, spent, *rest = row
    group, planned, rollout, training, ended, *counts = rest
    if not isinstance(name, str) or state not in get_args(JobState):
        raise ValueError(f"a job {name!r} that is {state!r}")
    return JobEntry(
        name,
        RunConfig.model_validate_json(run),
        TermsConfig.model_validate_json(terms),
        submitted,
        bool(cancel),
        state,
        reason,
        step,
        furthest,
        deaths,
        bool(began),
        spent,
        group,
        planned,
        json.loads(rollout),
        json.loads(training),
        ended,
        *counts,
    )
