"""How long a rollout takes, from its lengths: pass by pass, with the cache's size as a limit.

Engines do not let all sequences in at once: they keep room for what those inside may still grow. The rule here is
SGLang's, whose passes it reproduces (number and seconds within a few percent of the traced runs).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from jigsawrl.graph.cost import Costs, DecodeCost
from jigsawrl.graph.decode import DecodeCurve
from jigsawrl.graph.forecast import Floats

LOOK_AHEAD = 4096
"""Tokens of growth that an engine plans for, at most."""
RESERVED, LEAST_RESERVED = 0.7, 0.098
"""Share of the planned growth that is kept free: at first, and at least."""
FALLS_OVER = 600
"""Passes until the one has become the other."""
STRIDE = 25.0
"""Passes after which it is asked anew who may enter, while that share still falls."""
GIVE_WAY = 20
"""Tokens for each remaining sequence that are made free when the cache overflows."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The decode passes of a generation."""

    seconds: float
    count: float
    entered: float
    """Sequences let in; more than there are, if some had to give way and came again."""

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.seconds + other.seconds, self.count + other.count, self.entered + other.entered)


def rollout_seconds(
    costs: Costs,
    lengths: Floats,
    prompt_tokens: float,
    tp: int,
    max_tokens: float,
    turns: int = 1,
    tool_seconds: float = 0.0,
) -> float:
    """Seconds of one engine's generation: start and end, prefill, every decode pass, and the waits for tools.

    `lengths` are the tokens that each sequence generates, all turns together, in the order of their requests, and
    `max_tokens` how long one may become. `tool_seconds` is the wait of the whole batch after each turn but the last;
    where tools take no time, sequences take their turns as they come.
    """
    waves = turns if tool_seconds > 0 else 1
    count, mean, decode = len(lengths), float(lengths.mean()), costs.decode(tp)
    passes, context = Passes(0.0, 0.0, 0.0), prompt_tokens
    for _ in range(waves):
        passes += decode_passes(decode, lengths / waves, context, costs.kv_tokens, max_tokens)
        context += mean / waves
    again = max(0.0, passes.entered - waves * count)
    tokens = count * prompt_tokens + again * (prompt_tokens + mean / 2)
    prefill = costs.prefill_seconds(tokens, prompt_tokens, tp, count * turns + again)
    return costs.rollout_fixed_seconds + (passes.seconds + prefill) + (waves - 1) * tool_seconds


def decode_passes(
    decode: DecodeCost,
    lengths: Floats,
    prompt_tokens: float,
    kv_tokens: float | None,
    longest: float,
) -> Passes:
    """All passes that bring sequences from their prompts to these lengths, prefill left out."""
    if kv_tokens is not None:
        return _as_they_fit(decode, lengths, prompt_tokens, kv_tokens, max(longest, 1.0))
    curve = DecodeCurve.of(lengths, np.full(len(lengths), prompt_tokens), decode)
    count = float(curve.remaining[-1]) if len(lengths) else 0.0
    return Passes(curve.total, count, float(len(lengths)))


def _as_they_fit(
    decode: DecodeCost, lengths: Floats, prompt_tokens: float, kv_tokens: float, longest: float
) -> Passes:
    """First come, first served into a cache of this size.

    A sequence enters when there is room for it and for what those inside may still grow, of which a share is
    reserved. The share falls from pass to pass. When the cache is full nonetheless, those that came last give way,
    keep what they have generated, and enter again first. One sequence alone may always run.
    """
    waiting: deque[tuple[float, float]] = deque((prompt_tokens, length) for length in lengths.tolist())
    ending: list[
        tuple[float, int]
    ] = []  # pass in which each ends, and its number; those that are gone are skipped
    held: dict[
        int, tuple[float, float, float]
    ] = {}  # by number: pass and context when it came, pass of its end
    seconds, now, used, entered = 0.0, 0.0, 0.0, 0
    reserved, ahead = RESERVED, min(LOOK_AHEAD, longest)
    while waiting or held:
        while waiting:
            active = len(held)
            if active:
                grown = used / active - prompt_tokens
                growth = reserved * active * min(LOOK_AHEAD, max(0.0, longest - grown))
                if used + waiting[0][0] + ahead + growth > kv_tokens:
                    break
            context, left = waiting.popleft()
            entered += 1
            heapq.heappush(ending, (now + left, entered))
            held[entered] = now, context, now + left
            used += context
        active = len(held)
        while ending[0][1] not in held:
            heapq.heappop(ending)
        passes = ending[0][0] - now
        if waiting and reserved > LEAST_RESERVED:
            passes = min(passes, STRIDE)
        if active > 1:
            passes = min(passes, max(1.0, (kv_tokens - used) // active))
        seconds += passes * (decode.a + decode.b * active + decode.c * (used + passes * active / 2))
        now += passes
        used += passes * active
        reserved = max(LEAST_RESERVED, reserved - passes * (RESERVED - LEAST_RESERVED) / FALLS_OVER)
        while ending and ending[0][0] <= now:
            _, ended = heapq.heappop(ending)
            if ended in held:
                came, context, _ = held.pop(ended)
                used -= context + now - came
        if used + len(held) > kv_tokens and len(held) > 1:
            while len(held) > 1 and used + GIVE_WAY * len(held) > kv_tokens:
                _, (came, context, end) = held.popitem()  # the one that came last
                used -= context + now - came
                waiting.appendleft((context + now - came, end - now))
            reserved = min(1.0, max(reserved, (used / len(held) - prompt_tokens + GIVE_WAY) / longest))
    return Passes(seconds, now, entered)
