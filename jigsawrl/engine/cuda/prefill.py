"""Prompts and other runs of new tokens: one packed pass through the model, whatever sequences the tokens belong to.

What describes a pass goes to the device in one piece:

    tokens | positions | places in the cache | adapters' slots | tiles of attention | block ids

A small pass is padded to a rung and replayed as a graph, because its launches would take the host longer than the
device; the padding is tokens of nobody, in the block that is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from jigsawrl.engine.attention import KVCache
from jigsawrl.engine.cuda.adapters import Stack, StackedLinear
from jigsawrl.engine.cuda.chunks import ChunkAttention, shape_for
from jigsawrl.engine.cuda.graphs import Graphs
from jigsawrl.model.lora import LinearOp
from jigsawrl.model.spec import ModelSpec
from jigsawrl.model.transformer import Transformer
from jigsawrl.trainer.batch import onto
from jigsawrl.trainer.cuda.ops import FUSED

LADDER = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens that graphs are made for; larger passes keep the device busy by themselves."""
FIELDS = 4
"""Numbers of a token, and of a tile."""
MOST_BLOCKS = 1 << 16
"""Block ids that a graph's pass may have."""


@dataclass(slots=True)
class Chunks:
    """The sequences of a pass, in order, as arrays: new tokens, cached tokens before them, adapters' slot (-1: none)
    and blocks of each."""

    counts: NDArray[np.int64]
    contexts: NDArray[np.int64]
    adapters: NDArray[np.int64]
    blocks: list[list[int]]

    def padded(self, count: int, idle_block: int) -> Chunks:
        """With a tail of `count` tokens of nobody; they all stand at position 0."""
        return Chunks(
            np.append(self.counts, count),
            np.append(self.contexts, -count),
            np.append(self.adapters, -1),
            [*self.blocks, [idle_block]],
        )


class Prefill:
    """A model's packed passes over its cache."""

    def __init__(self, model: Transformer, cache: KVCache, graphs: Graphs) -> None:
        self.model, self.cache, self.graphs = model, cache, graphs
        self.idle_block = cache.keys.shape[1] - 1
        self.stack: Stack | None = None
        length = 2 * FIELDS * LADDER[-1] + MOST_BLOCKS
        self.inputs = torch.zeros(length, dtype=torch.int64, device=model.device)
        """Of passes that are replayed."""

    def adapt(self, stack: Stack | None) -> None:
        """From now on sequences have these adapters."""
        self.stack = stack

    @torch.inference_mode()
    def run(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        chunks: Chunks,
    ) -> Tensor:
        """Hidden states of the tokens, whose keys and values are in the cache then. They may be overwritten by the
        next pass."""
        count, adapted = len(tokens), bool((chunks.adapters >= 0).any())
        size = next((rung for rung in LADDER if rung >= count), 0)
        if size == 0 or sum(map(len, chunks.blocks)) >= MOST_BLOCKS:
            flat, tiles = packed(tokens, positions, slots, chunks, self.model.spec)
            return self._launch(onto(self.model.device, flat), count, tiles, adapted)
        if size > count:
            missing = size - count
            tokens, positions = (np.pad(x, (0, missing)) for x in (tokens, positions))
            slots = np.pad(slots, (0, missing), constant_values=self.idle_block * self.cache.block_size)
            chunks = chunks.padded(missing, self.idle_block)
        flat, _ = packed(tokens, positions, slots, chunks, self.model.spec)
        self.inputs[: len(flat)].copy_(flat.pin_memory(), non_blocking=True)
        self.graphs.drop_stale()
        hidden: Tensor = self.graphs.run(
            (size, adapted), lambda: self._launch(self.inputs, size, size, adapted)
        )
        return hidden[:count]

    def _launch(self, inputs: Tensor, size: int, tiles: int, adapted: bool) -> Tensor:
        tokens, positions, slots, adapters = inputs[: FIELDS * size].view(FIELDS, size).unbind()
        attend = ChunkAttention(
            self.model.spec,
            self.cache,
            positions,
            slots,
            inputs[FIELDS * size : 2 * FIELDS * size].view(size, FIELDS)[:tiles],
            inputs[2 * FIELDS * size :],
        )
        linear: LinearOp = F.linear
        if adapted:
            assert self.stack is not None
            linear = StackedLinear(self.stack, adapters.int())
        return self.model(tokens, positions, attend, linear, FUSED)


def packed(
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    chunks: Chunks,
    spec: ModelSpec,
) -> tuple[Tensor, int]:
    """All that the device needs to know of a pass, and how many tiles there are; there is room for as many as there
    are tokens."""
    per_tile = shape_for(spec, len(tokens)).rows // (spec.heads // spec.kv_heads)
    lengths = np.array([len(blocks) for blocks in chunks.blocks])
    cut = -(-chunks.counts // per_tile)
    chunk = np.repeat(np.arange(len(cut)), cut)
    number = np.arange(len(chunk)) - np.repeat(np.cumsum(cut) - cut, cut)
    before = number * per_tile
    here = np.minimum(chunks.counts[chunk] - before, per_tile)
    tiles = np.zeros((len(tokens), FIELDS), dtype=np.int64)
    tiles[: len(chunk)] = np.stack(
        (
            (np.cumsum(chunks.counts) - chunks.counts)[chunk] + before,
            here,
            np.maximum(chunks.contexts[chunk] + before + here, 1),
            (np.cumsum(lengths) - lengths)[chunk],
        ),
        axis=1,
    )
    adapters = np.repeat(chunks.adapters, chunks.counts)
    blocks = np.fromiter(chain.from_iterable(chunks.blocks), dtype=np.int64)
    flat = np.concatenate((tokens, positions, slots, adapters, tiles.reshape(-1), blocks))
    return torch.from_numpy(flat), len(chunk)
