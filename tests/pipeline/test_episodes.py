"""Episodes of a user's environment, from its first observation to what is learned of its rewards."""

from __future__ import annotations

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
        around=noting,
    )
    (row,) = metrics(tmp_path / "run")
    ((*trained,),) = noting.minibatches
    assert 0 < row["reward/none"] == 32 - len(trained) < 32
    assert row["reward/none"] % 4 == 0
    assert row["turns/mean"] > 1.5
    assert row["reward/mean"] == 1.0
