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
from jigsawrl.graph.forecast import Floats, Forecast
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import Workload, quantiles
from jigsawrl.policies.state import Phase
from jigsawrl.runtime.family import Family
from jigsawrl.runtime.messages import Ends, Over
from jigsawrl.telemetry.events import Substage

RETRIES = 3
"""Deaths in a row, without a step in between, after which a pipeline is given up."""
STEPS = 8
"""Steps whose lengths are remembered."""
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
    asked: tuple[Phase, int] | None = None
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
    held: bool = False
    """Whether somebody wants it to wait."""
    cancelled: bool = False
    alone: bool = True
    """Whether nobody else was on its workers while its phase ran."""
    steps_seen: list[Floats] = field(default_factory=list)
    """Lengths of its last steps."""

    @property
    def standing(self) -> str:
        if self.held:
            return "paused"
        return "under way" if self.began else "set-up" if self.family else "to come"

    @property
    def sentinels(self) -> list[int]:
        """By which the end of its processes is noticed."""
        return self.family.sentinels if self.family is not None else []

    def made(self, step: int) -> None:
        """A step is done. One that is made again does not make up for deaths."""
        self.done = step
        if step > self.furthest:
            self.furthest, self.deaths = step, 0

    def learn(self, over: Over, seconds: float) -> None:
        """What is foreseen follows what a phase of so many seconds turned out to be."""
        outlook = self.outlook
        costs, shape, forecast = outlook.costs, outlook.shape, outlook.forecast
        if over.phase == "rollout":
            if over.lengths:
                lengths = np.array(over.lengths, dtype=np.float64)
                forecast = forecast.after(lengths)
                self.steps_seen = [*self.steps_seen, lengths][-STEPS:]
            turns = max(1, round(over.turns))
            waits = over.tool_seconds / (turns - 1) if turns > 1 else 0.0
            shape = replace(shape, turns=turns, tool_seconds=_drawn(shape.tool_seconds, waits))
            expected = _at_work(outlook.engine(over.engines, 1).segments)
        else:
            expected = _at_work(outlook.training(len(over.busy)))
        costs = followed(costs, over, expected)
        if self.alone:
            costs = with_overhead(costs, over, seconds - max(over.busy) - over.tool_seconds)
        self.outlook = Outlook(shape, costs, outlook.hardware, forecast)

    def workload(self) -> Workload | None:
        """What was learned of it, for the next run; None before its first step."""
        outlook, shape = self.outlook, self.outlook.shape
        if not self.steps_seen:
            return None
        return Workload(
            name=self.name,
            model=shape.model,
            sequences=shape.sequences,
            samples=shape.samples,
            prompt_tokens=shape.prompt_tokens,
            observation_tokens=0.0,
            max_tokens=shape.max_tokens,
            turns=shape.turns,
            tool_seconds=shape.tool_seconds * (shape.turns - 1),
            reference=shape.reference,
            old_logprobs=shape.old_logprobs,
            gpus=outlook.costs.gpus,
            tp=1,
            quantiles=tuple(map(quantiles, self.steps_seen)),
            reconstructed=False,
            costs=replace(outlook.costs, source="measured by a run of these pipelines", derived=False),
        )


def _drawn(known: float, seen: float) -> float:
    return MEMORY * known + (1 - MEMORY) * seen


def with_overhead(costs: Costs, over: Over, seconds: float) -> Costs:
    """Seconds of a phase in which its workers had nothing to do: its driver was at work, and messages under way."""
    seconds = max(0.0, seconds)
    if over.phase == "rollout":
        return replace(costs, rollout_fixed_seconds=_drawn(costs.rollout_fixed_seconds, seconds))
    return replace(costs, sync=_drawn(costs.sync, seconds))


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
    name: str,
    run: RunConfig,
    entry: PipelineConfig,
    worker: Hardware,
    workers: int,
    known: Workload | None,
) -> Outlook:
    """Before anything was seen of it in this run; `known` is what an earlier one learned."""
    shape = pipeline_shape(name, run, entry)
    if known is not None:
        waits = max(1, round(known.turns) - 1)
        shape = replace(shape, turns=max(1, round(known.turns)), tool_seconds=known.tool_seconds / waits)
        forecast = Forecast.from_prior(known.lengths(0), shape.max_tokens)
        return Outlook(shape, replace(known.costs, hardware=worker), worker, forecast)
    lengths = prior_lengths(shape.max_tokens, (np.arange(SEQUENCES) + 0.5) / SEQUENCES)
    costs = cpu_costs(shape.model, worker, workers)
    return Outlook(shape, costs, worker, Forecast.from_prior(lengths, shape.max_tokens))
