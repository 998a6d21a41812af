"""The process that runs a cluster: hears of jobs, asks the scheduler, and keeps the runs in line with its answers.

Whatever happens is first decided, then in the ledger, then done. Runs that are not as they should be are made so
again and again (`orders`), so it does not matter at which moment a daemon was killed: the next one finds jobs that
are not over, places them anew, and begins runs for their groups.
"""

from __future__ import annotations

import math
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from jigsawrl.cluster.from_config import cluster_of
from jigsawrl.cluster.groups import Decision, Group
from jigsawrl.cluster.scheduler import Scheduler
from jigsawrl.cluster.simulation import DRIFTED, LOOK, RECONSIDER
from jigsawrl.daemon.admission import HOUR, job_of
from jigsawrl.daemon.ledger import GroupEntry, JobEntry, JobState, Ledger
from jigsawrl.daemon.orders import Begin, Halt, Join, Leave, Order, Reorder, Wanted, orders
from jigsawrl.daemon.runs import Run, Seats, held_stores, runs_folder, start, wait_until_ended
from jigsawrl.store import folders
from jigsawrl.telemetry.text import duration

TICK_S = 0.2
"""Time between two looks at the ledger and at what runs have written, at most."""
KEEP_S = 2.0
"""Time between two savings of figures that change all the time, at least."""
RETRIES = 3
"""Deaths of a job's runs in a row, without a step in between, after which it is given up."""
RECENT = 2 * LOOK
"""Phases by which durations are known."""
NOISE = 2.0
"""Standard errors by which durations must differ from what is known to have drifted."""
KILL_S = 10.0
"""Patience with runs that were told twice to stop."""


class Daemon:
    """Of one folder; nobody else runs it meanwhile."""

    def __init__(
        self, ledger: Ledger, cores: Mapping[str, Sequence[int]], say: Callable[[str], None]
    ) -> None:
        self.ledger, self.cores, self.say = ledger, cores, say
        self.folder = ledger.folder
        self.cluster = cluster_of(ledger.config)
        self.scheduler = Scheduler(
            self.cluster,
            level=ledger.config.quantile,
            largest=ledger.config.max_group,
            first_group=ledger.groups_founded,
        )
        self.jobs: dict[str, JobEntry] = {}
        """That are not over."""
        self.ever = 0
        """Jobs that were ever submitted."""
        self.failed = 0
        self.runs: dict[int, Run] = {}
        self.told: dict[str, float] = {}
        """Seconds of a step alone that the scheduler knows of each job."""
        self.looked: dict[str, int] = {}
        """The step at which each job's durations were last looked at."""
        self.decided_at = time.time()
        self.left: dict[Path, set[str]] = {}
        """Stores of dead runs, and the jobs that go on from what is remembered there."""
        self.broken: set[str] = set()
        """Nodes some of whose cores are gone."""
        self.began = time.time()
        self.now = self.kept = time.monotonic()

    def run(self, until_done: bool, pressed: Callable[[], int]) -> int:
        """Until it is told to stop (`pressed`: how often), or all jobs are over. The exit code."""
        self._recover()
        try:
            while not (until_done and self.ever and not self.jobs and not self.runs):
                if pressed():
                    self._stop(pressed)
                    return 0
                self._turn()
                self._carry_out()
        finally:
            self._end_all()
            self._keep()
        return 1 if self.failed else 0

    # What happened

    def _recover(self) -> None:
        """Whatever an earlier daemon left."""
        left = self.ledger.runs_under_way()
        wait_until_ended(left, self.folder)
        jobs = {job.name for job in self.ledger.jobs() if not job.over}
        for out, store in held_stores(runs_folder(self.folder)).items():
            self._keep_store(store, {name for name in jobs if (out / name).is_symlink()})
        with self.ledger.change():
            for number in left:
                self.ledger.end_run(number, "its daemon ended")
            self.ledger.save_groups([], self.ledger.groups_founded)
            self.ledger.save_broken(list(self.cores), ())
            for job in self.ledger.jobs():
                if not job.over:
                    job.state, job.group, job.planned = "submitted", None, None
                    self.ledger.save(job)

    def _turn(self) -> None:
        """Waits a moment, and hears of everything that happened."""
        self._listen()
        self._look_at_nodes()
        if self.ledger.changed():
            self._look_at_ledger()
        for job in list(self.jobs.values()):
            self._look_at_durations(job)
        if self.now - self.kept > KEEP_S:
            self._keep()

    def _pass(self) -> None:
        """Time goes by: it costs, and counts against promises."""
        passed, self.now = time.monotonic() - self.now, time.monotonic()
        self.ledger.dollars += self.scheduler.price * passed / HOUR
        for job in self.jobs.values():
            if job.state == "waiting" or job.began:
                job.spent += passed

    def _keep(self) -> None:
        self.kept = self.now
        with self.ledger.change():
            self.ledger.save_dollars(self.ledger.dollars)
            for job in self.jobs.values():
                self.ledger.save(job)

    def _look_at_nodes(self) -> None:
        """A node breaks when a core of it is taken away, and works again when that is back."""
        there = os.sched_getaffinity(0)
        for node, cores in self.cores.items():
            broken = not there.issuperset(cores)
            if broken != (node in self.broken):
                self.broken ^= {node}
                how = "broken" if broken else "repaired"
                self.say(f"{node}: {how}")
                self._stand()
                decisions = self.scheduler.fail(node) if broken else self.scheduler.repair(node)
                self._decided(decisions, partial(self._note_node, node, how))

    def _note_node(self, node: str, how: str) -> None:
        self.ledger.note(how, None, None, node)
        self.ledger.save_broken(list(self.cores), self.broken)

    def _look_at_ledger(self) -> None:
        self.ever = self.ledger.count()
        for entry in sorted(self.ledger.asked(), key=lambda job: -job.terms.priority):
            if entry.name in self.jobs:
                self._cancel(self.jobs[entry.name])
            else:
                self._arrive(entry)

    def _arrive(self, job: JobEntry) -> None:
        if job.cancel:
            with self.ledger.change():
                self._mark(job, "cancelled", "")
            return
        self.jobs[job.name] = job
        self._stand()
        found = job_of(job, self.cluster, (job.submitted - self.began) / HOUR)
        allowed = self._allowed(job, self._solo(job))
        decisions = self.scheduler.arrive(found, allowed, job.overtaken, job.preempted)
        self._decided(decisions)

    def _cancel(self, job: JobEntry) -> None:
        if job.cancel:
            return
        job.cancel = True
        if not any(job.name in run.jobs for run in self.runs.values()):
            self._ended(job, "cancelled", "")

    def _hear(self, run: Run, event: dict) -> None:
        name, kind = str(event.get("pipeline")), event["event"]
        if name not in run.jobs:
            return
        job = self.jobs[name]
        if kind in ("arrived", "recovered"):
            job.began, job.step = True, event["step"]
            self.looked[name] = job.step
            self._needs_no_store(name)
        elif kind == "step":
            job.step = event["step"]
            if job.step > job.furthest:
                job.furthest, job.deaths = job.step, 0
        elif kind == "phase":
            self._timed(run, job, event["phase"], event["t1"] - event["t0"])
            if event["phase"] == "training":
                job.count(event["step"])
        elif "reason" in event and kind in ("finished", "failed", "cancelled", "interrupted"):
            run.jobs.discard(name)
            run.leaving.discard(name)
            run.past.add(name)
            if kind in ("finished", "failed"):
                self._ended(job, kind, event["reason"])
            elif job.cancel:
                self._ended(job, "cancelled", "")

    def _timed(self, run: Run, job: JobEntry, phase: str, seconds: float) -> None:
        """A phase of a job, as long as it would have been on the nodes that the job asks for."""
        if phase == "rollout":
            seconds *= run.rollout_nodes(job.name) / job.terms.rollout_nodes
            job.rollout = [*job.rollout, seconds][-RECENT:]
        else:
            seconds *= len(run.seats.training_nodes) / job.terms.training_nodes
            job.training = [*job.training, seconds][-RECENT:]

    def _over(self, run: Run) -> None:
        """A run that has ended. Whoever was still in it goes on in another, from its last step."""
        wait_until_ended([run.number], self.folder)
        run.hold_store()
        del self.runs[run.number]
        run.close()
        reason = run.how_it_ended()
        with self.ledger.change():
            self.ledger.end_run(run.number, reason)
        blamed = re.match(r"pipelines\.([^ :]+): (.*)", reason)
        for name in sorted(run.jobs):
            job = self.jobs[name]
            if job.cancel:
                self._ended(job, "cancelled", "")
            elif blamed and blamed[1] == name:
                self._ended(job, "failed", blamed[2])
            elif not run.stopping and not (blamed and blamed[1] in run.jobs):
                self._died(job, reason)
        self._keep_store(run.store, {name for name in run.jobs if name in self.jobs})

    def _died(self, job: JobEntry, reason: str) -> None:
        job.deaths += 1
        if job.deaths > RETRIES:
            self._ended(job, "failed", f"its run died {job.deaths} times in a row; last, {reason}")
            return
        with self.ledger.change():
            self.ledger.save(job)
            self.ledger.note("died", job.name, job.group, reason)
        self.say(f"{job.name}: {reason}; it goes on from its last step")

    # What dead runs remember

    def _keep_store(self, store: Path | None, jobs: set[str]) -> None:
        """Until these jobs are in other runs, which take it over, or are over themselves."""
        if store is not None and jobs:
            self.left[store] = jobs
        elif store is not None:
            folders.remove(store)

    def _needs_no_store(self, job: str) -> None:
        for store in list(self.left):
            self.left[store].discard(job)
            self._keep_store(store, self.left.pop(store))

    # Decisions

    def _ended(self, job: JobEntry, how: JobState, reason: str) -> None:
        """A job is over, whatever way; its nodes are others'."""
        del self.jobs[job.name]
        self.looked.pop(job.name, None)
        self.told.pop(job.name, None)
        self._needs_no_store(job.name)
        self.failed += how == "failed"
        self._stand()
        decisions = self.scheduler.depart(job.name)
        self._decided(decisions, lambda: self._mark(job, how, reason))

    def _mark(self, job: JobEntry, how: JobState, reason: str) -> None:
        slowdown = "" if job.slowdown is None else f", {job.slowdown:.2f}x as long as alone"
        why = f": {reason.splitlines()[0]}" if reason else ""
        self.say(f"{job.name}: {how} after {job.step} steps, {duration(job.spent)}{slowdown}{why}")
        job.state, job.reason, job.ended, job.planned = how, reason, time.time(), None
        self.ledger.save(job)
        self.ledger.note(how, job.name, job.group, reason)

    def _look_at_durations(self, job: JobEntry) -> None:
        """Tells the scheduler of phases that are not as it knows them, and of jobs that fall behind."""
        if job.state != "running" or job.alone is None or job.step < self.looked.get(job.name, 0) + LOOK:
            return
        self.looked[job.name] = job.step
        found = job_of(job, self.cluster, (job.submitted - self.began) / HOUR)
        rollout, training = (next(iter(each.values())) for each in (found.rollout, found.training))
        seconds = rollout.typical + training.typical
        noise = max(rollout.spread, training.spread) / math.sqrt(LOOK)
        known = self.told.get(job.name)
        self._stand()
        if known is None or abs(seconds / known - 1) > max(DRIFTED, NOISE * noise):
            self.told[job.name] = seconds
            parts = f"{rollout.typical:.2f} rollout, {training.typical:.2f} training"
            text = f"a step alone takes {seconds:.2f} s ({parts})"
            self._decided(
                self.scheduler.measured(job.name, found),
                lambda: self.ledger.note("measured", job.name, job.group, text),
            )
            return
        group = self.scheduler.groups[self.scheduler.home[job.name]]
        if (
            len(group.standings) > 1
            and group.shape.slowdown(job.name) > group.standings[job.name].bound * 1.005
        ):
            self._decided(self.scheduler.relieve(job.name))
        elif self.scheduler.shapes.surely and time.time() - self.decided_at >= RECONSIDER:
            self._decided(self.scheduler.reconsider())

    def _solo(self, job: JobEntry) -> float:
        """Planned seconds of a step alone."""
        return self.scheduler.shapes.standing(job_of(job, self.cluster)).alone

    def _stand(self) -> None:
        """Tells the scheduler how all jobs stand to their promises."""
        for job in self.jobs.values():
            if job.name in self.scheduler.home or job.name in self.scheduler.waiting:
                alone = self.scheduler.standing(job.name).alone
                left = alone * max(0, job.steps - job.step)
                self.scheduler.progress(job.name, left, self._allowed(job, alone))

    def _allowed(self, job: JobEntry, planned: float) -> float:
        """Seconds that are left to do the rest in, of the clock that plans go by.

        Planned are token limits, where the cluster's quantile is 1; what steps really take is less.
        """
        measured = job.alone if self.scheduler.shapes.level >= 1 else None
        ratio = 1.0 if measured is None else measured / planned
        whole = job.made + (job.steps - job.counted) * planned * ratio
        allowed = (job.terms.max_slowdown * whole - job.spent) / ratio
        if job.terms.deadline is None:
            return allowed
        return min(allowed, job.submitted + job.terms.deadline - time.time())

    def _decided(self, decisions: Sequence[Decision], also: Callable[[], None] = lambda: None) -> None:
        """Writes down what the scheduler has decided; the runs follow."""
        self.decided_at = time.time()
        self.scheduler.changes()  # they are told by what the groups are now
        groups = [
            GroupEntry(
                group.number,
                group.shape.price,
                group.rollout_nodes,
                group.training_nodes,
                tuple(group.standings),
            )
            for group in self.scheduler.groups.values()
        ]
        with self.ledger.change():
            also()
            for decision in decisions:
                self.ledger.note(decision.how, decision.job, decision.group, decision.why)
                self.say(f"{decision.job}: {_told(decision)}")
            self.ledger.save_groups(groups, self.scheduler.founded)
            self.ledger.save_dollars(self.ledger.dollars)
            for job in self.jobs.values():
                home = self.scheduler.home.get(job.name)
                job.state = "waiting" if home is None else "running"
                job.group = home
                job.planned = None if home is None else self.scheduler.groups[home].shape.slowdown(job.name)
                standing = self.scheduler.standing(job.name)
                job.overtaken, job.preempted = standing.overtaken, standing.preempted
                self.ledger.save(job)

    # What is done

    def _carry_out(self) -> None:
        wanted = {}
        for number, group in self.scheduler.groups.items():
            seats = self._seats(group)
            names = tuple(name for name in group.standings if not self.jobs[name].cancel)
            wanted[number] = Wanted(seats.nodes, names, seats.places, seats.order)
        for order in orders(wanted, [run.going for run in self.runs.values()]):
            self._do(order)

    def _seats(self, group: Group) -> Seats:
        """With nodes in the order of their cores, as a run numbers its workers."""
        rollout, training = (
            tuple(sorted(nodes, key=lambda node: min(self.cores[node])))
            for nodes in (group.rollout_nodes, group.training_nodes)
        )
        if group.shape.shared:
            return Seats(rollout, training)
        places = {name: group.nodes_of(name)[0] for name in group.standings}
        return Seats(rollout, training, places, group.shape.verdict.order)

    def _do(self, order: Order) -> None:
        match order:
            case Begin(number):
                group = self.scheduler.groups[number]
                seats = self._seats(group)
                with self.ledger.change():
                    begun = self.ledger.begin_run(number, seats.nodes)
                jobs = [self.jobs[name] for name in group.standings if not self.jobs[name].cancel]
                memory = self.cluster.pools[group.shape.pair[0]].host_gb
                link = self.ledger.config.link
                self.runs[begun] = start(begun, number, seats, jobs, self.folder, self.cores, memory, link)
                told = f"{', '.join(group.standings)} on {', '.join(seats.nodes)}"
                self.say(f"group {number}: {told}, ${group.shape.price:,.2f}/h")
            case Join(number, name):
                run = self.runs[number]
                if run.listens():
                    run.join(self.jobs[name], self._seats(self.scheduler.groups[run.group]), self.folder)
            case Leave(number, name):
                if self.runs[number].listens():
                    self.runs[number].leave(name)
            case Reorder(number, promised):
                if self.runs[number].listens():
                    self.runs[number].reorder(promised)
            case Halt(number):
                run = self.runs[number]
                self.say(f"group {run.group}: its nodes change; steps are finished and saved")
                run.interrupt()

    def _stop(self, pressed: Callable[[], int]) -> None:
        """All runs finish their steps and save them; at once if that is asked for again."""
        self.say("stopping: steps are finished and saved; press Ctrl-C again to stop at once")
        for run in self.runs.values():
            run.interrupt()
        while self.runs and pressed() < 2:
            self._listen()

    def _listen(self) -> None:
        """To the runs, for a moment."""
        runs = self.runs.values()
        select.select(
            [run.ended for run in runs] + [each for run in runs for each in run.asked], [], [], TICK_S
        )
        self._pass()
        for run in list(self.runs.values()):
            run.end_if_silent()
            over = run.is_over()
            run.hear_answers()
            for event in run.news():
                self._hear(run, event)
            if over:
                self._over(run)

    def _end_all(self) -> None:
        """Nothing is left running, whatever happened."""
        for run in self.runs.values():
            run.stop_now()
        deadline = time.monotonic() + KILL_S
        while any(not run.is_over() for run in self.runs.values()) and time.monotonic() < deadline:
            select.select([run.ended for run in self.runs.values() if not run.is_over()], [], [], TICK_S)
        for run in self.runs.values():
            run.process.kill()
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(KILL_S)
            run.close()
        wait_until_ended(self.runs, self.folder)
        for store in [*self.left, *(run.store for run in self.runs.values())]:
            self._keep_store(store, set())
        with self.ledger.change():
            for number in self.runs:
                self.ledger.end_run(number, "stopped")
            self.ledger.save_groups([], self.scheduler.founded)
        self.runs.clear()


def _told(decision: Decision) -> str:
    where = (
        "" if decision.group is None else f" (group {decision.group}, {decision.slowdown or 1:.2f}x planned)"
    )
    return f"{decision.how}: {decision.why}{where}"
