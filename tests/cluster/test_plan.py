"""Plans of a cluster for a file of jobs."""

from __future__ import annotations

from jigsawrl.cluster.from_config import scene_of
from jigsawrl.cluster.plan import plan
from jigsawrl.config.cluster import ClusterConfig, JobsConfig

POOLS = {
    "roll": {"kind": "h100", "runs": "rollout", "gpus": 2, "price": 4.0, "host_memory": 900.0},
    "train": {"kind": "a100", "runs": "training", "gpus": 2, "price": 1.0},
    "all": {"kind": "a100", "runs": "both", "price": 1.0, "host_memory": 100.0},
}


def test_a_job_whose_cheapest_place_lacks_memory_while_the_others_are_too_slow_waits() -> None:
    job = {
        "model": "Qwen3-0.6B",
        "sequences": 256,
        "max_tokens": 8192,
        "rollout_nodes": 2,
        "rollout_memory": 300.0,
    }
    cluster = ClusterConfig.model_validate({"name": "cluster", "pools": POOLS})
    jobs = JobsConfig.model_validate({"name": "jobs", "jobs": {"large": job}})
    planned = plan(scene_of(cluster, jobs))
    assert planned.decisions["large"].how == "waits"
    assert planned.as_dict()["groups"] == []
