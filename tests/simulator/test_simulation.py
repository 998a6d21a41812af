"""Policies in the simulator: what must hold whatever the pipelines are."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graph.planning import WORKER, job
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.graph.interference import CORES, H200
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.serial import Serial
from jigsawrl.policies.state import Action, Change, Policy, Start, State, Wait
from jigsawrl.scheduler.invariants import InvariantViolated
from jigsawrl.simulator.jobs import Failure, Job
from jigsawrl.simulator.simulation import Outcome, Simulation

LEVERS: dict[str, Policy] = {
    f"jigsaw without {lever}": Jigsaw(**{lever: False}) for lever in ("fill", "shares", "merge", "lookahead")
}
ALL = {**POLICIES, **LEVERS}
EVERY = sorted(ALL)


def simulate(policy: str, jobs: list[Job], workers: int = 4, **settings: object) -> Outcome:
    return Simulation(ALL[policy], jobs, WORKER, workers, H200, **settings).run()  # type: ignore[arg-type]


jobs = st.lists(
    st.fixed_dictionaries(
        {
            "prompts": st.integers(1, 64),
            "samples": st.sampled_from([1, 4, 8]),
            "median": st.floats(5, 1500),
            "sigma": st.floats(0, 1.5),
            "steps": st.integers(1, 3),
            "seed": st.integers(0, 99),
            "tp": st.sampled_from([1, 2]),
            "turns": st.sampled_from([1, 3]),
            "tool_seconds": st.sampled_from([0.0, 5.0]),
            "arrival": st.sampled_from([0.0, 7.5, 300.0]),
            "parameters": st.sampled_from([1e9, 3e9]),
            "priority": st.integers(-1, 1),
            "max_slowdown": st.sampled_from([None, None, 1.0, 1.5]),
            "deadline": st.sampled_from([None, None, 10.0, 400.0]),
            "base": st.sampled_from(["", "", "one", "other"]),
        }
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("policy", EVERY)
@settings(max_examples=25, deadline=None)
@given(specs=jobs, workers=st.sampled_from([2, 4, 8]), noise=st.sampled_from([0.0, 0.3]))
def test_every_pipeline_makes_all_its_steps(
    policy: str, specs: list[dict], workers: int, noise: float
) -> None:
    """Nothing starves or deadlocks, memory and shares hold after every event (the simulator checks them)."""
    todo = [job(f"p{i}", **spec) for i, spec in enumerate(specs)]
    outcome = simulate(policy, todo, workers, noise=noise)
    steps = [(e["pipeline"], e["step"]) for e in outcome.log if e["event"] == "step"]
    assert sorted(steps) == sorted((j.shape.name, s) for j in todo for s in range(1, j.shape.steps + 1))
    for each in todo:
        expected = sum(each.lengths(s).sum() for s in range(1, each.shape.steps + 1))
        assert outcome.tokens[each.shape.name] == pytest.approx(expected)


@pytest.mark.parametrize("policy", EVERY)
@settings(max_examples=10, deadline=None)
@given(specs=jobs, at=st.floats(0.1, 200), back=st.sampled_from([50.0, float("inf")]))
def test_a_dead_worker_loses_no_step(policy: str, specs: list[dict], at: float, back: float) -> None:
    todo = [job(f"p{i}", **spec) for i, spec in enumerate(specs)]
    outcome = simulate(policy, todo, 4, failures=[Failure(1, at, at + back)])
    assert set(outcome.finished) == {each.shape.name for each in todo}


@pytest.mark.parametrize("policy", EVERY)
def test_the_same_seed_gives_the_same_log(policy: str) -> None:
    todo = [job("a", seed=1), job("b", seed=2, median=400)]
    first, second = (simulate(policy, todo, noise=0.2, seed=5) for _ in range(2))
    assert first.log == second.log
    assert simulate(policy, todo, noise=0.2, seed=6).log != first.log


def test_the_log_does_not_depend_on_how_strings_are_hashed() -> None:
    code = (
        "from simulator.test_simulation import *\n"
        "todo = [job(n, seed=i, median=300 + 90 * i, steps=3) for i, n in enumerate('abcd')]\n"
        "print(simulate('jigsaw', todo).log)"
    )
    logs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(logs) == 1


@pytest.mark.parametrize("policy", EVERY)
def test_one_pipeline_alone_takes_as_long_under_every_policy(policy: str) -> None:
    alone = [job("a", steps=3)]
    assert simulate(policy, alone).seconds <= simulate("serial", alone).seconds * 1.02


def test_serial_takes_the_sum_and_jigsaw_less() -> None:
    a, b = job("a", seed=1, steps=4), job("b", seed=2, steps=4)
    apart = simulate("serial", [a]).seconds + simulate("serial", [b]).seconds
    assert simulate("serial", [a, b]).seconds == pytest.approx(apart)
    assert simulate("jigsaw", [a, b]).seconds < 0.8 * apart


def test_tool_waits_are_filled() -> None:
    both = [job(n, seed=s, turns=4, tool_seconds=30.0, steps=3) for n, s in (("a", 1), ("b", 2))]
    assert simulate("jigsaw", both).seconds < 0.65 * simulate("serial", both).seconds


def test_what_cannot_be_is_refused() -> None:
    class Eager:
        name = "eager"

        def decide(self, state: State, changes: list[Change]) -> list[Action]:
            return [Start(phase.id, ((0,), (1,), (2,), (3,)), 0.8) for phase in state.ready()]

    with pytest.raises(InvariantViolated, match=r"invariant 6 .*: 1\.6 of worker 0"):
        Simulation(Eager(), [job("a"), job("b")], WORKER, 4, CORES).run()


def test_a_policy_that_does_nothing_is_found_out() -> None:
    class Idle:
        name = "idle"

        def decide(self, state: State, changes: list[Change]) -> list[Action]:
            return []

    with pytest.raises(InvariantViolated, match=r"invariant 16 .*: idle leaves a waiting for ever"):
        Simulation(Idle(), [job("a")], WORKER, 4, CORES).run()


def test_a_policy_may_ask_to_be_woken() -> None:
    class Late:
        name = "late"

        def decide(self, state: State, changes: list[Change]) -> list[Action]:
            if state.now < 5:
                return [Wait(5.0)]
            return Serial().decide(state, changes)

    alone = [job("a", steps=1)]
    usual = Simulation(Serial(), alone, WORKER, 4, H200).run().seconds
    assert Simulation(Late(), alone, WORKER, 4, H200).run().seconds == pytest.approx(usual + 5)


def test_the_log_says_where_every_second_went() -> None:
    outcome = Simulation(Serial(), [job("a", steps=1)], WORKER, 4, H200).run()
    spans = [e for e in outcome.log if e["event"] == "substage"]
    assert {"swap", "prefill", "decode", "tail", "logprob", "grad", "optim", "sync"} >= {
        e["substage"] for e in spans
    }
    assert max(e["t1"] for e in spans) == outcome.seconds
    assert all(e["t0"] < e["t1"] for e in spans)
    generated = sum(e["tokens"] for e in spans if e["substage"] in ("decode", "tail"))
    assert generated == pytest.approx(outcome.tokens["a"], abs=len(spans))


def test_a_drift_in_lengths_is_noticed_by_the_forecast() -> None:
    usual = job("a", steps=12, sigma=0.3)

    def lengths(step: int) -> np.ndarray:
        return usual.lengths(step) * (1 if step < 4 else 4)

    off: dict[int, float] = {}

    class Watched:
        name = "watched"

        def decide(self, state: State, changes: list[Change]) -> list[Action]:
            for phase in state.ready():
                if phase.kind == "rollout":
                    foreseen = phase.outlook.forecast.lengths(128).mean()
                    off[phase.index] = float(foreseen / lengths(phase.index).mean()) - 1
            return Serial().decide(state, changes)

    Simulation(Watched(), [replace(usual, lengths=lengths)], WORKER, 4, H200).run()
    assert all(abs(off[step]) < 0.1 for step in (1, 2, 3)), "as the profile says, at first"
    assert off[4] < -0.7, "four times as long all of a sudden: nobody could know"
    assert off[5] < off[7] < -0.05, "believed bit by bit"
    assert abs(off[12]) < 0.1, "the last steps are remembered, the first ones are forgotten"
