"""Who makes room for whom on a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from graph.planning import WORKER, job

from jigsawrl.graph.interference import CORES, H200, Interference
from jigsawrl.policies.balance import AHEAD, CAUTIOUS, LEVEL, balanced
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.state import Action, Change, State
from jigsawrl.simulator.jobs import Job
from jigsawrl.simulator.simulation import Simulation

LARGE = 3e9


@dataclass
class Watched:
    """The look-ahead, and after each of its decisions the work that everybody had left, likely and by caution."""

    inner: Jigsaw = field(default_factory=Jigsaw)
    name: str = "jigsaw"
    seen: list[tuple[dict[str, float], dict[str, float], dict[str, bool]]] = field(default_factory=list)

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        actions = self.inner.decide(state, changes)
        changed = {action.lane: action.confined for action in balanced(state)}
        left, most = (
            {each.name: state.left_alone(each, level) for each in state.unfinished() if each.lanes}
            for level in (0.5, CAUTIOUS)
        )
        rollouts = [lane for lane in state.lanes.lanes.values() if lane.phase == "rollout"]
        now = {lane.pipeline: changed.get(lane.id, lane.confined) for lane in rollouts}
        self.seen.append((left, most, now))
        return actions


def decisions(*jobs: Job, table: Interference = H200, workers: int = 1) -> Iterator[dict[str, Any]]:
    log = Simulation(Jigsaw(), list(jobs), WORKER, workers, table).run().log
    return (event for event in log if event["event"] == "action")


def confined(*jobs: Job, **settings: Any) -> bool:
    return any(event["action"] == "confine" for event in decisions(*jobs, **settings))


def test_a_large_model_that_has_less_left_makes_room_for_a_small_one():
    assert confined(job("large", parameters=LARGE, steps=3), job("small", steps=9))


def test_nobody_makes_room_for_a_larger_model_or_one_of_his_own_size():
    assert not confined(job("large", parameters=LARGE, steps=9), job("small", steps=3))
    assert not confined(job("first", steps=9), job("second", steps=3))


@pytest.mark.parametrize("wish", [{"priority": 1}, {"max_slowdown": 9.0}, {"deadline": 1e6}], ids=str)
def test_who_matters_more_or_has_a_time_to_be_done_by_makes_room_for_nobody(wish):
    assert not confined(job("large", parameters=LARGE, steps=3, **wish), job("small", steps=9))


def test_who_shares_an_engine_makes_room_for_nobody():
    assert not confined(
        job("large", parameters=LARGE, steps=3, base="model"),
        job("other", parameters=LARGE, base="model", steps=3),
        job("small", steps=9),
    )


def test_cores_are_held_anyway_and_without_shares_nothing_is():
    jobs = [job("large", parameters=LARGE, steps=3), job("small", steps=9)]
    assert not confined(*jobs, table=CORES)
    log = Simulation(Jigsaw(shares=False), jobs, WORKER, 1, H200).run().log
    assert not any(event["event"] == "action" and event["action"] == "confine" for event in log)


def test_who_is_confined_is_so_until_he_is_level_and_who_is_free_until_he_is_ahead():
    policy = Watched()
    jobs = [
        job("large", parameters=LARGE, steps=6, seed=1),
        job("small", steps=7),
        job("tiny", parameters=5e8, steps=6),
    ]
    Simulation(policy, jobs, WORKER, 1, H200).run()
    ways, doubted = set(), False
    for left, at_most, now in policy.seen:
        if "large" not in now or len(left) < 2:
            continue
        most = max(seconds for name, seconds in left.items() if name != "large")
        part = at_most["large"] / most
        doubted |= not now["large"] and left["large"] < AHEAD * most
        ways.add(now["large"])
        assert now["large"] or part >= AHEAD
        assert not now["large"] or part < LEVEL
        assert not now.get("small") or at_most["small"] < LEVEL * left["tiny"]
        assert not now.get("tiny")
    assert ways == {True, False}
    assert doubted, "who was likely to be ahead, and by caution was not, had all of the GPU"
