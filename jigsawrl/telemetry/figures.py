"""The figures of a run: what each of them is, and how it is computed.

Closing tables, `--json`, the report, `jigsaw compare` and the Python API show what is computed here.

    time of a run        from the first phase of any pipeline until the last pipeline ended, or until the last event
                         of a run that is under way or was killed. Set-up is left out, and so is the time in which
                         the run was down: from its last event to its first phase after `--resume`
    time of a pipeline   from its arrival until it ended, on the same clock, without the times in which `jigsaw pause`
                         held it. A pipeline arrives when it is set up, whether it is in the run file or was submitted
    steps, tokens        those of the steps in metrics.jsonl that were made in this run folder: a step that was lost
                         to a kill and made again counts once
    tokens/s             tokens divided by time, of a pipeline or of the run. A step that was lost has taken time
    first reward         the mean reward of the first step, before any update
    last reward          the mean of the rewards of the last twentieth of the steps, of 1 to 10 steps
    slowdown             the time of a pipeline divided by the time that it takes alone

The live display and TensorBoard show single steps instead. The slowdown of a cluster's job spans all of its runs and
the waits between them; `daemon/ledger.py` defines it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STAGES = {
    "timing_s/gen": "generation",
    "timing_s/reward": "rewards",
    "timing_s/old_log_prob": "old log-probs",
    "timing_s/ref": "reference log-probs",
    "timing_s/values": "critic's values",
    "timing_s/adv": "advantages",
    "timing_s/update_critic": "critic update",
    "timing_s/update_actor": "update",
    "timing_s/update_weights": "weight sync",
    "timing_s/checkpoint": "checkpoints",
}
MOST_LAST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Life:
    """When a pipeline was there, on the clock of its run, and when it was paused meanwhile."""

    arrived: float
    ended: float
    """Or the run's last event, while it has not ended."""
    pauses: tuple[tuple[float, float], ...] = ()

    @property
    def seconds(self) -> float:
        """The time of the pipeline."""
        within = ((max(t0, self.arrived), min(t1, self.ended)) for t0, t1 in self.pauses)
        paused = math.fsum(max(0.0, t1 - t0) for t0, t1 in within)
        return max(0.0, self.ended - self.arrived - paused)


def rate(tokens: float, seconds: float) -> float | None:
    """Tokens per second; None where no time has passed."""
    return tokens / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one stage over the whole run, and their share of the pipeline's time."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one pipeline. `window` is the number of steps whose mean the last reward is."""

    steps: int
    window: int
    reward_first: float | None
    reward_last: float | None
    rewards: list[float]
    tokens: int
    seconds: float
    generation_seconds: float
    stages: list[Stage]
    reward_errors: int
    reward_none: int
    """Samples that were left out, as no reward applied to them."""
    non_finite: dict[str, int]
    cut_off: float | None
    """Share of samples that ended at a limit of tokens or turns, mean of all steps."""

    @property
    def tokens_per_second(self) -> float | None:
        return rate(self.tokens, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable, without the reward of every step."""
        fields = asdict(self)
        del fields["rewards"]
        return {**fields, "tokens_per_second": self.tokens_per_second}


def summarize(rows: Sequence[Mapping[str, Any]], seconds: float) -> Summary:
    """The figures of a pipeline from the lines of its metrics.jsonl, finished or not, and its time."""
    window = min(MOST_LAST_STEPS, max(1, round(0.05 * len(rows))))
    return Summary(
        steps=len(rows),
        window=window,
        reward_first=_mean(_column(rows[:1], "reward/mean")),
        reward_last=_mean(_column(rows[-window:], "reward/mean")),
        rewards=_column(rows, "reward/mean"),
        tokens=round(math.fsum(_column(rows, "perf/tokens"))),
        seconds=seconds,
        generation_seconds=math.fsum(_column(rows, "timing_s/gen")),
        stages=_stages(rows, seconds),
        reward_errors=round(math.fsum(_column(rows, "reward/errors"))),
        reward_none=round(math.fsum(_column(rows, "reward/none"))),
        non_finite=_non_finite(rows),
        cut_off=_mean(_column(rows, "response_length/clip_ratio")),
    )


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _stages(rows: Sequence[Mapping[str, Any]], total: float) -> list[Stage]:
    """The known stages in the order of a step, others under their own names, and what no stage accounts for."""
    names = {key for row in rows for key in row if key.startswith("timing_s/")} - {"timing_s/step"}
    spent = {key: math.fsum(_column(rows, key)) for key in [*STAGES, *sorted(names - STAGES.keys())]}
    spent = {STAGES.get(key, key.removeprefix("timing_s/")): seconds for key, seconds in spent.items()}
    other = total - math.fsum(spent.values())
    if other > 0.01 * total:
        spent["other"] = other
    return [
        Stage(name, seconds, seconds / total if total else 0.0) for name, seconds in spent.items() if seconds
    ]


def _non_finite(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """In how many steps each metric was NaN or infinite."""
    counts: dict[str, int] = {}
    for row in rows:
        for name in row.get("non_finite", {}):
            counts[name] = counts.get(name, 0) + 1
    return counts
