"""Episodes of a user's environment, from its first observation to what is learned of its rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from small_runs import UNTRAINED, Noting, metrics, train

ENVIRONMENT = """
class Words:
    def reset(self, seed):
        self.seed = seed
        self.turns = 0
        return "say "

    def step(self, action):
        self.turns += 1
        return " and ", {reward}, self.turns == 2, {{}}
"""

ODD = """
class Odd:
    def reset(self, seed):
        self.seed = seed % 4
        self.turns = 0
        return ["say \\ud800", "", "say", "say"][self.seed]

    def step(self, action):
        self.turns += 1
        return "\\udfff and ", 3e38 if self.seed == 2 else 1.0, self.turns == 2, {}
"""


def words(folder: Path, reward: str) -> dict[str, Any]:
    (folder / "words.py").write_text(ENVIRONMENT.format(reward=reward))
    return {"kind": "environment", "path": f"{folder / 'words.py'}:Words", "size": 8, "processes": 1}


def test_a_turn_that_is_cut_off_at_the_token_limit_is_rewarded_as_it_is(tmp_path):
    """An untrained model hardly ever ends a turn by itself."""
    train(tmp_path / "run", steps=1, task=words(tmp_path, "len(action)"), model=UNTRAINED)
    (row,) = metrics(tmp_path / "run")
    assert row["response_length/clip_ratio"] > 0.8
    assert (
        row["response_length/mean"] - row["turns/mean"] <= row["reward/mean"] <= row["response_length/mean"]
    )


def test_turns_with_the_reward_none_add_nothing_and_an_episode_of_such_turns_is_left_out(tmp_path):
    reward = "None if self.seed % 2 or self.turns == 2 else 1.0"
    noting = Noting()
    rollout = {"stop": list("abcdefghijklmnopqrstuvwxyz"), "max_tokens": 32}
    train(
        tmp_path / "run",
        steps=1,
        task=words(tmp_path, reward),
        model=UNTRAINED,
        rollout=rollout,
        env=noting,
    )
    (row,) = metrics(tmp_path / "run")
    ((*trained,),) = noting.minibatches
    assert 0 < row["reward/none"] == 32 - len(trained) < 32
    assert row["reward/none"] % 4 == 0
    assert row["turns/mean"] > 1.5
    assert row["reward/mean"] == 1.0


def test_texts_and_rewards_that_cannot_be_used_end_their_episode_and_not_the_run(tmp_path):
    """Of four kinds of episode, one sees half of a surrogate pair, one opens without a text, one wins too much."""
    (tmp_path / "odd.py").write_text(ODD)
    task = {"kind": "environment", "path": f"{tmp_path / 'odd.py'}:Odd", "size": 32, "processes": 1}
    rollout = {
        "prompts_per_step": 32,
        "samples": 2,
        "max_tokens": 64,
        "stop": list("abcdefghijklmnopqrstuvwxyz"),
    }
    train(tmp_path / "run", steps=1, task=task, model=UNTRAINED, rollout=rollout)
    (row,) = metrics(tmp_path / "run")
    assert 0 < row["reward/errors"] < 64
    assert row["reward/none"] == 0
    warnings = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    said = " ".join(str(each) for each in warnings)
    assert "its rewards add up to 6e+38, which float32 cannot hold" in said
    assert "the first observation is empty" in said
    assert "surrogate" not in said
