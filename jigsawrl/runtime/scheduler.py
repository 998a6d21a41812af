"""The scheduler: hears what drivers say, lets the core decide, and carries out what it answers.

One process, messages only. What it believes is in `SchedulerCore`; everything that happened is in the event log.
Processes are looked after here: started, listened to, brought back when they die, ended.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.limits import OUT_OF_MEMORY
from jigsawrl.liveness import BEAT_S
from jigsawrl.policies.state import Action, Migrate, Swap, TimerDue
from jigsawrl.processes import heeded_interrupts
from jigsawrl.runtime.channel import Broken
from jigsawrl.runtime.commands import Commands
from jigsawrl.runtime.family import Family, how_it_ended
from jigsawrl.runtime.member import MEMORY_RETRIES, RETRIES, Member
from jigsawrl.runtime.messages import (
    Counted,
    Ends,
    FromDriver,
    Gather,
    Load,
    Logged,
    Made,
    Says,
    Sleep,
    Stop,
    ToDriver,
)
from jigsawrl.runtime.placing import permit_for, place
from jigsawrl.runtime.shares import Shares
from jigsawrl.runtime.sharing import Sharing
from jigsawrl.runtime.watch import Watch
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import (
    DriverBegan,
    Heard,
    LoadRequest,
    PhaseDone,
    PipelineGone,
    PipelineHeld,
    PipelineLost,
    StateAsleep,
    SubstageChanged,
    TurnsReordered,
    written,
    written_action,
)
from jigsawrl.scheduler.state import GANG
from jigsawrl.telemetry.events import EventLog, now
from jigsawrl.telemetry.progress import Progress

TICK_S = 0.5
"""Longest wait for anything, so that whatever was missed is looked at again."""


@dataclass(slots=True)
class Work:
    """What the scheduler itself costs."""

    messages: int = 0
    seconds: float = 0.0
    """Seconds of a CPU core, from the first decision on, display and log included."""


class Scheduler:
    """Looks after the processes of a run's pipelines, and lets them do what the core decides."""

    def __init__(
        self,
        members: dict[str, Member],
        core: SchedulerCore,
        shares: Shares,
        store: Path,
        log: EventLog,
        progress: Progress,
        resume: bool,
        commands: Commands,
        welcome: Callable[[Member], None],
    ) -> None:
        """`welcome` is called before the processes of a submitted pipeline are started."""
        self.members = members
        self.core = core
        self.shares = shares
        self.store = store
        self.log = log
        self.progress = progress
        self.resume = resume
        self.commands = commands
        self.welcome = welcome
        self.selector = selectors.DefaultSelector()
        self.watch = Watch(progress, len(shares.workers))
        self.sharing = Sharing(store, shares)
        self.work = Work()
        self.events: list[Heard] = []
        """Events that the core has not heard yet."""
        self.started = now()
        self.looked_around = 0.0
        """When it last looked for what no driver reports."""
        self.first_decision: float | None = None
        """When all pipelines that come at the start were set up."""
        commands.at_work = lambda name: any(phase.id.pipeline == name for phase in core.state.running())
        self.selector.register(commands.wake, selectors.EVENT_READ, ("", "commands"))
        for member in members.values():
            core.join(member.name, member.outlook, member.layout, awaited=member.arrival <= 0)

    def run(self) -> None:
        """Runs until every pipeline has ended, one way or another. No process is left, whatever happens."""
        with interrupts() as pressed:
            try:
                self._remember_requests()
                self.watch.show(self.core.state, self.members, at_once=True)
                while any(m.ended is None for m in self.members.values()) or not self.commands.close():
                    if pressed() > 1:
                        self._note_stop()
                        raise KeyboardInterrupt("stopped at once; go on with --resume")
                    if pressed() and not self.commands.stopping:
                        self._stop_all()
                    self._turn()
                self.watch.show(self.core.state, self.members, at_once=True)
            finally:
                if self.first_decision is not None:
                    self.work.seconds += time.process_time()
                for member in self.members.values():
                    if member.family is not None:
                        member.family.kill()
                self.sharing.close()

    def _turn(self) -> None:
        """Waits for something to happen, hears all of it, and decides once."""
        self._start_who_is_due()
        ready: dict[str, set[str]] = {}
        for key, _ in self.selector.select(self._patience()):
            name, what = key.data
            ready.setdefault(name, set()).add(what)
        self.watch.pass_time(self.core.state, now())
        if ready.pop("", None):
            self._obey()
        families = {name: self.members[name].family for name in ready}
        for name, what in ready.items():
            member = self.members[name]
            if member.family is not families[name]:
                continue  # started again just now, after the death of another
            self._listen(member)
            if "process" in what or member.ends is not None:
                self._look_after(member)
        if now() - self.looked_around > BEAT_S:
            self._look_around()
        if min(self.core.waits, default=float("inf")) <= now() or (
            self.events and not (ready and self._can_wait())
        ):
            self._decide()
        self._let_run()
        self.watch.show(self.core.state, self.members)
        if ready:
            self.log.flush()

    def _patience(self) -> float:
        due = [
            m.arrival + self.started for m in self.members.values() if m.family is None and m.ended is None
        ]
        if self.events and not self._can_wait():
            return 0.0
        return max(0.0, min([TICK_S, *(at - now() for at in [*due, *self.core.waits])]))

    def _can_wait(self) -> bool:
        """Whether the events can be heard with the next that come, or after a tick."""
        changes = all(isinstance(each, SubstageChanged) for _, each in self.events)
        return changes and self.core.indifferent()

    # Processes

    def _start_who_is_due(self) -> None:
        for member in self.members.values():
            if (
                member.family is None
                and member.ended is None
                and self.started + member.arrival <= now()
                and not self.commands.stopping
            ):
                self._start_family(member, self.resume)

    def _start_family(self, member: Member, resume: bool) -> None:
        member.ends, member.loads, member.paused = None, False, set()
        layout, everyone = member.layout, self.members.values()
        known = [each.config for each in everyone if each.ended is None and each.layout == layout]
        shared = self.sharing.actors_for(member.config, layout, known) if member.homes is None else None
        member.family = Family(
            member.config, member.out, resume, self.store, self.shares, layout, shared, member.homes
        )
        if member.cancelled:
            self._tell(member, Stop())  # it only saves what it had made
        self.selector.register(member.family.line, selectors.EVENT_READ, (member.name, "line"))
        for process in member.family.processes:
            self.selector.register(process.sentinel, selectors.EVENT_READ, (member.name, "process"))

    def _forget(self, family: Family) -> None:
        """Nothing more is heard of these processes."""
        self._ignore((family.line.fileno(), *(process.sentinel for process in family.processes)))

    def _ignore(self, sources: Iterable[int]) -> None:
        for each in sources:
            if each in self.selector.get_map():
                self.selector.unregister(each)

    def _look_after(self, member: Member) -> None:
        """Notices which processes have ended, and what that means."""
        family = member.family
        if family is None:
            return
        if member.ends is None and not family.dead():
            # Those that ended as they were told to would wake it again and again until their driver has ended too.
            self._ignore(each.sentinel for each in family.processes if each.exitcode is not None)
            return
        while self._listen(member):  # its last words
            pass
        self._forget(family)
        ends = member.ends
        if ends is not None and ends.how in ("finished", "interrupted"):
            family.wait()
            how = "cancelled" if member.cancelled and ends.how == "interrupted" else ends.how
            self._end(member, how, ends.reason)
            return
        dead = family.dead_actors() if ends is not None and ends.how == "died" else family.dead()
        reason = ends.reason if ends else how_it_ended(dead[0])
        if ends is not None and ends.how == "died" and dead:
            reason = how_it_ended(dead[0])
        family.kill()
        others = self._taken_along(member) if self.shares.broken() else []
        if ends is not None and ends.refused:
            self._end(member, "failed", reason)
        else:
            self._recover(member, reason)
        for other in others:
            self._recover(other, f"it could not go on after {member.name} had died", guilty=False)

    def _look_around(self) -> None:
        """Looks for what no driver reports: shared actors that have ended, and lines whose other end is not read."""
        self.looked_around = now()
        for member in self.members.values():
            if member.family is not None:
                with self._or_ends(member):
                    member.family.line.flush()
                self._look_after(member)

    def _taken_along(self, member: Member) -> list[Member]:
        """Kills the processes of all other pipelines, and returns those: their workers do nothing for them any more,
        nor for any process while they are there."""
        others = []
        for other in self.members.values():
            if other is not member and other.family is not None and other.ends is None:
                self._forget(other.family)
                other.family.kill()
                others.append(other)
        self.sharing.close()
        return others

    def _recover(self, member: Member, reason: str, guilty: bool = True) -> None:
        """Starts a pipeline again from its last step, or ends it if that keeps failing."""
        member.deaths += guilty
        self.log.emit("died", pipeline=member.name, reason=reason, deaths=member.deaths)
        retries = MEMORY_RETRIES if OUT_OF_MEMORY in reason else RETRIES
        if member.deaths > retries and member.cancelled:
            self._end(member, "cancelled", reason)
        elif member.deaths > retries:
            self._end(member, "failed", f"it died {member.deaths} times in a row; last, {reason}")
        elif self.commands.stopping:
            self._end(member, "interrupted", reason)
        else:
            first = reason.splitlines()[0] if reason else "for no known reason"
            self.progress.message(f"{member.name}: {first}; it goes on from its last step")
            self.events.append((member.name, PipelineLost()))
            self._start_family(member, resume=True)

    def _end(self, member: Member, how: str, reason: str) -> None:
        member.ended, member.reason, member.family = how, reason, None
        self.sharing.left(member.config, member.layout)
        if how == "finished":
            self.commands.finished(member.name)
        self.log.emit(how, pipeline=member.name, step=member.done, reason=reason)
        if how == "failed":
            self.progress.message(f"{member.name}: failed: {reason}")
        self.events.append((member.name, PipelineGone()))

    def _stop_all(self) -> None:
        self.commands.stopping = True
        self.progress.message("stopping: steps are finished and saved; press Ctrl-C again to stop at once")
        for member in self.members.values():
            if member.family is not None:
                for actor in range(len(member.layout.lives)):
                    member.family.stand(actor, still=False)
                self._tell(member, Stop())
                if member.held:  # a rollout that it has made is still trained on
                    member.held = False
                    self.events.append((member.name, PipelineHeld(False)))
            elif member.ended is None:
                self._end(member, "interrupted", "before it began")

    def _note_stop(self) -> None:
        """Logs that all pipelines under way end here. Without a reason: they are not saved, and readers of the log
        must not take them for ended as usual."""
        for member in self.members.values():
            if member.began and member.ended is None:
                self.log.emit("interrupted", pipeline=member.name, step=member.done)

    # Messages

    def _tell(self, member: Member, message: ToDriver) -> None:
        assert member.family is not None
        with self._or_ends(member):
            member.family.line.send(message)

    @contextmanager
    def _or_ends(self, member: Member) -> Iterator[None]:
        """A line that breaks inside ends its driver, as a death."""
        with suppress(OSError):  # its end will be noticed
            try:
                yield
            except Broken as broken:
                member.ends = Ends("died", f"{member.name}/driver: {broken}")

    def _listen(self, member: Member) -> bool:
        """Whether anything was said."""
        messages: list[FromDriver] = []
        if member.family is None or member.ends is not None:
            return False
        with self._or_ends(member):
            try:
                messages = member.family.line.receive()
            except EOFError:  # there would be something to read again and again until its end is noticed
                self._ignore((member.family.line.fileno(),))
        for message in messages:
            self.work.messages += 1
            self._hear(member, message)
        return bool(messages)

    def _hear(self, member: Member, message: FromDriver) -> None:
        match message:
            case LoadRequest():
                member.loads = True
                self.events.append((member.name, message))
            case SubstageChanged(engine, substage) if engine == GANG:
                member.training = substage
            case SubstageChanged() | StateAsleep():
                self.events.append((member.name, message))
            case PhaseDone():
                member.training = None
                self.events.append((member.name, message))
            case DriverBegan(steps, done):
                self.progress.start(member.name, steps, done)
                self.log.emit("recovered" if member.began else "arrived", pipeline=member.name, step=done)
                member.goes_on(done)
                self.events.append((member.name, message))
            case Made(step, values):
                member.made(step)
                self.progress.update(member.name, step, values)
            case Counted():
                member.counted = message
            case Says(text):
                self.progress.message(f"{member.name}: {text}")
            case Logged(lines):
                self.log.take(lines)
            case Ends():
                member.ends = message

    # What people ask for while it runs

    def _remember_requests(self) -> None:
        """Pipelines that were cancelled or paused in an earlier run of this folder, or during set-up, stay so."""
        self.commands.set_up = True
        for name in sorted(self.commands.requests.cancelled & self.members.keys()):
            self._told_to(self.members[name], "cancel")
            out = self.members[name].out.parent
            hint = f"'jigsaw resume {out} {name}' when the run has ended lets it go on"
            self.progress.message(f"{name}: is cancelled; {hint}")
        for name in sorted(self.commands.requests.paused & self.members.keys()):
            self._told_to(self.members[name], "pause")

    def _obey(self) -> None:
        """Carries out what users asked for since the last time; it is on the disk already."""
        for what, whom in self.commands.take():
            if isinstance(whom, str):
                self.events.append(("", TurnsReordered(whom)))
            elif what == "submit":
                self._take_in(whom)
            elif whom.ended is None:
                self._told_to(whom, what)

    def _take_in(self, member: Member) -> None:
        member.arrival, problem = now() - self.started, ""
        try:
            self.welcome(member)
        except (JigsawError, OSError) as error:
            problem = str(error)
        self.core.join(member.name, member.outlook, member.layout, awaited=False)
        self.log.emit("submitted", pipeline=member.name, layout=astuple(member.layout))
        self.progress.message(f"{member.name}: submitted")
        if problem:
            self._end(member, "failed", problem)
        elif self.commands.stopping:
            self._end(member, "interrupted", "before it began")

    def _told_to(self, member: Member, what: str) -> None:
        """Pause, resume or cancel. Whatever it is at now is finished: a phase, or with `cancel` a step.

        Nothing holds a pipeline that is to end.
        """
        if what == "cancel":
            if member.cancelled:
                return
            member.cancelled = True
            if member.family is None:
                self._end(member, "cancelled", "before it began")
                return
            self._tell(member, Stop())
        held = what == "pause" and not (self.commands.stopping or member.cancelled)
        if held == member.held and what != "cancel":
            return
        member.held = held
        self.events.append((member.name, PipelineHeld(held)))
        self.log.emit(what, pipeline=member.name, step=member.done)
        self.progress.message(f"{member.name}: {what}")

    # Decisions

    def _decide(self) -> None:
        """The core hears what happened; where that calls for it, it decides."""
        events, self.events = self.events, []
        at = round(now(), 6)
        if min(self.core.waits, default=float("inf")) <= at:
            events.append(("", TimerDue()))
        actions = self.core.handle(at, events)
        self._log_phases(at)
        heard = [written(each) for each in events]
        everyone = self.core.everyone_is_there()
        self.log.keep("turn", at=at, heard=heard, decides=self.core.decided, everyone=everyone)
        if self.core.decided:
            if everyone and self.first_decision is None:
                self._everything_starts(at)
            self._carry_out(actions)
        elif any(member.paused for member in self.members.values()):
            place(self.core.state, self.members, self.shares)  # what stood still may be gone

    def _everything_starts(self, at: float) -> None:
        """Clocks start now: no pipeline is charged for the time in which others were set up."""
        self.first_decision = at
        self.work.seconds -= time.process_time()
        for member in self.members.values():
            if member.began:
                self.progress.start(member.name, member.config.steps, member.done)

    def _let_run(self) -> None:
        """Drivers that wait for what was decided go on; not before there is room."""
        for member in self.members.values():
            if member.loads and self.core.may_load(member.name):
                member.loads = False
                self._tell(member, Load())
        for phase in self.core.permitted():
            if not phase.permitted:
                phase.permitted = True
                member = self.members[phase.id.pipeline]
                prompt = not self.core.indifferent()
                self._tell(member, permit_for(member, phase, self.core.state, self.shares, prompt))

    def _log_phases(self, at: float) -> None:
        """The phases that ended, and what is predicted of those that started."""
        for phase, done in self.core.ended:
            self.log.keep(
                "phase",
                pipeline=phase.id.pipeline,
                phase=phase.kind,
                step=phase.index,
                asked=phase.asked,
                t0=phase.since,
                t1=at if done.went_on is None else done.went_on,
                foreseen=phase.predicted,
                busy=list(done.busy),
            )
        for phase in self.core.begun:
            self.log.keep(
                "predicted",
                pipeline=phase.id.pipeline,
                phase=phase.kind,
                step=phase.index,
                seconds=phase.predicted,
            )

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self.log.keep("action", **written_action(action))
        place(self.core.state, self.members, self.shares)
        for action in actions:
            match action:
                case Migrate(name):
                    engine_on = self.members[name].layout.engine_on
                    self._tell(self.members[name], Gather(tuple(engine_on(p[0]) for p in action.places)))
                case Swap(name, out=True):
                    self._tell(self.members[name], Sleep(action.phase))


@contextmanager
def interrupts() -> Iterator[Callable[[], int]]:
    """Gives the number of times that Ctrl-C was pressed (or SIGTERM came) inside. A terminal that closes counts once,
    however many SIGHUP the kernel and the shell send."""
    count = 0

    def note(number: int, frame: object) -> None:
        nonlocal count
        count = max(count, 1) if number == signal.SIGHUP else count + 1

    before = {each: signal.signal(each, note) for each in heeded_interrupts()}
    try:
        yield lambda: count
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
