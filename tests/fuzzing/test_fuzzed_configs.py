"""Some hundred damaged files of each kind: they load, or are refused in a message of one to three lines."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fuzzing.check import Target, generator, judge, message_problem
from fuzzing.configs import CLUSTER, DATA, GAME, JOBS, MIX, POOLED, SUMS, TARGETS, write_whole_files
from fuzzing.values import damaged
from jigsawrl.cluster.from_config import scene_of as cluster_scene
from jigsawrl.config import load_run_file
from jigsawrl.config.cluster import load_cluster_file, load_jobs_file
from jigsawrl.config.pipelines import load_mix
from jigsawrl.simulator.from_config import scene_of

CASES = 60


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_damaged_files_load_or_are_refused_in_a_clear_message(target: Target, tmp_path: Path) -> None:
    for number in range(CASES):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        verdict = judge(target, f"test-{number}", folder)
        assert verdict.ended != "failed", f"case test-{number} of {target.__name__}, {folder}: {verdict.why}"


def test_the_files_that_are_damaged_were_whole_before(tmp_path: Path) -> None:
    write_whole_files(tmp_path)
    for name in ("sums", "data", "game"):
        load_run_file(tmp_path / f"{name}.yaml")
    for name in ("mix", "pooled"):
        scene_of(load_mix(tmp_path / f"{name}.yaml"))
    scene = cluster_scene(
        load_cluster_file(tmp_path / "cluster.yaml"), load_jobs_file(tmp_path / "jobs.yaml")
    )
    assert len(scene.jobs) == 4


def test_damage_is_the_same_for_the_same_seed_and_leaves_the_original_whole() -> None:
    for tree in (SUMS, DATA, GAME, MIX, POOLED, CLUSTER, JOBS):
        before = repr(tree)
        made = [repr(damaged(generator(TARGETS[0], "7"), tree)) for _ in range(2)]
        assert made[0] == made[1] != before == repr(tree)


def test_the_judge_tells_what_is_no_message_for_a_user() -> None:
    wrong = ("", "a\n\nb", "a\nb\nc\nd", "x" * 5000, "a\x1b[31mb")
    assert [message_problem(each) is None for each in ("a: b", "a\nb\nc", *wrong)] == [True] * 2 + [False] * 5
