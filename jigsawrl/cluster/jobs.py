"""What a cluster knows of a job: how long its phases take on each pool, what it keeps there, what it was promised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of a phase: log-normal about a typical one, and never above the worst."""

    typical: float
    """The median."""
    worst: float
    """With every response at the token limit."""
    spread: float = 0.0
    """Standard deviation of the logarithm, from step to step."""

    @classmethod
    def fixed(cls, seconds: float) -> Duration:
        return cls(seconds, seconds)

    def at(self, level: float) -> float:
        """The quantile at this level; 1 is the worst."""
        return self.worst if level >= 1 else self.drawn(NormalDist().inv_cdf(max(level, 1e-9)))

    def drawn(self, deviate: float) -> float:
        """For one draw of the standard normal."""
        return min(self.worst, self.typical * math.exp(self.spread * deviate))

    def scaled(self, factor: float) -> Duration:
        return Duration(self.typical * factor, self.worst * factor, self.spread)

    def grown(self, factor: float) -> Duration:
        """Typically so much longer; the token limit stays where it is."""
        return replace(self, typical=min(self.worst, self.typical * factor))


@dataclass(frozen=True, slots=True)
class Job:
    """One synchronous RL job: rollout, training, and again."""

    name: str
    rollout: Mapping[str, Duration]
    """By pool, on `rollout_nodes` of its nodes."""
    training: Mapping[str, Duration]
    """By pool, on `training_nodes` of its nodes, weight sync included."""
    max_slowdown: float = 1.5
    """Its SLO: times as long as alone, at most."""
    steps: int = 1
    rollout_nodes: int = 1
    training_nodes: int = 1
    rollout_gb: float = 0.0
    """State that stays in the host memory of each of its rollout nodes."""
    training_gb: float = 0.0
    """The same of each of its training nodes, at its own number of them."""
    warm_rollout: float = 0.0
    """Seconds to bring resident state to the devices, where others used them in between."""
    warm_training: float = 0.0
    cold_seconds: float = 0.0
    """To start on nodes that do not hold its state."""
    arrival: float = 0.0
    """Hours."""
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """Hours after its arrival."""
    tail: float = 0.0
    """The part of a rollout in which less than a fifth of its responses is still going."""
    drift: float = 0.0
    """By which part its phases are longer in the end than in the beginning, as its answers grow (or shrink)."""

    def runs_on(self, rollout_pool: str, training_pool: str) -> bool:
        """Whether its phases can run there."""
        return rollout_pool in self.rollout and training_pool in self.training

    def durations(self, rollout_pool: str, training_pool: str, nodes: int) -> tuple[Duration, Duration]:
        """Of its phases there, with training spread over so many nodes."""
        factor = self.training_nodes / nodes
        training = self.training[training_pool]
        return self.rollout[rollout_pool], training if factor == 1 else training.scaled(factor)

    def grown(self, rollout: float, training: float) -> Job:
        """With phases that typically take so many times as long."""
        return replace(
            self,
            rollout={pool: each.grown(rollout) for pool, each in self.rollout.items()},
            training={pool: each.grown(training) for pool, each in self.training.items()},
        )
