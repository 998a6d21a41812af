"""The scheduler's beliefs stay consistent, whatever is heard and done in whatever order."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from graph.planning import WORKER, job
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jigsawrl.graph.interference import CORES, H200
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.shares import BRIEF, at_first
from jigsawrl.policies.state import Confine, Event, Migrate, Pause, Resize, Resume, Start, Woken
from jigsawrl.policies.turns import out_of_turn
from jigsawrl.runtime.messages import Began, Over
from jigsawrl.runtime.mind import Mind
from jigsawrl.runtime.world import World
from jigsawrl.telemetry.events import Substage

WORKERS = 3
STEPS = 3
NAMES = ("a", "b", "c")


def outlook(name: str) -> Outlook:
    """One with a deadline, one with turns, a plain one."""
    settings = {"a": {"deadline": 60.0}, "b": {"turns": 3, "tool_seconds": 2.0}, "c": {}}[name]
    made = job(name, seed=ord(name), sigma=1.5, **settings)  # type: ignore[arg-type]
    return Outlook(made.shape, made.costs, WORKER, made.forecast)


OUTLOOKS = {name: outlook(name) for name in NAMES}
pipelines = st.sampled_from(NAMES)


class Beliefs(RuleBasedStateMachine):
    """Drivers say what they can say in their state, true or too late; any policy answers."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(CORES, WORKERS, WORKER.device_bytes, units=2)
        self.happened: list[Event] = []

    def status(self, name: str) -> str | None:
        known = self.world.pipelines.get(name)
        return known.status if known else None

    @rule(name=pipelines, done=st.integers(0, STEPS - 1))
    def begins_or_comes_back(self, name: str, done: int) -> None:
        again = name in self.world.pipelines
        self.happened.append(self.world.arrive(name, OUTLOOKS[name], STEPS, again))
        self.happened.append(self.world.ask(name, "rollout", done + 1))

    @rule(name=pipelines, phase=st.sampled_from(["rollout", "training"]), step=st.integers(1, STEPS))
    def asks(self, name: str, phase: Literal["rollout", "training"], step: int) -> None:
        if self.status(name) == "done":
            self.happened.append(self.world.ask(name, phase, step))

    @rule(
        name=pipelines,
        engine=st.integers(-1, WORKERS - 1),
        kind=st.sampled_from([None, "decode", "tail", "tool"]),
        samples=st.integers(0, 40),
    )
    def is_elsewhere(self, name: str, engine: int, kind: Substage | None, samples: int) -> None:
        if name in self.world.pipelines and engine >= 0:
            self.happened += self.world.at(name, engine, kind, samples)

    @rule(name=pipelines)
    def phase_is_over(self, name: str) -> None:
        if self.status(name) == "running":
            self.happened += self.world.over(name)
            self.world.forecast(name, OUTLOOKS[name])

    @rule(name=pipelines)
    def leaves(self, name: str) -> None:
        if name in self.world.pipelines:
            self.happened.append(self.world.leave(name))

    @rule(name=pipelines)
    def dies(self, name: str) -> None:
        if name in self.world.pipelines:
            self.world.drop(name)
            self.world.pipelines[name].status = "done"

    @rule(seconds=st.floats(-1, 1e4))
    def time_passes(self, seconds: float) -> None:
        before = self.world.lanes.now
        self.world.advance(before + seconds)
        assert self.world.lanes.now >= before

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def a_policy_decides(self, name: str) -> None:
        happened, self.happened = self.happened or [Woken()], []
        for action in POLICIES[name].decide(self.world.state(), happened):
            match action:
                case Start():
                    self.world.start(action)
                case Migrate():
                    self.world.gather(action)
                case Pause(lane) | Resume(lane):
                    self.world.lanes.pause(lane, isinstance(action, Pause))
                case Resize(lane, share):
                    self.world.lanes.resize(lane, share)
                case Confine(lane, confined):
                    self.world.lanes.confine(lane, confined)

    @invariant()
    def lanes_belong_to_who_runs(self) -> None:
        world = self.world
        assert world.lanes.lanes.keys() == world.running.keys()
        owned = [(key, name) for name, pipeline in world.pipelines.items() for key in pipeline.lanes]
        assert sorted(owned) == sorted((lane.id, lane.pipeline) for lane in world.lanes.lanes.values())
        for pipeline in world.pipelines.values():
            assert bool(pipeline.lanes) == (pipeline.status == "running")

    @invariant()
    def workers_know_their_lanes(self) -> None:
        for worker, there in enumerate(self.world.lanes.on_worker):
            lanes = self.world.lanes.lanes
            assert sorted(there) == sorted(key for key, lane in lanes.items() if worker in lane.workers)

    @invariant()
    def memory_that_is_held_is_that_of_the_lanes(self) -> None:
        for worker, held in enumerate(self.world.held):
            there = self.world.lanes.on_worker[worker]
            assert held == pytest.approx(sum(self.world.running[key].bytes for key in there), abs=1.0)
            assert held <= WORKER.device_bytes + 1.0

    @invariant()
    def policies_can_reckon_with_it(self) -> None:
        state = self.world.state()
        assert state.survivors.keys() <= state.lanes.lanes.keys()
        for pipeline in state.unfinished():
            assert state.left_alone(pipeline) >= 0


TestBeliefs = Beliefs.TestCase
TestBeliefs.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("name", "units", "indifferent"), [("c", 1, True), ("c", 2, False), ("a", 1, False)])
def test_what_engines_are_at_makes_no_difference_where_nobody_waits_and_workers_are_shared_by_turns(
    name: str, units: int, indifferent: bool
) -> None:
    """But it does to a pipeline with a deadline."""
    mind = Mind(POLICIES["jigsaw"], CORES, 1, WORKER.device_bytes, units)
    mind.join(name, OUTLOOKS[name])
    mind.hear(name, Began(STEPS, 0))
    assert not mind.indifferent()
    mind.decide()
    assert mind.indifferent() == indifferent


def test_a_pipeline_that_went_on_unasked_is_where_it_says_and_asks_again_at_last() -> None:
    mind = Mind(POLICIES["jigsaw"], CORES, 2, WORKER.device_bytes)
    for name in ("b", "c"):
        mind.join(name, OUTLOOKS[name])
        mind.hear(name, Began(STEPS, 0))
    starts = {action.pipeline: action for action in mind.decide() if isinstance(action, Start)}
    assert starts["c"].onward
    mind.world.advance(9.0)
    mind.hear("c", Over("rollout", 1, (2.0, 0.0), 1, (100,) * 8, went_on=2.0))
    assert mind.runs("c") == ("training", 1)
    assert mind.thoughts["c"].since == 2.0
    trained_on = {
        worker for key in mind.world.pipelines["c"].lanes for worker in mind.world.lanes.lanes[key].workers
    }
    assert trained_on == {worker for place in starts["c"].places for worker in place}
    mind.hear("c", Over("training", 1, (1.0, 1.0), 1, went_on=4.0))
    assert mind.runs("c") == ("rollout", 2)
    mind.hear("c", Over("rollout", 2, (2.0, 0.0), 1, (100,) * 8))
    assert mind.runs("c") is None
    assert mind.world.pipelines["c"].status == "ready"


def on_a_gpu(waking: float = 0.5, a_prompt_token: float = 1e-6) -> Mind:
    """A scheduler with two pipelines on one worker whose rollouts are about to begin."""
    mind = Mind(POLICIES["jigsaw"], H200, 1, WORKER.device_bytes, units=16)
    for name in ("b", "c"):
        made = job(name, prompts=64, samples=8, sigma=0.3)
        reading = replace(made.costs.prefilling, per_token=a_prompt_token)
        costs = replace(made.costs, rollout_fixed_seconds=waking, prefilling=reading)
        mind.join(name, Outlook(made.shape, costs, WORKER, made.forecast))
        mind.hear(name, Began(STEPS, 0))
    return mind


def test_a_rollout_is_thought_to_decode_when_it_should_have_begun_to_though_nobody_says_so() -> None:
    mind = on_a_gpu()
    mind.decide()
    (lane,) = mind.world.pipelines["c"].lanes
    assert mind.world.kind(lane) == "swap"
    mind.world.advance(2.0)
    assert mind.world.kind(lane) == "decode"
    mind.world.advance(1e6)  # of its end a word would have come
    assert mind.world.kind(lane) == "decode"


def test_a_training_is_thought_to_make_gradients_once_its_logprobs_should_be_there() -> None:
    world = on_a_gpu().world
    world.ask("c", "training", 1)
    world.start(Start("c", ((0,),)))
    (key,) = world.pipelines["c"].lanes
    lane = world.lanes.lanes[key]
    logprobs, gradients = (segment.seconds for segment in lane.segments[:2])
    assert world.kind(key) == "logprob"
    world.advance(logprobs + gradients / 2)
    assert world.kind(key) == "grad"
    assert lane.left == pytest.approx(gradients / 2)
    world.advance(1e6)  # of its end a word would have come
    assert world.kind(key) == "grad"


@pytest.mark.parametrize(("waking", "in_turn"), [(BRIEF / 2, False), (2 * BRIEF, True)])
def test_nobody_stands_still_for_what_is_over_in_a_moment(waking: float, in_turn: bool) -> None:
    world = on_a_gpu(waking).world
    for name in ("b", "c"):
        world.start(Start(name, ((0,),), 0.5))
    assert {world.kind(lane) for lane in world.lanes.lanes} == {"swap"}
    assert bool(out_of_turn(world.state(), set())) == in_turn


@pytest.mark.parametrize(("a_prompt_token", "signature"), [(1e-6, "bulk"), (1e-3, "prefill")])
def test_a_rollout_that_begins_is_given_the_share_of_what_it_does_for_longer_than_a_moment(
    a_prompt_token: float, signature: str
) -> None:
    mind = on_a_gpu(a_prompt_token=a_prompt_token)
    start = next(action for action in mind.decide() if isinstance(action, Start))
    state = mind.world.state()
    assert at_first(state, start) == signature
    state.pipelines[start.pipeline].phase = "training"
    assert at_first(state, start) == "compute"
