"""What the live display is told, from what the scheduler believes: no process is started."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mixes import CALC, SUMS, write_mix
from rich.console import Console
from scheduler.hearing import hear

from jigsawrl.config.pipelines import load_mix
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.interference import CORES
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Start
from jigsawrl.runtime.launch import member_of, own_config
from jigsawrl.runtime.member import Member
from jigsawrl.runtime.messages import Counted
from jigsawrl.runtime.watch import BETWEEN_S, Watch, doing
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import DriverBegan, PhaseDone, PipelineLost, SubstageChanged
from jigsawrl.scheduler.state import SchedulerState
from jigsawrl.telemetry.board import Piece, PipelineLine, WorkerLine
from jigsawrl.telemetry.events import Substage
from jigsawrl.telemetry.progress import Progress


class Told(Progress):
    """Keeps what it is told."""

    def __init__(self, terminal: bool = True, now: Callable[[], float] = time.monotonic) -> None:
        self.file = io.StringIO()
        screen = Console(file=self.file, force_terminal=terminal, force_interactive=terminal)
        super().__init__(console=screen, now=now)
        self.told: list[tuple[list[PipelineLine], list[WorkerLine]]] = []

    def standing(self, pipelines: Sequence[PipelineLine], workers: Sequence[WorkerLine]) -> None:
        self.told.append((list(pipelines), list(workers)))

    def written(self) -> str:
        return self.file.getvalue()


@dataclass
class Story:
    """Two pipelines on two workers, and a clock."""

    members: dict[str, Member]
    progress: Told = field(default_factory=Told)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.core = SchedulerCore(POLICIES["serial"], CORES, 2, 1e12)
        self.watch = Watch(self.progress, 2)
        self.state.advance(self.now)

    @property
    def state(self) -> SchedulerState:
        return self.core.state

    def arrive(self, *names: str, steps: int = 1) -> None:
        for name in names:
            self.core.join(name, self.members[name].outlook)
            hear(self.core, name, DriverBegan(steps, 0))

    def start(self, name: str, places: tuple[tuple[int, ...], ...], share: float = 1.0) -> None:
        self.state.start(Start(self.state.pipelines[name].current.id, places, share))

    def at(self, name: str, engine: int, kind: Substage, samples: int) -> None:
        hear(self.core, name, SubstageChanged(engine, kind, samples))

    def over(self, name: str) -> None:
        phase = self.state.pipelines[name].current
        hear(self.core, name, PhaseDone(phase.kind, phase.index, (0.5,), 2))

    def later(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.watch.pass_time(self.state, self.now)
        self.state.advance(self.now)

    def pipelines(self) -> dict[str, tuple[str, float]]:
        self.watch.show(self.state, self.members, at_once=True)
        return {line.name: (line.state, line.share) for line in self.progress.told[-1][0]}

    def workers(self) -> list[WorkerLine]:
        self.watch.show(self.state, self.members, at_once=True)
        return self.progress.told[-1][1]


@pytest.fixture
def members(tmp_path: Path) -> dict[str, Member]:
    mix = load_mix(write_mix(tmp_path, sums=SUMS, calc=CALC))
    hardware = cpu_worker(1, 2)
    return {
        name: member_of(mix, name, own_config(mix, name, "cpu"), tmp_path, hardware, None)
        for name in ("sums", "calc")
    }


@pytest.fixture
def story(members: dict[str, Member]) -> Story:
    return Story(members)


def test_a_pipeline_says_where_it_stands_from_its_set_up_to_its_end(story: Story) -> None:
    calc = story.members["calc"]
    seen = [story.pipelines()["calc"]]
    story.arrive("sums", "calc")
    seen.append(story.pipelines()["calc"])
    story.start("calc", ((0,), (1,)), 0.5)
    story.at("calc", 0, "decode", 16)
    story.at("calc", 1, "tool", 0)
    seen.append(story.pipelines()["calc"])
    story.at("calc", 0, "tool", 0)
    seen.append(story.pipelines()["calc"])
    story.over("calc")
    seen.append(story.pipelines()["calc"])
    story.start("calc", ((0, 1),), 1.0)
    calc.training = "grad"
    seen.append(story.pipelines()["calc"])
    for key in story.state.pipelines["calc"].lanes:
        story.state.lanes.pause(key, True)
    seen.append(story.pipelines()["calc"])
    story.over("calc")
    seen.append(story.pipelines()["calc"])
    calc.ended = "finished"
    seen.append(story.pipelines()["calc"])
    assert seen == [
        ("set-up", 0.0),
        ("waiting", 0.0),
        ("", 0.25),
        ("tool", 0.0),
        ("waiting", 0.0),
        ("", 1.0),
        ("paused", 0.0),
        ("saving", 0.0),
        ("finished", 0.0),
    ]


def test_one_that_died_is_recovering_and_one_that_failed_says_why(story: Story) -> None:
    story.arrive("sums")
    sums, calc = story.members["sums"], story.members["calc"]
    hear(story.core, "sums", PipelineLost())
    sums.deaths = calc.deaths = 1
    assert story.pipelines() == {"sums": ("recovering", 0.0), "calc": ("recovering", 0.0)}
    calc.ended, calc.reason = "failed", "the reward fell over\nTraceback ..."
    assert story.pipelines()["calc"] == ("failed: the reward fell over", 0.0)


def test_one_that_is_to_come_later_says_so(story: Story) -> None:
    story.members["calc"].arrival = 60.0
    assert story.pipelines()["calc"] == ("to come", 0.0)


def test_a_worker_has_what_runs_there_and_the_time_it_was_busy(story: Story) -> None:
    story.later(10.0)  # set-up does not count
    story.arrive("sums", "calc")
    story.start("sums", ((0,),))
    story.at("sums", 0, "decode", 16)
    story.later()
    story.later(3.0)
    story.over("sums")
    story.later()
    story.start("sums", ((0, 1),), 0.75)
    story.start("calc", ((1,),), 0.25)
    story.at("calc", 1, "tail", 2)
    story.members["sums"].training = "optim"
    assert story.workers() == [
        WorkerLine(0, (Piece("sums", "optim", 0.75),), 0.75),
        WorkerLine(1, (Piece("sums", "optim", 0.75), Piece("calc", "tail", 0.25)), 0.0),
    ]


def test_it_is_shown_a_few_times_a_second_at_most(story: Story) -> None:
    story.arrive("sums")
    for _ in range(100):
        story.later(BETWEEN_S / 10)
        story.watch.show(story.state, story.members)
    assert 9 <= len(story.progress.told) <= 11


def test_without_a_terminal_nothing_is_even_looked_at(members: dict[str, Member]) -> None:
    story = Story(members, Told(terminal=False))
    story.arrive("sums")
    story.start("sums", ((0,),))
    story.later()
    story.watch.show(story.state, story.members, at_once=True)
    assert (story.progress.told, story.watch.busy) == ([], [0.0, 0.0])


def test_where_lines_are_printed_they_say_what_each_pipeline_is_at(members: dict[str, Member]) -> None:
    at_the_moment = [100.0]
    story = Story(members, Told(terminal=False, now=lambda: at_the_moment[0]))
    members["calc"].arrival = 1e6
    sums = members["sums"]
    at = [doing(story.state, sums)]
    story.arrive("sums")
    at.append(doing(story.state, sums))
    story.start("sums", ((0,), (1,)))
    at.append(doing(story.state, sums))
    for step in (2, 1):  # the first is of another step
        sums.counted = Counted(step, 3, 32)
        at.append(doing(story.state, sums))
    for _ in range(5):
        story.later(10.0)
        at_the_moment[0] = story.now
        story.watch.show(story.state, members)
    story.over("sums")
    story.start("sums", ((0, 1),))
    at.append(doing(story.state, sums))
    sums.ended = "finished"
    at.append(doing(story.state, sums))
    waits, rolls, trains = (1, "", 0, 0), (1, "generation", 0, 0), (1, "training", 0, 0)
    assert at == [(0, "set-up", 0, 0), waits, rolls, rolls, (1, "generation", 3, 32), trains, (0, "", 0, 0)]
    assert story.progress.written() == "sums: step 1, generation for 0:20, 3 of 32 samples done\n"
