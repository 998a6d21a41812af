"""Pipelines with several phases in flight: asynchronous ones, and those whose evaluation lags behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from scheduler.graphs import BEFORE, asynchronous, evaluating
from soak.core.driver import Driver, Permit
from soak.core.program import ANYTHING, Program, Step
from soak.core.world import World

from jigsawrl.phases.graph import PhaseGraph
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.named import POLICIES

STEPS = 12
EVERY_POLICY = (*POLICIES, ANYTHING)


def joined(name: str, graph: str, kind: int = 0) -> Step:
    """Joins at once, on all workers, and is as long as predicted."""
    return [0, "join", name, kind, graph, STEPS, 4, 0, 1.0, False]


def world(policy: str, *pipelines: Step, pools: int | None = None) -> World:
    return World(Program(7, policy, "h200", 4, 4, pools, 1e13, list(pipelines)))


@dataclass
class Watch:
    """What a pipeline had begun and ended, whenever one of its phases began."""

    began: list[PhaseId] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    """Steps that each rollout was ahead of the trainings that had ended."""
    lags: list[int] = field(default_factory=list)
    """Steps that the oldest evaluation lagged behind each rollout that began."""
    most: int = 0
    """Phases of one pipeline at a time."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found, run = Watch(), Driver._run

    def watched(driver: Driver, permit: Permit) -> None:
        id = permit.phase
        found.began.append(id)
        trained = [each.index for each in driver.ended if each.kind == "training"]
        judged = [each.index for each in driver.ended if each.kind == "evaluation"]
        if id.kind == "rollout":
            found.ahead.append(id.index - 1 - max(trained, default=0))
            found.lags.append(id.index - min({*range(1, STEPS + 1)} - {*judged}, default=STEPS))
        run(driver, permit)
        found.most = max(found.most, len(driver.running))

    monkeypatch.setattr(Driver, "_run", watched)
    return found


def in_order(began: list[PhaseId], name: str, kind: str) -> bool:
    indices = [id.index for id in began if id.pipeline == name and id.kind == kind]
    return indices == list(range(1, STEPS + 1))


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("pools", [None, 2])
@pytest.mark.parametrize(("graph", "bound"), [("fresh", 0), ("asynchronous", 1), ("stale", 3)])
def test_no_rollout_is_staler_than_its_bound_whatever_the_policy(
    policy: str, pools: int | None, graph: str, bound: int, watch: Watch
) -> None:
    world(policy, joined("a", graph), pools=pools).run()
    assert max(watch.ahead) <= bound
    assert in_order(watch.began, "a", "rollout")
    assert in_order(watch.began, "a", "training")


@pytest.mark.parametrize("policy", ["concurrent", ANYTHING])
def test_an_asynchronous_pipeline_has_several_phases_in_flight_as_far_as_its_bound_lets_it(
    policy: str, watch: Watch
) -> None:
    world(policy, joined("a", "stale")).run()
    assert watch.most >= 2
    assert max(watch.ahead) == 3


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("pools", [None, 2])
def test_an_evaluation_may_wait_but_not_beyond_the_step_that_needs_it(
    policy: str, pools: int | None, watch: Watch
) -> None:
    world(policy, joined("a", "evaluating"), pools=pools).run()
    assert max(watch.lags) < BEFORE
    assert sorted(id.index for id in watch.began if id.kind == "evaluation") == list(range(1, STEPS + 1))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_pipelines_of_every_kind_end_beside_each_other(policy: str, watch: Watch) -> None:
    pipelines = [joined("a", "stale", 1), joined("b", "evaluating", 2), joined("c", "synchronous", 3)]
    world(policy, *pipelines).run()
    for name in "abc":
        assert in_order(watch.began, name, "training")


@pytest.mark.parametrize("graph", [asynchronous(0), asynchronous(3), evaluating()])
def test_a_graph_names_each_phase_once_and_needs_none_that_comes_later(graph: PhaseGraph) -> None:
    named: set[PhaseId] = set()
    for step in range(1, STEPS):
        for spec in graph.phases_of("a", step):
            assert spec.id not in named
            named.add(spec.id)
            needed = [need for need in (*spec.needs, *spec.after) if need.index > 0]
            assert named >= {*needed}
