"""Whatever a policy moves or pauses, and whenever, what is learned stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixes import CALC, SUMS, Results, assert_nothing_is_left, events, result, run_here, write_mix

from jigsawrl.policies.concurrent import Concurrent, start_all
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.shares import equal, shared
from jigsawrl.policies.state import (
    Action,
    Change,
    Migrate,
    Pause,
    Pipeline,
    Policy,
    Resume,
    State,
    TimerDue,
    Wait,
)
from jigsawrl.policies.tails import last_tails

MOMENT_S = 1e-3


class Gathers:
    """Everything at once. Every other rollout goes to one worker as soon as it runs, all others with their tails."""

    name = "gathers"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        starts = list(Concurrent().decide(state, changes))
        woken = any(isinstance(event, TimerDue) for event in changes)
        moves = [move for pipeline in state.unfinished() for move in gathered(state, pipeline, woken)]
        return [*starts, *moves, Wait(state.now + MOMENT_S)] if starts else list(moves)


class Restless:
    """Whatever happens, all stand still for a moment. Every other rollout is gathered while it does."""

    name = "restless"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        lanes, starts = state.lanes.lanes.values(), start_all(state)
        if any(isinstance(event, TimerDue) for event in changes):
            moves = [move for pipeline in state.unfinished() for move in gathered(state, pipeline, True)]
            leaving = {key for move in moves for key in move.lanes}
            resumes = [Resume(lane.id) for lane in lanes if lane.paused and lane.id not in leaving]
            returning = {resume.lane for resume in resumes}
            return [*moves, *resumes, *shared(state, starts, equal, leaving, returning)]
        pauses = [Pause(lane.id) for lane in lanes if not lane.paused]
        standing = {lane.id for lane in lanes}
        return [*pauses, *shared(state, starts, equal, standing), Wait(state.now + 0.02)]


def gathered(state: State, pipeline: Pipeline, at_once: bool) -> list[Migrate]:
    """What runs of a rollout, onto one of its workers: if it is all tail, or `at_once` and its step is odd."""
    lanes = state.lanes_of(pipeline)
    if pipeline.phase != "rollout" or len(lanes) < 2:
        return []
    if len(last_tails(state, pipeline)) < len(lanes) and not (at_once and pipeline.step % 2):
        return []
    target = lanes[pipeline.step // 2 % len(lanes)].workers
    return [Migrate(pipeline.name, tuple(lane.id for lane in lanes), (target,))]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "does"), [(Gathers(), "migrate"), (Restless(), "pause")])
def test_pipelines_that_are_moved_and_paused_learn_the_same(
    policy: Policy, does: str, alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "concurrent", policy)
    out = tmp_path / "out"
    run_here(write_mix(tmp_path, "concurrent", a=SUMS, b=CALC), out)
    assert {name: result(out / name) for name in "ab"} == alone
    assert does in {event["action"] for event in events(out, "action")}
    assert events(out, "died") == []
    assert_nothing_is_left(out)
