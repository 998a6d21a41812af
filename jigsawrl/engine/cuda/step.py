"""One decode step: a token for every slot, all of it on the device.

    rows -> begin -> layers (qkv, attention, o, gate_up, down) -> head -> choose -> tokens, log-probs

A *row* is a sequence's place for as long as it runs, and holds its token, position, key, temperature and blocks; a
*slot* is a place in one step's batch and names a row. So a batch changes by nothing more than new slots, and one
step's results are the next one's inputs without the host knowing them. Slots that nobody needs name the idle row,
which never moves on and writes to a block that is nobody's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jigsawrl.engine.attention import KVCache
from jigsawrl.engine.cuda.adapters import AdapterScratch, Stack, beside, expand, expand_swiglu, shrink
from jigsawrl.engine.cuda.attention import attention_kernel
from jigsawrl.engine.cuda.cuts import MOST_SPLITS, Cut
from jigsawrl.engine.cuda.linear import DEPENDENT, LAUNCH, Beside, Scratch, linear
from jigsawrl.engine.cuda.sampling import choose_kernel, tile_kernel
from jigsawrl.engine.cuda.small import add_norm_kernel, begin_kernel, swiglu_kernel
from jigsawrl.engine.cuda.streamed import streamed
from jigsawrl.engine.cuda.streamed_attention import MOST_HEADS, streamed_attention_kernel
from jigsawrl.engine.cuda.tilings import (
    HEAD,
    HEAD_TILE,
    MOST_ADAPTED_HIDDEN,
    MOST_ADAPTED_ROWS,
    MOST_ROWS,
    PLAIN,
    RESIDUAL,
    SWIGLU,
    ring,
    rows_in_bands,
    tiling,
    tiling_beside_adapters,
)
from jigsawrl.model.transformer import Layer, Transformer

IN_FLIGHT = 4
"""Steps whose results may be on their way at once; a burst keeps two."""
PART_SLOTS = 4096
"""Slots times parts of a context that there is scratch space for."""
TILES_AT_ONCE = 16
"""Of logits, that a program looks at where the library has made them: one each kept the chip busy with starting
programs (72 us of a step of 96 sequences)."""
LOG2_E = 1.4426950408889634


class Rows:
    """The sequences' state on the device, one row each, and the idle row at the end."""

    def __init__(self, count: int, width: int, idle_block: int, device: torch.device) -> None:
        self.idle = count
        self.tokens = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.keys = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.temperatures = torch.ones(count + 1, dtype=torch.float32, device=device)
        self.adapters = torch.full((count + 1,), -1, dtype=torch.int32, device=device)
        """The slot of each one's adapters; -1: none."""
        self.tables = torch.full((count + 1, width), idle_block, dtype=torch.int32, device=device)


class DecodeStep:
    """The launches of a step, over buffers that stay where they are: what a graph is captured from.

    Each kernel lets the next one start while it runs. Alone on a GPU a step is fastest where they may start at once:
    up to four then wait for each other, with what they can read before in shared memory. A step that *yields* lets
    each start only when its own inputs are there: others' kernels find room, and all together are faster.
    """

    def __init__(self, model: Transformer, cache: KVCache, rows: Rows, slots: int) -> None:
        spec, device = model.spec, model.device
        self.model, self.cache, self.rows = model, cache, rows
        self.streams = torch.cuda.get_device_capability(device)[0] == 9
        """Whether rings, which are written for Hopper, can be used for products."""
        self.streams_contexts = self.streams and spec.heads // spec.kv_heads <= MOST_HEADS
        self.most_adapted = MOST_ADAPTED_ROWS if spec.hidden_size <= MOST_ADAPTED_HIDDEN else MOST_ROWS
        """Slots up to which our own products are faster where there are adapters."""
        self.inputs = torch.full((slots,), rows.idle, dtype=torch.int32, device=device)
        """Each slot's row."""
        self.outputs = torch.zeros((2, slots), dtype=torch.int32, device=device)
        """Each slot's token, and the bits of its log-prob."""
        self.tokens, self.logprobs = self.outputs[0], self.outputs[1].view(torch.float32)
        self.results = torch.empty((IN_FLIGHT, 2, slots), dtype=torch.int32, pin_memory=True)
        """The same of the last steps, in turns, where the host finds it."""
        self.turn = torch.full((1,), IN_FLIGHT - 1, dtype=torch.int32, device=device)
        matrix: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        numbers: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.x = torch.zeros(slots, spec.hidden_size, **matrix)
        self.change = torch.zeros(slots, spec.hidden_size, **matrix)
        self.qkv = torch.zeros(slots, spec.q_size + 2 * spec.kv_size, **matrix)
        self.attended = torch.zeros(slots, spec.q_size, **matrix)
        self.gate_up = torch.zeros(slots, 2 * spec.intermediate_size, **matrix)
        self.mlp = torch.zeros(slots, spec.intermediate_size, **matrix)
        self.logits = torch.zeros(slots, spec.vocab_size, **matrix)
        head_tiles = -(-spec.vocab_size // HEAD_TILE)
        widest = max(spec.hidden_size, spec.q_size + 2 * spec.kv_size) + 128
        self.scratch = Scratch(
            slots=slots,
            scaled=torch.zeros(slots, spec.hidden_size, **matrix),
            squares=torch.zeros(-(-spec.hidden_size // 16), slots, **numbers),
            maxima=torch.zeros(head_tiles, slots, **numbers),
            sums=torch.zeros(head_tiles, slots, **numbers),
            partials=torch.zeros(16 * rows_in_bands(min(slots, self.most_adapted)) * widest, **numbers),
            counters=torch.zeros(widest, dtype=torch.int32, device=device),
        )
        parts = min(PART_SLOTS, slots * MOST_SPLITS) * spec.heads
        self.part_out = torch.zeros(parts, spec.head_dim, **numbers)
        self.part_max = torch.zeros(parts, **numbers)
        self.part_sum = torch.zeros(parts, **numbers)
        self.part_counters = torch.zeros(slots * spec.kv_heads, dtype=torch.int32, device=device)
        self.adapters: Stack | None = None
        self.adapter_scratch: AdapterScratch | None = None
        self.yields = False

    def adapt(self, stack: Stack | None) -> None:
        """From now on the rows have these adapters."""
        self.adapters = stack
        self.adapter_scratch = None if stack is None else AdapterScratch.of(stack, self.scratch.slots)

    def launch(self, slots: int, cut: Cut, choose: bool, yields: bool = False) -> None:
        """A step over the first `slots` slots; without `choose` it ends with the logits."""
        self.yields = yields
        self._begin(slots)
        if slots <= (self.most_adapted if self.adapters is not None else MOST_ROWS):
            self._few(slots, cut)
        else:
            self._many(slots, cut)
        if choose:
            self._choose(slots)

    def _begin(self, slots: int) -> None:
        spec, rows = self.model.spec, self.rows
        begin_kernel[(slots,)](
            self.inputs,
            rows.tokens,
            self.model.embed_tokens,
            self.model.blocks()[0].input_layernorm.weight,
            self.x,
            self.scratch.scaled,
            self.scratch.squares,
            self.inputs if self.adapter_scratch is None else self.adapter_scratch.flags,
            self.turn,
            spec.hidden_size,
            HP=_power(spec.hidden_size),
            FLAGS=0 if self.adapter_scratch is None else len(self.adapter_scratch.flags),
            TURNS=IN_FLIGHT,
            PDL=DEPENDENT,
        )

    def _few(self, slots: int, cut: Cut) -> None:
        """Every product through our kernel, norms and gates inside."""
        layers, eps = self.model.blocks(), self.model.spec.norm_eps
        scratch, norm_tiles = self.scratch, 1
        after = [layer.input_layernorm.weight for layer in layers[1:]] + [self.model.norm.weight]
        for index, (layer, next_norm) in enumerate(zip(layers, after, strict=True)):
            self._product(
                slots, scratch.scaled, layer.qkv.weight, PLAIN,
                bias=layer.qkv.bias, out=self.qkv, eps=eps, norm_tiles=norm_tiles,
            )  # fmt: skip
            self._attend(index, layer, slots, cut)
            norm_tiles = self._product(
                slots, self.attended, layer.o.weight, RESIDUAL,
                bias=layer.o.bias, residual=self.x, next_norm=layer.post_attention_layernorm.weight,
            )  # fmt: skip
            self._product(
                slots, scratch.scaled, layer.gate_up.weight, SWIGLU,
                out=self.mlp, eps=eps, norm_tiles=norm_tiles,
            )  # fmt: skip
            norm_tiles = self._product(
                slots, self.mlp, layer.down.weight, RESIDUAL, residual=self.x, next_norm=next_norm
            )
        if slots > MOST_ROWS:
            self._add_norm(slots, None, self.model.norm.weight)
            self._head(slots)
            return
        self._product(
            slots, scratch.scaled, self.model.head, HEAD, out=self.logits, eps=eps, norm_tiles=norm_tiles,
            rows=self.inputs, temperatures=self.rows.temperatures,
        )  # fmt: skip

    def _product(self, slots: int, x: Tensor, w: Tensor, epilogue: int, **arguments: Any) -> int:
        adapters = self._beside(w)
        rounds = ring(slots, *w.shape) if self.streams and adapters is None else None
        if rounds is not None:
            return streamed(x, w, slots, epilogue, rounds, self.scratch, yields=self.yields, **arguments)
        cut = tiling if adapters is None else tiling_beside_adapters
        how = cut(slots, w.shape[0], w.shape[1], epilogue)
        arguments |= {"adapters": adapters, "yields": self.yields}
        return linear(x, w, slots, epilogue, how, self.scratch, **arguments)

    def _beside(self, w: Tensor) -> Beside | None:
        """The adapters beside a matrix, if there are any."""
        stack, scratch = self.adapters, self.adapter_scratch
        matrices = None if stack is None else stack.matrices.get(w)
        if stack is None or scratch is None or matrices is None:
            return None
        return beside(matrices, stack.rank, self.inputs, self.rows.adapters, scratch)

    def _many(self, slots: int, cut: Cut) -> None:
        """Products through the library, norms and gates between them."""
        model = self.model
        part = slice(0, slots)
        change, qkv, attended = self.change[part], self.qkv[part], self.attended[part]
        gate_up, mlp, normed = self.gate_up[part], self.mlp[part], self.scratch.scaled[part]
        layers = model.blocks()
        after = [layer.input_layernorm.weight for layer in layers[1:]] + [model.norm.weight]
        self._add_norm(slots, None, layers[0].input_layernorm.weight)
        for index, (layer, next_norm) in enumerate(zip(layers, after, strict=True)):
            self._into(qkv, normed, layer.qkv.weight, layer.qkv.bias)
            self._attend(index, layer, slots, cut)
            self._into(change, attended, layer.o.weight, layer.o.bias)
            self._add_norm(slots, change, layer.post_attention_layernorm.weight)
            self._gated(mlp, gate_up, normed, layer.gate_up.weight)
            self._into(change, mlp, layer.down.weight, None)
            self._add_norm(slots, change, next_norm)
        self._head(slots)

    def _gated(self, mlp: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor) -> None:
        """The first half of a layer's second part."""
        adapters, (slots, inner) = self._beside(weight), mlp.shape
        if adapters is not None:
            shrink(x, adapters, slots)
        torch.mm(x, weight.t(), out=gate_up)
        if adapters is not None:
            expand_swiglu(gate_up, mlp, adapters, slots)
        else:
            swiglu_kernel[(slots, -(-inner // 1024))](gate_up, mlp, inner, SIZE=1024, PDL=DEPENDENT, **LAUNCH)

    def _into(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        adapters = self._beside(weight)
        if adapters is not None:
            shrink(x, adapters, len(out))
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)
        if adapters is not None:
            expand(out, adapters, len(out))

    def _add_norm(self, slots: int, change: Tensor | None, weight: Tensor) -> None:
        spec = self.model.spec
        add_norm_kernel[(slots,)](
            self.x,
            self.x if change is None else change,
            weight,
            self.scratch.scaled,
            spec.norm_eps,
            spec.hidden_size,
            HP=_power(spec.hidden_size),
            ADD=change is not None,
            PDL=DEPENDENT,
            **LAUNCH,
        )

    def _attend(self, index: int, layer: Layer, slots: int, cut: Cut) -> None:
        spec, rows = self.model.spec, self.rows
        keys, values = self.cache.blocks[index]
        weights = [self.x if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm)]
        group = spec.heads // spec.kv_heads
        own: dict[str, Any] = {"STAGES": cut.stages, "WARPS": 4}
        if not cut.streamed:
            padded = max(16, _power(group))
            own = {"PADDED": padded, "AHEAD": cut.ahead, "PDL": DEPENDENT, "num_stages": cut.stages}
        (streamed_attention_kernel if cut.streamed else attention_kernel)[(cut.splits, spec.kv_heads, slots)](
            self.qkv,
            keys,
            values,
            rows.tables,
            self.inputs,
            rows.positions,
            self.model.cos,
            self.model.sin,
            *weights,
            self.attended,
            self.part_out,
            self.part_max,
            self.part_sum,
            self.part_counters,
            LOG2_E / math.sqrt(spec.head_dim),
            spec.norm_eps,
            rows.tables.shape[1],
            cut.part,
            KV_HEADS=spec.kv_heads,
            GROUP=group,
            D=spec.head_dim,
            BLOCK=self.cache.block_size,
            SPLITS=cut.splits,
            TILE=cut.tile,
            QK_NORM=layer.q_norm is not None,
            YIELDS=self.yields,
            num_warps=4,
            **own,
            **LAUNCH,
        )

    def _head(self, slots: int) -> None:
        """The library's product, and what ours would have left beside the logits."""
        torch.mm(self.scratch.scaled[:slots], self.model.head.t(), out=self.logits[:slots])
        self._tiles(slots)

    def _tiles(self, slots: int) -> None:
        tiles = self.scratch.maxima.shape[0]
        tile_kernel[(-(-tiles // TILES_AT_ONCE), slots)](
            self.logits,
            self.inputs,
            self.rows.temperatures,
            self.scratch.maxima,
            self.scratch.sums,
            tiles,
            self.model.spec.vocab_size,
            SLOTS=self.scratch.slots,
            AT_ONCE=TILES_AT_ONCE,
            TILE=HEAD_TILE,
            PDL=DEPENDENT,
            num_warps=4,
            **LAUNCH,
        )

    def _choose(self, slots: int) -> None:
        rows, tiles = self.rows, self.scratch.maxima.shape[0]
        choose_kernel[(slots,)](
            self.logits,
            self.scratch.maxima,
            self.scratch.sums,
            self.inputs,
            rows.temperatures,
            rows.keys,
            rows.tokens,
            rows.positions,
            self.tokens,
            self.logprobs,
            self.results,
            self.turn,
            tiles,
            rows.idle,
            self.model.spec.vocab_size,
            SLOTS=self.scratch.slots,
            TILES=_power(tiles),
            TILE=HEAD_TILE,
            PDL=DEPENDENT,
            num_warps=4,
            **LAUNCH,
        )


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
