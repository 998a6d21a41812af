"""What the scheduler core believes of pipelines, and what follows from it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from graph.planning import WORKER, job
from scheduler.hearing import hear, phase, runs, set_up

from jigsawrl.graph.interference import CORES, H200
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.named import POLICIES, policy_of
from jigsawrl.policies.shares import BRIEF, at_first
from jigsawrl.policies.state import Start
from jigsawrl.policies.turns import out_of_turn
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import PhaseDone, TurnsReordered, read, written
from jigsawrl.scheduler.invariants import InvariantViolated

WORKERS = 3
STEPS = 3
NAMES = ("a", "b", "c")


def outlook(name: str) -> Outlook:
    """One with a deadline, one with turns, a plain one."""
    settings = {"a": {"deadline": 60.0}, "b": {"turns": 3, "tool_seconds": 2.0}, "c": {}}[name]
    made = job(name, seed=ord(name), sigma=1.5, **settings)  # type: ignore[arg-type]
    return Outlook(made.shape, made.costs, WORKER, made.forecast)


OUTLOOKS = {name: outlook(name) for name in NAMES}


@pytest.mark.parametrize(("name", "units", "indifferent"), [("c", 1, True), ("c", 2, False), ("a", 1, False)])
def test_what_engines_are_at_makes_no_difference_where_nobody_waits_and_workers_are_shared_by_turns(
    name: str, units: int, indifferent: bool
) -> None:
    """But it does to a pipeline with a deadline."""
    core = SchedulerCore(POLICIES["jigsaw"], CORES, 1, WORKER.device_bytes, units)
    core.join(name, OUTLOOKS[name])
    set_up(core, STEPS, name)
    assert not core.indifferent()
    core.decide()
    assert core.indifferent() == indifferent


def test_a_pipeline_that_went_on_unasked_is_where_it_says_and_asks_again_at_last() -> None:
    core = SchedulerCore(POLICIES["jigsaw"], CORES, 2, WORKER.device_bytes)
    for name in ("b", "c"):
        core.join(name, OUTLOOKS[name])
    set_up(core, STEPS, "b", "c")
    starts = {action.pipeline: action for action in core.decide() if isinstance(action, Start)}
    assert starts["c"].auto_continue
    hear(core, "c", PhaseDone("rollout", 1, (2.0, 0.0), 1, (100,) * 8, went_on=2.0), at=9.0)
    assert runs(core, "c") == ("training", 1)
    assert phase(core, "c", "training", 1).since == 2.0
    trained_on = {
        worker for key in core.state.pipelines["c"].lanes for worker in core.state.lanes.lanes[key].workers
    }
    assert trained_on == {worker for place in starts["c"].places for worker in place}
    hear(core, "c", PhaseDone("training", 1, (1.0, 1.0), 1, went_on=4.0))
    assert runs(core, "c") == ("rollout", 2)
    hear(core, "c", PhaseDone("rollout", 2, (2.0, 0.0), 1, (100,) * 8))
    assert runs(core, "c") is None
    assert phase(core, "c", "training", 2).status == "ready"


def on_a_gpu(waking: float = 0.5, a_prompt_token: float = 1e-6) -> SchedulerCore:
    """A scheduler with two pipelines on one worker whose rollouts are about to begin."""
    core = SchedulerCore(POLICIES["jigsaw"], H200, 1, WORKER.device_bytes, units=16)
    for name in ("b", "c"):
        made = job(name, prompts=64, samples=8, sigma=0.3)
        reading = replace(made.costs.prefilling, per_token=a_prompt_token)
        costs = replace(made.costs, rollout_fixed_seconds=waking, prefilling=reading)
        core.join(name, Outlook(made.shape, costs, WORKER, made.forecast))
    set_up(core, STEPS, "b", "c")
    return core


def test_a_rollout_is_thought_to_decode_when_it_should_have_begun_to_though_nobody_says_so() -> None:
    core = on_a_gpu()
    core.decide()
    (lane,) = core.state.pipelines["c"].lanes
    assert core.state.kind(lane) == "swap"
    core.state.advance(2.0)
    assert core.state.kind(lane) == "decode"
    core.state.advance(1e6)  # of its end a word would have come
    assert core.state.kind(lane) == "decode"


def test_a_training_is_thought_to_make_gradients_once_its_logprobs_should_be_there() -> None:
    state = on_a_gpu().state
    state.start(Start(PhaseId("c", "training", 1), ((0,),)))
    (key,) = state.pipelines["c"].lanes
    lane = state.lanes.lanes[key]
    logprobs, gradients = (segment.seconds for segment in lane.segments[:2])
    assert state.kind(key) == "logprob"
    state.advance(logprobs + gradients / 2)
    assert state.kind(key) == "grad"
    assert lane.left == pytest.approx(gradients / 2)
    state.advance(1e6)  # of its end a word would have come
    assert state.kind(key) == "grad"


@pytest.mark.parametrize(("waking", "in_turn"), [(BRIEF / 2, False), (2 * BRIEF, True)])
def test_nobody_stands_still_for_what_is_over_in_a_moment(waking: float, in_turn: bool) -> None:
    state = on_a_gpu(waking).state
    for name in ("b", "c"):
        state.start(Start(PhaseId(name, "rollout", 1), ((0,),), 0.5))
    assert {state.kind(lane) for lane in state.lanes.lanes} == {"swap"}
    assert bool(out_of_turn(state, set())) == in_turn


@pytest.mark.parametrize(("a_prompt_token", "signature"), [(1e-6, "bulk"), (1e-3, "prefill")])
def test_a_rollout_that_begins_is_given_the_share_of_what_it_does_for_longer_than_a_moment(
    a_prompt_token: float, signature: str
) -> None:
    core = on_a_gpu(a_prompt_token=a_prompt_token)
    start = next(action for action in core.decide() if isinstance(action, Start))
    state = core.state
    assert at_first(state, start) == signature
    training = PhaseId(start.pipeline, "training", start.phase.index)
    assert at_first(state, replace(start, phase=training)) == "compute"


def test_a_plan_that_changes_changes_the_order_in_which_pipelines_take_turns_and_the_log_says_so() -> None:
    core = SchedulerCore(POLICIES["rollmux"], CORES, 2, WORKER.device_bytes, rollout_workers=1)
    heard = read(written(("", TurnsReordered("by-need"))))
    core.handle(0.0, [heard])
    assert core.policy == policy_of("rollmux", "by-need")
    assert policy_of("jigsaw", "by-need") is POLICIES["jigsaw"], "others have no turns"


def test_a_violation_says_its_number_also_where_it_came_from_another_process() -> None:
    violation = pickle.loads(pickle.dumps(InvariantViolated(9, "2.0 is not later than 3.0")))
    assert (violation.number, str(violation)) == (9, str(InvariantViolated(9, "2.0 is not later than 3.0")))
    assert str(violation).startswith("invariant 9 (a wait ends in the future)")
