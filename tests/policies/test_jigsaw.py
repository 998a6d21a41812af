"""What the look-ahead policy does that others do not, and what users may ask of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph.planning import WORKER, job

from jigsawrl.graph.interference import H200
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
    return replace(first, lengths=lambda step: first.lengths(1), expected=first.lengths(1))


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
        (target,) = [e for e in after if e["pipeline"] == move["pipeline"]]
        assert (target["workers"],) == move["places"]


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
