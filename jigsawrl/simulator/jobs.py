"""What is simulated: pipelines whose true lengths and durations only the simulator knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jigsawrl.graph.cost import Costs
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.shape import PipelineShape

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Job:
    """A pipeline, what its steps will turn out to be, and what is believed of it at first."""

    shape: PipelineShape
    costs: Costs
    lengths: Callable[[int], Floats]
    """Response lengths of a step, the same at every call."""
    forecast: Forecast
    """Of lengths, as a profile has it."""
    rollout_workers: tuple[int, ...] | None = None
    """Of those that only roll out, the ones it uses; None: all."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker dies, and comes back or does not."""

    worker: int
    at: float
    back: float = float("inf")
