"""What is to be done for the runs to become what the scheduler wants. Pure.

A run is a group at work: its nodes never change while it goes, nor those of a job, but who is in it may, and the
order in which they take turns. A job that leaves finishes its step and is saved; one that joins goes on from there.
Nobody begins on nodes, or with jobs, that another run still has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jigsawrl.phases.turns import OrderName

Places = Mapping[str, frozenset[str]]
"""The rollout nodes of each job, where it has some of its group's for itself."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A group as the scheduler has it."""

    nodes: tuple[str, ...]
    """Rollout nodes first."""
    jobs: tuple[str, ...]
    places: Places = field(default_factory=dict)
    order: OrderName | None = None
    """That its plan promises, where its jobs have pools to take turns in."""


@dataclass(frozen=True, slots=True)
class Going:
    """A run as it is."""

    number: int
    group: int
    nodes: tuple[str, ...]
    jobs: frozenset[str]
    """That have not ended in it."""
    past: frozenset[str]
    """That have; a run takes nobody twice."""
    leaving: frozenset[str]
    """That were told to."""
    stopping: bool
    places: Places = field(default_factory=dict)
    order: OrderName | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    group: int


@dataclass(frozen=True, slots=True)
class Join:
    run: int
    job: str


@dataclass(frozen=True, slots=True)
class Leave:
    run: int
    job: str


@dataclass(frozen=True, slots=True)
class Reorder:
    """From now on its jobs take turns in another order."""

    run: int
    order: OrderName | None


@dataclass(frozen=True, slots=True)
class Halt:
    run: int


Order = Begin | Join | Leave | Reorder | Halt


def orders(wanted: Mapping[int, Wanted], going: Sequence[Going]) -> list[Order]:
    """All that can be done now; more may follow when it is done."""
    found: list[Order] = []
    busy_nodes = {node for run in going for node in run.nodes}
    busy_jobs = {job for run in going for job in run.jobs}
    for run in going:
        if not run.stopping and run.jobs:
            found += _of_run(run, wanted.get(run.group), busy_jobs)
    for number, group in wanted.items():
        if group.jobs and busy_nodes.isdisjoint(group.nodes) and busy_jobs.isdisjoint(group.jobs):
            found.append(Begin(number))
    return found


def _of_run(run: Going, group: Wanted | None, busy_jobs: set[str]) -> list[Order]:
    if group is None or set(group.nodes) != set(run.nodes):
        return [Halt(run.number)]
    if any(run.places.get(job) != group.places.get(job) for job in run.jobs.intersection(group.jobs)):
        return [Halt(run.number)]
    new = [job for job in group.jobs if job not in run.jobs]
    if any(job in run.past for job in new):
        return [Halt(run.number)]
    found: list[Order] = [Leave(run.number, job) for job in sorted(run.jobs - {*group.jobs} - run.leaving)]
    if run.order != group.order:
        found.append(Reorder(run.number, group.order))
    return found + [Join(run.number, job) for job in new if job not in busy_jobs]
