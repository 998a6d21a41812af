"""What a local cluster refuses, and why: exit code 2, nothing is written, torch is never imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_helpers import Case, Outcome, outcomes_of, without_torch
from local_cluster import POOLS

from jigsawrl.config.cluster import load_cluster_file
from jigsawrl.daemon.cores import cores_of_nodes
from jigsawrl.daemon.ledger import Ledger
from jigsawrl.daemon.status import document
from jigsawrl.errors import JigsawError
from jigsawrl.underway import under_way

CORES = len(os.sched_getaffinity(0))
SMALL = "pools.rollout.host_memory=2 pools.training.host_memory=2"
JOB = "steps: 3\ntask: {kind: arithmetic}\n"
FILES = (
    ("pools.yaml", POOLS),
    ("job.yaml", JOB),
    ("gpu.yaml", JOB + "device: cuda\n"),
    ("wrong.yaml", "stepz: 3\ntask: {kind: arithmetic}\n"),
    ("large.yaml", JOB + "model: {tiny: {layers: 64, hidden: 16384, heads: 128, kv_heads: 128}}\n"),
    ("full/notes.txt", "mine\n"),
)
REFUSED = {
    "unknown kind": Case(
        "cluster start pools.yaml pools.rollout.kind=tpu",
        2,
        "pools.rollout.kind: 'tpu' is not allowed; it must be one of h100, h200, a100, h20, h800, cpu; did you "
        "mean 'cpu'?",
    ),
    "negative price": Case(
        "cluster start pools.yaml pools.rollout.price=-1",
        2,
        "pools.yaml: pools.rollout.price: -1 is not allowed; it must be a number, at least 0 and at most 1000000, "
        "or null",
    ),
    "no rollout pool": Case(
        "cluster start pools.yaml pools.rollout.runs=training",
        2,
        "pools: none of them runs rollout; set one's 'runs' to rollout or both",
    ),
    "GPUs": Case(
        "cluster start pools.yaml pools.rollout.kind=h100",
        2,
        "pools.rollout.kind: is 'h100'; only a cluster of this machine's cores can be started (kind: cpu), any can "
        "be planned and simulated",
    ),
    "cores with GPUs": Case(
        "cluster start pools.yaml pools.rollout.gpus=8",
        2,
        "pools.yaml: pools.rollout: gpus are given, and a node of kind cpu has none; set cores",
    ),
    "no number of nodes": Case(
        "cluster start pools.yaml pools.rollout.nodes=null",
        2,
        "pools.yaml: pools.rollout: needs nodes: a machine has only so many cores",
    ),
    "too few cores": Case(
        "cluster start pools.yaml pools.rollout.nodes=999",
        2,
        "pools: 999 of rollout + 1 of training are 1000 nodes of 1 cores, 1000 in all, and there are "
        f"{CORES}; lower nodes or cores",
    ),
    "unequal nodes": Case(
        "cluster start pools.yaml pools.rollout.cores=2",
        2,
        "pools: their nodes have 1, 2 cores; give all the same number",
    ),
    "somebody's folder": Case(
        "cluster start pools.yaml --out full",
        2,
        "full: is not empty, and holds no cluster; choose another folder with --out",
    ),
    "a file": Case(
        "cluster start pools.yaml --out job.yaml", 2, "job.yaml: is a file; choose another folder with --out"
    ),
    "other settings": Case(
        "cluster start pools.yaml max_group=2 SMALL --out MADE",
        2,
        "MADE: holds a cluster with other settings: max_group\n"
        "start it with the settings it had, or choose another folder with --out",
    ),
    "running already": Case(
        "cluster start pools.yaml SMALL --out MADE",
        2,
        f"MADE: process {os.getpid()} runs what is in it; let it end, stop it with 'kill {os.getpid()}', "
        "or choose another folder with --out",
    ),
    "no cluster": Case(
        "cluster status full", 2, "full: is no cluster's folder; 'jigsaw cluster start' makes one"
    ),
    "no run file": Case("submit MADE nothing.yaml", 2, "nothing.yaml: there is no such run file"),
    "wrong run file": Case("submit MADE wrong.yaml", 2, "stepz: no such setting; did you mean 'steps'?"),
    "wants a GPU": Case(
        "submit MADE gpu.yaml",
        2,
        "gpu.yaml: device is cuda, and the nodes of MADE are cores; set device: cpu or auto",
    ),
    "too wide": Case(
        "submit MADE job.yaml --rollout-nodes 3",
        2,
        "job: can never fit: it needs 3 nodes of rollout, which has 1",
    ),
    "too large": Case(
        "submit MADE large.yaml",
        2,
        "large: can never fit: it keeps 3,157 GB on each rollout node and 3,351 GB on each training node; host "
        "memory is 2 GB on rollout and 2 GB on training",
    ),
    "impossible promise": Case(
        "submit MADE job.yaml --max-slowdown 0.5",
        2,
        "max_slowdown: 0.5 is not allowed; it must be a number, at least 1 (default 1.5)",
    ),
    "deadline in the past": Case(
        "submit MADE job.yaml --deadline -3",
        2,
        "deadline: -3.0 is not allowed; it must be a number, above 0 and at most 1000000000, or null",
    ),
    "name taken": Case(
        "submit MADE job.yaml --name first",
        2,
        "MADE: there is a job first already; choose another --name",
    ),
    "a run's own name": Case(
        "submit MADE job.yaml --name store",
        2,
        "'store' is the name of one of a run folder's own files; choose another --name",
    ),
    "no folder's name": Case(
        "submit MADE job.yaml --name ../out",
        2,
        "name: '../out' cannot name a folder; use letters, digits, '.', '_' and '-', 100 at most",
    ),
    "nodes in a run": Case(
        "submit full job.yaml --training-nodes 2",
        2,
        "--training-nodes: is for clusters, and full is none; leave it out",
    ),
    "a tenant in a run": Case(
        "submit full job.yaml --tenant vision",
        2,
        "--tenant: is for clusters, and full is none; leave it out",
    ),
    "no such job": Case("cancel MADE second", 2, "MADE: there is no job second; there are first"),
    "pausing a job": Case(
        "pause MADE first", 2, "MADE: is a cluster, whose jobs cannot be paused, only cancelled"
    ),
    "pausing a job by its folder": Case(
        "pause c/jobs/first first",
        2,
        "c/jobs/first: is a job of a cluster, and can only be cancelled: 'jigsaw cancel c first'",
        files=(("c/cluster.db", ""), ("c/jobs/first/config.yaml", JOB)),
    ),
}
DONE = {
    "submit": Case(
        "submit MADE job.yaml --name first --steps 2 --tenant vision --priority 1",
        0,
        "",
        "first: submitted\n",
    ),
    "status": Case("cluster status MADE", 0, "", None),
    "help": Case("cluster start --help", 0, "", None),
    "plan": Case(
        "plan pools.yaml jobs.yaml", 0, "", None, (("jobs.yaml", "jobs: {a: {rollout: 2, training: 1}}"),)
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster's folder, of which somebody else is the daemon."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "pools.yaml").write_text(POOLS)
    Ledger.make(folder / "out", load_cluster_file(folder / "pools.yaml", SMALL.split())).close()
    with under_way(folder / "out"):
        yield folder / "out"


@pytest.fixture(scope="module")
def outcomes(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = {
        name: replace(case, arguments=case.arguments.replace("MADE", str(made)).replace("SMALL", SMALL))
        for name, case in {**DONE, **REFUSED}.items()
    }
    return outcomes_of(cases, FILES, tmp_path_factory, without_torch(tmp_path_factory))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_said(name: str, outcomes: dict[str, Outcome], made: Path) -> None:
    outcome = outcomes[name]
    assert outcome.stderr == f"jigsaw: {REFUSED[name].stderr}\n".replace("MADE", str(made))
    assert (outcome.code, outcome.stdout, outcome.written) == (2, "", set())


@pytest.mark.parametrize("name", DONE)
def test_what_is_right_is_done(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome, expected = outcomes[name], DONE[name].stdout
    assert (outcome.code, outcome.stderr, outcome.written) == (0, "", set())
    assert expected in (None, outcome.stdout)


def test_a_job_is_in_the_ledger_as_soon_as_it_is_submitted_and_nothing_that_was_refused(
    outcomes: dict[str, Outcome], made: Path
) -> None:
    found = document(made)
    assert found["running"]
    assert {name: (job["state"], job["steps"]) for name, job in found["jobs"].items()} == {
        "first": ("waiting", 2)
    }
    assert [(event["kind"], event["job"]) for event in found["events"]] == [("submitted", "first")]
    said = " ".join(outcomes["status"].stdout.split())
    assert "│ first │ waiting │ 0/2 │ │ │ │ 1.50x │ for" in said
    assert "vision, │" in said
    assert "first: submitted pools is running; $0.0000 so far, $0.00/h now" in said


def test_nodes_are_cores_those_for_rollouts_first(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text(
        "pools:\n"
        "  train: {kind: cpu, runs: training, nodes: 1, cores: 2}\n"
        "  roll: {kind: cpu, runs: rollout, nodes: 2, cores: 2}\n"
    )
    config = load_cluster_file(tmp_path / "pools.yaml")
    found = cores_of_nodes(config, [1, 3, 5, 7, 9, 11, 13])
    assert found == {"roll-0": (1, 3), "roll-1": (5, 7), "train-0": (9, 11)}
    with pytest.raises(JigsawError, match="3 nodes of 2 cores, 6 in all, and there are 5"):
        cores_of_nodes(config, [1, 3, 5, 7, 9])
