"""`jigsaw plan` and `jigsaw simulate` with a cluster file, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import Case, Outcome, outcomes_of, without_torch

from jigsawrl.cluster.from_config import cluster_of, job_of, scene_of
from jigsawrl.cluster.plan import plan
from jigsawrl.config.cluster import ClusterConfig, JobConfig, load_cluster_file, load_jobs_file
from jigsawrl.graph.profile import load_profile

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster"
POOLS = """
pools:
  roll: {kind: h20, runs: rollout, nodes: 2}
  train: {kind: h800, runs: training, nodes: 1}
"""
JOBS = """
jobs:
  a: {rollout: 100, training: 50, steps: 20}
  b: {rollout: 100, training: 50, steps: 20, arrival: 0.1}
"""
FILES = (
    ("c.yaml", POOLS),
    ("j.yaml", JOBS),
    ("huge.yaml", "jobs: {a: {rollout: 1, training: 1, rollout_memory: 9999}}\n"),
    ("wide.yaml", "jobs: {a: {rollout: 1, training: 1, training_nodes: 4}}\n"),
    ("deep.yaml", "jobs: {a: {model: Llama-3-70B}}\n"),
    ("half.yaml", "jobs: {a: {rollout: 5}}\n"),
    ("worse.yaml", "jobs: {a: {rollout: 5, training: 2, rollout_worst: 3}}\n"),
    ("broken.yaml", JOBS + "failures: {x: {node: role-0, at: 1, hours: 1}}\n"),
    ("odd.yaml", JOBS + "failures: {x: {node: roll-00, at: 1, hours: 1}}\n"),
    ("long.yaml", "jobs: {a: {rollout: 5, training: 2, steps: 50000000}}\n"),
    ("many.yaml", "jobs: {" + ", ".join(f"{x}: {{rollout: 100, training: 50}}" for x in "abcdefgh") + "}\n"),
    ("hasty.yaml", "jobs: {a: {rollout: 100, training: 50, steps: 72, deadline: 2}}\n"),
    (
        "twice.yaml",
        JOBS + "failures: {x: {node: roll-0, at: 0.2, hours: 0.1}, y: {node: roll-0, at: 0.25, hours: 90}}\n",
    ),
)
REFUSED = {
    "unknown kind": Case(
        "plan c.yaml j.yaml pools.roll.kind=h2000",
        2,
        "pools.roll.kind: 'h2000' is not allowed; it must be one of h100, h200, a100, h20, h800, cpu; did you mean "
        "'h200'?",
    ),
    "negative price": Case(
        "plan c.yaml j.yaml pools.roll.price=-1",
        2,
        "c.yaml: pools.roll.price: -1 is not allowed; it must be a number, at least 0 and at most "
        "1000000, or null",
    ),
    "nothing trains": Case(
        "plan c.yaml j.yaml pools.train.runs=rollout",
        2,
        "pools: none of them runs training; set one's 'runs' to training or both",
    ),
    "host memory": Case(
        "plan c.yaml huge.yaml",
        2,
        "jobs.a: can never fit: it keeps 9,999 GB on each rollout node and 0 GB on each training node; host memory "
        "is 2,199 GB on roll and 2,199 GB on train",
    ),
    "too few nodes": Case(
        "plan c.yaml wide.yaml", 2, "jobs.a: can never fit: it needs 4 nodes of train, which has 1"
    ),
    "device memory": Case(
        "plan c.yaml deep.yaml",
        2,
        "jobs.a: can never fit: no pool's devices hold its model; give it more training_nodes, or use devices with "
        "more memory",
    ),
    "half a job": Case(
        "simulate c.yaml half.yaml",
        2,
        "half.yaml: jobs.a: needs a model, or seconds of both rollout and training",
    ),
    "worst below typical": Case(
        "plan c.yaml worse.yaml", 2, "worse.yaml: jobs.a: rollout_worst is 3, less than rollout (5)"
    ),
    "no such file": Case("plan c.yaml k.yaml", 2, "k.yaml: there is no such jobs file"),
    "no such node": Case(
        "simulate c.yaml broken.yaml",
        2,
        "failures.x.node: 'role' is not allowed; it must be one of roll, train; did you mean 'roll'?",
    ),
    "a number that is no node's": Case(
        "simulate c.yaml odd.yaml",
        2,
        "failures.x.node: 'roll-00' is no node; write its pool and number, such as roll-0",
    ),
    "more steps than could be played": Case(
        "simulate c.yaml long.yaml",
        2,
        "long.yaml: jobs.a.steps: 50000000 is not allowed; it must be a whole number, at least 1 and at most 1000000 "
        "(default 100)",
    ),
    "negative seed": Case(
        "simulate c.yaml j.yaml --seed -1",
        2,
        "Invalid value for '--seed': Input should be greater than or equal to 0\ntry 'jigsaw simulate --help'",
    ),
    "no trace": Case(
        "simulate c.yaml quantile=0.9",
        2,
        "c.yaml: is a cluster file; name a trace (a jobs file with arrivals) after it, such as\n"
        "jigsaw simulate c.yaml trace.yaml",
    ),
    "another file's option": Case(
        "simulate c.yaml j.yaml --workers 3",
        2,
        "--workers: is for run files; c.yaml is a cluster file, leave it out",
    ),
}
DONE = {
    "plan": Case("plan c.yaml j.yaml", 0, "", None),
    "plan as JSON": Case("plan c.yaml j.yaml --json", 0, "", None),
    "simulate": Case("simulate c.yaml j.yaml --seed 1", 0, "", None),
    "simulate as JSON": Case("simulate c.yaml j.yaml quantile=0.9 --json", 0, "", None),
    "more jobs than nodes": Case("plan c.yaml many.yaml", 0, "", None),
    "a deadline too soon": Case("plan c.yaml hasty.yaml", 0, "", None),
    "a deadline missed": Case("simulate c.yaml hasty.yaml", 0, "", None),
    "a node that breaks while it is broken": Case("simulate c.yaml twice.yaml --json", 0, "", None),
    "help": Case("plan --help", 0, "", None),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return outcomes_of({**REFUSED, **DONE}, FILES, tmp_path_factory, without_torch(tmp_path_factory))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_said(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.stderr == f"jigsaw: {REFUSED[name].stderr}\n"
    assert (outcome.code, outcome.stdout) == (2, "")


@pytest.mark.parametrize("name", DONE)
def test_what_is_right_is_done_and_nothing_written(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert (outcome.code, outcome.stderr, outcome.written) == (0, "", set())
    assert max(map(len, outcome.stdout.splitlines())) <= 80 or "--json" in DONE[name].arguments


def test_a_plan_says_who_goes_where_and_why(outcomes: dict[str, Outcome]) -> None:
    found = json.loads(outcomes["plan as JSON"].stdout)
    assert [group["jobs"] for group in found["groups"]] == [["a", "b"]]
    assert found["jobs"]["b"]["why"] == "beside a: no node is added"
    assert found["dollars_per_hour"] * 2 == found["alone_dollars_per_hour"] == pytest.approx(114.08)


def test_reasons_tell_of_the_plan_as_it_is_and_not_of_how_it_was_made() -> None:
    """Groups become others while the example's jobs are placed; nobody moves, as nothing runs yet."""
    found = plan(scene_of(load_cluster_file(EXAMPLE / "cluster.yaml"), load_jobs_file(EXAMPLE / "jobs.yaml")))
    for name, decision in found.decisions.items():
        group = found.scheduler.groups[found.scheduler.home[name]]
        others = [each for each in group.standings if each != name]
        assert decision.why.startswith(f"beside {', '.join(others)}" if others else "a group of its own")
        assert decision.how in ("packed", "scaled", "new group")
        assert {*decision.rollout_nodes} == group.nodes_of(name)[0]


def test_a_simulation_says_what_it_cost_and_who_was_late(outcomes: dict[str, Outcome]) -> None:
    found = json.loads(outcomes["simulate as JSON"].stdout)
    assert found["dollars"] < found["alone_dollars"]
    assert found["slo_attainment"] == 1.0
    assert set(found["jobs"]) == {"a", "b"}


def test_who_waits_saves_nothing(outcomes: dict[str, Outcome]) -> None:
    said = " ".join(outcomes["more jobs than nodes"].stdout.split())
    assert (
        "$71.84 an hour, 3.18 times less than $228.16 with every job alone, without the 4 that wait" in said
    )


def test_deadlines_that_cannot_be_kept_or_were_not_are_told(outcomes: dict[str, Outcome]) -> None:
    assert "a takes 3.0 h alone: too long for its deadline (2 h)" in outcomes["a deadline too soon"].stdout
    assert "1 missed its deadline" in outcomes["a deadline missed"].stdout


def test_time_is_over_with_the_last_job(outcomes: dict[str, Outcome]) -> None:
    found = json.loads(outcomes["a node that breaks while it is broken"].stdout)
    assert found["hours"] < 3
    assert found["dollars_per_hour"] > 50


def test_the_example_can_be_planned_and_its_trace_read() -> None:
    cluster = load_cluster_file(EXAMPLE / "cluster.yaml")
    for name in ("jobs.yaml", "trace.yaml"):
        scene = scene_of(cluster, load_jobs_file(EXAMPLE / name))
        assert len(scene.jobs) >= 6


def test_a_kind_of_ones_own_has_its_price_and_memory() -> None:
    kind = {
        "flops": 200.0,
        "memory_bandwidth": 2.0,
        "device_memory": 64.0,
        "host_memory": 100.0,
        "price": 1.5,
    }
    pool = {"kind": "mine", "runs": "both", "gpus": 4}
    found = cluster_of(ClusterConfig.model_validate({"kinds": {"mine": kind}, "pools": {"all": pool}}))
    assert (found.pools["all"].price, found.pools["all"].host_gb) == (6.0, 400.0)
    assert found.pairs == (("all", "all"),)


def test_longer_answers_and_larger_models_are_estimated_to_take_longer() -> None:
    cluster = cluster_of(load_cluster_file(EXAMPLE / "cluster.yaml"))
    profile = load_profile("h100-traces")

    def estimated(**settings: object) -> tuple[float, float, float]:
        job = job_of("a", JobConfig.model_validate(settings), cluster, profile)
        rollout, training = job.rollout["rollout"], job.training["training"]
        assert rollout.typical < rollout.worst
        assert training.typical < training.worst
        return rollout.typical, training.typical, job.rollout_gb

    small, long, large = (
        estimated(model="Qwen3-4B", max_tokens=4096),
        estimated(model="Qwen3-4B", max_tokens=16384),
        estimated(model="Qwen2.5-14B", max_tokens=4096),
    )
    assert small[:2] < long[:2]
    assert all(a < b for a, b in zip(small, large, strict=True))


def test_measured_seconds_are_carried_to_other_kinds() -> None:
    cluster = ClusterConfig.model_validate(
        {
            "pools": {
                "slow": {"kind": "h800", "runs": "rollout"},
                "fast": {"kind": "h200", "runs": "rollout"},
                "train": {"kind": "h800", "runs": "training"},
            }
        }
    )
    job = job_of(
        "a",
        JobConfig.model_validate({"rollout": 100.0, "training": 50.0}),
        cluster_of(cluster),
        load_profile("h100-traces"),
    )
    assert job.rollout["fast"].typical == pytest.approx(100 * 3.35 / 4.8)
    assert job.training["train"].typical == 50
