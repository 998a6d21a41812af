"""A pipeline's coming phases as they are foreseen: the sub-stage graph, built for as many workers as one asks.

A step is two phases. Rollout: one lane per engine (swap, prefill, decode, tail, and tool waits between turns).
Training: one gang over its workers (log-probs, gradients, optimizer step, weight sync), which starts when the last
engine is done. The next step's rollout starts when the weights are there.

    engine 0: swap prefill decode tail --.
    engine 1: swap prefill decode tail ---+-> reward logprob grad optim sync --> step + 1
    engine 2: swap prefill decode tail --'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from jigsawrl.graph.batch import Batch, Engine, engine
from jigsawrl.graph.cost import Costs
from jigsawrl.graph.forecast import Floats, Forecast
from jigsawrl.graph.hardware import CPU, Hardware
from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.memory import KV_SHARE, Memory, memory
from jigsawrl.graph.shape import PipelineShape

P = ParamSpec("P")
T = TypeVar("T")

ENOUGH = 128
"""Sequences that an estimate follows; more are taken several at a time."""
_WITHOUT_TRAINING = frozenset({"engine", "rollout_seconds", "memory"})
"""What does not depend on the costs of training."""


def remembered(method: Callable[Concatenate[Outlook, P], T]) -> Callable[Concatenate[Outlook, P], T]:
    """Computes what a method of an outlook returns once for the same arguments."""

    @wraps(method)
    def found(outlook: Outlook, /, *args: P.args, **named: P.kwargs) -> T:
        return outlook.kept((method.__name__, *args, *named.items()), lambda: method(outlook, *args, **named))

    return found


@dataclass(frozen=True, slots=True)
class Outlook:
    """Everything a policy may ask about a pipeline's next step."""

    shape: PipelineShape
    costs: Costs
    hardware: Hardware
    forecast: Forecast
    _cache: dict = field(default_factory=dict, compare=False, repr=False)

    def kept(self, key: tuple, make: Callable[[], T]) -> T:
        """What was made for this key before, or is made now: an outlook never changes, and is asked often."""
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = make()
        return found

    def with_training(self, costs: Costs) -> Outlook:
        """With other costs of training only: what was made of the rest stays."""
        kept = {key: made for key, made in self._cache.items() if key[0] in _WITHOUT_TRAINING}
        return Outlook(self.shape, costs, self.hardware, self.forecast, kept)

    @remembered
    def engine(self, engines: int, tp: int, level: float = 0.5) -> Engine:
        """One of so many engines, each spanning `tp` workers."""
        count = max(1, round(self.shape.sequences / engines))
        few = min(count, ENOUGH)
        lengths = self.forecast.lengths(few, level, self.shape.sequences)
        return self.engine_of(self.batch(lengths), tp, count / few)

    def engine_of(self, batch: Batch, tp: int, each: float = 1.0) -> Engine:
        """The lane of one engine's sequences, every one of which may stand for several."""
        return engine(
            batch,
            self.costs,
            tp,
            tool_seconds=self.shape.tool_seconds,
            swap_seconds=self.costs.rollout_fixed_seconds,
            max_tokens=self.shape.max_tokens,
            kv_tokens=self.costs.kv_tokens,
            each=each,
        )

    def engines(self, lengths: Floats, engines: int, tp: int) -> list[Engine]:
        """The lanes of a step with these lengths, dealt out to so many engines."""
        return [self.engine_of(part, tp) for part in self.batch(lengths).split(min(engines, len(lengths)))]

    def batch(self, lengths: Floats) -> Batch:
        """Sequences that will have these lengths, before they begin."""
        return Batch(lengths, np.full(len(lengths), self.shape.prompt_tokens), self.shape.turns)

    def moved(self, batch: Batch, tp: int) -> Engine:
        """The lane of gathered survivors: weights are loaded, every prefix is run again."""
        return engine(
            batch,
            self.costs,
            tp,
            tool_seconds=0.0,
            max_tokens=self.shape.max_tokens,
            swap_seconds=self.shape.model.weight_bytes / tp / self.costs.hardware.host_bandwidth,
        )

    @remembered
    def training(self, workers: int, response_tokens: float | None = None) -> tuple[Segment, ...]:
        """The gang's sub-stages over all of the step's tokens."""
        shape, costs = self.shape, self.costs
        if response_tokens is None:
            response_tokens = float(self.forecast.lengths(ENOUGH).mean()) * shape.sequences
        tokens = response_tokens + shape.prompt_tokens * shape.sequences
        seconds = self.training_stages(workers, tokens)
        fetched = costs.swapped("logprob", workers) if shape.old_logprobs else 0.0
        fetched += costs.swapped("ref", workers) if shape.reference else 0.0
        refetched = self.shape.passes * costs.swapped("grad", workers)
        state = costs.swapped("optim", workers)
        segments = (
            Segment("reward", shape.reward_seconds),
            Segment("swap", fetched),
            Segment("logprob", seconds["old_log_prob"] + seconds["ref"] - fetched, shape.sequences, tokens),
            Segment("swap", refetched),
            Segment("grad", seconds["grad"] - refetched, shape.sequences, tokens),
            Segment("swap", state),
            Segment("optim", seconds["optim"] - state),
            Segment("sync", seconds["sync"]),
        )
        return tuple(segment for segment in segments if segment.seconds > 0)

    def training_stages(self, workers: int, tokens: float) -> Mapping[str, float]:
        """Seconds of each stage over so many tokens, prompts and responses, before they are cut into sub-stages."""
        shape, costs = self.shape, self.costs
        mean = tokens / shape.sequences
        return {
            "old_log_prob": costs.token_pass_seconds("logprob", tokens, mean, workers)
            if shape.old_logprobs
            else 0.0,
            "ref": costs.token_pass_seconds("ref", tokens, mean, workers) if shape.reference else 0.0,
            "grad": shape.passes * costs.token_pass_seconds("grad", tokens, mean, workers),
            "optim": costs.optim_seconds(workers),
            "sync": costs.sync_seconds(shape.tp),
        }

    @remembered
    def rollout_seconds(self, engines: int, tp: int, level: float = 0.5) -> float:
        return self.engine(engines, tp, level).seconds

    @remembered
    def training_seconds(self, workers: int) -> float:
        return sum(segment.seconds for segment in self.training(workers))

    @remembered
    def solo_seconds(self, workers: int) -> float:
        """A step alone on so many workers."""
        tp = self.shape.tp
        return self.rollout_seconds(workers // tp, tp) + self.training_seconds(workers)

    @remembered
    def busy_seconds(self, workers: int) -> float:
        """Of a step alone on so many workers, those in which they are at work and do not wait for tools or links."""
        tp = self.shape.tp
        return sum(
            segment.seconds
            for segment in (*self.engine(max(1, workers // tp), tp).segments, *self.training(workers))
            if SIGNATURES[segment.kind] not in ("host", "link")
        )

    def memory_trained(self, tp: int, workers: int) -> Memory:
        """Where all of these train, with as many engines as they make."""
        return self.memory(max(1, workers // tp), tp, workers)

    @remembered
    def memory(self, engines: int, tp: int, workers: int) -> Memory:
        shape = self.shape
        return memory(
            shape.model,
            sequences=shape.sequences / engines,
            tokens=shape.prompt_tokens + shape.max_tokens,
            tp=tp,
            workers=workers,
            device_bytes=self.hardware.device_bytes,
            cache_tokens=shape.cache_tokens,
            trained=shape.trained,
            whole=shape.whole,
            by_kernels=self.hardware.name != CPU,
            micro_batch_tokens=shape.micro_batch_tokens,
            longest=shape.longest,
            recomputed=shape.recomputed,
            ranks_on_each=shape.ranks_on_each,
        )

    def memory_moved(self, sequences: float, tp: int) -> float:
        """Bytes that so many survivors, gathered, hold on each of their workers."""
        tokens = self.shape.prompt_tokens + self.shape.max_tokens
        cache = sequences * tokens * self.shape.model.kv_bytes_per_token / tp
        return self.shape.model.weight_bytes / tp + min(cache, KV_SHARE * self.hardware.device_bytes)
