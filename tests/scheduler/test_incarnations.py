"""Processes die and others take their place: what those before have sent changes nothing any more."""

from __future__ import annotations

import json

import pytest
from graph.planning import WORKER, job
from scheduler.hearing import hear, phase, runs, set_up

from jigsawrl.graph.interference import H200
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.named import POLICIES
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import (
    DriverBegan,
    LoadRequest,
    PhaseDone,
    PipelineLost,
    SchedulerEvent,
    Sent,
    SubstageChanged,
    WorkerGone,
    read,
    written,
)

STEPS = 3
ROLLED_OUT = PhaseDone("rollout", 1, (1.0,), 1, (100,) * 8)


def alone() -> SchedulerCore:
    """A pipeline whose first rollout runs."""
    core = SchedulerCore(POLICIES["concurrent"], H200, 2, WORKER.device_bytes, units=16)
    made = job("a")
    core.join("a", Outlook(made.shape, made.costs, WORKER, made.forecast))
    set_up(core, STEPS, "a")
    core.decide()
    assert runs(core, "a") == ("rollout", 1)
    return core


def again(core: SchedulerCore, incarnation: int) -> None:
    hear(core, "a", Sent(incarnation, LoadRequest()))
    core.decide()
    hear(core, "a", Sent(incarnation, DriverBegan(STEPS, 0)))
    core.decide()


def test_a_phase_that_ended_before_its_processes_died_has_to_run_again() -> None:
    core = alone()
    hear(core, "a", Sent(0, PipelineLost()))
    again(core, 1)
    hear(core, "a", Sent(0, ROLLED_OUT))
    assert runs(core, "a") == ("rollout", 1)
    hear(core, "a", Sent(1, ROLLED_OUT))
    assert phase(core, "a", "training", 1).status == "ready"


def test_a_death_is_noticed_once_by_whoever_tells_it_first() -> None:
    core = alone()
    hear(core, "", WorkerGone(0))
    assert core.beliefs["a"].incarnation == 1
    again(core, 1)
    hear(core, "a", Sent(0, PipelineLost()))
    assert runs(core, "a") == ("rollout", 1)


@pytest.mark.parametrize("event", [LoadRequest(), DriverBegan(STEPS, 0), ROLLED_OUT])
def test_what_is_heard_twice_happens_once(event: SchedulerEvent) -> None:
    core = alone()
    hear(core, "a", Sent(0, PipelineLost()))
    heard: list[SchedulerEvent] = [LoadRequest(), DriverBegan(STEPS, 0), ROLLED_OUT]
    for each in heard[: heard.index(event) + 1]:
        hear(core, "a", Sent(1, each))
        core.decide()
    before = runs(core, "a"), list(core.memory.loading), set(core.memory.coming)
    hear(core, "a", Sent(1, event))
    assert core.decide() == []
    assert (runs(core, "a"), core.memory.loading, core.memory.coming) == before


def test_an_event_is_read_as_it_was_written() -> None:
    for event in (LoadRequest(), ROLLED_OUT, SubstageChanged(0, "tail", 2, ("rollout", 7)), PipelineLost()):
        for each in (event, Sent(3, event)):
            assert read(json.loads(json.dumps(written(("a", each))))) == ("a", each)
