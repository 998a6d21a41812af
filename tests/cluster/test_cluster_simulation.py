"""Jobs that come and go: what they take, what it costs, whether promises are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_world import job, two_pools
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.cluster.baselines import at_random, most_idle
from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.scheduler import Scheduler
from jigsawrl.cluster.simulation import ClusterSimulation, Failure, Outcome


def simulate(scheduler: Scheduler, jobs: list[Job], **settings: object) -> Outcome:
    return ClusterSimulation(scheduler, jobs, **settings).run()  # type: ignore[arg-type]


def varying(name: str, rollout: float, training: float, **wishes: object) -> Job:
    plain = job(name, rollout, training, **wishes)
    return replace(
        plain,
        rollout={pool: Duration(rollout, 2 * rollout, 0.1) for pool in plain.rollout},
        training={pool: Duration(training, 2 * training, 0.05) for pool in plain.training},
    )


def test_a_job_alone_takes_its_time_and_costs_its_nodes():
    outcome = simulate(Scheduler(two_pools()), [job("a", steps=90)])
    assert outcome.records["a"].slowdown == 1.0
    assert outcome.seconds == 90 * 200
    assert outcome.dollars == pytest.approx(4.0 * 5)
    assert outcome.busy == pytest.approx({"roll": 0.5, "train": 0.5})


def test_a_pair_on_shared_nodes_costs_half_and_takes_hardly_longer():
    outcome = simulate(Scheduler(two_pools()), [job(name, steps=900) for name in "ab"])
    assert all(record.slowdown < 1.01 for record in outcome.records.values())
    assert outcome.dollars == pytest.approx(4.0 * 50, rel=0.01)


def test_the_same_trace_is_the_same_twice_and_alone_times_do_not_depend_on_the_scheduler():
    trace = [varying(f"{k}", 100 + 20 * k, 60, steps=50, arrival=0.3 * k) for k in range(5)]
    first, again = (simulate(Scheduler(two_pools(), level=0.8), trace, seed=3) for _ in range(2))
    solo = simulate(Scheduler(two_pools(), largest=1), trace, seed=3)
    assert (first.dollars, first.rates) == (again.dollars, again.rates)
    assert {n: r.alone for n, r in first.records.items()} == pytest.approx(
        {n: r.alone for n, r in solo.records.items()}
    )


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.integers(30, 400), st.integers(30, 400), st.floats(1.0, 2.0), st.floats(0, 6)),
        min_size=2,
        max_size=8,
    )
)
def test_fixed_phases_keep_every_promise_through_arrivals_departures_and_moves(rows):
    trace = [
        job(f"{k}", float(r), float(t), max_slowdown=slow, arrival=at, steps=120, cold_seconds=60.0)
        for k, (r, t, slow, at) in enumerate(rows)
    ]
    outcome = simulate(Scheduler(two_pools()), trace)
    solo = simulate(Scheduler(two_pools(), largest=1), trace)
    late = {n: (r.slowdown, r.job.max_slowdown) for n, r in outcome.records.items() if not r.kept}
    assert late == {}
    assert outcome.dollars <= solo.dollars * 1.001


def test_a_broken_node_costs_its_jobs_a_step_and_a_cold_start():
    trace = [job("a", steps=90, cold_seconds=50.0)]
    outcome = simulate(Scheduler(two_pools()), trace, failures=[Failure("train-0", 1.01, 1.0)])
    record = outcome.records["a"]
    assert record.moves == 1
    lost = 1.01 * 3600 % 200
    assert record.finished == pytest.approx(90 * 200 + lost + 50)


def test_lengths_that_grow_are_noticed_and_promises_kept():
    trace = [
        varying("a", 100, 100, steps=400, max_slowdown=1.4),
        varying("b", 100, 100, steps=400, max_slowdown=1.4, drift=0.9),
    ]
    outcome = simulate(Scheduler(two_pools(), level=0.8), trace)
    assert outcome.slo_attainment == 1.0


def test_limited_nodes_make_jobs_wait():
    trace = [job(name, steps=18) for name in "ab"]
    outcome = simulate(Scheduler(two_pools(1, 1), largest=1), trace)
    assert [record.waited for record in outcome.records.values()] == [0, 3600]


def test_a_preempted_job_loses_a_step_and_goes_on_when_there_are_nodes_again():
    trace = [
        job("low", steps=90, cold_seconds=50.0),
        job("high", steps=18, arrival=1.01, priority=1, cold_seconds=50.0),
    ]
    outcome = simulate(Scheduler(two_pools(1, 1), largest=1), trace)
    low, high = outcome.records["low"], outcome.records["high"]
    assert (low.preempted, low.moves, high.slowdown) == (1, 0, 1.0)
    assert (low.waited, high.waited) == (pytest.approx(18 * 200), 0)
    lost = 1.01 * 3600 % 200
    assert low.finished == pytest.approx(90 * 200 + lost + 18 * 200 + 50)


def test_placement_that_ignores_promises_breaks_them():
    trace = [job(f"{k}", 300, 50, steps=60, max_slowdown=1.2) for k in range(6)]
    kept = [
        simulate(Scheduler(two_pools(), regroup=False, choose=choose), trace, follow=False).slo_attainment
        for choose in (at_random(0), most_idle, None)
    ]
    assert kept[0] < 1
    assert kept[1] < 1
    assert kept[2] == 1
