"""The run file of a co-execution group."""

from __future__ import annotations

from pathlib import Path

from local_cluster import JOB

from jigsawrl.config.cluster import TermsConfig
from jigsawrl.config.pipelines import checked_mix
from jigsawrl.config.runfile import checked
from jigsawrl.daemon.ledger import JobEntry
from jigsawrl.daemon.runs import Seats, run_config

R0, R1, T0 = "rollout-0", "rollout-1", "training-0"


def jobs(names: str) -> list[JobEntry]:
    return [JobEntry(name, checked({**JOB, "name": name}), TermsConfig(priority=2), 0.0) for name in names]


def test_it_has_the_clusters_pools_and_link_and_each_job_its_own_rollout_nodes(tmp_path: Path) -> None:
    places = {"a": frozenset({R0}), "b": frozenset({R1}), "c": frozenset({R0, R1})}
    seats = Seats((R0, R1), (T0,), places, "by-need")
    found = run_config(3, seats, jobs("abc"), tmp_path, memory=4.0, link=10.0)
    config = checked_mix(found)
    assert config.order == "by-need", "the order that its plan promises"
    assert (config.name, config.workers, config.memory) == ("group-3", 3, 4.0)
    assert config.pools is not None
    assert (config.pools.rollout, config.pools.training, config.pools.link) == (2, 1, 10.0)
    workers = {name: entry.rollout_workers for name, entry in config.pipelines.items()}
    assert workers == {"a": (0,), "b": (1,), "c": (0, 1)}
    terms = {(entry.priority, entry.max_slowdown) for entry in config.pipelines.values()}
    assert terms == {(2, TermsConfig().max_slowdown)}


def test_where_both_phases_share_their_nodes_there_are_no_pools(tmp_path: Path) -> None:
    config = checked_mix(run_config(0, Seats((T0,), (T0,)), jobs("a"), tmp_path, memory=4.0, link=10.0))
    assert (config.workers, config.pools, config.order) == (1, None, None)
    assert config.pipelines["a"].rollout_workers is None


def test_a_steps_time_alone_counts_once_and_as_it_was() -> None:
    (job,) = jobs("a")
    for step, seconds in ((1, 4.0), (2, 1.0), (2, 9.0), (3, 1.0)):  # the second one was lost, and made again
        job.rollout.append(seconds)
        job.training.append(seconds)
        job.count(step)
    job.spent = 18.0
    assert (job.made, job.counted, job.slowdown) == (12.0, 3, 1.5)
