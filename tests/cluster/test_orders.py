"""What is done for runs to become what the scheduler wants."""

from __future__ import annotations

from jigsawrl.cluster.from_config import cluster_of
from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.scheduler import Scheduler
from jigsawrl.config.cluster import ClusterConfig
from jigsawrl.daemon.orders import Begin, Going, Halt, Join, Leave, Reorder, Wanted, orders

R0, R1, T0, T1 = "rollout-0", "rollout-1", "training-0", "training-1"


def going(number: int, group: int, nodes: tuple[str, ...], jobs: str, **more: object) -> Going:
    found = {"past": frozenset(), "leaving": frozenset(), "stopping": False, **more}
    return Going(number, group, nodes, frozenset(jobs), **found)


def test_a_new_group_begins_and_one_that_is_as_it_should_be_is_let_alone() -> None:
    wanted = {0: Wanted((R0, T0), ("a", "b")), 1: Wanted((R1, T1), ("c",))}
    assert orders(wanted, [going(7, 0, (R0, T0), "ab")]) == [Begin(1)]


def test_a_job_that_is_packed_joins_the_run_of_its_group() -> None:
    assert orders({0: Wanted((R0, T0), ("a", "b"))}, [going(7, 0, (R0, T0), "a")]) == [Join(7, "b")]


def test_a_group_with_other_nodes_stops_first_and_begins_when_all_of_it_is_free() -> None:
    wanted = {0: Wanted((R0, R1, T0), ("a", "b"))}
    assert orders(wanted, [going(7, 0, (R0, T0), "a")]) == [Halt(7)]
    assert orders(wanted, [going(7, 0, (R0, T0), "a", stopping=True)]) == []
    assert orders(wanted, []) == [Begin(0)]


def test_a_job_that_gets_other_rollout_nodes_of_its_group_needs_another_run() -> None:
    apart = {"a": frozenset({R0}), "b": frozenset({R1})}
    wanted = {0: Wanted((R0, R1, T0), ("a", "b"), apart)}
    assert orders(wanted, [going(7, 0, (R0, R1, T0), "ab", places=apart)]) == []
    other = {**apart, "b": frozenset({R0})}
    assert orders(wanted, [going(7, 0, (R0, R1, T0), "ab", places=other)]) == [Halt(7)]
    assert orders(wanted, [going(7, 0, (R0, R1, T0), "a", places=other)]) == [Join(7, "b")]


def test_a_run_is_told_of_another_order_before_a_job_joins_it() -> None:
    wanted = {0: Wanted((R0, T0), ("a", "b"), order="by-need")}
    assert orders(wanted, [going(7, 0, (R0, T0), "a", order="as-ready")]) == [
        Reorder(7, "by-need"),
        Join(7, "b"),
    ]
    assert orders(wanted, [going(7, 0, (R0, T0), "ab", order="by-need")]) == []


def test_a_job_that_moves_leaves_one_run_before_it_joins_the_other() -> None:
    wanted = {0: Wanted((R0, T0), ("a",)), 1: Wanted((R1, T1), ("b", "c"))}
    both = [going(7, 0, (R0, T0), "ab"), going(8, 1, (R1, T1), "c")]
    assert orders(wanted, both) == [Leave(7, "b")]
    left = going(7, 0, (R0, T0), "ab", leaving=frozenset("b"))
    assert orders(wanted, [left, both[1]]) == []
    gone = going(7, 0, (R0, T0), "a", past=frozenset("b"))
    assert orders(wanted, [gone, both[1]]) == [Join(8, "b")]


def test_a_job_that_comes_back_needs_another_run_for_none_takes_it_twice() -> None:
    gone = going(7, 0, (R0, T0), "a", past=frozenset("b"))
    assert orders({0: Wanted((R0, T0), ("a", "b"))}, [gone]) == [Halt(7)]


def test_a_job_that_has_to_wait_again_leaves_after_its_step_and_the_others_go_on() -> None:
    wanted = {0: Wanted((R0, T0), ("b",))}
    assert orders(wanted, [going(7, 0, (R0, T0), "ab")]) == [Leave(7, "a")]
    assert orders(wanted, [going(7, 0, (R0, T0), "ab", leaving=frozenset("a"))]) == []
    assert orders(wanted, [going(7, 0, (R0, T0), "b", past=frozenset("a"))]) == []


def test_a_job_that_makes_room_for_another_stops_before_that_begins_on_its_nodes() -> None:
    wanted = {1: Wanted((R0, T0), ("urgent",))}
    assert orders(wanted, [going(7, 0, (R0, T0), "a")]) == [Halt(7)]
    assert orders(wanted, [going(7, 0, (R0, T0), "a", stopping=True)]) == []
    assert orders(wanted, [going(7, 0, (R0, T0), "", past=frozenset("a"), stopping=True)]) == []
    assert orders(wanted, []) == [Begin(1)]


def test_a_group_that_is_no_more_stops_and_its_job_begins_elsewhere_afterwards() -> None:
    wanted = {1: Wanted((R1, T1), ("a",))}
    assert orders(wanted, [going(7, 0, (R0, T0), "a")]) == [Halt(7)]
    assert orders(wanted, [going(7, 0, (R0, T0), "", past=frozenset("a"))]) == [Begin(1)]


def test_a_run_whose_jobs_are_over_ends_by_itself_and_keeps_its_nodes_until_then() -> None:
    wanted = {1: Wanted((R0, T0), ("b",))}
    assert orders(wanted, [going(7, 0, (R0, T0), "", past=frozenset("a"))]) == []


def test_a_group_whose_jobs_are_all_to_be_cancelled_does_not_begin() -> None:
    assert orders({0: Wanted((R0, T0), ())}, []) == []
    assert orders({0: Wanted((R0, T0), ())}, [going(7, 0, (R0, T0), "a")]) == [Leave(7, "a")]


def test_rollout_scaling_stops_the_run_of_the_group_and_begins_it_with_one_node_more() -> None:
    pools = {
        "rollout": {"kind": "cpu", "runs": "rollout", "nodes": 2},
        "training": {"kind": "cpu", "runs": "training", "nodes": 1},
    }
    scheduler = Scheduler(cluster_of(ClusterConfig.model_validate({"pools": pools})))

    def wanted() -> dict[int, Wanted]:
        return {
            number: Wanted(group.rollout_nodes + group.training_nodes, tuple(group.standings))
            for number, group in scheduler.groups.items()
        }

    durations = {"rollout": {"rollout": Duration.fixed(10)}, "training": {"training": Duration.fixed(4)}}
    scheduler.arrive(Job("a", **durations, max_slowdown=1.2, steps=100))
    assert orders(wanted(), []) == [Begin(0)]
    (decision,) = scheduler.arrive(Job("b", **durations, max_slowdown=1.2, steps=100))
    assert decision.how == "scaled"
    assert orders(wanted(), [going(1, 0, (R0, T0), "a")]) == [Halt(1)]
    assert orders(wanted(), []) == [Begin(0)]
    assert orders(wanted(), [going(2, 0, (R0, R1, T0), "ab")]) == []
    scheduler.depart("b")
    assert orders(wanted(), [going(2, 0, (R0, R1, T0), "a", past=frozenset("b"))]) == [Halt(2)]
