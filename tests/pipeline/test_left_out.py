"""Samples whose reward is None: nothing is learned from them, and everything from the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import UNTRAINED, Noting, metrics, train

from jigsawrl.errors import JigsawError


def task(folder: Path, reward: str, size: int = 8) -> dict[str, Any]:
    """Prompts `0=`, `1=` ... with these expressions of `text` and `number`, the prompt's, as their reward."""
    (folder / "rewards.py").write_text(
        f"def score(data_source, solution_str, ground_truth):\n"
        f"    text, number = solution_str, int(ground_truth)\n    return {reward}\n"
    )
    rows = [json.dumps({"prompt": f"{n}=", "answer": str(n)}) for n in range(size)]
    (folder / "data.jsonl").write_text("\n".join(rows))
    path = f"{folder / 'rewards.py'}:score"
    return {"kind": "data", "path": str(folder / "data.jsonl"), "reward": {"path": path, "processes": 1}}


def test_samples_with_the_reward_none_are_neither_trained_on_nor_counted_as_zero(tmp_path):
    noting = Noting()
    reward = "{'score': None if 'e' in text or number == 5 else len(text), 'length': len(text)}"
    rewarded = task(tmp_path, reward)
    many = {"minibatches": 32}
    train(tmp_path / "run", steps=1, task=rewarded, model=UNTRAINED, algorithm=many, env=noting)
    (row,) = metrics(tmp_path / "run")
    trained = [prompt for minibatch in noting.minibatches for prompt in minibatch]
    assert {len(minibatch) for minibatch in noting.minibatches} == {1}
    assert 4 < row["reward/none"] == 32 - len(trained) < 32
    assert len(set(trained)) == 7  # all of the prompts but 5=
    assert row["reward/errors"] == 0
    assert row["reward/mean"] == pytest.approx(row["reward/length"])
    assert row["reward/mean"] > 4


def test_a_step_in_which_every_reward_is_none_changes_nothing_and_the_run_goes_on(tmp_path, capsys):
    first = {"steps": 1, "model": UNTRAINED, "checkpoint": {"every": 1, "keep": 3}}
    train(tmp_path / "run", task=task(tmp_path, "None"), **first)
    (row,) = metrics(tmp_path / "run")
    assert "reward/mean" not in row
    assert row["reward/none"] == 32
    assert (
        "step 1: nothing is learned from it, as the reward of all its samples is None"
        in capsys.readouterr().err
    )
    base, model = ((tmp_path / "run" / name / "model.safetensors").read_bytes() for name in ("base", "model"))
    assert model == base
    train(tmp_path / "run", resume=True, **{**first, "steps": 2}, task=task(tmp_path, "len(text)"))
    assert metrics(tmp_path / "run")[1]["reward/mean"] > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() != base


def test_a_run_ends_when_no_reward_has_applied_to_anything_for_hundreds_of_prompts(tmp_path):
    rollout = {"prompts_per_step": 128, "samples": 1, "max_tokens": 1}
    with pytest.raises(JigsawError, match=r"step 2: .* all samples of 256 prompts in a row is None"):
        train(
            tmp_path / "run",
            steps=3,
            task=task(tmp_path, "None", size=128),
            model=UNTRAINED,
            rollout=rollout,
            algorithm={"advantage": "reinforce_pp"},
        )
    assert len(metrics(tmp_path / "run")) == 1


def test_one_reward_that_fails_ends_no_run_whose_other_rewards_are_none(tmp_path):
    reward = "float('no') if number == 3 else None"
    train(tmp_path / "run", steps=1, task=task(tmp_path, reward), model=UNTRAINED)
    (row,) = metrics(tmp_path / "run")
    assert 0 < row["reward/errors"] < row["reward/none"]


def test_a_run_ends_when_every_reward_that_applies_has_failed_for_hundreds_of_prompts(tmp_path):
    rollout = {"prompts_per_step": 128, "samples": 1, "max_tokens": 1}
    with pytest.raises(JigsawError, match=r"step 2: .* prompts in a row is None, .* or failed"):
        train(
            tmp_path / "run",
            steps=3,
            task=task(tmp_path, "None if number < 64 else float('no')", size=128),
            model=UNTRAINED,
            rollout=rollout,
            algorithm={"advantage": "reinforce_pp"},
        )


def test_dynamic_sampling_replaces_groups_with_less_than_two_rewards(tmp_path):
    reward = "(None if hash(text) % 4 else len(text)) if number % 2 else (hash(text) % 1000)"
    noting = Noting()
    train(
        tmp_path / "run",
        steps=1,
        task=task(tmp_path, reward, size=40),
        model=UNTRAINED,
        algorithm={"dynamic_sampling": {"max_rounds": 8}},
        env=noting,
    )
    (row,) = metrics(tmp_path / "run")
    assert row["rollout/groups_kept"] == 8
    assert row["rollout/rounds"] > 1
    (trained,) = noting.minibatches
    assert min(trained.count(prompt) for prompt in trained) >= 2
