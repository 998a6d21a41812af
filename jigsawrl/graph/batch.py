"""The sequences of one rollout engine, and the sub-stages that generating them takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jigsawrl.graph.cost import Costs, DecodeCost
from jigsawrl.graph.decode import DecodeCurve
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.rollout import decode_passes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens still to generate and tokens behind, sequence by sequence, with `turns` turns to go."""

    remaining: Floats
    context: Floats
    turns: int = 1

    @classmethod
    def fresh(cls, lengths: Floats, prompt_tokens: float, turns: int) -> Batch:
        return cls(lengths, np.full(len(lengths), prompt_tokens), turns)

    @classmethod
    def merged(cls, batches: list[Batch]) -> Batch:
        """Of engines that are in the same turn."""
        assert len({batch.turns for batch in batches}) == 1
        return cls(
            np.concatenate([batch.remaining for batch in batches]),
            np.concatenate([batch.context for batch in batches]),
            batches[0].turns,
        )

    def split(self, parts: int) -> list[Batch]:
        """In turn, as requests are dealt out to engines."""
        return [Batch(self.remaining[i::parts], self.context[i::parts], self.turns) for i in range(parts)]

    def turn(self, cost: DecodeCost) -> DecodeCurve:
        """The decode of the coming turn; the other turns are as long."""
        return DecodeCurve.of(np.ceil(self.remaining / self.turns), self.context, cost)

    def next_turn(self) -> Batch:
        done = np.ceil(self.remaining / self.turns)
        return Batch(self.remaining - done, self.context + done, self.turns - 1)


@dataclass(frozen=True, slots=True)
class Engine:
    """Segments of a lane, and for each of them the decode it is a part of."""

    segments: tuple[Segment, ...]
    curves: tuple[DecodeCurve | None, ...]
    offsets: tuple[float, ...]
    """Seconds into its curve at which each segment starts."""

    def survivors(self, index: int, left: float) -> Batch:
        """What remains to be generated when segment `index`, of the last turn, has `left` seconds to go."""
        curve = self.curves[index]
        assert curve is not None
        done = self.offsets[index] + self.segments[index].seconds - left
        remaining, context = curve.after(curve.passes_at(done))
        return Batch(remaining, context)


def engine(
    batch: Batch,
    costs: Costs,
    tp: int,
    *,
    tool_seconds: float,
    swap_seconds: float,
    max_tokens: float,
    kv_tokens: float | None = None,
    each: float = 1.0,
) -> Engine:
    """Wakes, runs what the sequences have behind them, decodes and waits for tools until every one is done.

    Where the cache does not hold all sequences at once (`kv_tokens`), the bulk of a turn takes the longer. The
    kinds of segments depend on the turns alone, so that what was foreseen and what happens stand side by side; some
    may take no time. Every sequence may stand for several (`each`), where an estimate will do.
    """
    cost = costs.decode(tp)
    cost = replace(cost, b=cost.b * each, c=cost.c * each)
    kv_tokens = None if kv_tokens is None else kv_tokens / each
    count = len(batch.remaining)
    segments: list[Segment] = []
    curves: list[DecodeCurve | None] = []
    offsets: list[float] = []

    def add(segment: Segment, curve: DecodeCurve | None = None, offset: float = 0.0) -> None:
        segments.append(segment)
        curves.append(curve)
        offsets.append(offset)

    add(Segment("swap", swap_seconds))
    tokens = float(batch.context.sum())
    while True:
        mean = float(batch.context.mean()) if count else 0.0
        seconds = costs.prefill_seconds(tokens * each, mean, tp, count * each)
        add(Segment("prefill", seconds, round(count * each), tokens * each))
        curve = batch.turn(cost)
        start = curve.tail_start()
        bulk = curve.seconds_at(start)
        bulk_tokens = float(np.minimum(curve.remaining, start).sum())
        queued = 0.0
        if kv_tokens is not None and tokens + curve.tokens > kv_tokens:
            order = np.ceil(batch.remaining / batch.turns)
            passes = decode_passes(cost, order, mean, kv_tokens, max_tokens / batch.turns)
            queued = max(0.0, passes.seconds - curve.total)
        add(Segment("decode", bulk + queued, round(count * each), bulk_tokens * each), curve)
        active = round(curve.active_at(start) * each)
        add(Segment("tail", curve.total - bulk, active, (curve.tokens - bulk_tokens) * each), curve, bulk)
        if batch.turns == 1:
            return Engine(tuple(segments), tuple(curves), tuple(offsets))
        add(Segment("tool", tool_seconds, round(count * each)))
        batch = batch.next_turn()
        tokens = 0.0  # what tools say is short beside what is generated
