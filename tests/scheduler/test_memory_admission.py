"""Who sleeps to make room, and who waits for it instead: what a scheduler decides, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph.planning import WORKER, job
from scheduler.hearing import hear, phase, runs

from jigsawrl.graph.interference import H200
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Action, Start, Swap, Wait
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import (
    DriverBegan,
    LoadRequest,
    PhaseDone,
    PipelineGone,
    PipelineHeld,
    PipelineLost,
    TimerDue,
)
from jigsawrl.scheduler.memory import FIRST_SWAP_BYTES_S, SWAP_BYTES_S

STEPS = 4


def foreseen(name: str) -> Outlook:
    """Of a pipeline whose actors keep all of their state, and that needs as much again to train."""
    made = job(name, parameters=3e9)
    shape = replace(made.shape, whole=True, old_logprobs=False, cache_tokens=1000, micro_batch_tokens=300_000)
    return Outlook(shape, made.costs, WORKER, made.forecast)


SIZES = foreseen("a").memory(1, 1, 1)
LIMIT = SIZES.training + SIZES.awake + (SIZES.training + SIZES.awake) / 2
"""Bytes that two may train in, or one while two others are awake: not two while a third is."""


def three() -> SchedulerCore:
    """A trains, and b and c are at their rollouts."""
    core = SchedulerCore(POLICIES["concurrent"], H200, 1, LIMIT, units=16)
    for name in "abc":
        core.join(name, foreseen(name))
        hear(core, name, LoadRequest())
    core.decide()
    for name in "abc":
        hear(core, name, DriverBegan(STEPS, 0))
    core.decide()
    rolled_out(core, "a", 10.0)
    assert started(core.decide()) == ["a"]
    assert runs(core, "a") == ("training", 1)
    return core


def rolled_out(core: SchedulerCore, name: str, now: float) -> None:
    hear(core, name, PhaseDone("rollout", 1, (now,), 1, (200,) * 128), at=now)


def trained(core: SchedulerCore, name: str, now: float) -> None:
    hear(core, name, PhaseDone("training", 1, (1.0,), 1), at=now)


def started(actions: list[Action]) -> list[str]:
    return [action.pipeline for action in actions if isinstance(action, Start)]


def waits(actions: list[Action]) -> list[float]:
    return [action.until for action in actions if isinstance(action, Wait)]


def asleep(actions: list[Action]) -> list[str]:
    return [action.pipeline for action in actions if isinstance(action, Swap) and action.out]


def left_of(core: SchedulerCore, name: str) -> float:
    (lane,) = core.state.pipelines[name].lanes
    return core.state.lanes.seconds_left(core.state.lanes.lanes[lane])


def paused_third(core: SchedulerCore) -> None:
    """C has nothing to do for a while, by somebody's wish, and keeps its state."""
    hear(core, "c", PipelineHeld(wait=True))
    rolled_out(core, "c", core.state.lanes.now)
    assert started(core.decide()) == []


def soon(core: SchedulerCore) -> float:
    """When a's training has less to go than the first sleep of another takes."""
    return core.state.lanes.now + left_of(core, "a") - SIZES.awake / FIRST_SWAP_BYTES_S / 2


def test_nobody_is_put_to_sleep_for_room_that_comes_sooner_by_itself() -> None:
    core = three()
    paused_third(core)
    asked = soon(core)
    rolled_out(core, "b", asked)
    actions = core.decide()
    assert (started(actions), asleep(actions)) == ([], [])
    assert waits(actions) == pytest.approx([asked + SIZES.awake / FIRST_SWAP_BYTES_S])
    assert phase(core, "b", "training", 1).status == "ready"
    trained(core, "a", asked + 1.0)
    actions = core.decide()
    assert sorted(started(actions)) == ["a", "b"]
    assert (asleep(actions), waits(actions)) == ([], [])


def test_what_takes_longer_than_a_sleep_is_not_waited_for() -> None:
    core = three()
    paused_third(core)
    assert left_of(core, "a") > SIZES.awake / FIRST_SWAP_BYTES_S
    rolled_out(core, "b", core.state.lanes.now)
    actions = core.decide()
    assert (started(actions), asleep(actions), waits(actions)) == (["b"], ["c"], [])


def test_who_was_asleep_before_falls_asleep_sooner_than_room_comes() -> None:
    core = three()
    paused_third(core)
    (memory,) = core.memory.memories
    memory.slept.add("c")
    rolled_out(core, "b", soon(core))
    assert left_of(core, "a") > SIZES.awake / SWAP_BYTES_S
    actions = core.decide()
    assert (started(actions), asleep(actions)) == (["b"], ["c"])


def test_nobody_waits_for_room_longer_than_a_sleep_would_have_taken() -> None:
    core = three()
    paused_third(core)
    rolled_out(core, "b", soon(core))
    (until,) = waits(core.decide())
    hear(core, "", TimerDue(), at=until)  # a's training goes on and on
    actions = core.decide()
    assert (started(actions), asleep(actions)) == (["b"], ["c"])


def test_meanwhile_another_takes_the_room_that_there_is() -> None:
    core = three()
    asked = soon(core)
    hear(core, "c", PipelineLost(), at=asked)
    core.handle(asked, [("c", LoadRequest())])
    hear(core, "c", DriverBegan(STEPS, 1))
    rolled_out(core, "b", asked)
    actions = core.decide()
    assert (started(actions), asleep(actions)) == (["c"], [])
    assert runs(core, "c") == ("rollout", 2)


def test_one_that_comes_again_with_new_processes_has_never_slept() -> None:
    core = three()
    (memory,) = core.memory.memories
    memory.sleeps("c")
    assert memory.swap_seconds(["c"]) == SIZES.awake / SWAP_BYTES_S
    hear(core, "c", PipelineGone())
    assert memory.swap_seconds(["c"]) == SIZES.awake / FIRST_SWAP_BYTES_S
