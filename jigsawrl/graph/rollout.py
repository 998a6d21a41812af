"""How long a rollout takes, from its lengths: pass by pass, with the cache's size as a limit.

Engines do not let all sequences in at once: they keep room for what those inside may still grow. The rule here is
SGLang's, whose passes it reproduces (number and seconds within a few percent of the traced runs).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jigsawrl.graph.decode import DecodeCurve

if TYPE_CHECKING:
    from jigsawrl.graph.cost import Costs, DecodeCost

Lengths = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]

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
    lengths: Lengths,
    prompt_tokens: float,
    tp: int,
    turns: float = 1,
    tool_seconds: float = 0.0,
    *,
    engines: int = 1,
    observation_tokens: float = 0.0,
    kv_tokens: float | None = None,
    max_tokens: float | None = None,
) -> float:
    """Seconds of a whole generation: start and end, prefill, every decode pass, and the waits for tools.

    `lengths` are the tokens that each sequence generates, all turns together, in the order of their requests;
    `observation_tokens` is what tools add to a sequence on the mean. `tool_seconds` is the wait of the whole
    batch after each turn but the last; where tools take no time, sequences take their turns as they come.
    Several engines get the sequences in turn, and the slowest counts. `kv_tokens` is what one engine's cache
    holds, and `max_tokens` how long a sequence may become.
    """
    whole = np.maximum(np.asarray(lengths, dtype=np.float64), 0.0)
    waves = max(1, round(turns)) if tool_seconds > 0 else 1
    slowest = 0.0
    for first in range(min(engines, len(whole))):
        mine = whole[first::engines]
        passes = rollout_passes(
            costs, mine, prompt_tokens, tp, waves, observation_tokens, kv_tokens, max_tokens
        )
        again = max(0.0, passes.entered - waves * len(mine))
        context = prompt_tokens + observation_tokens
        seconds = passes.seconds + costs.prefill_seconds(
            len(mine) * context + again * (context + float(mine.mean()) / 2),
            context,
            tp,
            sequences=len(mine) * max(1.0, turns) + again,
        )
        slowest = max(slowest, seconds)
    return costs.rollout_fixed_seconds + slowest + (waves - 1) * tool_seconds


def rollout_passes(
    costs: Costs,
    lengths: NDArray[np.float64],
    prompt_tokens: float,
    tp: int,
    waves: int = 1,
    observation_tokens: float = 0.0,
    kv_tokens: float | None = None,
    max_tokens: float | None = None,
) -> Passes:
    """The decode passes of one engine; in several waves if the whole batch waits for tools in between."""
    decode, held = costs.decode(tp), costs.kv_tokens if kv_tokens is None else kv_tokens
    longest = max(float(lengths.max(initial=1.0)), 1.0) if max_tokens is None else float(max_tokens)
    total, context = Passes(0.0, 0.0, 0.0), prompt_tokens
    for _ in range(waves):
        total += decode_passes(decode, lengths / waves, context, held, longest)
        context += float(lengths.mean()) / waves + observation_tokens / max(1, waves - 1)
    return total


def decode_passes(
    decode: DecodeCost,
    lengths: NDArray[np.float64],
    prompt_tokens: float,
    kv_tokens: float | None,
    longest: float,
) -> Passes:
    """All passes that bring sequences from their prompts to these lengths, prefill left out."""
    if kv_tokens is None:
        return _all_at_once(decode, lengths, prompt_tokens)
    return _as_they_fit(decode, lengths, prompt_tokens, kv_tokens, max(longest, 1.0))


def _all_at_once(decode: DecodeCost, lengths: NDArray[np.float64], prompt_tokens: float) -> Passes:
    curve = DecodeCurve.of(lengths, np.full(len(lengths), prompt_tokens), decode)
    count = float(curve.remaining[-1]) if len(lengths) else 0.0
    return Passes(curve.total, count, float(len(lengths)))


def _as_they_fit(
    decode: DecodeCost, lengths: NDArray[np.float64], prompt_tokens: float, kv_tokens: float, longest: float
) -> Passes:
    """First come, first served into a cache of this size.

    A sequence enters when there is room for it and for what those inside may still grow, of which a share is
    reserved. The share falls from pass to pass. When the cache is full nonetheless, those that came last give way,
    keep what they have generated, and enter again first. One sequence alone may always run.
    """
    waiting: deque[tuple[float, float]] = deque((prompt_tokens, length) for length in lengths.tolist())
    ending: list[tuple[float, int]] = []  # by the pass in which they end; a number that tells them apart
    latest: list[int] = []  # the same, by when they came; in both, those that are gone are skipped
    held: dict[int, tuple[float, float, float]] = {}  # pass and context when it came, pass of its end
    seconds, now, used, number, entered = 0.0, 0.0, 0.0, 0, 0
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
            number += 1
            entered += 1
            heapq.heappush(ending, (now + left, number))
            latest.append(number)
            held[number] = now, context, now + left
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
                last = latest.pop()
                if last not in held:
                    continue
                came, context, end = held.pop(last)
                used -= context + now - came
                waiting.appendleft((context + now - came, end - now))
            reserved = min(1.0, max(reserved, (used / len(held) - prompt_tokens + GIVE_WAY) / longest))
    return Passes(seconds, now, entered)
