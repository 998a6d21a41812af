"""What the look-ahead policy does that others do not, and what users may ask of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from graph.planning import WORKER, job

from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.interference import CORES, H200, Interference
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Policy
from jigsawrl.simulator.jobs import Job
from jigsawrl.simulator.simulation import Outcome, Simulation


def simulate(policy: Policy, jobs: list[Job], workers: int = 4) -> Outcome:
    return Simulation(policy, jobs, WORKER, workers, H200).run()


def asked(job: Job, **wishes: float) -> Job:
    return replace(job, shape=replace(job.shape, **wishes))  # type: ignore[arg-type]


def mixed() -> list[Job]:
    return [job("long", seed=1, median=900, sigma=0.4, steps=4), job("tailed", seed=2, sigma=1.5, steps=8)]


def alone(job: Job, workers: int = 4) -> float:
    return simulate(POLICIES["serial"], [job], workers).seconds


def steady(name: str, **settings: object) -> Job:
    """A pipeline whose steps are all alike, so that its time alone is known beforehand."""
    first = job(name, **settings)  # type: ignore[arg-type]
    known = Forecast.from_prior(first.lengths(1), first.shape.max_tokens)
    return replace(first, lengths=lambda step: first.lengths(1), forecast=known)


def test_a_pipeline_that_may_not_be_slowed_is_hardly_slowed() -> None:
    first, second = steady("a", median=900, sigma=0.4, steps=4), steady("b", seed=2, sigma=1.5, steps=8)
    free = simulate(Jigsaw(), [first, second]).finished["a"] / alone(first)
    assert free > 1.1
    for limit in (1.02, 1.1):
        bound = simulate(Jigsaw(), [asked(first, max_slowdown=limit), second]).finished["a"] / alone(first)
        assert bound < limit + 0.02


def test_a_deadline_is_met_where_it_can_be() -> None:
    others = [steady(name, seed=i, median=900, sigma=0.4, steps=6) for i, name in enumerate("ac")]
    wanted = steady("b", seed=2, sigma=1.5, steps=6)
    deadline = 1.2 * alone(wanted)
    assert simulate(Jigsaw(), [*others, wanted]).finished["b"] > 1.1 * deadline
    assert simulate(Jigsaw(), [*others, asked(wanted, deadline=deadline)]).finished["b"] <= deadline


def test_a_long_tail_on_many_workers_is_gathered_for_those_who_wait() -> None:
    todo = [job(f"p{i}", seed=i, sigma=1.6, prompts=64, median=150, steps=3) for i in range(3)]
    outcome = simulate(Jigsaw(lookahead=False), todo, workers=8)
    moves = [e for e in outcome.log if e["event"] == "action" and e["action"] == "migrate"]
    assert moves
    for move in moves:
        after = [e for e in outcome.log if e["event"] == "substage" and e["t0"] == move["t"]]
        targets = {e["workers"] for e in after if e["pipeline"] == move["pipeline"]}
        assert targets == set(move["places"])


@pytest.mark.parametrize("lever", ["fill", "shares", "merge", "lookahead"])
def test_it_works_without_any_one_of_its_levers(lever: str) -> None:
    outcome = simulate(Jigsaw(**{lever: False}), mixed())
    assert set(outcome.finished) == {"long", "tailed"}


def test_looking_ahead_beats_the_best_pair_now_over_many_mixes() -> None:
    ratios = []
    for seed in range(8):
        todo = [job(f"p{i}", seed=seed * 10 + i, median=100 * (i + 1), sigma=1.2, steps=3) for i in range(3)]
        ratios.append(simulate(POLICIES["greedy"], todo, 8).seconds / simulate(Jigsaw(), todo, 8).seconds)
    assert sum(ratios) / len(ratios) > 1.05


def waited(outcome: Outcome) -> float:
    """Seconds that pipelines did nothing between two of their sub-stages, all together."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in outcome.log:
        if event["event"] == "substage":
            spans.setdefault(event["pipeline"], []).append((event["t0"], event["t1"]))
    return sum(
        max(0.0, after - end)
        for each in spans.values()
        for (_, end), (after, _) in itertools.pairwise(sorted(each))
    )


def test_on_one_worker_work_is_not_put_off_for_looking_faster_up_to_a_horizon() -> None:
    """Who holds a training back has done more at the horizon, and none of it has become less. Where that was taken
    for speed, pipelines waited six times as long, and all work ended later than without looking ahead."""
    ahead, at_once = Jigsaw(), Jigsaw(lookahead=False)
    outcomes: dict[Jigsaw, list[Outcome]] = {ahead: [], at_once: []}
    for seed in range(12):
        todo = [
            job(f"p{i}", seed=10 * seed + i, prompts=8, median=200 * (i + 1), sigma=1.4 - 0.4 * i, steps=12)
            for i in range(3)
        ]
        for policy, each in outcomes.items():
            each.append(simulate(policy, todo, workers=1))
    seconds = {policy: sum(outcome.seconds for outcome in each) for policy, each in outcomes.items()}
    assert sum(map(waited, outcomes[ahead])) < 0.05 * seconds[ahead]
    assert seconds[ahead] < 0.998 * seconds[at_once]


def seconds_in_common(outcome: Outcome, *kinds: str) -> float:
    """Worker-seconds in which two pipelines are at sub-stages of these kinds at once."""
    spans = [e for e in outcome.log if e["event"] == "substage" and e["substage"] in kinds]
    total = 0.0
    for a, b in itertools.combinations(spans, 2):
        if a["pipeline"] != b["pipeline"]:
            both = set(a["workers"]) & set(b["workers"])
            total += len(both) * max(0.0, min(a["t1"], b["t1"]) - max(a["t0"], b["t0"]))
    return total


def test_pipelines_take_turns_on_a_link_that_would_halve_their_speed() -> None:
    todo = []
    for name in "ab":
        one = job(name, sigma=0.3, steps=6)
        fetching = replace(one.costs.grad, fixed=8.0)
        todo.append(replace(one, costs=replace(one.costs, grad=fetching, offloaded=True)))
    at_once, in_turn = (simulate(Jigsaw(shares=shares, lookahead=False), todo) for shares in (False, True))
    together = [seconds_in_common(outcome, "swap", "sync") for outcome in (at_once, in_turn)]
    assert together[0] > 20
    assert together[1] < 0.2 * together[0]
    assert in_turn.seconds < at_once.seconds


def test_tails_that_gain_nothing_by_many_workers_keep_to_a_part_of_them() -> None:
    todo = [job(f"p{i}", seed=i, prompts=8, samples=2, median=600, sigma=0.5, steps=3) for i in range(2)]
    on_all, apart = (simulate(policy, todo, workers=8) for policy in (POLICIES["concurrent"], Jigsaw()))
    assert seconds_in_common(apart, "tail") < 0.2 * seconds_in_common(on_all, "tail")
    assert apart.seconds < 0.9 * on_all.seconds


def test_where_workers_are_only_taken_in_turns_each_keeps_to_one_and_the_last_has_them_all() -> None:
    todo = [steady(name, seed=i, steps=4 + 4 * (name == "d")) for i, name in enumerate("abcd")]
    outcome = Simulation(Jigsaw(), todo, WORKER, 2, CORES).run()
    starts = [e for e in outcome.log if e["event"] == "action" and e["action"] == "start"]
    others_end = max(outcome.finished[name] for name in "abc")

    def widths(of: list[dict[str, Any]]) -> set[int]:
        return {len({worker for place in e["places"] for worker in place}) for e in of}

    assert widths([e for e in starts if e["t"] < 0.5 * others_end]) == {1}
    assert widths([e for e in starts if e["t"] > others_end]) == {2}
    assert outcome.seconds < Simulation(POLICIES["concurrent"], todo, WORKER, 2, CORES).run().seconds


def test_trainings_follow_unasked_only_where_nobody_waits_or_is_in_a_hurry() -> None:
    def unasked(*todo: Job, policy: str = "jigsaw", table: Interference = CORES) -> set[bool]:
        outcome = Simulation(POLICIES[policy], list(todo), WORKER, 2, table).run()
        return {e["auto_continue"] for e in outcome.log if e["event"] == "action" and e["action"] == "start"}

    a, b = steady("a", steps=2), steady("b", seed=2, steps=2)
    assert True in unasked(a, b)
    assert True in unasked(a, b, policy="concurrent")
    assert unasked(a, asked(b, deadline=1e6)) == {False}
    assert unasked(a, b, policy="serial") == {False}
    assert unasked(a, b, table=H200) == {False}
