"""What a cluster remembers of those who made room for others, whoever runs it."""

from __future__ import annotations

from pathlib import Path

from local_cluster import LocalCluster

from jigsawrl.cluster.waiting import PREEMPTIONS
from jigsawrl.daemon.admission import submit
from jigsawrl.daemon.daemon import Daemon
from jigsawrl.daemon.ledger import Ledger

CORES = {"rollout-0": [0], "training-0": [1]}


def recovered(cluster: LocalCluster) -> Daemon:
    """The next daemon, when it has placed all jobs and has not begun their runs."""
    daemon = Daemon(Ledger(cluster.out), CORES, lambda line: None)
    daemon._recover()
    daemon._look_at_ledger()
    return daemon


def test_how_often_a_job_made_room_outlives_its_daemon_and_is_not_counted_twice(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.make()
    cluster.submit("a", max_slowdown=1)
    for number in range(PREEMPTIONS):
        daemon = recovered(cluster)
        assert daemon.jobs["a"].state == "running"
        urgent = f"urgent-{number}"
        submit(cluster.out, cluster.write_job(urgent), None, None, {"max_slowdown": 1, "priority": 1})
        daemon._look_at_ledger()
        daemon = recovered(cluster)  # the urgent one has the nodes, and nobody had to leave them again
        assert (daemon.jobs["a"].state, daemon.jobs["a"].preempted) == ("waiting", number + 1)
        daemon._cancel(daemon.jobs[urgent])
    daemon = recovered(cluster)
    submit(cluster.out, cluster.write_job("too-late"), None, None, {"max_slowdown": 1, "priority": 1})
    daemon._look_at_ledger()
    assert {name: job.state for name, job in daemon.jobs.items()} == {"a": "running", "too-late": "waiting"}
