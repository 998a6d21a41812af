"""Bugs that are planted in the core, one at a time, are all found by the soak within a few worlds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from soak.core.program import draw_program
from soak.core.shrink import shrunk, what_goes_wrong

from jigsawrl.graph.lanes import Lanes
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.state import Action, Migrate, Phase, Pipeline, Start, Wait
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import PhaseDone
from jigsawrl.scheduler.memory import Memory, MemoryAdmission
from jigsawrl.scheduler.state import SchedulerState

WORLDS = 150
"""Within which each is found; a world has some 150 events."""

Plant = Callable[[pytest.MonkeyPatch], None]


def memory_is_not_given_back_by_who_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryAdmission, "leave", lambda self, name: self.coming.discard(name))


def a_lane_keeps_its_share_when_it_is_resized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lanes, "resize", lambda self, lane, share: None)


def a_phase_does_not_wait_for_what_it_needs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "free", lambda self, phase: True)


def a_permit_is_sent_while_states_fall_asleep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerCore, "permitted", lambda self: self.state.running())


def a_lane_is_left_where_a_tail_was(patch: pytest.MonkeyPatch) -> None:
    migrate = SchedulerState.migrate

    def planted(self: SchedulerState, action: Migrate) -> None:
        migrate(self, replace(action, lanes=action.lanes[:-1]))

    patch.setattr(SchedulerState, "migrate", planted)


def a_timer_is_lost(patch: pytest.MonkeyPatch) -> None:
    apply = SchedulerCore._apply

    def planted(self: SchedulerCore, action: Action) -> None:
        if not isinstance(action, Wait):
            apply(self, action)

    patch.setattr(SchedulerCore, "_apply", planted)


def a_pipeline_that_is_held_starts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "block", lambda self, phases: None)


def a_window_is_not_extended(patch: pytest.MonkeyPatch) -> None:
    extend = SchedulerState.extend

    def planted(self: SchedulerState, pipeline: Pipeline) -> None:
        if pipeline.made < 2:
            extend(self, pipeline)

    patch.setattr(SchedulerState, "extend", planted)


def a_state_that_sleeps_counts_as_awake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "sleeps", lambda self, name: self.slept.add(name))


def a_phase_that_runs_does_not_wake_its_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryAdmission, "wakes", lambda self, phase: None)


def what_ends_twice_is_heard_twice(patch: pytest.MonkeyPatch) -> None:
    done = SchedulerCore._done

    def planted(self: SchedulerCore, name: str, event: PhaseDone) -> None:
        pipeline = self.state.pipelines.get(name)
        known = pipeline and PhaseId(name, event.phase, event.step) in pipeline.phases
        if pipeline is not None and not known and pipeline.running:
            event = replace(event, phase=pipeline.current.kind, step=pipeline.current.index)
        done(self, name, event)

    patch.setattr(SchedulerCore, "_done", planted)


def a_lost_worker_is_still_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "settle", _settle_on_all)


def _settle_on_all(state: SchedulerState, pipeline: Pipeline) -> None:
    layout = state.layouts[pipeline.name]
    pipeline.rollout_home = layout.rollout[: len(layout.rollout) // pipeline.tp * pipeline.tp]
    if state.apart:
        pipeline.training_home = layout.training


def processes_that_are_gone_are_still_heard(patch: pytest.MonkeyPatch) -> None:
    hear = SchedulerCore._hear

    def planted(self: SchedulerCore, name: str, event: Any) -> None:
        hear(self, name, getattr(event, "event", event))

    patch.setattr(SchedulerCore, "_hear", planted)


def what_runs_on_a_lost_worker_goes_on(patch: pytest.MonkeyPatch) -> None:
    def planted(self: SchedulerCore, worker: int) -> None:
        self.state.alive[worker] = False
        self._settle()

    patch.setattr(SchedulerCore, "_worker_gone", planted)


def what_runs_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    start = SchedulerState.start

    def planted(self: SchedulerState, action: Start) -> Phase:
        phase = start(self, action)
        for key in phase.lanes[1:]:
            for worker in self.lanes.lanes[key].workers:
                self.held[worker] -= self.uses[key].bytes
            self.uses[key].bytes = 0.0
        return phase

    patch.setattr(SchedulerState, "start", planted)


PLANTED: list[Plant] = [
    memory_is_not_given_back_by_who_is_lost,
    a_lane_keeps_its_share_when_it_is_resized,
    a_phase_does_not_wait_for_what_it_needs,
    a_permit_is_sent_while_states_fall_asleep,
    a_lane_is_left_where_a_tail_was,
    a_timer_is_lost,
    a_pipeline_that_is_held_starts,
    a_window_is_not_extended,
    a_state_that_sleeps_counts_as_awake,
    a_phase_that_runs_does_not_wake_its_state,
    what_ends_twice_is_heard_twice,
    a_lost_worker_is_still_used,
    processes_that_are_gone_are_still_heard,
    what_runs_on_a_lost_worker_goes_on,
    what_runs_is_not_counted,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = next(program for seed in range(WORLDS) if what_goes_wrong(program := draw_program(seed)))
    monkeypatch.undo()
    assert not what_goes_wrong(found)


def test_what_was_found_is_shown_in_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    a_timer_is_lost(monkeypatch)
    program = next(p for seed in range(WORLDS) if what_goes_wrong(p := draw_program(seed)))
    short = shrunk(program, seconds=5.0)
    assert what_goes_wrong(short) == what_goes_wrong(program)
    assert len(short.steps) <= min(10, len(program.steps) // 2)
