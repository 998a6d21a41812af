"""Rollouts and trainings in pools of their own: what crosses between them, who waits for whom, what is learned."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
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
    command_of,
    events,
    grandchildren,
    named,
    result,
    run_here,
    start,
    write_mix,
)
from scheduler.hearing import hear, set_up

from jigsawrl.config.pipelines import load_mix
from jigsawrl.errors import JigsawError
from jigsawrl.graph import memory
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.interference import CORES
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.ids import PhaseId, PhaseKind
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.rollmux import RollMux, in_rounds
from jigsawrl.policies.starts import engine_bytes
from jigsawrl.policies.state import Action, Change, Migrate, Phase, Pipeline, Start, State, Swap, Wait
from jigsawrl.runtime import shares
from jigsawrl.runtime.control import ADDRESS, ask
from jigsawrl.runtime.launch import member_of, own_config
from jigsawrl.runtime.replay import replayed
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import DriverBegan, LoadRequest, PhaseDone, TimerDue

POOLS = {"rollout": 1, "training": 1}
LINK = 0.05
TEAM = {"rollout": [0], "training": [1]}


def write_pooled(
    folder: Path,
    policy: str = "rollmux",
    more: Mapping[str, Any] | None = None,
    pins: Mapping[str, list[int]] | None = None,
    **mix: Any,
) -> Path:
    """The usual two pipelines, and maybe more, on two workers in two pools; some pinned to rollout workers."""
    file = write_mix(folder, policy, a=SUMS, b=CALC, **(more or {}))
    written = json.loads(file.read_text())
    for name, workers in (pins or {}).items():
        written["pipelines"][name]["rollout_workers"] = workers
    file.write_text(json.dumps({**written, "pools": POOLS, **mix}))
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
    return max(each.outlook.memory(1, 1, 1).training_apart for each in members) / 1e9


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run under rollmux, with a slow link, on workers that do not hold everybody."""
    folder = tmp_path_factory.mktemp("pooled")
    longer = {**SUMS, "steps": 1, "rollout": {**SUMS["rollout"], "max_tokens": 48}}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ACTIVATIONS_PER_LAYER", "ACTIVATIONS_NOW"):
            patch.setattr(memory, name, 0)  # else that is much more than any state of so small models
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


@pytest.mark.slow
def test_pipelines_pinned_to_rollout_workers_of_their_own_roll_out_at_once_and_share_the_trainer(
    on_one: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(shares, "split_cores", lambda workers: [(first,), (second,), (first,)])
    pools, out = {"rollout": 2, "training": 1}, tmp_path / "out"
    pins = {"a": [1], "b": [0]}
    file = write_pooled(tmp_path, pins=pins, pools=pools, workers=3)
    seen: set[str] = set()
    run_here(file, out, lambda name, step: seen.update(map(command_of, grandchildren())))
    actors = {name for name in seen if name.startswith("actor")}
    assert actors == {"actor1:a", "actor2:a", "actor0:b", "actor2:b"}, "none where it does not roll out"
    for name, workers in pins.items():
        decoded = [each for each in spans(out, "prefill", "decode", "tail") if each["pipeline"] == name]
        assert {each["worker"] for each in decoded} == set(workers)
        waits = [each for each in spans(out, "tool") if each["pipeline"] == name]
        assert {each["worker"] for each in waits} <= set(workers)
    assert {each["worker"] for each in spans(out, "grad", "sync")} == {2}
    permits = [each for each in events(out, "phase") if each["phase"] == "rollout"]
    assert any(
        one["t0"] < other["t1"] and other["t0"] < one["t1"]
        for one in permits
        for other in permits
        if one["pipeline"] < other["pipeline"]
    ), "both at once"
    assert all(each.same for each in replayed(out))
    assert {name: result(out / name) for name in "ab"} == on_one
    assert_nothing_is_left(out)


class Gathers(RollMux):
    """Never leaves a rollout on two workers for long while another waits."""

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        actions = super().decide(state, changes)
        waiting = [each for each in state.ready() if each.generates]
        rolling = [each for each in state.unfinished() if len(each.lanes) == 2]
        if actions or not waiting or not rolling:
            return [*actions, Wait(state.now + MOMENT_S)] if waiting else actions
        move = Migrate(rolling[0].name, tuple(rolling[0].lanes), ((0,),))
        return [move, Start(waiting[0].id, ((1,),))]


MOMENT_S = 0.02
TRIES = 3
"""On a busy machine a rollout may be over before it is moved."""


@pytest.mark.slow
def test_a_rollout_that_is_gathered_on_one_worker_leaves_the_other_to_the_next_and_learns_the_same(
    on_one: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(shares, "split_cores", lambda workers: [(first,), (second,), (first,)])
    monkeypatch.setitem(POLICIES, "rollmux", Gathers())
    for number in range(TRIES):
        out = tmp_path / str(number) / "out"
        run_here(write_pooled(out.parent, pools={"rollout": 2, "training": 1}, workers=3), out)
        actions = [each["action"] for each in events(out, "action")]
        assert all(each.same for each in replayed(out))
        assert {name: result(out / name) for name in "ab"} == on_one
        if "migrate" in actions:
            break
    assert "migrate" in actions, "never in all tries"
    assert_nothing_is_left(out)


def test_pipelines_take_turns_in_the_order_of_the_run_file_until_another_one_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start(write_pooled(tmp_path, order="by-need"), out)
    command.wait_for((out / ADDRESS).exists, "a run that listens")
    ask(out, do="order", order="round-robin")
    with pytest.raises(JigsawError, match="not understood"):
        ask(out, do="order", order="by luck")
    assert command.answer()[0] == 0
    heard = [entry for turn in events(out, "turn") for entry in turn["heard"]]
    assert [entry for entry in heard if entry[1] == "Reordered"] == [["", "Reordered", "round-robin"]]
    assert all(each.same for each in replayed(out))


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
        ({"pools": POOLS, "order": "by-need", "policy": "jigsaw"}, "order: only under policy: rollmux with"),
        ({"pools": None, "order": "by-need"}, "order: only under policy: rollmux with pools"),
        ({"pools": POOLS, "memory": 0.001}, "needs .* on each of its 1 workers, and a cpu has 0.001 GB"),
        (
            {"pins": {"a": [1]}},
            "pipelines.a.rollout_workers: 1 is not in the rollout pool, .* workers 0 to 0",
        ),
        ({"pins": {"b": []}}, r"pipelines.b.rollout_workers: \[\] is nowhere to roll out"),
        ({"pins": {"a": [0, 0]}}, r"pipelines.a.rollout_workers: \[0, 0\] names a worker twice"),
        ({"pins": {"a": [-1]}}, "pipelines.a.rollout_workers: -1 is not in the rollout pool"),
        ({"pins": {"a": [0]}, "pools": None}, "pipelines.a.rollout_workers: there is no rollout pool"),
    ],
)
def test_pools_that_cannot_be_are_refused(mix: Mapping[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match=why):
        run_here(write_pooled(tmp_path, **mix), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The order of permits, without processes


def foreseen(name: str, parameters: float = 1e9) -> Outlook:
    made = job(name, seed=ord(name), parameters=parameters)
    return Outlook(made.shape, made.costs, WORKER, made.forecast)


class Group:
    """Pipelines in two pools under rollmux, whose phases end in whatever order the test likes."""

    def __init__(self, names: str) -> None:
        self.core = SchedulerCore(
            RollMux(), CORES, 2, 64 * WORKER.device_bytes, rollout_workers=1, checked=True
        )
        for name in names:
            self.core.join(name, foreseen(name))
        set_up(self.core, 1000, *names)
        self.log: dict[PhaseKind, list[str]] = {"rollout": [], "training": []}

    @property
    def pipelines(self) -> list[Pipeline]:
        return list(self.core.state.pipelines.values())

    @property
    def running(self) -> list[Phase]:
        return self.core.state.running()

    def decide(self) -> None:
        for action in self.core.decide():
            assert isinstance(action, Start)
            assert action.places == (((0,),) if action.phase.kind == "rollout" else ((1,),))
            self.log[action.phase.kind].append(action.pipeline)

    def end(self, phase: Phase) -> None:
        done = PhaseDone(phase.kind, phase.index, (1.0,), 1, (100,) * 8 if phase.generates else ())
        hear(self.core, phase.id.pipeline, done, at=self.core.state.lanes.now + 1.0)


@given(st.integers(1, 4), st.lists(st.integers(0, 1), min_size=20, max_size=60))
def test_a_pool_has_one_at_a_time_and_nobody_waits_for_ever(size: int, choices: list[int]) -> None:
    group = Group("abcd"[:size])
    for choice in choices:
        group.decide()
        kinds = [each.kind for each in group.running]
        assert len(kinds) == len(set(kinds)) > 0
        group.end(group.running[choice % len(kinds)])
    for order in group.log.values():
        times = [order.count(name) for name in group.core.state.pipelines]
        assert max(times) - min(times) <= 2


def test_a_group_goes_in_rounds_until_it_is_saturated() -> None:
    assert in_rounds(Group("a").pipelines)
    assert not in_rounds(Group("abcd").pipelines), "four times as much as one needs"


# Memory, without processes


class Scripted:
    """Does what a test likes, once."""

    name = "scripted"

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions


def thinking(
    names: str, pins: Mapping[str, tuple[int, ...]], limit: float
) -> tuple[SchedulerCore, list[Action]]:
    """Two workers that roll out and one that trains, with so many bytes each; and what setting all up took."""
    core = SchedulerCore(Scripted(), CORES, 3, limit, rollout_workers=2)
    actions: list[Action] = []
    for name in names:
        core.join(name, small(name), replace(core.state.layout, rollout=pins.get(name, (0, 1))))
        hear(core, name, LoadRequest())
        actions += core.decide()
        hear(core, name, DriverBegan(10, 0))
    return core, actions


def small(name: str) -> Outlook:
    """Of a model that needs more for what it generates than for its training, and whose actors keep all of it."""
    known = foreseen(name, parameters=1e8)
    return Outlook(replace(known.shape, whole=True), known.costs, known.hardware, known.forecast)


def bytes_of_engines(names: str) -> float:
    """On each of two workers."""
    return sum(engine_bytes(small(name), 2, 1) for name in names)


def test_only_those_who_roll_out_on_a_worker_need_room_there() -> None:
    limit = 0.98 * bytes_of_engines("ab")
    assert Swap("a", out=True, phase="rollout") in thinking("ab", {}, limit)[1]
    apart = {"a": (0,), "b": (1,)}
    assert thinking("ab", apart, limit)[1] == [Swap(name, out=False) for name in "ab"]


def test_a_rollout_that_was_gathered_elsewhere_keeps_its_room() -> None:
    core, _ = thinking("ab", {}, 0.98 * bytes_of_engines("abc"))
    policy = core.policy
    assert isinstance(policy, Scripted)
    policy.actions = [Start(PhaseId("a", "rollout", 1), ((0,), (1,)))]
    core.decide()
    policy.actions = [
        Migrate("a", tuple(core.state.pipelines["a"].lanes), ((0,),)),
        Start(PhaseId("b", "rollout", 1), ((1,),)),
    ]
    core.handle(1.0, [("", TimerDue())])
    core.join("c", small("c"))
    hear(core, "c", LoadRequest())
    assert core.decide() == [], (
        "there is none for a third, though little of the first two runs on each worker"
    )
