"""A step in which no reward applies to anything has a training like any other, in which nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mixes import STEPS, SUMS, assert_nothing_is_left, learned, result, run_here, write_mix

from jigsawrl.pipeline.prompts import PromptSource


def second_step_without_rewards(folder: Path) -> dict[str, Any]:
    """A pipeline whose reward is None for all prompts of its second step, and for some samples of the others."""
    source = PromptSource(list(range(16)), seed=0)
    _, second = source.take(8), source.take(8)
    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text(
        "def score(data_source, solution_str, ground_truth):\n"
        f"    if ground_truth in {[str(index) for index in second]} or 'e' in solution_str:\n"
        "        return None\n"
        "    return float(len(solution_str) % 2)\n"
    )
    lines = [json.dumps({"prompt": f"{n}=", "answer": str(n)}) for n in range(16)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    task = {
        "kind": "data",
        "path": str(folder / "data.jsonl"),
        "reward": {"path": f"{folder / 'rewards.py'}:score", "processes": 1},
    }
    tiny = {**SUMS["model"]["tiny"], "warmup_steps": 0}
    return {**SUMS, "model": {"tiny": tiny}, "task": task}


@pytest.mark.slow
def test_a_step_without_any_reward_is_the_same_alone_beside_another_and_in_pools(tmp_path: Path) -> None:
    bare = second_step_without_rewards(tmp_path / "data")
    alone = write_mix(tmp_path / "alone", "serial", bare=bare)
    beside = write_mix(tmp_path / "beside", "jigsaw", bare=bare, a=SUMS)
    pooled = write_mix(tmp_path / "pooled", "rollmux", bare=bare)
    one, two = {"workers": 1}, {"pools": {"rollout": 1, "training": 1}}
    found = []
    for file, workers in ((alone, one), (beside, one), (pooled, two)):
        file.write_text(json.dumps({**json.loads(file.read_text()), **workers}))
        out = file.parent / "out"
        outcome = run_here(file, out)
        assert {(each.how, each.steps) for each in outcome.pipelines} == {("finished", STEPS)}
        found.append(result(out / "bare"))
        assert_nothing_is_left(out)
    assert found == found[:1] * 3
    none = [row["reward/none"] for row in learned(tmp_path / "alone" / "out" / "bare")]
    assert none[1] == 32
    assert 0 < none[0] < 32
    assert 0 < none[2] < 32
