"""How far a pipeline has come, as whoever shows it remembers."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from jigsawrl.telemetry.figures import rate


@dataclass(slots=True)
class Track:
    """One pipeline. `stamps` are the ends of its last steps, for the pace."""

    name: str
    total: int
    step: int
    started: float
    stamps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    figures: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    line_at: float = -math.inf

    def seconds_left(self, now: float) -> float | None:
        (first_step, first), (last_step, last) = self.stamps[0], self.stamps[-1]
        if last_step == first_step:
            return None
        pace = (last - first) / (last_step - first_step)
        return max(0.0, pace * (self.total - self.step) - (now - last))

    def made(self, step: int, values: Mapping[str, float], now: float) -> None:
        """A step is done, with its metrics by their names in metrics.jsonl."""
        self.step = step
        self.stamps.append((step, now))
        self.figures = figures(values)
        if "reward" in self.figures:
            self.rewards.append(self.figures["reward"])


def figures(values: Mapping[str, float]) -> dict[str, float]:
    """The figures of one step, those that are there, in the order in which they are shown."""
    tokens, seconds = values.get("perf/tokens"), values.get("timing_s/step")
    found = {
        "reward": values.get("reward/mean"),
        "tokens/s": None if tokens is None or seconds is None else rate(tokens, seconds),
        "length": values.get("response_length/mean"),
        "loss": values.get("actor/loss"),
        "kl": values.get("actor/kl"),
    }
    return {label: float(value) for label, value in found.items() if value is not None}
