"""How the contexts of a decode step are cut into parts for attention: pure arithmetic, measured on an H200.

Even contexts are cut into the same number of parts each. Uneven ones, of samples that began at different times, are
cut into parts of the same length: a short one stays whole where a long one has many. Where there is a processor for
every part, or one for two of them in turns, each has its memory to itself and fetches more at once. Light rings
leave room for two more on a processor, and for the kernels that come next; parts that take all of these places, or
half of them, are best where that makes them neither short nor many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jigsawrl.model.spec import ModelSpec

MOST_SPLITS = 128
EVEN, EVEN_LIGHT = 1.5, 1.25
"""How many times the mean the longest context may be where all are cut into the same number of parts; likewise where
there are light rings."""
SLACK = 1.05
"""How many times its fair share of the tokens a processor may get before that number is doubled."""
MERGED, MERGED_LIGHT = 16, 32
"""Parts of a context up to which putting them together costs less than longer ones; of light rings."""
LONG, LONGEST = 512, 1024
"""Tokens of a part that keep nobody waiting long, however short the others are; and of any in light rings, or where
there are more parts than places."""
SHORT = 260
"""Tokens of a part up to which two of them beside each other are better than one that fetches more at once."""
HALVED = 1000
"""Tokens up to which a part that is not short is better halved, where contexts are cut anyway and heads are 128 wide:
where they are 64 wide, halves took up to 15 % longer."""
ALONE = 128, 5, 1
"""Of a part that has a processor to itself: tokens a round, rounds in flight, rounds fetched ahead."""
STREAMED, STREAMED_MOST = (128, 2), 300
"""Of such a part of at most so many tokens: tokens a round, and rounds in a ring where heads are 128 wide; longer
parts were measured to be faster the other way."""
LIGHT, LIGHT_MOST = (64, 2), 3
"""Of rings that leave room on a processor, for others and for the kernels that come next; and how many of them there
are on one, which have half the bytes each where heads are 64 wide."""
FEW, FEW_NARROW = 6, 4
"""Parts of a context up to which it pays to take all places that light rings have; where heads are 64 wide."""
LEAST, LEAST_OF_MANY, FILLED = 75, 125, 340
"""Tokens of such a part at least, where a context has up to four and where it has more of them, and at most."""
WHOLE, FAR = 800, 4_096
"""Tokens up to which a context is better left whole where halves of all would fit, and up to which light rings were
measured where all others are as long."""
IN_TURNS = 64, 7, 0
"""Of parts that have one in turns."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How contexts are cut: cached tokens of a part at least, parts at most (very long contexts have longer ones),
    tokens a round, rounds in flight, rounds fetched into L2 ahead, and whether they are rounds of a ring."""

    part: int
    splits: int
    tile: int
    stages: int
    ahead: int = 0
    streamed: bool = False


def cut_for(contexts: list[int], spec: ModelSpec, processors: int, most: int, streams: bool) -> Cut:
    """Parts, at most `most` of a context, such that no processor waits long for another; `streams`: there may be
    rings."""
    lengths, wide = np.asarray(contexts), spec.head_dim > 64
    most = _below(min(most, MOST_SPLITS))
    even = EVEN_LIGHT if streams and wide else EVEN
    cut = _even if lengths.max() <= even * lengths.mean() else _uneven
    return cut(lengths, spec, processors, most, streams)


def _even(lengths: NDArray[np.int64], spec: ModelSpec, processors: int, most: int, streams: bool) -> Cut:
    """The same number of parts of each context."""
    wide, longest = spec.head_dim > 64, int(lengths.max())
    filling = _filling(longest, len(lengths) * spec.kv_heads, spec, processors) if streams else None
    if filling is not None and filling.splits <= most:
        return filling
    splits = min(_even_parts(longest, _fair(lengths, spec, processors)), most)
    programs = len(lengths) * spec.kv_heads * splits
    if programs > SLACK * processors:
        if streams and wide and splits == 1 and programs <= LIGHT_MOST * processors and longest <= FAR:
            if 2 * programs > LIGHT_MOST * processors:
                return Cut(64, 1, *LIGHT, streamed=True)
            if longest > WHOLE and most >= 2:
                return Cut(64, 2, *LIGHT, streamed=True)
        if splits > 1:
            return Cut(64, splits, *_beside(wide))
        two = programs <= 2 * SLACK * processors
        return Cut(64, 1, *(IN_TURNS if two else (64, 3, 2) if wide else (128, 3, 1)))
    tokens = longest / splits
    if streams and wide and processors < 3 * programs <= 3 * processors:
        halved = splits > 1 and SHORT < tokens <= HALVED
        rings = 2 * splits if halved else splits
        if rings <= most and (halved or tokens <= SHORT):
            return Cut(64, rings, *LIGHT, streamed=True)
    if 2 * programs > processors and tokens < SHORT:
        return Cut(64, splits, *_beside(wide))
    return Cut(64, splits, *_alone(tokens, spec, streams))


def _filling(longest: int, contexts: int, spec: ModelSpec, processors: int) -> Cut | None:
    """Parts that take all places that light rings have, or half of them, then as many bytes each for any head."""
    wide, places = spec.head_dim > 64, LIGHT_MOST * processors
    tile, rounds = LIGHT
    parts = _rounded(places // contexts)
    if 3 <= parts <= (FEW if wide else FEW_NARROW) and _is_between(longest / parts, parts, FILLED):
        return Cut(64, parts, tile, rounds, streamed=True)
    parts = _rounded(places // (2 * contexts))
    if 2 <= parts <= MERGED_LIGHT and _is_between(longest / parts, parts, SHORT if wide else FILLED):
        return Cut(64, parts, tile, rounds * 128 // spec.head_dim, streamed=True)
    return None


def _is_between(tokens: float, parts: int, most: int) -> bool:
    """Whether parts that take light rings' places are neither too short for so many nor too long."""
    return (LEAST if parts <= 4 else LEAST_OF_MANY) <= tokens <= most


def _uneven(lengths: NDArray[np.int64], spec: ModelSpec, processors: int, most: int, streams: bool) -> Cut:
    """Parts of the same length, all of them at once if no long one keeps the others waiting then."""
    light, fair = streams and spec.head_dim > 64, _fair(lengths, spec, processors)
    places = processors * (LIGHT_MOST if light else 1) // spec.kv_heads
    part = _part_at_once(lengths, places, MERGED_LIGHT if light else MERGED)
    parts = _parts(lengths, part)
    at_once = parts <= places and part <= max(LONG, min(LONGEST, fair / 2) if light else 1.5 * fair)
    if not at_once:
        part = 1 << round(math.log2(min(LONGEST, max(256, fair / (8 if light else 2)))))
    if light and not (at_once and 3 * parts * spec.kv_heads <= processors):
        how = *LIGHT, 0, True
    elif at_once:
        how = _alone(part, spec, streams)
    else:
        how = *_beside(spec.head_dim > 64), False
    return Cut(part, min(_above(lengths.max() / part), most), *how)


def _fair(lengths: NDArray[np.int64], spec: ModelSpec, processors: int) -> float:
    """A processor's share of all tokens."""
    return float(lengths.sum()) * spec.kv_heads / processors


def _beside(wide: bool) -> tuple[int, int, int]:
    """How one of two parts on a processor is read."""
    return (64, 5, 2) if wide else (128, 5, 1)


def _alone(tokens: float, spec: ModelSpec, streams: bool) -> tuple[int, int, int, bool]:
    """How a part of so many tokens is read that has a processor to itself. A ring has as many bytes for any head."""
    if tokens > STREAMED_MOST or not streams:
        return (*ALONE, False)
    tile, rounds = STREAMED
    return tile, rounds * 128 // spec.head_dim, 0, True


def _even_parts(longest: int, fair: float) -> int:
    """Of each context: as many as fill the processors, unless they were too small or too many to put together."""
    return min(_below(SLACK * longest / fair), _above(longest / 128), max(2 * MERGED, _below(longest / 512)))


def _part_at_once(lengths: NDArray[np.int64], places: int, merged: int) -> int:
    """Tokens of a part such that all parts have a place, or that no context is cut."""
    longest = int(lengths.max())
    part = min(LONG, _above(max(128, longest / merged)))
    while part < longest and _parts(lengths, part) > places:
        part *= 2
    return part


def _parts(lengths: NDArray[np.int64], part: int) -> int:
    return int(np.sum(-(-lengths // part)))


def _below(x: float) -> int:
    """The power of two at or below x."""
    return 1 << int(math.log2(max(1.0, x)))


def _rounded(count: int) -> int:
    """Down to a power of two or three halves of one: every other number would be a graph of its own."""
    power = _below(count)
    return power * 3 // 2 if power > 1 and count >= power * 3 // 2 else power


def _above(x: float) -> int:
    return 1 << math.ceil(math.log2(max(1.0, x)))
