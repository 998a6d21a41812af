"""Who shares which nodes, and what always holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cluster_world import job, one_pool, two_pools
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.regroup import bill, cheapest_partition, least_price, possible_groups
from jigsawrl.cluster.rounds import SLACK
from jigsawrl.cluster.scheduler import Scheduler
from jigsawrl.cluster.waiting import OVERTAKINGS, PREEMPTIONS


def check(scheduler: Scheduler) -> None:
    """Groups share no node, nothing is beyond its pool, memory holds, promises are planned to be kept."""
    taken: list[str] = []
    pools = scheduler.shapes.cluster.pools
    for number, group in scheduler.groups.items():
        shared = group.shape.shared
        nodes = [*group.training_nodes, *(() if shared else group.rollout_nodes)]
        taken += nodes
        held = dict.fromkeys(nodes, 0.0)
        for name, standing in group.standings.items():
            assert scheduler.home[name] == number
            rollout, training = group.nodes_of(name)
            assert len(rollout) == standing.job.rollout_nodes
            for node in rollout:
                held[node] += standing.job.rollout_gb
            for node in training:
                held[node] += standing.job.training_gb * standing.job.training_nodes / len(training)
            if len(group.standings) > 1:
                assert group.shape.slowdown(name) <= standing.bound * (1 + 10 * SLACK)
        assert all(gb <= pools[node.rpartition("-")[0]].host_gb for node, gb in held.items())
        price = sum(pools[node.rpartition("-")[0]].price for node in nodes)
        assert group.shape.price == pytest.approx(price)
    assert len(set(taken)) == len(taken)
    assert not scheduler.nodes.broken & set(taken)
    for name, pool in pools.items():
        rented = sum(node.rpartition("-")[0] == name for node in taken)
        assert pool.nodes is None or rented <= pool.nodes
    assert not scheduler.waiting.keys() & scheduler.home.keys()


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    return [
        job(
            f"job-{number}",
            float(draw(st.integers(20, 600))),
            float(draw(st.integers(20, 600))),
            max_slowdown=draw(st.floats(1.0, 2.0)),
            rollout_nodes=draw(st.sampled_from((1, 1, 1, 2))),
            training_nodes=draw(st.sampled_from((1, 1, 1, 2))),
            rollout_gb=float(draw(st.integers(50, 500))),
            training_gb=float(draw(st.integers(50, 500))),
            priority=draw(st.integers(0, 1)),
        )
        for number in range(draw(st.integers(2, 9)))
    ]


@settings(max_examples=40)
@given(jobs(), st.randoms(use_true_random=False), st.booleans(), st.sampled_from((None, 4)))
def test_whatever_happens_nodes_memory_and_promises_hold(some, random, regroup, limit):
    scheduler = Scheduler(two_pools(limit, limit), regroup=regroup)
    for each in some:
        scheduler.arrive(each)
        check(scheduler)
    for _ in range(4):
        if random.random() < 0.3 and scheduler.groups:
            group = random.choice(list(scheduler.groups.values()))
            node = random.choice([*group.rollout_nodes, *group.training_nodes])
            scheduler.fail(node)
            check(scheduler)
            scheduler.repair(node)
        elif scheduler.home:
            scheduler.depart(random.choice(sorted(scheduler.home)))
        check(scheduler)


@settings(max_examples=25)
@given(jobs())
def test_the_same_calls_give_the_same_decisions(some):
    first, second = Scheduler(two_pools()), Scheduler(two_pools())
    assert [first.arrive(each) for each in some] == [second.arrive(each) for each in some]


@settings(max_examples=25)
@given(jobs())
def test_no_grouping_is_cheaper_than_the_best_partition(some):
    few = some[:5]
    scheduler = Scheduler(two_pools())
    for each in few:
        scheduler.arrive(each)
    standings = [scheduler.standing(each.name) for each in few]
    found = cheapest_partition(scheduler.shapes, standings)
    assert found is not None
    price, shapes = found
    assert sorted(turn.name for shape in shapes for turn in shape.turns) == sorted(each.name for each in few)
    assert least_price(scheduler.shapes, list(scheduler.groups.values())) <= price + 1e-6
    assert price <= scheduler.price + 1e-6


@settings(max_examples=25)
@given(jobs())
def test_all_sets_that_can_be_a_group_are_found_however_wide_their_training(some):
    shapes = Scheduler(two_pools()).shapes
    standings = [shapes.standing(each) for each in some[:5]]
    sets = {
        mask: [each for k, each in enumerate(standings) if mask >> k & 1]
        for mask in range(1, 1 << len(standings))
    }
    found = possible_groups(shapes, standings)
    assert found.keys() == {mask for mask, some in sets.items() if shapes.best(some) is not None}


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=20, max_size=60))
def test_a_wide_job_is_overtaken_only_so_often_and_then_gets_its_nodes(departures):
    scheduler = Scheduler(two_pools(4, 4))
    scheduler.arrive(job("first"))
    assert scheduler.arrive(job("wide", rollout_nodes=4, training_nodes=4))[0].how == "waits"
    overtook: set[str] = set()
    for number, departs in enumerate(departures):
        if departs and scheduler.home and "wide" in scheduler.waiting:
            scheduler.depart(min(scheduler.home))
        else:
            scheduler.arrive(job(f"later-{number}"))
        if "wide" in scheduler.waiting:
            overtook |= scheduler.home.keys() - {"first"}
        check(scheduler)
    while "wide" in scheduler.waiting:
        overtook |= scheduler.home.keys() - {"first"}
        scheduler.depart(min(scheduler.home))
    assert len(overtook) <= OVERTAKINGS


def test_a_job_that_was_overtaken_often_under_an_earlier_scheduler_is_not_overtaken_again():
    scheduler = Scheduler(two_pools(2, 2), largest=1)
    scheduler.arrive(job("first"))
    scheduler.arrive(job("wide", rollout_nodes=2, training_nodes=2), overtaken=OVERTAKINGS - 1)
    assert scheduler.arrive(job("last to pass"))[0].how == "new group"
    scheduler.depart("first")
    assert scheduler.arrive(job("held back"))[0].why == "others wait for longer"
    assert [each.job for each in scheduler.depart("last to pass")] == ["wide"]


def test_a_job_that_waits_for_broken_nodes_holds_nobody_back():
    scheduler = Scheduler(two_pools(2, 2), largest=1)
    scheduler.fail("train-1")
    scheduler.arrive(job("wide", training_nodes=2))
    for number in range(2 * OVERTAKINGS):
        assert scheduler.arrive(job(f"{number}"))[0].how == "new group"
        scheduler.depart(f"{number}")
    assert [each.job for each in scheduler.repair("train-1")] == ["wide"]


def test_a_balanced_pair_shares_both_pools():
    scheduler = Scheduler(two_pools())
    first, second = (scheduler.arrive(job(name))[0] for name in "ab")
    assert (first.how, first.added) == ("new group", 4.0)
    assert (second.how, second.added, second.why) == ("packed", 0.0, "beside a: no node is added")
    assert scheduler.price == 4.0


def test_rollout_heavy_jobs_share_the_training_node_only():
    scheduler = Scheduler(two_pools())
    decisions = [scheduler.arrive(job(name, 300, 80, max_slowdown=1.4))[0] for name in "abc"]
    assert [(each.how, each.added) for each in decisions] == [
        ("new group", 4.0),
        ("scaled", 1.0),
        ("scaled", 1.0),
    ]


def test_a_job_with_a_tight_promise_is_left_alone():
    scheduler = Scheduler(two_pools())
    scheduler.arrive(job("a", max_slowdown=1.0))
    decision = scheduler.arrive(job("b"))[0]
    assert decision.how == "new group"
    assert decision.passed_over == {"slowdown": 2}


def test_state_that_does_not_fit_into_host_memory_keeps_jobs_apart():
    scheduler = Scheduler(two_pools(host_gb=150.0))
    scheduler.arrive(job("a"))
    decision = scheduler.arrive(job("b"))[0]
    assert (decision.how, decision.passed_over) == ("new group", {"memory": 1})


def test_planning_by_a_quantile_packs_what_the_worst_case_keeps_apart():
    def uneven(name: str) -> Job:
        often, limit = Duration(100.0, 110.0, 0.05), Duration(100.0, 300.0, 0.05)
        return Job(name, {"roll": limit}, {"train": often}, max_slowdown=1.2, steps=1000)

    prices = []
    for level in (1.0, 0.8):
        scheduler = Scheduler(two_pools(), level=level)
        for name in "ab":
            scheduler.arrive(uneven(name))
        prices.append(scheduler.price)
    assert prices == [5.0, 4.0]


def test_a_departure_gives_back_what_nobody_uses():
    scheduler = Scheduler(two_pools())
    for name in "abc":
        scheduler.arrive(job(name, 300, 80, max_slowdown=1.4))
    assert scheduler.price == 6.0
    scheduler.depart("b")
    assert scheduler.price == 5.0
    scheduler.depart("a")
    scheduler.depart("c")
    assert (scheduler.price, scheduler.groups, scheduler.home) == (0, {}, {})


def test_departures_compact_groups():
    scheduler = Scheduler(two_pools(), largest=2)
    for name in "abcd":
        scheduler.arrive(job(name))
    assert scheduler.price == 8.0
    scheduler.depart("a")
    moves = scheduler.depart("c")
    assert scheduler.price == 4.0
    assert [(each.how, each.why) for each in moves] == [("moved", "groups 1, 0 cost $4.00/h less so")]
    assert scheduler.changes().moved == {moves[0].job}


def test_groups_that_only_pack_closer_when_many_change_at_once_do_so():
    rng = random.Random(9)
    scheduler = Scheduler(two_pools(), regroup=False)
    for number in range(18):
        phases = float(rng.randint(50, 600)), float(rng.randint(50, 600))
        scheduler.arrive(job(f"{number}", *phases, max_slowdown=round(rng.uniform(1, 2), 2), steps=2000))
    assert scheduler.price == 43.0
    scheduler.regroup = True
    scheduler.depart("0")
    check(scheduler)
    assert scheduler.price == 35.0  # 37 by a few groups at a time


def test_jobs_that_got_ahead_of_their_promises_are_packed_closer_though_nobody_came_or_went():
    scheduler = Scheduler(two_pools())
    for name in "ab":
        scheduler.arrive(job(name, max_slowdown=1.0))
    assert scheduler.reconsider() == []
    assert scheduler.price == 8.0
    for name in "ab":
        scheduler.progress(name, 20_000, 36_000)
    moves = scheduler.reconsider()
    assert [each.how for each in moves] == ["moved"]
    assert scheduler.price == 4.0


def test_a_group_is_paid_until_its_last_job_ends_less_what_is_given_back_before():
    scheduler = Scheduler(two_pools())
    for name, steps in {"short": 9, "long": 18}.items():
        scheduler.arrive(job(name, 300, 80, max_slowdown=1.8, steps=steps))
    group = scheduler.groups[0]
    assert group.shape.price == 5.0
    shared = 9 * group.shape.slowdown("short") * 380 / 3600
    rest = 18 * 380 / 3600 - shared / group.shape.slowdown("long")
    assert bill(scheduler.shapes, group.shape, group.standings) == pytest.approx(5 * shared + 4 * rest)


def test_nobody_moves_who_has_no_time_for_it():
    scheduler = Scheduler(two_pools(), largest=2)
    for name in "abcd":
        scheduler.arrive(job(name, cold_seconds=1e6))
    scheduler.depart("a")
    assert scheduler.depart("c") == []
    assert scheduler.price == 8.0


def test_jobs_of_a_broken_node_are_placed_elsewhere():
    scheduler = Scheduler(two_pools())
    for name in "ab":
        scheduler.arrive(job(name))
    broken = scheduler.groups[0].training_nodes[0]
    decisions = scheduler.fail(broken)
    assert sorted(each.job for each in decisions) == ["a", "b"]
    assert all(broken not in each.training_nodes for each in decisions)
    assert scheduler.changes().moved == {"a", "b"}
    check(scheduler)


def test_who_waits_is_served_by_priority_deadline_tenant_and_arrival():
    scheduler = Scheduler(two_pools(2, 2), largest=1)
    scheduler.arrive(job("first", tenant="rich", priority=1))
    scheduler.arrive(job("other", tenant="another", priority=1))
    for name, wishes in {
        "rich": {"tenant": "rich"},
        "poor": {"tenant": "poor"},
        "urgent": {"deadline": 20.0, "tenant": "rich"},
        "important": {"priority": 1, "tenant": "rich"},
    }.items():
        each = job(name, **wishes)
        allowed = None if each.deadline is None else each.deadline * 3600
        assert scheduler.arrive(each, allowed)[0].how == "waits"
    served = []
    for leaves in ("other", "important", "urgent", "poor"):
        served += [each.job for each in scheduler.depart(leaves)]
    assert served == ["important", "urgent", "poor", "rich"]


def test_an_important_job_gets_the_nodes_of_the_latest_less_important_one():
    scheduler = Scheduler(two_pools(2, 2), largest=1)
    for name, priority in {"equal": 1, "early": 0, "late": 0}.items():
        scheduler.arrive(job(name, priority=priority))
    scheduler.changes()
    assert list(scheduler.waiting) == ["late"]
    decisions = scheduler.arrive(job("important", priority=1))
    assert [(each.job, each.how) for each in decisions] == [
        ("important", "new group"),
        ("early", "preempted"),
    ]
    changes = scheduler.changes()
    assert (changes.preempted, changes.moved, len(changes.groups)) == ({"early"}, frozenset(), 2)
    assert scheduler.arrive(job("another", priority=1))[0].how == "waits"
    assert [each.job for each in scheduler.depart("equal")] == ["another"]
    assert [each.job for each in scheduler.depart("another")] == ["early"]
    check(scheduler)


def test_beside_jobs_as_important_as_itself_a_job_gets_the_seat_of_a_less_important_one():
    scheduler = Scheduler(two_pools(1, 1))
    for name, priority in {"equal": 1, "low": 0}.items():
        scheduler.arrive(job(name, priority=priority))
    scheduler.changes()
    decisions = scheduler.arrive(job("important", priority=1))
    assert [(each.job, each.how) for each in decisions] == [("important", "packed"), ("low", "preempted")]
    assert set(scheduler.groups[0].standings) == {"equal", "important"}
    assert (scheduler.changes().preempted, list(scheduler.waiting)) == ({"low"}, ["low"])
    assert [each.job for each in scheduler.depart("equal")] == ["low"]
    check(scheduler)


def test_nobody_is_preempted_more_than_a_few_times():
    scheduler = Scheduler(two_pools(1, 1), largest=1)
    scheduler.arrive(job("low"))
    preempted = []
    for number in range(PREEMPTIONS + 2):
        name = f"high-{number}"
        preempted += [each.job for each in scheduler.arrive(job(name, priority=1)) if each.how == "preempted"]
        scheduler.depart(name)
    assert preempted == ["low"] * PREEMPTIONS
    assert "low" in scheduler.home


@settings(max_examples=25)
@given(jobs(), st.booleans())
def test_only_jobs_of_lower_priority_are_preempted(some, equal):
    scheduler = Scheduler(two_pools(3, 3))
    for each in some:
        priority = 0 if equal else each.priority
        for decision in scheduler.arrive(replace(each, priority=priority)):
            if decision.how == "preempted":
                assert scheduler.standing(decision.job).job.priority < priority
        check(scheduler)


def test_a_job_that_has_drifted_leaves_a_group_it_no_longer_fits():
    scheduler = Scheduler(two_pools(), level=0.5)
    for name in "ab":
        loose = Duration(100.0, 400.0)
        scheduler.arrive(Job(name, {"roll": loose}, {"train": loose}, max_slowdown=1.3, steps=1000))
    assert len(scheduler.groups) == 1
    drifted = scheduler.standing("b").job.grown(2.5, 1.0)
    assert [(each.job, each.how) for each in scheduler.measured("b", drifted)] == [("b", "moved")]
    assert len(scheduler.groups) == 2


def test_one_pool_for_both_phases_is_shared_by_patient_jobs():
    scheduler = Scheduler(one_pool())
    patient = [scheduler.arrive(job(name, max_slowdown=2.1))[0] for name in "ab"]
    hasty = scheduler.arrive(job("c", max_slowdown=1.5))[0]
    assert [each.how for each in (*patient, hasty)] == ["new group", "packed", "new group"]
    assert scheduler.price == 6.0


def test_a_deadline_tightens_the_promise():
    scheduler = Scheduler(two_pools())
    scheduler.arrive(job("a", 300, 80, max_slowdown=1.4))
    alone_hours = 200 * 200 / 3600
    decision = scheduler.arrive(job("b", deadline=1.02 * alone_hours), 1.02 * alone_hours * 3600)[0]
    assert decision.how == "new group"
