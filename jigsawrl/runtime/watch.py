"""What the live display is told of a run: where each pipeline stands, and what each worker is at.

Read from what the scheduler believes, at most a few times a second, and only where there is a display; for the lines
that are printed elsewhere, what each pipeline is at is enough.
"""

from __future__ import annotations

from collections.abc import Mapping

from jigsawrl.graph.lanes import Lane
from jigsawrl.runtime.member import Member
from jigsawrl.scheduler.state import SchedulerState
from jigsawrl.telemetry.board import Piece, PipelineLine, WorkerLine
from jigsawrl.telemetry.progress import Progress

BETWEEN_S = 0.25
"""Least number of seconds between two looks."""
DOING = {"rollout": "generation", "training": "training"}
"""What a pipeline is at in its phases."""


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

    def pass_time(self, state: SchedulerState, now: float) -> None:
        """Counts the time until now, in which everything ran as `state` has it."""
        if self.since is not None:
            for worker in range(len(self.busy)):
                if state.lanes.occupants(worker):
                    self.busy[worker] += now - self.now
        elif self.wanted and state.lanes.lanes:
            self.since = now
        self.now = now

    def show(self, state: SchedulerState, members: Mapping[str, Member], *, at_once: bool = False) -> None:
        """Shows where everything stands; not if that was done a moment ago, unless `at_once`."""
        if not at_once and self.now - self.shown < BETWEEN_S:
            return
        self.shown = self.now
        if not self.wanted:
            for member in members.values():
                self.progress.doing(member.name, *doing(state, member))
            self.progress.beat()
            return
        passed = self.now - self.since if self.since is not None else 0.0
        pipelines = [pipeline_line(state, member) for member in members.values()]
        workers = [
            WorkerLine(worker, pieces(state, members, worker), busy / passed if passed > 0 else 0.0)
            for worker, busy in enumerate(self.busy)
        ]
        self.progress.standing(pipelines, workers)


def pieces(state: SchedulerState, members: Mapping[str, Member], worker: int) -> tuple[Piece, ...]:
    """What runs on a worker."""
    lanes = [state.lanes.lanes[key] for key in state.lanes.on_worker[worker]]
    return tuple(
        Piece(lane.pipeline, substage_of(lane, members[lane.pipeline]), lane.share, lane.paused)
        for lane in lanes
    )


def substage_of(lane: Lane, member: Member) -> str:
    """Engines tell what they are at; of a training gang its driver does.

    State stays where it is: a swap is only predicted, and of a lane that is at one nothing was heard yet.
    """
    told = member.training if lane.phase == "training" else None
    return told or ("starting" if lane.segment.kind == "swap" else lane.segment.kind)


def pipeline_line(state: SchedulerState, member: Member) -> PipelineLine:
    if member.ended is not None:
        reason = member.reason.strip().partition("\n")[0] if member.ended == "failed" else ""
        return PipelineLine(member.name, 0.0, f"failed: {reason}" if reason else member.ended)
    if member.family is None and member.arrival > 0:
        return PipelineLine(member.name, 0.0, "to come")
    if member.name not in state.pipelines:
        return PipelineLine(member.name, 0.0, "recovering" if member.deaths else "set-up")
    pipeline = state.pipelines[member.name]
    lanes = state.lanes_of(pipeline)
    if all(lane.paused for lane in lanes) and (lanes or member.held):
        return PipelineLine(member.name, 0.0, "paused")
    if not lanes and pipeline.at_work:
        return PipelineLine(member.name, 0.0, "waiting")
    if not lanes:
        return PipelineLine(member.name, 0.0, "recovering" if member.deaths else "saving")
    share = sum(lane.share * len(lane.workers) for lane in lanes if lane.occupies) / len(state.alive)
    if share == 0:  # what runs takes no worker: tools, rewards
        first = next(lane for lane in lanes if not lane.paused)
        return PipelineLine(member.name, 0.0, substage_of(first, member))
    return PipelineLine(member.name, min(1.0, share))


def doing(state: SchedulerState, member: Member) -> tuple[int, str, int, int]:
    """A pipeline's step, what it is at (empty: it waits, or has ended), and how many samples are done of how many."""
    if member.ended is not None or (member.family is None and member.arrival > 0):
        return 0, "", 0, 0
    if member.name not in state.pipelines:
        return 0, "recovering" if member.deaths else "set-up", 0, 0
    pipeline, counted = state.pipelines[member.name], member.counted
    what = DOING[pipeline.phase] if pipeline.lanes else ""
    if what != DOING["rollout"] or counted is None or counted.step != pipeline.step:
        return pipeline.step, what, 0, 0
    return pipeline.step, what, counted.done, counted.of
