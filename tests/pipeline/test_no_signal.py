"""A run that cannot learn says so, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import COLD, config, train

from jigsawrl.pipeline.no_signal import NoSignal
from jigsawrl.pipeline.trajectory import Trajectory


def samples(rewards: Sequence[Sequence[float]], cut_off: int = 0) -> list[Trajectory]:
    """Those of one step, by prompt; so many of them were cut off."""
    made = [
        Trajectory(prompt, number, [1], 1, reward=reward)
        for prompt, group in enumerate(rewards)
        for number, reward in enumerate(group)
    ]
    for each in made[:cut_off]:
        each.truncated = True
    return made


def said(steps: Sequence[list[Trajectory]], **changes: Any) -> list[str]:
    watch = NoSignal(config(**changes))
    return [text for step, each in enumerate(steps, 1) if (text := watch.look(step, each))]


def test_equal_rewards_are_said_once_after_three_steps_with_the_share_of_cut_off_samples() -> None:
    learning, zeros = samples([[0, 1], [0, 0]]), samples([[0, 0], [0, 0]], cut_off=1)
    assert said([zeros, zeros, learning, zeros, zeros]) == []
    assert said([learning, zeros, zeros, zeros, learning, zeros, zeros, zeros]) == [
        "steps 2 to 4: all rewards are 0.000, so nothing is learned from them; 25% of the samples were cut off at "
        "6 tokens"
    ]


def test_rewards_are_compared_as_the_advantage_compares_them() -> None:
    step = samples([[0, 0], [1, 1]])
    (text,) = said([step] * 4)
    assert text.startswith(
        "steps 1 to 3: the rewards of each prompt's samples are equal, so nothing is learned"
    )
    assert said([step] * 4, algorithm={"advantage": "reinforce_pp"}) == []


def test_cut_off_samples_are_said_once_with_the_settings_that_cut_them_off() -> None:
    step = samples([[0, 1], [0, 1]], cut_off=2)
    assert said([step] * 8) == [
        "steps 1 to 3: 50% of the samples were cut off at 6 tokens; for longer answers raise rollout.max_tokens"
    ]
    assert said([step] * 8, rollout={"ignore_eos": True}) == []
    assert said([samples([[0, 1], [0, 1]], cut_off=1)] * 8) == []
    task = {"kind": "calculator", "max_turns": 3}
    (text,) = said([step] * 3, task=task)
    assert (
        "cut off at 6 tokens or 3 turns; for longer answers raise rollout.max_tokens or task.max_turns"
        in text
    )


def test_both_are_one_message() -> None:
    (text,) = said([samples([[0, 0], [0, 0]], cut_off=4)] * 8)
    assert text == (
        "steps 1 to 3: all rewards are 0.000, so nothing is learned from them; 100% of the samples were cut off at "
        "6 tokens; for longer answers raise rollout.max_tokens"
    )


def test_a_run_without_signal_and_with_columns_that_are_not_used_says_both_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}+1=", "tools": [{"name": "add"}], "chat_template_kwargs": None} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text("def score(completions): return [0.0] * len(completions)\n")
    reward = {"path": f"{tmp_path / 'rewards.py'}:score"}
    task = {"kind": "data", "path": str(tmp_path / "rows.jsonl"), "reward": reward}
    rollout = {"prompts_per_step": 2, "samples": 2, "max_tokens": 2}
    result = train(tmp_path / "run", steps=5, task=task, model=COLD, rollout=rollout)
    printed = capsys.readouterr().err.splitlines()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kept = [event["text"] for event in events if event["event"] == "warning"]
    assert [text.partition(":")[0] for text in kept] == [
        "the column tools is not used for the prompts",
        "steps 1 to 3",
    ]
    assert [line for line in printed if line in kept] == kept
    assert result.summary.cut_off is not None
    assert result.summary.cut_off > 0.5
