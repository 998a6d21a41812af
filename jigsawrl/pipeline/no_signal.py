"""Notices when the rewards of several steps are equal, and when most answers are cut off. Each is said once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jigsawrl.config.combinations import GROUP_ADVANTAGES
from jigsawrl.config.tasks import EpisodeTask
from jigsawrl.pipeline.trajectory import Trajectory
from jigsawrl.telemetry.text import number

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

STEPS = 3
"""Steps in a row that are looked at: one step, or two, may be chance."""
MOST = 0.5
"""Share of cut-off samples, of each of these steps, from which on it is said."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step's samples were rewarded with, and how many were cut off."""

    number: int
    lowest: float
    highest: float
    flat: bool
    """Whether no sample was better than those it is compared with."""
    samples: int
    cut_off: int


class NoSignal:
    """Looks at the samples of each step; what is to be said about the last ones is said once."""

    def __init__(self, config: RunConfig) -> None:
        self._by_prompt = config.algorithm.advantage in GROUP_ADVANTAGES
        self._limit, self._fix = _limits(config)
        self._flat_said = False
        self._cut_off_said = config.rollout.ignore_eos  # all are to be cut off
        self._steps: deque[Step] = deque(maxlen=STEPS)

    def look(self, step: int, samples: Sequence[Trajectory]) -> str | None:
        """What is to be said after a step."""
        self._steps.append(self._step(step, samples))
        if len(self._steps) < STEPS:
            return None
        share = sum(each.cut_off for each in self._steps) / sum(each.samples for each in self._steps)
        flat = all(each.flat for each in self._steps) and not self._flat_said
        cut_off = all(s.cut_off >= MOST * s.samples for s in self._steps) and not self._cut_off_said
        if not flat and not cut_off:
            return None
        self._flat_said, self._cut_off_said = self._flat_said or flat, self._cut_off_said or cut_off
        said = f"{share:.0%} of the samples were cut off at {self._limit}"
        if flat:
            said = f"{self._equal()}, so no answer counts as better than another; {said}"
        if cut_off:
            said = f"{said}; for longer answers raise {self._fix}"
        return f"steps {self._steps[0].number} to {step}: {said}"

    def _step(self, step: int, samples: Sequence[Trajectory]) -> Step:
        rewards: dict[int, set[float]] = {}
        for each in samples:
            if each.reward is not None:
                rewards.setdefault(each.prompt if self._by_prompt else 0, set()).add(each.reward)
        every = set().union(*rewards.values())
        flat = bool(every) and all(len(group) == 1 for group in rewards.values())
        cut_off = sum(each.truncated for each in samples)
        return Step(step, min(every, default=0.0), max(every, default=0.0), flat, len(samples), cut_off)

    def _equal(self) -> str:
        lowest, highest = min(s.lowest for s in self._steps), max(s.highest for s in self._steps)
        if lowest == highest:
            return f"all rewards are {number(lowest)}"
        return "the rewards of each prompt's samples are equal" if self._by_prompt else "rewards are equal"


def _limits(config: RunConfig) -> tuple[str, str]:
    """What cuts a sample off, and the settings that do."""
    tokens = f"{config.rollout.max_tokens} tokens"
    if isinstance(config.task, EpisodeTask):
        return f"{tokens} or {config.task.max_turns} turns", "rollout.max_tokens or task.max_turns"
    return tokens, "rollout.max_tokens"
