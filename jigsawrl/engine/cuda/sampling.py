"""Drawing tokens on the device: the same numbers for a key and a position as `engine/sampler.py` takes.

The vocabulary is looked at twice in tiles: whoever has a tile's logits leaves their maximum and their sum of
exponentials; from these alone the tile is found that the number falls into, and then the token within it.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def keyed_uniform(key, position):
    """`keyed_uniforms` for one key and position."""
    z = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 41).to(tl.float32) * (1.0 / 8388608.0)


@triton.jit
def tile_kernel(
    logits,
    rows,
    temperatures,
    maxima,
    sums,
    tiles,
    V,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tiles' maxima and sums of exponentials, where no product has left them."""
    t = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    slot = tl.program_id(1)
    if PDL:
        gdc_wait()
    v = t[:, None] * TILE + tl.arange(0, TILE)[None, :]
    heat = tl.load(temperatures + tl.load(rows + slot))
    logit = tl.load(logits + slot.to(tl.int64) * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
    logit = logit / tl.where(heat == 0.0, 1.0, heat)
    highest = tl.max(logit, axis=1)
    place = t * SLOTS + slot
    tl.store(maxima + place, highest, mask=t < tiles)
    tl.store(sums + place, tl.sum(tl.exp(logit - highest[:, None]), axis=1), mask=t < tiles)


@triton.jit
def choose_kernel(
    logits,
    maxima,
    sums,
    rows,
    temperatures,
    keys,
    tokens,
    positions,
    chosen,
    logprobs,
    results,
    turn,
    tiles,
    idle_row,
    V,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token for a slot, its log-prob, and the sequence's state for the next step. `results` is the host's memory:
    a copy of its own would keep the next step waiting."""
    slot = tl.program_id(0)
    if PDL:
        gdc_wait()
    row = tl.load(rows + slot)
    heat = tl.load(temperatures + row)
    position = tl.load(positions + row)
    t = tl.arange(0, TILES)
    highs = tl.load(maxima + t * SLOTS + slot, mask=t < tiles, other=-float("inf"))
    masses = tl.load(sums + t * SLOTS + slot, mask=t < tiles, other=0.0)
    highest = tl.max(highs, axis=0)
    masses = masses * tl.exp(highs - highest)
    total = tl.sum(masses, axis=0)
    cumulative = tl.cumsum(masses, axis=0)
    threshold = keyed_uniform(tl.load(keys + row), position + 1) * total

    tile = tl.sum((cumulative <= threshold).to(tl.int32), axis=0)
    if heat == 0.0:
        tile = tl.min(tl.where(highs == highest, t, TILES), axis=0)
    tile = tl.minimum(tile, tiles - 1)
    before = tl.max(tl.where(t < tile, cumulative, 0.0), axis=0)

    i = tl.arange(0, TILE)
    v = tile * TILE + i
    logit = tl.load(logits + slot.to(tl.int64) * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
    logit = logit / tl.where(heat == 0.0, 1.0, heat)
    mass = tl.exp(logit - highest)
    inner = tl.sum((before + tl.cumsum(mass, axis=0) <= threshold).to(tl.int32), axis=0)
    if heat == 0.0:
        inner = tl.min(tl.where(logit == highest, i, TILE - 1), axis=0)
    # Rounding may leave the number just beyond the tile's last token that can be drawn at all.
    inner = tl.minimum(inner, tl.max(tl.where(mass > 0.0, i, 0), axis=0))

    token = tile * TILE + inner
    value = tl.sum(tl.where(i == inner, logit, 0.0), axis=0)
    logprob = value - highest - tl.log(total)
    tl.store(chosen + slot, token)
    tl.store(logprobs + slot, logprob)
    place = results + tl.load(turn) * 2 * SLOTS + slot
    tl.store(place, token)
    tl.store(place + SLOTS, logprob.to(tl.int32, bitcast=True))
    tl.store(tokens + row, token, mask=row != idle_row)
    tl.store(positions + row, position + 1, mask=row != idle_row)
