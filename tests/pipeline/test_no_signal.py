"""What a run says once: that it cannot learn, what it does not use, what decodes on its GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import COLD, config, train

from jigsawrl.config import RunConfig
from jigsawrl.engine.decoding import Decoded, told_of_decoding, why_not_kernels
from jigsawrl.pipeline.execution_env import StandaloneEnv
from jigsawrl.pipeline.loop import run
from jigsawrl.pipeline.no_signal import NoSignal
from jigsawrl.pipeline.trajectory import Trajectory
from jigsawrl.pipeline.workers import LocalHandle, Workers
from jigsawrl.telemetry.progress import Progress


def samples(rewards: Sequence[Sequence[float | None]], cut_off: int = 0) -> list[Trajectory]:
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


def test_samples_without_a_reward_are_compared_with_none() -> None:
    assert said([samples([[None, 1.0, 0.0], [None, None, None]])] * 4) == []
    assert said([samples([[None, None]])] * 4) == []
    assert len(said([samples([[None, 0.0, 0.0], [0.0, None, None]])] * 4)) == 1


def test_equal_rewards_are_said_once_after_three_steps_with_the_share_of_cut_off_samples() -> None:
    learning, zeros = samples([[0, 1], [0, 0]]), samples([[0, 0], [0, 0]], cut_off=1)
    assert said([zeros, zeros, learning, zeros, zeros]) == []
    assert said([learning, zeros, zeros, zeros, learning, zeros, zeros, zeros]) == [
        "steps 2 to 4: all rewards are 0.000, so no answer counts as better than another; 25% of the samples were "
        "cut off at 6 tokens"
    ]


def test_rewards_are_compared_as_the_advantage_compares_them() -> None:
    step = samples([[0, 0], [1, 1]])
    (text,) = said([step] * 4)
    assert text.startswith(
        "steps 1 to 3: the rewards of each prompt's samples are equal, so no answer counts as better than another"
    )
    assert said([step] * 4, algorithm={"advantage": "reinforce_pp"}) == []


def test_cut_off_samples_are_said_once_with_the_settings_that_cut_them_off() -> None:
    step = samples([[0, 1], [0, 1]], cut_off=2)
    assert said([step] * 8) == [
        "steps 1 to 3: 50% of the samples were cut off at 6 tokens; for longer answers raise rollout.max_tokens"
    ]
    assert said([step] * 8, rollout={"ignore_eos": True}) == []
    assert said([samples([[0, 1], [0, 1]], cut_off=1)] * 8) == []
    assert said([samples([[0, 1], [0, 1]], cut_off=4)] * 2 + [samples([[0, 1], [0, 1]])] * 8) == [], (
        "it learns"
    )
    task = {"kind": "calculator", "max_turns": 3}
    (text,) = said([step] * 3, task=task)
    assert (
        "cut off at 6 tokens or 3 turns; for longer answers raise rollout.max_tokens or task.max_turns"
        in text
    )


def test_both_are_one_message() -> None:
    (text,) = said([samples([[0, 0], [0, 0]], cut_off=4)] * 8)
    assert text == (
        "steps 1 to 3: all rewards are 0.000, so no answer counts as better than another; 100% of the samples were "
        "cut off at 6 tokens; for longer answers raise rollout.max_tokens"
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
    beginnings = ("the column tools is not used for the prompts", "steps 1 to 3: ")
    assert [text.startswith(begins) for text, begins in zip(kept, beginnings, strict=True)] == [True, True]
    assert [line for line in printed if line in kept] == kept
    assert result.summary.cut_off is not None
    assert result.summary.cut_off > 0.5


class OnAnA100(StandaloneEnv):
    """Actors that say what they would say on a GPU before Hopper."""

    def workers(self, config: RunConfig, base: Path, device: str) -> Workers:
        found = Decoded((8, 0), torch.bfloat16, 64, (64, 64, 64), deterministic=False)
        workers = super().workers(config, base, device)
        (handle,) = workers.handles
        assert isinstance(handle, LocalHandle)
        handle.actor.decoding = lambda: told_of_decoding("A100", why_not_kernels(found))  # type: ignore[method-assign]
        return workers


def test_a_run_says_once_which_code_decodes_on_its_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(json=True) as progress:
        run(config(steps=2, model=COLD), tmp_path / "run", False, progress, OnAnA100())
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("decoding on A100")]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert said == [event["text"] for event in events if event["event"] == "decoding"]
    assert len(said) == 1


def test_on_a_cpu_there_is_one_way_to_decode_and_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", steps=1, model=COLD)
    assert "decoding" not in capsys.readouterr().err
