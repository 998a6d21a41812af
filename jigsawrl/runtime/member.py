"""A pipeline as the scheduler knows it: its processes, its budget of retries, and what is foreseen of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.config.settings import RunConfig
from jigsawrl.config.shapes import pipeline_shape, prior_lengths
from jigsawrl.graph.cost import Costs, follow
from jigsawrl.graph.cpu import cpu_costs
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.outlook import Outlook
from jigsawrl.runtime.family import Family
from jigsawrl.runtime.messages import Ends, Over
from jigsawrl.telemetry.events import Substage

RETRIES = 3
"""Deaths in a row, without a step in between, after which a pipeline is given up."""
SEQUENCES = 256
"""Lengths by which a first step is foreseen."""
MEMORY = 0.5
"""Weight of what was known of a tool's latency against what was seen last."""


@dataclass(slots=True)
class Member:
    name: str
    config: RunConfig
    out: Path
    outlook: Outlook
    arrival: float
    family: Family | None = None
    began: bool = False
    asked: tuple[str, int] | None = None
    """Phase and step that its driver waits for."""
    done: int = 0
    furthest: int = 0
    """The last step that it ever made."""
    deaths: int = 0
    ends: Ends | None = None
    """What its driver said last."""
    ended: str | None = None
    """finished, failed, interrupted; None while it is under way."""
    reason: str = ""
    foreseen: float = 0.0
    """Seconds alone that its running phase was foreseen to take."""
    since: float = 0.0
    """When its phase started."""
    finished_at: float | None = None
    training: Substage | None = None
    """What its training gang was at last."""
    paused: set[int] = field(default_factory=set)
    """Engines that stand still."""

    @property
    def sentinels(self) -> list[int]:
        """By which the end of its processes is noticed."""
        return self.family.sentinels if self.family is not None else []

    def learn(self, over: Over) -> None:
        """What is foreseen follows what a phase turned out to be."""
        outlook = self.outlook
        costs, shape, forecast = outlook.costs, outlook.shape, outlook.forecast
        if over.phase == "rollout":
            if over.lengths:
                forecast = forecast.after(np.array(over.lengths, dtype=np.float64))
            if over.tool_seconds > 0 and shape.turns > 1:
                seen = over.tool_seconds / (shape.turns - 1)
                shape = replace(shape, tool_seconds=MEMORY * shape.tool_seconds + (1 - MEMORY) * seen)
            expected = _at_work(outlook.engine(over.engines, 1).segments)
        else:
            expected = _at_work(outlook.training(len(over.busy)))
        costs = followed(costs, over, expected)
        self.outlook = Outlook(shape, costs, outlook.hardware, forecast)


def _at_work(segments: Sequence[Segment]) -> float:
    """Seconds of these sub-stages in which a worker is busy."""
    return sum(segment.seconds for segment in segments if SIGNATURES[segment.kind] not in ("host", "link"))


def followed(costs: Costs, over: Over, expected: float) -> Costs:
    """Costs after a phase that kept its busiest worker at work for so long."""
    factor, error = follow(expected, max(over.busy, default=0.0), costs.errors.get(over.phase, 0.3))
    errors = {**costs.errors, over.phase: error}
    if over.phase == "rollout":
        return replace(
            costs,
            decoding=costs.decoding.scaled(factor),
            prefilling=costs.prefilling.scaled(factor),
            errors=errors,
        )
    return replace(
        costs,
        logprob=costs.logprob.scaled(factor),
        ref=costs.ref.scaled(factor),
        grad=costs.grad.scaled(factor),
        optim=costs.optim * factor,
        errors=errors,
    )


def first_outlook(
    name: str, run: RunConfig, entry: PipelineConfig, worker: Hardware, workers: int
) -> Outlook:
    """Before anything was seen of it."""
    shape = pipeline_shape(name, run, entry)
    lengths = prior_lengths(shape.max_tokens, (np.arange(SEQUENCES) + 0.5) / SEQUENCES)
    costs = cpu_costs(shape.model, worker, workers)
    return Outlook(shape, costs, worker, Forecast.from_prior(lengths, shape.max_tokens))
