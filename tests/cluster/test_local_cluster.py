"""A small real cluster: real processes, real kills."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import JOB, POOLS, LocalCluster, learned

from jigsawrl.api import launch
from jigsawrl.config.runfile import checked
from jigsawrl.daemon.ledger import Ledger
from jigsawrl.liveness import SETTING
from jigsawrl.telemetry.progress import Progress

pytestmark = pytest.mark.slow

ONE_CORE_MORE = Path(__file__).parent / "one_core_more"
SLOW_ROLLOUTS = {
    "task": {"kind": "calculator", "max_number": 6, "size": 49, "latency": 0.5, "max_turns": 2},
    "rollout": {"prompts_per_step": 4, "samples": 2, "max_tokens": 8, "stop": ["]"]},
}


@pytest.fixture
def cluster(tmp_path: Path, own_stores: None) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path)
    yield cluster
    cluster.kill_all()


def alone(name: str, steps: int, folder: Path) -> Path:
    """The same job in an ordinary run of its own."""
    run = checked({**JOB, "name": name, "steps": steps, "device": "cpu"})
    launch(run, folder / name, False, Progress(json=True))
    return folder / name


def test_whatever_is_killed_jobs_go_on_from_their_last_steps_once_and_all_learn_the_same(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    steps = {"a": 40, "b": 32}
    cluster.make()
    for name in steps:
        cluster.submit(name, steps=steps[name], checkpoint={"every": 1000})
    cluster.start()
    for name in steps:
        cluster.wait_for_step(name, 2)
    run = json.loads((cluster.out / "runs" / "1" / "control.json").read_text())["pid"]
    os.kill(run, signal.SIGKILL)  # its jobs go on in another one
    for name in steps:
        cluster.wait_for(lambda name=name: cluster.steps(2, name, "arrived"), f"{name} in another run")
        cluster.wait_for_step(name, cluster.steps(2, name, "arrived")[0] + 1)
    cluster.wait_for(lambda: len(cluster.stores()) == 1, "the end of the dead run's store")
    cluster.signal(signal.SIGKILL)
    cluster.end()
    assert not cluster.status()["running"]
    cluster.start("--until-done")
    (reference := tmp_path / "reference").mkdir()
    undisturbed = {name: learned(alone(name, steps[name], reference)) for name in steps}
    assert cluster.end() == 0
    assert {name: learned(cluster.out / "jobs" / name) for name in steps} == undisturbed
    for name in steps:
        arrived = [cluster.steps(run, name, "arrived") for run in (1, 2, 3)]
        assert arrived[0] == [0] < arrived[1] < arrived[2], "nothing of it was on the disk"
    status = cluster.status()
    assert {name: (job["state"], job["step"]) for name, job in status["jobs"].items()} == {
        name: ("finished", count) for name, count in steps.items()
    }
    assert status["dollars"] > 0
    kinds = Counter((event["kind"], event["job"]) for event in Ledger(cluster.out).events())
    assert [kinds["finished", name] for name in steps] == [1, 1]
    assert kinds["died", "a"] == 1
    assert kinds["packed", "b"] >= 1  # beside a: there are nodes for one group only
    assert not cluster.stores()


@pytest.mark.long
def test_a_run_that_is_stopped_for_ever_is_ended_and_its_job_goes_on_in_another(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster.environment[SETTING] = "6"
    cluster.make()
    cluster.submit("a", steps=30, checkpoint={"every": 1000})
    cluster.start("--until-done")
    cluster.wait_for_step("a", 2)
    run = json.loads((cluster.out / "runs" / "1" / "control.json").read_text())["pid"]
    for pid in cluster.alive():
        if os.getsid(pid) == run:  # all of it: none of its own processes can end it
            os.kill(pid, signal.SIGSTOP)
    assert cluster.end() == 0
    (died,) = [event for event in Ledger(cluster.out).events() if event["kind"] == "died"]
    assert "its run did not show that it was alive for 6 s, and was ended" in died["text"]
    assert learned(cluster.out / "jobs" / "a") == learned(alone("a", 30, tmp_path))
    assert not cluster.stores()


def test_jobs_with_rollout_nodes_of_their_own_wait_for_broken_ones_and_no_step_is_made_twice(
    cluster: LocalCluster,
) -> None:
    cluster.pools = POOLS.replace("runs: rollout, nodes: 1", "runs: rollout, nodes: 2")
    cluster.environment["PYTHONPATH"] = os.pathsep.join(
        [str(ONE_CORE_MORE), os.environ.get("PYTHONPATH", "")]
    )
    cluster.make()
    endless = {**SLOW_ROLLOUTS, "steps": 5000, "checkpoint": {"every": 5000}}
    cluster.submit("a", 1.7, **endless)
    said = cluster.jigsaw(
        "submit", "cluster", cluster.write_job("b", **endless).name, "--max-slowdown", "1.7"
    )
    assert said.stdout == "b: submitted; it waits until the cluster is started\n"
    cluster.start()
    for name in "ab":
        cluster.wait_for_step(name, 1)
    (group,) = cluster.status()["groups"]
    assert (group["jobs"], group["rollout_nodes"]) == (["a", "b"], ["rollout-0", "rollout-1"])
    cluster.give_cores(1)
    cluster.wait_for(lambda: cluster.states() == {"a": "waiting", "b": "waiting"}, "the failure")
    assert cluster.status()["broken_nodes"] == ["rollout-1", "training-0"]
    cluster.wait_for(lambda: all(cluster.saved(name) for name in "ab"), "checkpoints")
    before = cluster.metrics("a")
    cluster.give_cores()
    cluster.wait_for_step("a", before + 1)
    cluster.signal(signal.SIGINT)
    assert cluster.end() == 0
    steps = {name: cluster.metrics(name) for name in "ab"}
    for name, count in steps.items():
        assert cluster.saved(name) == count
        stages = [each for run in (1, 2) for each in cluster.events(run, name, "substage")]
        rolled = {each["worker"] for each in stages if each["substage"] in ("prefill", "decode")}
        assert rolled == {"ab".index(name)}
        made = [step for run in (1, 2) for step in cluster.steps(run, name, "step")]
        assert made == list(range(1, count + 1))
    assert cluster.states() == {"a": "waiting", "b": "waiting"}
    ledger = Ledger(cluster.out)
    for name in "ab":
        ledger.ask_to_cancel(name)
    runs = sorted((cluster.out / "runs").iterdir())
    cluster.start("--until-done")
    assert cluster.end() == 0
    assert {each.name: (each.state, each.step) for each in ledger.jobs()} == {
        name: ("cancelled", count) for name, count in steps.items()
    }
    assert sorted((cluster.out / "runs").iterdir()) == runs


def test_a_job_makes_room_for_a_more_important_one_and_goes_on_where_it_was(cluster: LocalCluster) -> None:
    cluster.make()
    cluster.submit("a", **SLOW_ROLLOUTS, steps=5000, checkpoint={"every": 5000})
    cluster.start()
    cluster.wait_for_step("a", 1)
    file = cluster.write_job("urgent", steps=1).name
    cluster.jigsaw("submit", "cluster", file, "--priority", "1", "--max-slowdown", "1")
    cluster.wait_for(lambda: cluster.states()["urgent"] == "finished", "the important one")
    before = cluster.saved("a")
    cluster.wait_for_step("a", before + 1)
    cluster.signal(signal.SIGINT)
    assert cluster.end() == 0
    made = [step for run in (1, 3) for step in cluster.steps(run, "a", "step")]
    assert made == list(range(1, cluster.metrics("a") + 1))
    kinds = [event["kind"] for event in Ledger(cluster.out).events() if event["job"] == "a"]
    assert kinds.count("preempted") == 1
