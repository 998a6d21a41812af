"""How long a pipeline's phases are predicted to take, corrected by what they took. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from statistics import fmean

import numpy as np

from jigsawrl.graph.cost import Costs
from jigsawrl.graph.forecast import Floats, Forecast
from jigsawrl.graph.hardware import CPU
from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import Workload, quantiles
from jigsawrl.scheduler.colocation import Colocation, Followed
from jigsawrl.scheduler.events import PhaseDone

STEPS = 8
"""Steps whose lengths are remembered."""
LEAST = 0.25
"""Least weight of what was seen last against all that was known before; the first few count as in a mean."""
ENOUGH = 2
"""Times that a kind of phase must have been learned from alone before its neighbours' effect on it is learned."""
BETWEEN_S, SELDOM = 2.0, 3
"""Seconds: phases that end sooner after each other are learned from together, as learning takes a millisecond. This
time grows with how often a kind of phase was learned from, up to `SELDOM` times as long."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A phase that ended, as it was observed."""

    over: PhaseDone
    seconds: float
    alone: bool
    """Whether no other pipeline was on its workers."""
    by_turns: bool = False
    """Whether its workers were time-sliced: then, on a CPU, it was at work for as long as it is alone."""
    colocation: Colocation = field(default_factory=Colocation)
    on_each: int = 1
    """Number of its actors that took turns on a worker: a gang may train on fewer workers than it has actors."""

    @property
    def busy(self) -> float:
        """Seconds in which its busiest worker was at work for it."""
        at_work = self.on_each * max(self.over.busy, default=0.0)
        return min(at_work, max(0.0, self.seconds - self.over.tool_seconds))

    @property
    def width(self) -> int:
        """Number of engines of a rollout, or of workers of a training."""
        return (
            self.over.engines if self.over.phase == "rollout" else max(1, len(self.over.busy) // self.on_each)
        )

    @property
    def overhead(self) -> float:
        """Seconds in which its workers had nothing to do: its driver was at work, and messages under way."""
        return max(0.0, self.seconds - self.busy - self.over.tool_seconds)


@dataclass(slots=True)
class Learned:
    """What is learned of one pipeline."""

    outlook: Outlook
    steps_seen: list[Floats] = field(default_factory=list)
    """Lengths of its last steps."""
    seen: dict[str, list[Seen]] = field(default_factory=lambda: {"rollout": [], "training": []})
    """Phases that the outlook does not know of yet."""
    renewed: dict[str, float] = field(default_factory=dict)
    """When each kind of phase was last learned from."""
    times: Counter[str] = field(default_factory=Counter)
    """How often each kind of phase was learned from."""
    times_alone: Counter[str] = field(default_factory=Counter)
    """How often each kind of phase was learned from alone."""

    def ended(self, phase: Seen, now: float) -> Followed | None:
        """Learns from a phase that ended, perhaps with others later; None where the outlook stays as it is."""
        kind = phase.over.phase
        if phase.over.empty or kind not in self.seen:
            return None
        self.seen[kind].append(phase)
        between = BETWEEN_S * min(max(self.times[kind], 1), SELDOM)
        if now - self.renewed.get(kind, float("-inf")) < between:
            return None
        self.renewed[kind] = now
        return self._follow(kind)

    def _follow(self, kind: str) -> Followed:
        """Corrects the outlook: what phases took is compared with what is predicted for their real lengths. Of those
        that were seen, the ones on as many workers as the last count."""
        width = self.seen[kind][-1].width
        seen, self.seen[kind] = [each for each in self.seen[kind] if each.width == width], []
        self.times[kind] += 1
        weight = max(1 / self.times[kind], LEAST)
        outlook, last = self.outlook, seen[-1].over
        shape, forecast = outlook.shape, outlook.forecast
        if kind == "rollout":
            turns = max(1, round(fmean(each.over.turns for each in seen)))
            waits = fmean(each.over.tool_seconds for each in seen) / (turns - 1) if turns > 1 else 0.0
            shape = replace(shape, turns=turns, tool_seconds=_drawn(shape.tool_seconds, waits, weight))
            drawn = [np.array(each.over.lengths, dtype=np.float64) for each in seen if each.over.lengths]
            if drawn and weight == 1 and outlook.costs.derived:  # nothing was measured, here or elsewhere
                forecast = Forecast((), shape.max_tokens)
            forecast = reduce(Forecast.after, drawn, forecast)
            self.steps_seen = [*self.steps_seen, *drawn][-STEPS:]
            as_it_was = Forecast.from_prior(drawn[-1], shape.max_tokens) if last.lengths else forecast
            known = Outlook(shape, outlook.costs, outlook.hardware, as_it_was)
            segments = known.engine(width, shape.tp).segments
        else:
            tokens = float(self.steps_seen[-1].mean()) * shape.sequences if self.steps_seen else None
            segments = outlook.training(width, tokens)
        found = self._held_against(segments, seen[-1])
        costs = self._costs_after(kind, seen, segments, weight)
        after = Outlook(shape, costs, outlook.hardware, forecast)
        self.outlook = after if kind == "rollout" else outlook.with_training(costs)
        return found

    def _held_against(self, segments: Sequence[Segment], phase: Seen) -> Followed:
        """Compares a phase with what it was predicted to take alone."""
        kind, costs = phase.over.phase, self.outlook.costs
        known = not costs.derived or self.times_alone[kind] >= ENOUGH
        present = phase.seconds - phase.over.tool_seconds - phase.colocation.paused
        fixed = costs.rollout_fixed_seconds if kind == "rollout" else costs.sync
        took = present - fixed - _of_its_own(kind, segments)
        if self.outlook.hardware.name == CPU:  # a process knows how long it was at work itself
            took = phase.busy
        return Followed(phase.colocation, present, took, _at_work(segments) if known else None)

    def _costs_after(self, kind: str, seen: list[Seen], segments: Sequence[Segment], weight: float) -> Costs:
        """Costs after these phases. Those that were alone, or took turns, were at work for what they take alone. On a
        CPU any are better than none."""
        costs, own, alone = self.outlook.costs, seen, [each for each in seen if each.alone]
        times = self.times_alone[kind] + bool(alone)
        of_alone = max(1 / max(times, 1), LEAST)
        if not seen[-1].by_turns and (times or self.outlook.hardware.name != CPU):
            own, weight = alone, of_alone
        if own:
            costs = followed(costs, kind, fmean(each.busy for each in own), _at_work(segments), weight)
        if alone:
            self.times_alone[kind] = times
            overhead = fmean(each.overhead for each in alone) - _of_its_own(kind, segments)
            costs = with_overhead(costs, kind, overhead, of_alone)
        return costs

    def workload(self) -> Workload | None:
        """What was learned, for the next run; None before its first step."""
        for kind in [kind for kind, seen in self.seen.items() if seen]:
            self._follow(kind)
        if not self.steps_seen:
            return None
        costs, shape = self.outlook.costs, self.outlook.shape
        if self.outlook.hardware.name == CPU or all(kind in self.times_alone for kind in self.times):
            costs = replace(costs, source="measured by a run of these pipelines", derived=False)
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
            gpus=costs.gpus,
            tp=1,
            quantiles=tuple(map(quantiles, self.steps_seen)),
            reconstructed=False,
            costs=costs,
        )


def _drawn(known: float, seen: float, weight: float) -> float:
    return (1 - weight) * known + weight * seen


def with_overhead(costs: Costs, phase: str, seconds: float, weight: float) -> Costs:
    if phase == "rollout":
        return replace(costs, rollout_fixed_seconds=_drawn(costs.rollout_fixed_seconds, seconds, weight))
    return replace(costs, sync=_drawn(costs.sync, seconds, weight))


def _at_work(segments: Sequence[Segment]) -> float:
    """Seconds of these sub-stages in which a worker is busy."""
    return sum(segment.seconds for segment in segments if SIGNATURES[segment.kind] not in ("host", "link"))


def _of_its_own(kind: str, segments: Sequence[Segment]) -> float:
    """Seconds of a training that are predicted by themselves, though no worker is busy: rewards, and offloaded state
    on its way."""
    return sum(each.seconds for each in segments if kind == "training" and each.kind in ("reward", "swap"))


def followed(costs: Costs, phase: str, busy: float, expected: float, weight: float) -> Costs:
    """Costs after phases that kept their busiest worker at work for `busy` seconds; `expected` were predicted."""
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
