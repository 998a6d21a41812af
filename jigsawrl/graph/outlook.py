"""A pipeline's coming phases as they are foreseen: the sub-stage graph, built for as many workers as one asks.

A step is two phases. Rollout: one lane per engine (swap, prefill, decode, tail, and tool waits between turns).
Training: one gang over its workers (log-probs, gradients, optimizer step, weight sync), which starts when the last
engine is done. The next step's rollout starts when the weights are there.

    engine 0: swap prefill decode tail --.
    engine 1: swap prefill decode tail ---+-> reward logprob grad optim sync --> step + 1
    engine 2: swap prefill decode tail --'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from jigsawrl.graph.batch import Batch, Engine, engine
from jigsawrl.graph.cost import Costs
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import CPU, Hardware
from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.memory import KV_SHARE, Memory, memory
from jigsawrl.graph.shape import PipelineShape

T = TypeVar("T")

ENOUGH = 128
"""Sequences that an estimate follows; more are taken several at a time."""
_WITHOUT_TRAINING = frozenset({"engine", "lengths", "mean length", "rollout_seconds", "memory"})
"""What does not depend on the costs of training."""


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

    def engine(self, engines: int, tp: int, level: float = 0.5) -> Engine:
        """One of so many engines, each spanning `tp` workers."""
        return self.kept(("engine", engines, tp, level), lambda: self._engine(engines, tp, level))

    def _engine(self, engines: int, tp: int, level: float) -> Engine:
        count = max(1, round(self.shape.sequences / engines))
        few = min(count, ENOUGH)
        lengths = self.kept(
            ("lengths", few, level), lambda: self.forecast.lengths(few, level, self.shape.sequences)
        )
        batch = Batch.fresh(lengths, self.shape.prompt_tokens, self.shape.turns)
        return self.engine_of(batch, tp, count / few)

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

    def moved(self, batch: Batch, tp: int) -> Engine:
        """The lane of gathered survivors: weights are loaded, every prefix is run again."""
        return engine(
            batch,
            self.costs,
            tp,
            tool_seconds=0.0,
            max_tokens=self.shape.max_tokens,
            swap_seconds=self.costs.swap_seconds(self.shape.model.weight_bytes / tp),
        )

    def training(self, workers: int, response_tokens: float | None = None) -> tuple[Segment, ...]:
        """The gang's sub-stages over all of the step's tokens."""
        key = ("training", workers, response_tokens)
        return self.kept(key, lambda: self._training(workers, response_tokens))

    def _training(self, workers: int, response_tokens: float | None) -> tuple[Segment, ...]:
        shape, costs = self.shape, self.costs
        if response_tokens is None:
            mean = self.kept(("mean length",), lambda: float(self.forecast.lengths(ENOUGH).mean()))
            response_tokens = mean * shape.sequences
        tokens = response_tokens + shape.prompt_tokens * shape.sequences
        mean = tokens / shape.sequences
        logprob = costs.logprob_seconds(tokens, mean, workers) if shape.old_logprobs else 0.0
        reference = costs.ref_seconds(tokens, mean, workers) if shape.reference else 0.0
        grad = costs.grad_seconds(tokens, mean, workers)
        passes = shape.epochs * (2 if shape.critic else 1)
        fetched = costs.swapped("logprob", workers) if shape.old_logprobs else 0.0
        fetched += costs.swapped("ref", workers) if shape.reference else 0.0
        refetched = passes * costs.swapped("grad", workers)
        state = costs.swapped("optim", workers)
        segments = (
            Segment("reward", shape.reward_seconds),
            Segment("swap", fetched),
            Segment("logprob", logprob + reference - fetched, shape.sequences, tokens),
            Segment("swap", refetched),
            Segment("grad", passes * grad - refetched, shape.sequences, tokens),
            Segment("swap", state),
            Segment("optim", costs.optim_seconds(workers) - state),
            Segment("sync", costs.sync_seconds(workers, shape.tp)),
        )
        return tuple(segment for segment in segments if segment.seconds > 0)

    def rollout_seconds(self, engines: int, tp: int, level: float = 0.5) -> float:
        return self.kept(
            ("rollout_seconds", engines, tp, level),
            lambda: sum(segment.seconds for segment in self.engine(engines, tp, level).segments),
        )

    def training_seconds(self, workers: int) -> float:
        return self.kept(
            ("training_seconds", workers),
            lambda: sum(segment.seconds for segment in self.training(workers)),
        )

    def solo_seconds(self, workers: int) -> float:
        """A step alone on so many workers."""
        tp = self.shape.tp
        return self.kept(
            ("solo_seconds", workers),
            lambda: self.rollout_seconds(workers // tp, tp) + self.training_seconds(workers),
        )

    def busy_seconds(self, workers: int) -> float:
        """Of a step alone on so many workers, those in which they are at work and do not wait for tools or links."""
        tp = self.shape.tp
        return self.kept(
            ("busy_seconds", workers),
            lambda: sum(
                segment.seconds
                for segment in (*self.engine(max(1, workers // tp), tp).segments, *self.training(workers))
                if SIGNATURES[segment.kind] not in ("host", "link")
            ),
        )

    def memory(self, engines: int, tp: int, workers: int) -> Memory:
        return self.kept(("memory", engines, tp, workers), lambda: self._memory(engines, tp, workers))

    def memory_trained(self, tp: int, workers: int) -> Memory:
        """Where all of these train, with as many engines as they make."""
        return self.memory(max(1, workers // tp), tp, workers)

    def _memory(self, engines: int, tp: int, workers: int) -> Memory:
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
