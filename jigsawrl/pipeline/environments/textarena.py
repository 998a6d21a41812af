"""A single-player game of the textarena package as an environment.

The games draw from Python's global random state. Here each game has a state of its own, put in place around every
call, so that games played side by side in one process do not disturb each other, and a replayed game is the same.
"""

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import textarena

_one_at_a_time = threading.Lock()


class TextArena:
    """One game. The model's text goes in as it is; the reward comes at the end, as the game gives it.

    An observation is only what is new since the last one: the model has the rest, its own words included, before it.
    """

    def __init__(self, name: str, params: dict[str, Any]) -> None:
        self._name = name
        self._params = params

    def reset(self, seed: int) -> str:
        self._random_state = random.Random(seed).getstate()
        with self._turn():
            self._env = self._game = textarena.make(self._name, **self._params)
            self._env.reset(num_players=1, seed=seed)
            while isinstance(self._game, textarena.Wrapper):
                self._game = self._game.env
            if not isinstance(self._game.state, textarena.SinglePlayerState):
                raise ValueError("it has no single-player state")
            return f"{self._news()}\n"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        with self._turn():
            done, _ = self._env.step(action=action)
            news = self._news()
            observation = f"\n{news}\n" if news else "\n"
            if not done:
                return observation, 0.0, False, {}
            rewards, players = self._env.close()
            reward = rewards[0] if rewards else 0.0
            if not isinstance(reward, int | float):
                reward = 0.0  # a few games mix up reason and reward when they end on an invalid move
            info = {
                "reason": str(players[0].get("reason")),
                "invalid_move": bool(players[0].get("invalid_move")),
            }
            return observation, float(reward), True, info

    def _news(self) -> str:
        """What the game has said since it was last asked. The wrappers, which would repeat it all, are passed by."""
        _, messages = self._game.get_observation()
        return "\n".join(
            str(text) for _, text, kind in messages if kind is not textarena.ObservationType.PLAYER_ACTION
        )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """This game's random state in place, and what it prints on stderr."""
        with _one_at_a_time, contextlib.redirect_stdout(sys.stderr):
            outside = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(outside)
