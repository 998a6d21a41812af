"""The scheduler: hears what drivers say, lets the mind decide, and carries out what it answers.

One process, messages only. What it believes is in `Mind`; everything that happened is in the event log. Processes are
looked after here: started, listened to, brought back when they die, ended.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl.errors import JigsawError
from jigsawrl.limits import OUT_OF_MEMORY
from jigsawrl.liveness import BEAT_S
from jigsawrl.policies.state import Action, Migrate, Phase, Start, Swap, Wait
from jigsawrl.processes import heeded_interrupts
from jigsawrl.runtime.channel import Broken
from jigsawrl.runtime.commands import Commands
from jigsawrl.runtime.family import Family, how_it_ended
from jigsawrl.runtime.member import MEMORY_RETRIES, RETRIES, Member
from jigsawrl.runtime.messages import (
    Asleep,
    At,
    Began,
    Counted,
    Ends,
    FromDriver,
    Gather,
    Load,
    Loads,
    Logged,
    Made,
    Over,
    Says,
    Sleep,
    Stop,
    ToDriver,
)
from jigsawrl.runtime.mind import Due, Gone, Held, Lost, Mind, News, written, written_action
from jigsawrl.runtime.placing import go_for, place
from jigsawrl.runtime.shares import Shares
from jigsawrl.runtime.sharing import Sharing
from jigsawrl.runtime.watch import Watch
from jigsawrl.telemetry.events import EventLog, now

if TYPE_CHECKING:
    from jigsawrl.telemetry.progress import Progress

TICK_S = 0.5
"""Longest wait for anything, so that whatever was missed is looked at again."""


@dataclass(slots=True)
class Work:
    """What the scheduler itself cost."""

    messages: int = 0
    decisions: int = 0
    seconds: float = 0.0
    """Of a core, from the first decision on, display and log included."""


@dataclass(slots=True)
class Scheduler:
    members: dict[str, Member]
    mind: Mind
    shares: Shares
    store: Path
    log: EventLog
    progress: Progress
    resume: bool
    commands: Commands
    welcome: Callable[[Member], None]
    """Called before the processes of a submitted pipeline are started."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    watch: Watch = field(init=False)
    sharing: Sharing = field(init=False)
    work: Work = field(default_factory=Work)
    news: list[tuple[str, News]] = field(default_factory=list)
    """That the mind has not heard yet."""
    falling_asleep: set[tuple[str, Phase | None]] = field(default_factory=set)
    """Pipelines that make room; nobody takes it before they have."""
    wakes: list[float] = field(default_factory=list)
    started: float = field(default_factory=now)
    stopping: bool = False
    looked_around: float = 0.0
    """When it was last looked for what nobody says."""
    first_decision: float | None = None
    """When all who come at the start were there."""

    def __post_init__(self) -> None:
        self.watch = Watch(self.progress, len(self.shares.workers))
        self.sharing = Sharing(self.store, self.shares)
        self.commands.at_work = lambda name: self.mind.runs(name) is not None
        self.selector.register(self.commands, selectors.EVENT_READ, ("", "commands"))
        for member in self.members.values():
            self._join(member)

    def _join(self, member: Member) -> None:
        self.mind.join(member.name, member.outlook, member.layout)

    def run(self) -> None:
        """Until every pipeline has ended, one way or another. Nothing is left running, whatever happens."""
        with interrupts() as pressed:
            try:
                self._remember_requests()
                self.watch.show(self.mind.world, self.members, at_once=True)
                while any(m.ended is None for m in self.members.values()) or not self.commands.close():
                    if pressed() > 1:
                        self._note_stop()
                        raise KeyboardInterrupt("stopped at once; go on with --resume")
                    if pressed() and not self.stopping:
                        self._stop_all()
                    self._turn()
                self.watch.show(self.mind.world, self.members, at_once=True)
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
        self.watch.pass_time(self.mind.world, now())
        if ready.pop("", None):
            self._obey()
        families = {name: self.members[name].family for name in ready}
        for name, what in ready.items():
            member = self.members[name]
            if member.family is not families[name]:
                continue  # started anew just now, after the death of another
            if "line" in what:
                self._listen(member)
            if "process" in what or member.ends is not None:
                self._look_after(member)
        if now() - self.looked_around > BEAT_S:
            self._look_around()
        if self.wakes and self.wakes[0] <= now():
            self.wakes = [at for at in self.wakes if at > now()]
            self.news.append(("", Due()))
        if self.news and not (ready and self._can_wait()):
            self._think()
        self._let_run()
        self.watch.show(self.mind.world, self.members)
        if ready:
            self.log.flush()

    def _patience(self) -> float:
        due = [
            m.arrival + self.started for m in self.members.values() if m.family is None and m.ended is None
        ]
        return max(0.0, min([TICK_S, *(at - now() for at in [*due, *self.wakes])]))

    def _can_wait(self) -> bool:
        """Whether the news can be thought of with the next that come, or after a tick."""
        return all(isinstance(each, At) for _, each in self.news) and self.mind.indifferent()

    def _everyone_is_there(self) -> bool:
        """Pipelines that come at the start are set up before the first of them runs."""
        return all(m.began or m.ended or m.arrival > 0 for m in self.members.values())

    # Processes

    def _start_who_is_due(self) -> None:
        for member in self.members.values():
            due = self.started + member.arrival <= now()
            if member.family is None and member.ended is None and due and not self.stopping:
                self._start_family(member, self.resume)

    def _start_family(self, member: Member, resume: bool) -> None:
        member.ends, member.told, member.loads, member.paused = None, None, False, set()
        layout, everyone = member.layout, self.members.values()
        known = [each.config for each in everyone if each.ended is None and each.layout == layout]
        shared = self.sharing.actors_for(member.config, layout, known) if member.homes is None else None
        member.family = Family(
            member.config, member.out, resume, self.store, self.shares, layout, shared, member.homes
        )
        if member.cancelled:
            self._tell(member, Stop())  # it only saves what it had made
        self.selector.register(member.family.line, selectors.EVENT_READ, (member.name, "line"))
        for sentinel in member.family.sentinels:
            self.selector.register(sentinel, selectors.EVENT_READ, (member.name, "process"))

    def _forget(self, family: Family) -> None:
        """Nothing more is heard of it."""
        self._ignore((family.line.fileno(), *family.sentinels))

    def _ignore(self, sources: Iterable[int]) -> None:
        for each in sources:
            if each in self.selector.get_map():
                self.selector.unregister(each)

    def _look_after(self, member: Member) -> None:
        """Notices who has ended, and what that means."""
        family = member.family
        if family is None:
            return
        if member.ends is None and not family.dead():
            # Those that ended as they were told to would wake us again and again until their driver has ended too.
            self._ignore(each.sentinel for each in family.processes if each.exitcode is not None)
            return
        while self._listen(member):  # its last words
            pass
        ends = member.ends
        if ends is not None and ends.how in ("finished", "interrupted"):
            self._forget(family)
            family.wait()
            how = "cancelled" if member.cancelled and ends.how == "interrupted" else ends.how
            self._end(member, how, ends.reason)
            return
        dead = family.dead_actors() if ends is not None and ends.how == "died" else family.dead()
        reason = ends.reason if ends else how_it_ended(dead[0])
        if ends is not None and ends.how == "died" and dead:
            reason = how_it_ended(dead[0])
        self._forget(family)
        family.kill()
        others = self._taken_along(member) if self.shares.broken() else []
        if ends is not None and ends.refused:
            self._end(member, "failed", reason)
        else:
            self._recover(member, reason)
        for other in others:
            self._recover(other, f"it could not go on after {member.name} had died", guilty=False)

    def _look_around(self) -> None:
        """For what no driver says: shared actors that have ended, and lines of which nobody reads the other end."""
        self.looked_around = now()
        for member in self.members.values():
            family = member.family
            if family is None:
                continue
            with self._or_ends(member):
                family.line.flush()
            if member.ends is not None or family.dead():
                self._look_after(member)

    def _taken_along(self, member: Member) -> list[Member]:
        """All others, killed: their workers do nothing for them any more, nor for anybody while they are there."""
        others = []
        for other in self.members.values():
            if other is not member and other.family is not None and other.ends is None:
                self._forget(other.family)
                other.family.kill()
                others.append(other)
        self.sharing.close()
        return others

    def _recover(self, member: Member, reason: str, guilty: bool = True) -> None:
        """From its last step, or not at all if that keeps failing."""
        member.deaths += guilty
        self.log.emit("died", pipeline=member.name, reason=reason, deaths=member.deaths)
        retries = MEMORY_RETRIES if OUT_OF_MEMORY in reason else RETRIES
        if member.deaths > retries and member.cancelled:
            self._end(member, "cancelled", reason)
        elif member.deaths > retries:
            self._end(member, "failed", f"it died {member.deaths} times in a row; last, {reason}")
        elif self.stopping:
            self._end(member, "interrupted", reason)
        else:
            first = reason.splitlines()[0] if reason else "for no known reason"
            self.progress.message(f"{member.name}: {first}; it goes on from its last step")
            self.news.append((member.name, Lost()))
            self._waits_no_more_for(member)
            self._start_family(member, resume=True)

    def _end(self, member: Member, how: str, reason: str) -> None:
        member.ended, member.reason, member.family = how, reason, None
        self.sharing.left(member.config, member.layout)
        if how == "finished":
            self.commands.finished(member.name)
        self.log.emit(how, pipeline=member.name, step=member.done, reason=reason)
        if how == "failed":
            self.progress.message(f"{member.name}: failed: {reason}")
        self.news.append((member.name, Gone()))
        self._waits_no_more_for(member)

    def _waits_no_more_for(self, member: Member) -> None:
        """Whatever was to fall asleep is gone."""
        self.falling_asleep = {each for each in self.falling_asleep if each[0] != member.name}

    def _stop_all(self) -> None:
        self.stopping = self.commands.stopping = True
        self.progress.message("stopping: steps are finished and saved; press Ctrl-C again to stop at once")
        for member in self.members.values():
            if member.family is not None:
                for actor in range(len(member.layout.lives)):
                    member.family.go_on(actor)
                self._tell(member, Stop())
                if member.held:  # a rollout that it has made is still trained on
                    member.held = False
                    self.news.append((member.name, Held(False)))
                    self.wakes = [now(), *self.wakes]
            elif member.ended is None:
                self._end(member, "interrupted", "before it began")

    def _note_stop(self) -> None:
        """All that are under way end here, and nothing more is heard of them. Without a reason: they are not saved,
        and whoever reads the log to know which pipelines are must not take them for ended as usual."""
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
            case Loads():
                member.loads = True
                self.news.append((member.name, message))
            case Asleep(phase):
                self.falling_asleep.discard((member.name, phase))
            case At(-1, substage):
                member.training = substage
            case At():
                self.news.append((member.name, message))
            case Over():
                member.training = None
                self.news.append((member.name, message))
            case Began(steps, done):
                self.progress.start(member.name, steps, done)
                self.log.emit("recovered" if member.began else "arrived", pipeline=member.name, step=done)
                member.goes_on(done)
                self.news.append((member.name, message))
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
        """Whoever was cancelled or paused in an earlier run of this folder, or during set-up, stays so."""
        self.commands.set_up = True
        for name in sorted(self.commands.requests.cancelled & self.members.keys()):
            member = self.members[name]
            member.cancelled = True
            self._end(member, "cancelled", "before it began")
            hint = f"'jigsaw resume {member.out.parent} {name}' when the run has ended lets it go on"
            self.progress.message(f"{name}: is cancelled; {hint}")
        for name in sorted(self.commands.requests.paused & self.members.keys()):
            self._told_to(self.members[name], "pause")

    def _obey(self) -> None:
        """Carries out what users asked for since the last time; it is on the disk already."""
        for what, member in self.commands.take():
            if what == "submit":
                self._take_in(member)
            elif member.ended is None:
                self._told_to(member, what)

    def _take_in(self, member: Member) -> None:
        member.arrival, problem = now() - self.started, ""
        try:
            self.welcome(member)
        except (JigsawError, OSError) as error:
            problem = str(error)
        self._join(member)
        self.log.emit("submitted", pipeline=member.name, layout=member.layout.written())
        self.progress.message(f"{member.name}: submitted")
        if problem:
            self._end(member, "failed", problem)
        elif self.stopping:
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
        held = what == "pause" and not (self.stopping or member.cancelled)
        if held == member.held and what != "cancel":
            return
        member.held = held
        self.news.append((member.name, Held(held)))
        self.log.emit(what, pipeline=member.name, step=member.done)
        self.progress.message(f"{member.name}: {what}")

    # Decisions

    def _think(self) -> None:
        """The mind hears the news; where they call for it, it decides."""
        news, self.news = self.news, []
        at = round(now(), 6)
        self.mind.world.advance(at)
        for name, each in news:
            if isinstance(each, Over):
                self._log_phase(name, each, at)
            self.mind.hear(name, each)
            if isinstance(each, Over) and each.went_on is not None:
                self.members[name].told = self.mind.runs(name)
                self._log_predicted(name)
            elif isinstance(each, Lost):  # its last words, just heard, were those of the processes before
                self.members[name].told = None
        everyone = self._everyone_is_there()
        decides = bool(self.mind.loading) or (everyone and bool(self.mind.events))
        heard = [written(name, each) for name, each in news]
        self.log.keep("turn", at=at, heard=heard, decides=decides, everyone=everyone)
        if decides:
            self.work.decisions += 1
            if everyone and self.first_decision is None:
                self._everything_starts(at)
            self._carry_out(self.mind.decide(everyone))
        elif any(member.paused for member in self.members.values()):
            place(self.mind.world, self.members, self.shares)  # what stood still may be gone

    def _everything_starts(self, at: float) -> None:
        """Clocks start now: the time that others took to be set up is nobody's."""
        self.first_decision = at
        self.work.seconds -= time.process_time()
        for member in self.members.values():
            if member.began:
                self.progress.start(member.name, member.config.steps, member.done)

    def _let_run(self) -> None:
        """Whoever waits for what was decided; not before there is room."""
        if self.falling_asleep:
            return
        for member in self.members.values():
            if member.loads and self.mind.rooms.is_awake(member.name):
                member.loads = False
                self._tell(member, Load())
            runs = self.mind.runs(member.name)
            if runs is not None and runs != member.told:
                member.told = runs
                prompt = not self.mind.indifferent()
                self._tell(member, go_for(member, self.mind.world, self.shares, prompt))

    def _log_phase(self, name: str, over: Over, at: float) -> None:
        thought = self.mind.thoughts[name]
        self.log.keep(
            "phase",
            pipeline=name,
            phase=over.phase,
            step=over.step,
            asked=thought.asked,
            t0=thought.since,
            t1=at if over.went_on is None else over.went_on,
            foreseen=thought.foreseen,
            busy=list(over.busy),
        )

    def _log_predicted(self, name: str) -> None:
        pipeline, thought = self.mind.world.pipelines[name], self.mind.thoughts[name]
        self.log.keep(
            "predicted",
            pipeline=name,
            phase=pipeline.phase,
            step=pipeline.step,
            seconds=thought.foreseen,
        )

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self.log.keep("action", **written_action(action))
        place(self.mind.world, self.members, self.shares)
        for action in actions:
            match action:
                case Start(name):
                    self._log_predicted(name)
                case Migrate(name):
                    engine_on = self.members[name].layout.engine_on
                    self._tell(self.members[name], Gather(tuple(engine_on(p[0]) for p in action.places)))
                case Swap(name, out=True):
                    self.falling_asleep.add((name, action.phase))
                    self._tell(self.members[name], Sleep(action.phase))
                case Wait(until):
                    self.wakes = sorted({*self.wakes, until})


@contextmanager
def interrupts() -> Iterator[Callable[[], int]]:
    """How often Ctrl-C was pressed (or SIGTERM came) inside. A terminal that closes counts once, however many SIGHUP
    the kernel and the shell send."""
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
