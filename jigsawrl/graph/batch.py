"""The sequences of one rollout engine, and the sub-stages that generating them takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jigsawrl.graph.cost import Costs
from jigsawrl.graph.decode import DecodeCurve
from jigsawrl.graph.forecast import Floats
from jigsawrl.graph.lanes import Segment
from jigsawrl.graph.rollout import decode_passes


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens still to generate and tokens behind, sequence by sequence, with `turns` turns to go."""

    remaining: Floats
    context: Floats
    turns: int = 1

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


@dataclass(frozen=True, slots=True)
class Engine:
    """Segments of a lane, and the decode that some of them are parts of."""

    segments: tuple[Segment, ...]
    curves: Mapping[int, tuple[DecodeCurve, float]]
    """For each segment that decodes its curve, and the seconds into it at which the segment starts."""

    def _at(self, index: int, left: float) -> tuple[DecodeCurve, float]:
        """The curve of segment `index`, and how far in it one is when the segment has `left` seconds to go."""
        curve, offset = self.curves[index]
        return curve, offset + self.segments[index].seconds - left

    def left(self, index: int, left: float) -> int:
        """How many sequences are not done when segment `index` has `left` seconds to go."""
        curve, done = self._at(index, left)
        return len(curve.seconds) - int(curve.seconds.searchsorted(done, side="right"))

    @property
    def seconds(self) -> float:
        """Of all of it, alone."""
        return sum(segment.seconds for segment in self.segments)

    def survivors(self, index: int, left: float) -> Batch:
        """What remains to be generated when segment `index`, of the last turn, has `left` seconds to go."""
        curve, done = self._at(index, left)
        return Batch(*curve.after(curve.passes_at(done)))


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
    segments = [Segment("swap", swap_seconds)]
    curves: dict[int, tuple[DecodeCurve, float]] = {}
    tokens = float(batch.context.sum())
    while True:
        mean = float(batch.context.mean()) if count else 0.0
        seconds = costs.prefill_seconds(tokens * each, mean, tp, count * each)
        segments.append(Segment("prefill", seconds, round(count * each), tokens * each))
        order = np.ceil(batch.remaining / batch.turns)  # each turn is as long as the others
        curve = DecodeCurve.of(order, batch.context, cost)
        start = curve.tail_start()
        bulk = curve.seconds_at(start)
        bulk_tokens = float(np.minimum(curve.remaining, start).sum())
        queued = 0.0
        if kv_tokens is not None and tokens + curve.tokens > kv_tokens:
            passes = decode_passes(cost, order, mean, kv_tokens, max_tokens / batch.turns)
            queued = max(0.0, passes.seconds - curve.total)
        active = round(curve.active_at(start) * each)
        curves |= {len(segments): (curve, 0.0), len(segments) + 1: (curve, bulk)}
        segments += [
            Segment("decode", bulk + queued, round(count * each), bulk_tokens * each),
            Segment("tail", curve.total - bulk, active, (curve.tokens - bulk_tokens) * each),
        ]
        if batch.turns == 1:
            return Engine(tuple(segments), curves)
        segments.append(Segment("tool", tool_seconds, round(count * each)))
        batch = Batch(batch.remaining - order, batch.context + order, batch.turns - 1)
        tokens = 0.0  # what tools say is short beside what is generated
