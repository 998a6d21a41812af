"""Policies held against each other on the same pipelines, run for real or simulated, in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from jigsawrl.telemetry.figures import rate
from jigsawrl.telemetry.report import Cause, Report
from jigsawrl.telemetry.runlog import RunLog
from jigsawrl.telemetry.text import duration, number

_MOST_CAUSES = 3


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one pipeline."""

    ended: str
    reason: str
    steps: int
    seconds: float
    """The pipeline's time: from its arrival until it ended."""
    alone: float | None
    """The pipeline's time with all workers for itself; None where it is not known."""
    tokens: int
    reward_first: float | None = None
    reward_last: float | None = None
    same_rewards: bool | None = None
    """Whether all rewards equal those of the first run; None where they need not be equal."""
    max_slowdown: float | None = None
    deadline: float | None = None

    @property
    def slowdown(self) -> float | None:
        return self.seconds / self.alone if self.alone and self.ended == "finished" else None

    @property
    def kept(self) -> bool | None:
        """Whether max_slowdown and deadline were met; None where neither was asked for, or it is not known."""
        met = []
        if self.deadline is not None:
            met.append(self.ended == "finished" and self.seconds <= self.deadline)
        if self.max_slowdown is not None and self.slowdown is not None:
            met.append(self.slowdown <= self.max_slowdown)
        return all(met) if met else None

    def times(self, sign: str) -> list[str]:
        """For people: time, time alone, and slowdown with the sign of a ratio."""
        alone = "" if self.alone is None else duration(self.alone)
        return [duration(self.seconds), alone, ratio(self.slowdown, sign)]

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable."""
        figures = {"alone_seconds": self.alone, "slowdown": self.slowdown, "kept": self.kept}
        return {**asdict(self), **figures}


@dataclass(frozen=True, slots=True)
class Side:
    """The pipelines under one policy, run for real or simulated."""

    policy: str
    log: RunLog
    report: Report
    fates: Mapping[str, Fate]
    events: Sequence[dict[str, Any]] = ()
    """The whole event log of a simulation; that of a real run is in its folder."""

    @property
    def seconds(self) -> float:
        return self.report.seconds

    @property
    def tokens(self) -> int:
        return sum(fate.tokens for fate in self.fates.values())

    @property
    def tokens_per_second(self) -> float:
        return rate(self.tokens, self.seconds) or 0.0

    @property
    def slowdowns(self) -> list[float]:
        return [fate.slowdown for fate in self.fates.values() if fate.slowdown is not None]

    @property
    def mean_slowdown(self) -> float | None:
        return fmean(self.slowdowns) if self.slowdowns else None

    @property
    def worst_slowdown(self) -> float | None:
        return max(self.slowdowns, default=None)

    @property
    def failed(self) -> list[str]:
        return [name for name, fate in self.fates.items() if fate.ended != "finished"]

    @property
    def rewards(self) -> str:
        """Whether deterministic pipelines have the rewards that they must have."""
        known = {name: fate.same_rewards for name, fate in self.fates.items()}
        others = [name for name, same in known.items() if same is False]
        return f"differ: {', '.join(others)}" if others else "equal" if True in known.values() else ""

    @property
    def bubbles(self) -> dict[Cause, float]:
        """Parts of all worker time, by cause."""
        whole = self.report.worker_seconds
        return {cause: lost / whole if whole else 0.0 for cause, lost in self.report.bubbles.items()}

    @property
    def largest_bubbles(self) -> str:
        largest = sorted(self.bubbles.items(), key=lambda part: -part[1])[:_MOST_CAUSES]
        return ", ".join(f"{cause} {part:.0%}" for cause, part in largest if part >= 0.005) or "none"

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable."""
        return {
            "policy": self.policy,
            "seconds": self.seconds,
            "setup_seconds": self.log.setup,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "mean_slowdown": self.mean_slowdown,
            "worst_slowdown": self.worst_slowdown,
            "busy_fraction": self.report.busy_fraction,
            "bubbles": self.bubbles,
            "pipelines": {name: fate.as_dict() for name, fate in self.fates.items()},
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    workers: int
    baseline: Side
    """What the others are held against. Of a simulation it need not be one of `runs`."""
    runs: Sequence[Side]

    @property
    def simulated(self) -> bool:
        return self.baseline.log.simulated

    @property
    def best(self) -> str | None:
        """The policy with the most tokens a second, of equals the one with the least mean slowdown.

        Only policies under which every pipeline came to its end are considered.
        """
        whole = [run for run in self.runs if not run.failed]
        return min(whole, key=_rank).policy if whole else None

    def ratio(self, run: Side) -> float:
        """Tokens a second of a run over those of the baseline."""
        base = self.baseline
        if not base.tokens_per_second:
            return 1.0
        return run.tokens / base.tokens * (base.seconds / run.seconds) if run.seconds else 0.0

    def columns(self, sign: str) -> dict[str, list[str]]:
        """The table of the policies: what stands below each head. `sign` stands after ratios."""
        runs = self.runs
        rates = {"tokens/s": [number(run.tokens_per_second) for run in runs]}
        bubbles = {"largest bubbles": [run.largest_bubbles for run in runs]}
        return {
            "policy": [run.policy for run in runs],
            "time": [duration(run.seconds) for run in runs],
            **({} if self.simulated else rates),
            f"vs {self.baseline.policy}": [ratio(self.ratio(run), sign) for run in runs],
            "slowdown": [ratio(run.mean_slowdown, sign) for run in runs],
            "worst": [ratio(run.worst_slowdown, sign) for run in runs],
            "busy": [f"{run.report.busy_fraction:.0%}" for run in runs],
            **(bubbles if self.simulated else {"rewards": [run.rewards for run in runs]}),
        }

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable. A run's ratio is there under a name that says what it is over, too."""
        against = self.baseline.policy
        ratios = {run.policy: self.ratio(run) for run in self.runs}
        return {
            "name": self.name,
            "simulated": self.simulated,
            "workers": self.workers,
            "against": against,
            "best": self.best,
            "policies": [
                {**run.as_dict(), **dict.fromkeys(("ratio", f"throughput_vs_{against}"), ratios[run.policy])}
                for run in self.runs
            ],
        }


def _rank(run: Side) -> tuple[float, float]:
    return -float(f"{run.tokens_per_second:.9g}"), run.mean_slowdown or 0.0


def ratio(value: float | None, sign: str) -> str:
    """1.77x; nothing where it is not known."""
    return "" if value is None else f"{value:.2f}{sign}"
