"""What the live display is told of a run: where each pipeline stands, and what each worker is at.

Read from what the scheduler believes, at most a few times a second, and only where there is a display; for the lines
that are printed elsewhere, what each pipeline is at is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jigsawrl.graph.lanes import Lane
from jigsawrl.runtime.member import Member
from jigsawrl.runtime.world import World
from jigsawrl.telemetry.board import Piece, PipelineLine, WorkerLine

if TYPE_CHECKING:
    from jigsawrl.telemetry.progress import Progress

BETWEEN_S = 0.25
"""Time between two looks, at least."""


class Watch:
    def __init__(self, progress: Progress, workers: int) -> None:
        self.progress = progress
        self.wanted = progress.on_terminal
        self.busy = [0.0] * workers
        """Seconds in which something ran on each worker."""
        self.since: float | None = None
        """When the first of all lanes was there."""
        self.now = 0.0
        self.shown = float("-inf")

    def pass_time(self, world: World, now: float) -> None:
        """Until now everything ran as `world` has it."""
        if not self.wanted:
            self.now = now
            return
        if self.since is not None:
            for worker in range(len(self.busy)):
                if world.lanes.occupants(worker):
                    self.busy[worker] += now - self.now
        elif world.lanes.lanes:
            self.since = now
        self.now = now

    def show(self, world: World, members: Mapping[str, Member], *, at_once: bool = False) -> None:
        """Nothing if it was shown a moment ago, unless that must not be."""
        if not self.progress.on_terminal and (at_once or self.now - self.shown >= BETWEEN_S):
            self.shown = self.now
            for member in members.values():
                self.progress.doing(member.name, *doing(world, member))
            self.progress.beat()
        if not self.wanted or (self.now - self.shown < BETWEEN_S and not at_once):
            return
        self.shown = self.now
        passed = self.now - self.since if self.since is not None else 0.0
        pipelines = [pipeline_line(world, member) for member in members.values()]
        workers = [
            WorkerLine(worker, tuple(pieces(world, members, worker)), busy / passed if passed > 0 else 0.0)
            for worker, busy in enumerate(self.busy)
        ]
        self.progress.standing(pipelines, workers)


def pieces(world: World, members: Mapping[str, Member], worker: int) -> Iterable[Piece]:
    for key in world.lanes.on_worker[worker]:
        lane = world.lanes.lanes[key]
        yield Piece(lane.pipeline, substage_of(lane, members[lane.pipeline]), lane.share, lane.paused)


def substage_of(lane: Lane, member: Member) -> str:
    """Engines tell what they are at; of a training gang its driver does.

    State stays where it is: a swap was foreseen, and of a lane that is at one nothing was heard yet.
    """
    told = member.training if lane.phase == "training" else None
    return told or ("starting" if lane.segment.kind == "swap" else lane.segment.kind)


def pipeline_line(world: World, member: Member) -> PipelineLine:
    if member.ended is not None:
        reason = member.reason.strip().partition("\n")[0] if member.ended == "failed" else ""
        return PipelineLine(member.name, 0.0, f"failed: {reason}" if reason else member.ended)
    if member.family is None and member.arrival > 0:
        return PipelineLine(member.name, 0.0, "to come")
    if member.name not in world.pipelines:
        return PipelineLine(member.name, 0.0, "recovering" if member.deaths else "set-up")
    pipeline = world.pipelines[member.name]
    lanes = [world.lanes.lanes[key] for key in pipeline.lanes]
    if not lanes and member.held:
        return PipelineLine(member.name, 0.0, "paused")
    if not lanes:
        states = {"ready": "waiting", "running": "", "done": "recovering" if member.deaths else "saving"}
        return PipelineLine(member.name, 0.0, states[pipeline.status])
    share = sum(lane.share * len(lane.workers) for lane in lanes if lane.occupies) / len(world.alive)
    if all(lane.paused for lane in lanes):
        return PipelineLine(member.name, 0.0, "paused")
    if share == 0:  # what runs takes no worker: tools, rewards
        first = next(lane for lane in lanes if not lane.paused)
        return PipelineLine(member.name, 0.0, substage_of(first, member))
    return PipelineLine(member.name, min(1.0, share))


def doing(world: World, member: Member) -> tuple[int, str, int, int]:
    """Its step, what it is at (empty: it waits, or has ended), and how many samples are done of how many."""
    if member.ended is not None or (member.family is None and member.arrival > 0):
        return 0, "", 0, 0
    if member.name not in world.pipelines:
        return 0, "recovering" if member.deaths else "set-up", 0, 0
    pipeline = world.pipelines[member.name]
    if not pipeline.lanes:
        return pipeline.step, "", 0, 0
    if pipeline.phase == "training":
        return pipeline.step, "training", 0, 0
    counted = member.counted
    if counted is None or counted.step != pipeline.step:
        return pipeline.step, "generation", 0, 0
    return pipeline.step, "generation", counted.done, counted.of
