"""What is foreseen of a pipeline, and how it follows what its phases turn out to be. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.config.settings import RunConfig
from jigsawrl.config.shapes import pipeline_shape, prior_lengths
from jigsawrl.graph.cost import Costs
from jigsawrl.graph.cpu import cpu_costs
from jigsawrl.graph.forecast import Floats, Forecast
from jigsawrl.graph.gpu import gpu_costs
from jigsawrl.graph.hardware import CPU, Hardware
from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import Workload, quantiles
from jigsawrl.policies.state import Phase
from jigsawrl.runtime.company import Company
from jigsawrl.runtime.messages import Over

STEPS = 8
"""Steps whose lengths are remembered."""
SEQUENCES = 256
"""Lengths by which a first step is foreseen."""
LEAST = 0.25
"""Weight of what was seen last against all that was known before; of the first few, that of a mean."""
ENOUGH = 2
"""Times that a kind of phase must have been learned from alone, before what others do to it is."""
BETWEEN_S, SELDOM = 2.0, 3
"""Phases that end sooner after each other are learned from together, for that takes a millisecond; so many times as
long where they were learned from as often."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A phase that ended."""

    over: Over
    seconds: float
    alone: bool
    """Nobody else was on its workers."""
    by_turns: bool = False
    """Who was took turns with it: then it was at work for as long as it is alone, on a CPU."""
    company: Company = field(default_factory=Company)
    on_each: int = 1
    """Of its actors, that took turns on a worker: a gang may train on fewer workers than it has actors."""

    @property
    def busy(self) -> float:
        """Seconds in which its busiest worker was at work for it."""
        at_work = self.on_each * max(self.over.busy, default=0.0)
        return min(at_work, max(0.0, self.seconds - self.over.tool_seconds))

    @property
    def width(self) -> int:
        """Workers on which it was."""
        return (
            self.over.engines if self.over.phase == "rollout" else max(1, len(self.over.busy) // self.on_each)
        )

    @property
    def overhead(self) -> float:
        """Seconds in which its workers had nothing to do: its driver was at work, and messages under way."""
        return max(0.0, self.seconds - self.busy - self.over.tool_seconds)


@dataclass(frozen=True, slots=True)
class Followed:
    """A phase by which the outlook was put right."""

    company: Company
    present: float
    """Seconds in which it did not stand still, and did not wait for tools."""
    took: float
    """Seconds of those in which it was at work."""
    alone: float | None
    """What that is alone; None where it was never measured."""


@dataclass(slots=True)
class Learned:
    """Of one pipeline."""

    outlook: Outlook
    steps_seen: list[Floats] = field(default_factory=list)
    """Lengths of its last steps."""
    seen: dict[Phase, list[Seen]] = field(default_factory=lambda: {"rollout": [], "training": []})
    """Phases that the outlook does not know of yet."""
    renewed: dict[Phase, float] = field(default_factory=dict)
    """When it last followed what was seen."""
    times: dict[Phase, int] = field(default_factory=dict)
    """How often it did."""
    times_alone: dict[Phase, int] = field(default_factory=dict)
    """How often by phases that were alone."""

    def ended(self, phase: Seen, now: float) -> Followed | None:
        """None where no other outlook came of it."""
        kind = phase.over.phase
        if phase.over.empty:
            return None
        self.seen[kind].append(phase)
        between = BETWEEN_S * min(self.times.get(kind, 1), SELDOM)
        if now - self.renewed.get(kind, float("-inf")) < between:
            return None
        self.renewed[kind] = now
        return self._follow(kind)

    def _follow(self, kind: Phase) -> Followed:
        """What these phases needed is held against what was foreseen for lengths as they turned out; of phases on as
        many workers as the last."""
        width = self.seen[kind][-1].width
        seen, self.seen[kind] = [each for each in self.seen[kind] if each.width == width], []
        self.times[kind] = self.times.get(kind, 0) + 1
        weight = max(1 / self.times[kind], LEAST)
        outlook, last = self.outlook, seen[-1].over
        shape, forecast = outlook.shape, outlook.forecast
        if kind == "rollout":
            turns = max(1, round(fmean(each.over.turns for each in seen)))
            waits = fmean(each.over.tool_seconds for each in seen) / (turns - 1) if turns > 1 else 0.0
            shape = replace(shape, turns=turns, tool_seconds=_drawn(shape.tool_seconds, waits, weight))
            drawn = [np.array(each.over.lengths, dtype=np.float64) for each in seen if each.over.lengths]
            guessed = weight == 1 and outlook.costs.derived  # nothing was measured before, here or elsewhere
            if drawn and guessed:
                forecast = Forecast((), shape.max_tokens)
            for lengths in drawn:
                forecast = forecast.after(lengths)
            self.steps_seen = [*self.steps_seen, *drawn][-STEPS:]
            as_it_was = Forecast.from_prior(drawn[-1], shape.max_tokens) if last.lengths else forecast
            known = Outlook(shape, outlook.costs, outlook.hardware, as_it_was)
            expected = _at_work(known.engine(width, 1).segments)
        else:
            tokens = float(self.steps_seen[-1].mean()) * shape.sequences if self.steps_seen else None
            expected = _at_work(outlook.training(width, tokens))
        found = self._held_against(expected, seen[-1])
        costs = self._costs_after(kind, seen, expected, weight)
        if kind == "rollout":
            self.outlook = Outlook(shape, costs, outlook.hardware, forecast)
        else:
            self.outlook = outlook.with_training(costs)
        return found

    def _held_against(self, expected: float, phase: Seen) -> Followed:
        """A phase, and what it was thought to take alone."""
        kind, costs = phase.over.phase, self.outlook.costs
        known = not costs.derived or self.times_alone.get(kind, 0) >= ENOUGH
        present = phase.seconds - phase.over.tool_seconds - phase.company.paused
        took = present - (costs.rollout_fixed_seconds if kind == "rollout" else costs.sync)
        if self.outlook.hardware.name == CPU:  # a process knows how long it was at work itself
            took = phase.busy
        return Followed(phase.company, present, took, expected if known else None)

    def _costs_after(self, kind: Phase, seen: list[Seen], expected: float, weight: float) -> Costs:
        """Phases that were alone are at work for what they take alone, and so are those that took turns. On a CPU any
        is better than none."""
        costs, own, alone = self.outlook.costs, seen, [each for each in seen if each.alone]
        times = self.times_alone.get(kind, 0) + bool(alone)
        of_alone = max(1 / max(times, 1), LEAST)
        if not seen[-1].by_turns and (times or self.outlook.hardware.name != CPU):
            own, weight = alone, of_alone
        if own:
            costs = followed(costs, kind, fmean(each.busy for each in own), expected, weight)
        if alone:
            self.times_alone[kind] = times
            costs = with_overhead(costs, kind, fmean(each.overhead for each in alone), of_alone)
        return costs

    def workload(self) -> Workload | None:
        """What was learned, for the next run; None before its first step."""
        for kind, seen in self.seen.items():
            if seen:
                self._follow(kind)
        outlook, shape = self.outlook, self.outlook.shape
        if not self.steps_seen:
            return None
        return Workload(
            name=shape.name,
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
            costs=self._measured(outlook.costs),
        )

    def _measured(self, costs: Costs) -> Costs:
        """For the next run; as they were where nothing of them was measured."""
        alone = all(kind in self.times_alone for kind in self.times)
        if self.outlook.hardware.name != CPU and not alone:
            return costs
        return replace(costs, source="measured by a run of these pipelines", derived=False)


def _drawn(known: float, seen: float, weight: float) -> float:
    return (1 - weight) * known + weight * seen


def with_overhead(costs: Costs, phase: Phase, seconds: float, weight: float) -> Costs:
    if phase == "rollout":
        return replace(costs, rollout_fixed_seconds=_drawn(costs.rollout_fixed_seconds, seconds, weight))
    return replace(costs, sync=_drawn(costs.sync, seconds, weight))


def _at_work(segments: Sequence[Segment]) -> float:
    """Seconds of these sub-stages in which a worker is busy."""
    return sum(segment.seconds for segment in segments if SIGNATURES[segment.kind] not in ("host", "link"))


def followed(costs: Costs, phase: Phase, busy: float, expected: float, weight: float) -> Costs:
    """Costs after phases that kept their busiest worker at work for so long."""
    if not (busy > 0 and expected > 0):
        return costs
    off = math.log(busy / expected)
    if weight < 1:  # a first measurement is all that is known; a later one may be an outlier
        off = min(max(off, -1.0), 1.0)
    factor = math.exp(weight * off)
    error = math.sqrt((1 - weight) * costs.errors.get(phase, 0.0) ** 2 + weight * math.expm1(abs(off)) ** 2)
    errors = {**costs.errors, phase: error}
    if phase == "rollout":
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
    ranks_on_each: int = 1,
) -> Outlook:
    """Before anything was seen of it in this run; `known` is what an earlier one learned."""
    shape = replace(pipeline_shape(name, run, entry), whole=True, ranks_on_each=ranks_on_each)
    if known is not None:
        waits = max(1, round(known.turns) - 1)
        shape = replace(shape, turns=max(1, round(known.turns)), tool_seconds=known.tool_seconds / waits)
        costs = replace(known.costs, hardware=worker)
        return Outlook(shape, costs, worker, known.forecast(shape.max_tokens))
    lengths = prior_lengths(shape.max_tokens, (np.arange(SEQUENCES) + 0.5) / SEQUENCES)
    costs = (cpu_costs if worker.name == CPU else gpu_costs)(shape.model, worker, workers)
    return Outlook(shape, costs, worker, Forecast.from_prior(lengths, shape.max_tokens))
