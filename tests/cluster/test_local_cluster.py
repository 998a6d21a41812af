"""A small real cluster: real processes, real kills."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import JOB, LocalCluster, learned

from jigsawrl.api import launch
from jigsawrl.config.runfile import checked
from jigsawrl.daemon.ledger import Ledger
from jigsawrl.telemetry.progress import Progress

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path)
    yield cluster
    cluster.kill_all()


def alone(name: str, steps: int, folder: Path) -> Path:
    """The same job in an ordinary run of its own."""
    run = checked({**JOB, "name": name, "steps": steps, "device": "cpu"})
    launch(run, folder / name, False, Progress(json=True))
    return folder / name


def test_whatever_is_killed_no_job_is_lost_or_made_twice_and_all_learn_the_same(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    steps = {"a": 24, "b": 16}
    cluster.start()
    for name in steps:
        assert cluster.submit(name, steps=steps[name]).stdout == f"{name}: submitted\n"
    cluster.wait_for_step("a", 1)
    run = json.loads((cluster.out / "runs" / "1" / "control.json").read_text())["pid"]
    os.kill(run, signal.SIGKILL)  # its jobs go on in another one
    cluster.wait_for(lambda: (cluster.out / "runs" / "2" / "control.json").exists(), "another run")
    cluster.wait_for_step("b", 6)
    cluster.signal(signal.SIGKILL)
    cluster.end()
    assert not cluster.status()["running"]
    cluster.start("--until-done")
    assert cluster.end() == 0
    (reference := tmp_path / "reference").mkdir()
    for name in steps:
        assert learned(cluster.out / "jobs" / name) == learned(alone(name, steps[name], reference))
    status = cluster.status()
    assert {name: (job["state"], job["step"]) for name, job in status["jobs"].items()} == {
        name: ("finished", count) for name, count in steps.items()
    }
    assert status["dollars"] > 0
    kinds = Counter((event["kind"], event["job"]) for event in Ledger(cluster.out).events())
    assert [kinds["finished", name] for name in steps] == [1, 1]
    assert kinds["died", "a"] == 1
    assert kinds["packed", "b"] >= 1  # beside a: there are nodes for one group only


def test_a_job_waits_for_its_broken_node_ctrl_c_saves_its_steps_and_it_can_be_cancelled_meanwhile(
    cluster: LocalCluster,
) -> None:
    cluster.start()
    cluster.submit("a", steps=5000, checkpoint={"every": 5000, "keep": 1})
    cluster.wait_for_step("a", 1)
    cluster.give_cores(1)
    cluster.wait_for(lambda: cluster.status()["jobs"]["a"]["state"] == "waiting", "the failure")
    assert cluster.status()["broken_nodes"] == ["training-0"]
    cluster.wait_for(lambda: cluster.saved("a") == cluster.metrics("a"), "a checkpoint")
    steps = cluster.metrics("a")
    cluster.give_cores(2)
    cluster.wait_for_step("a", steps + 1)
    cluster.signal(signal.SIGINT)
    assert cluster.end() == 0
    steps = cluster.metrics("a")
    assert cluster.saved("a") == steps
    job = cluster.status()["jobs"]["a"]
    assert (job["state"], job["step"]) == ("waiting", steps)
    assert cluster.submit("b").stdout == "b: submitted; it waits until the cluster is started\n"
    ledger = Ledger(cluster.out)
    for name in "ab":
        ledger.ask_to_cancel(name)
    runs = sorted((cluster.out / "runs").iterdir())
    cluster.start("--until-done")
    assert cluster.end() == 0
    assert {each.name: (each.state, each.step) for each in ledger.jobs()} == {
        "a": ("cancelled", steps),
        "b": ("cancelled", 0),
    }
    assert sorted((cluster.out / "runs").iterdir()) == runs
