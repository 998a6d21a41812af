"""Rollouts and trainings in pools of their own: what crosses between them, who waits for whom, what is learned."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from graph.planning import WORKER, job
from hypothesis import given
from hypothesis import strategies as st
from mixes import (
    CALC,
    STEPS,
    SUMS,
    Results,
    assert_nothing_is_left,
    events,
    named,
    result,
    run_here,
    write_mix,
)

from jigsawrl.config.pipelines import load_mix
from jigsawrl.errors import JigsawError
from jigsawrl.graph import memory
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.interference import CORES
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.rollmux import RollMux, in_rounds
from jigsawrl.policies.state import Phase, Pipeline, Start
from jigsawrl.runtime import shares
from jigsawrl.runtime.launch import member_of, own_config
from jigsawrl.runtime.replay import replayed
from jigsawrl.runtime.world import World

POOLS = {"rollout": 1, "training": 1}
LINK = 0.05
TEAM = {"rollout": [0], "training": [1]}


def write_pooled(
    folder: Path, policy: str = "rollmux", more: Mapping[str, Any] | None = None, **mix: Any
) -> Path:
    """The usual two pipelines, and maybe more, on two workers in two pools."""
    file = write_mix(folder, policy, a=SUMS, b=CALC, **(more or {}))
    file.write_text(json.dumps({**json.loads(file.read_text()), "pools": POOLS, **mix}))
    return file


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of the two learns on one worker that does everything, one after the other."""
    folder = tmp_path_factory.mktemp("on-one")
    file = write_mix(folder, "serial", a=SUMS, b=CALC)
    file.write_text(json.dumps({**json.loads(file.read_text()), "workers": 1}))
    run_here(file, folder / "out")
    return {name: result(folder / "out" / name) for name in "ab"}


def spans(out: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events(out, "substage") if event["substage"] in kinds]


def tight(file: Path) -> float:
    """GB of workers that hold what runs on them, and not all that waits beside it."""
    mix, worker = load_mix(file), cpu_worker(1, 2)
    members = [member_of(mix, name, own_config(mix, name, "cpu"), file.parent, worker, None) for name in "ab"]
    return max(each.outlook.memory(1, 1, 1).training for each in members) / 1e9


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run under rollmux, with a slow link, on workers that do not hold everybody."""
    folder = tmp_path_factory.mktemp("pooled")
    longer = {**SUMS, "steps": 1, "rollout": {**SUMS["rollout"], "max_tokens": 48}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            memory, "MICRO_BATCH_TOKENS", 1
        )  # else that is much more than any state of so small models
        limit = tight(write_pooled(folder))
        file = write_pooled(
            folder, more={"c": longer, "d": longer}, pools={**POOLS, "link": LINK}, memory=limit
        )
        outcome = run_here(file, folder / "out")
        assert all(each.same for each in replayed(folder / "out")), "every decision can be made again"
    assert [each.how for each in outcome.pipelines] == ["finished"] * 4
    assert_nothing_is_left(folder / "out")
    return folder / "out"


@pytest.mark.slow
def test_each_phase_keeps_to_its_pool_and_learns_what_one_worker_does(pooled: Path, on_one: Results) -> None:
    assert {each["worker"] for each in spans(pooled, "prefill", "decode", "tail")} == {0}
    assert {each["worker"] for each in spans(pooled, "logprob", "grad", "optim", "sync")} == {1}
    assert {name: result(pooled / name) for name in "ab"} == on_one


def test_weights_cross_the_link_once_a_step_in_the_time_that_it_takes(pooled: Path) -> None:
    crossings = spans(pooled, "sync")
    made = sorted((each["pipeline"], each["step"]) for each in crossings)
    assert made == [(name, step) for name in "ab" for step in (1, 2, 3)] + [("c", 1), ("d", 1)]
    for each in crossings:
        assert each["bytes"] > 0
        assert each["t1"] - each["t0"] >= 8 * each["bytes"] / (LINK * 1e9)


def test_a_pool_is_one_pipelines_at_a_time(pooled: Path) -> None:
    for phase in TEAM:
        permits = [each for each in events(pooled, "phase") if each["phase"] == phase]
        assert len(permits) == 2 * STEPS + 2
        assert all(one["t1"] <= after["t0"] for one, after in pairwise(permits))
        assert all(each["asked"] <= each["t0"] <= each["t1"] for each in permits)


def test_every_permit_is_in_the_timeline(pooled: Path) -> None:
    trace = json.loads((pooled / "timeline.json").read_text())["traceEvents"]
    permits = [event["name"] for event in trace if event["name"].startswith("permit: ")]
    assert len(permits) == len(events(pooled, "phase"))


def test_the_side_that_does_not_run_sleeps_while_the_other_does(pooled: Path) -> None:
    swaps = spans(pooled, "swap")
    for phase, workers in TEAM.items():
        verbs = {each["verb"] for each in swaps if each["workers"] == workers}
        assert verbs >= {"sleep", "wake_up"}, phase
    took = [each for each in swaps if each["verb"] == "take_weights"]
    assert [each["bytes"] > 0 for each in took] == [True] * (2 * STEPS + 2)
    away = [each for each in swaps if each["verb"] == "sleep"]
    assert any(
        phase["pipeline"] == each["pipeline"] and phase["t0"] < each["t0"] and each["t1"] < phase["t1"]
        for phase in events(pooled, "phase")
        for each in away
        if each["workers"] != TEAM[phase["phase"]]
    ), "in the middle of what the other side does"


@pytest.mark.slow
def test_two_engines_and_a_gang_of_two_learn_what_two_workers_do_though_one_is_killed(
    alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(shares, "split_cores", lambda workers: [(core,) for core in cores] * 2)
    killed: list[str] = []

    def kill(name: str, step: int) -> None:
        if (name, step) == ("a", 1) and not killed:
            killed.append(name)
            os.kill(named("actor3:a"), signal.SIGKILL)

    out = tmp_path / "out"
    run_here(write_pooled(tmp_path, "jigsaw", pools={"rollout": 2, "training": 2}, workers=4), out, kill)
    assert len(events(out, "died")) == 1
    assert {each["worker"] for each in spans(out, "decode")} == {0, 1}
    assert all(set(each["workers"]) <= {2, 3} for each in spans(out, "grad", "optim", "sync"))
    assert {name: result(out / name) for name in "ab"} == alone
    assert_nothing_is_left(out)


@pytest.mark.parametrize(
    ("mix", "why"),
    [
        (
            {"pools": {"rollout": 2, "training": 1}},
            "2 for rollouts and 1 for training are not all of the 2 workers",
        ),
        ({"pools": {"rollout": 2, "training": 0}}, "pools.training: 0 is not allowed"),
        ({"pools": {**POOLS, "link": 0}}, "pools.link: 0 is not allowed; it must be a number, above 0"),
        ({"pools": POOLS, "policy": "rlix"}, "pools: rlix lets both phases share one pool"),
        ({"pools": POOLS, "memory": 0.001}, "needs .* on each of its 1 workers, and a cpu has 0.001 GB"),
    ],
)
def test_pools_that_cannot_be_are_refused(mix: Mapping[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match=why):
        run_here(write_pooled(tmp_path, **mix), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The order of permits, without processes


class Group:
    """Pipelines in two pools under rollmux, whose phases end in whatever order somebody likes."""

    def __init__(self, names: str) -> None:
        self.world = World(CORES, 2, 64 * WORKER.device_bytes, rollout_workers=1)
        for name in names:
            made = job(name, seed=ord(name))
            forecast = Forecast.from_prior(made.expected, made.shape.max_tokens)
            outlook = Outlook(made.shape, made.costs, WORKER, forecast)
            self.world.arrive(name, outlook, 1000, again=False)
            self.world.ask(name, "rollout", 1)
        self.log: dict[Phase, list[str]] = {"rollout": [], "training": []}

    @property
    def running(self) -> list[Pipeline]:
        return [each for each in self.world.pipelines.values() if each.status == "running"]

    def decide(self) -> None:
        for action in RollMux().decide(self.world.state(), []):
            assert isinstance(action, Start)
            pipeline = self.world.pipelines[action.pipeline]
            assert action.places == ((0,),) if pipeline.phase == "rollout" else ((1,),)
            self.world.start(action)
            self.log[pipeline.phase].append(action.pipeline)

    def end(self, pipeline: Pipeline) -> None:
        self.world.advance(self.world.lanes.now + 1.0)
        self.world.over(pipeline.name)
        phase, step = pipeline.phase, pipeline.step
        follows: tuple[Phase, int] = ("training", step) if phase == "rollout" else ("rollout", step + 1)
        self.world.ask(pipeline.name, *follows)


@given(st.integers(1, 4), st.lists(st.integers(0, 1), min_size=20, max_size=60))
def test_a_pool_has_one_at_a_time_and_nobody_waits_for_ever(size: int, choices: list[int]) -> None:
    group = Group("abcd"[:size])
    for choice in choices:
        group.decide()
        phases = [each.phase for each in group.running]
        assert len(phases) == len(set(phases)) > 0
        group.end(group.running[choice % len(phases)])
    for order in group.log.values():
        times = [order.count(name) for name in group.world.pipelines]
        assert max(times) - min(times) <= 2


def test_a_group_goes_in_rounds_until_it_is_saturated() -> None:
    assert in_rounds(list(Group("a").world.pipelines.values()))
    assert not in_rounds(list(Group("abcd").world.pipelines.values())), "four times as much as one needs"
