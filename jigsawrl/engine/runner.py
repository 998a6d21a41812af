"""Runs one scheduled pass through the model: flat inputs in, logits of the sequences that are due a token out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from jigsawrl.engine.attention import (
    Chunk,
    KVCache,
    PagedAttention,
    Rows,
    merged,
    padded_lengths,
    row_groups,
)
from jigsawrl.engine.decoding import decoded_by, why_not_kernels, why_not_with
from jigsawrl.engine.mixed import Adapters, mixed
from jigsawrl.engine.scheduler import Scheduled
from jigsawrl.model.cpu import onednn_linear, prefers_onednn
from jigsawrl.model.lora import LinearOp, linears
from jigsawrl.model.transformer import Transformer

if TYPE_CHECKING:
    from jigsawrl.engine.cuda.decoder import Decoder

TILE = 32
"""Rows of every matrix product in deterministic mode: one shape, so one order of summation."""


class Runner:
    """Owns the cache and a table of block ids with one line for each running sequence.

    Rows go through the model as it is and through the adapters of their owner, where those are not the model's own.
    """

    def __init__(
        self, model: Transformer, num_blocks: int, block_size: int, max_num_seqs: int, deterministic: bool
    ) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.deterministic = deterministic
        self.adapters: dict[int, Adapters] = {}
        """By the number of the owner whose rows they are for."""
        self.beside: dict[int, Adapters] = {}
        """Those of them that the model does not apply by itself."""
        self.linear = tiled_linear if deterministic else fastest_linear(model)
        longest = padded_lengths(np.array([model.spec.max_positions]), block_size)
        width = int(longest[0]) // block_size
        self.tables = np.zeros((max_num_seqs, width), dtype=np.int64)
        self.table_lengths = [0] * max_num_seqs
        self.table_sources: list[list[int] | None] = [None] * max_num_seqs
        self.cache: KVCache | None = None
        self.decoder: Decoder | None = None
        """Where there are kernels for decoding this model."""
        self.why_not_kernels: str | None = None
        """Why there are none, on a GPU."""
        self.allocate()

    def adapt(self, owner: int, adapters: Adapters) -> None:
        """From now on these are the adapters of an owner's rows; without any, those it had are let go of."""
        own = {linear.lora for _, linear in linears(self.model)}
        self.adapters[owner] = adapters
        self.beside[owner] = {weight: lora for weight, lora in adapters.items() if lora not in own}
        if not adapters:
            del self.adapters[owner], self.beside[owner]
        if self.decoder is not None:
            self._teach(self.decoder, owner, adapters)

    def allocate(self) -> None:
        # One block more than the manager knows: padding rows write there.
        self.cache = KVCache(
            self.model.spec, self.num_blocks + 1, self.block_size, self.model.dtype, self.model.device
        )
        if self.model.device.type != "cuda":
            return
        self.why_not_kernels = why_not_kernels(decoded_by(self.model, self.deterministic))
        if self.why_not_kernels is None:
            from jigsawrl.engine.cuda.decoder import Decoder

            self.decoder = decoder = Decoder(self.model, self.cache, len(self.tables))
            for owner, adapters in self.adapters.items():
                self._teach(decoder, owner, adapters)

    def _teach(self, decoder: Decoder, owner: int, adapters: Adapters) -> None:
        """Gives the decoder an owner's adapters; where it cannot take them, there is none from now on."""
        if (why_not := why_not_with(adapters)) is None:
            decoder.adapt(owner, adapters)
        else:
            self.decoder, self.why_not_kernels = None, why_not

    def release(self) -> None:
        """Gives the cache back, and the graphs that were captured over it."""
        self.cache = self.decoder = None

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> Tensor:
        """Logits [n, vocabulary] of the n sequences that this pass completes, in batch order."""
        tokens, positions, slots, last = self._flatten(batch)
        device = self.model.device
        if self.decoder is not None:
            hidden = self._packed(self.decoder, batch, tokens, positions, slots)
        else:
            hidden = self._eager(batch, tokens, positions, slots)
        rows = hidden.index_select(0, torch.tensor(last, dtype=torch.int64, device=device))
        if self.deterministic and len(last) % TILE:
            return self.linear(F.pad(rows, (0, 0, 0, -len(last) % TILE)), self.model.head, None)[: len(last)]
        return self.linear(rows, self.model.head, None)

    def _eager(
        self,
        batch: list[Scheduled],
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> Tensor:
        """Hidden states, through torch's operators."""
        groups, chunks = self._attention_plan(batch)
        device = self.model.device
        assert self.cache is not None, "the engine sleeps"
        attend = PagedAttention(
            self.model.spec, self.cache, torch.from_numpy(slots).to(device), groups, chunks
        )
        owners = [(item.sequence.owner.number, item.tokens) for item in batch]
        hidden: Tensor = self.model(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(positions).to(device),
            attend,
            mixed(self.linear, owners, self.beside, TILE if self.deterministic else 1, device),
        )
        return hidden

    def _packed(
        self,
        decoder: Decoder,
        batch: list[Scheduled],
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> Tensor:
        """Hidden states, through kernels."""
        from jigsawrl.engine.cuda.prefill import Chunks

        sequences = [item.sequence for item in batch]
        adapters = [decoder.slot_of(s.owner) if self.beside.get(s.owner.number) else -1 for s in sequences]
        chunks = Chunks(
            np.array([item.tokens for item in batch]),
            np.array([s.computed for s in sequences]),
            np.array(adapters),
            [s.blocks for s in sequences],
        )
        return decoder.prefill.run(tokens, positions, slots, chunks)

    def _flatten(self, batch: list[Scheduled]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        """Tokens, positions and cache slots of the pass, and the rows whose logits are wanted."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        last: list[int] = []
        for item in batch:
            sequence, start = item.sequence, item.sequence.computed
            self._update_table(sequence.row, sequence.blocks)
            if item.tokens == 1:
                tokens.append(sequence.tokens[start])
                positions.append(start)
                rows.append(sequence.row)
            else:
                tokens += sequence.tokens[start : start + item.tokens]
                positions += range(start, start + item.tokens)
                rows += [sequence.row] * item.tokens
            if item.tokens == sequence.pending:
                last.append(len(tokens) - 1)
        where = np.array(positions, dtype=np.int64)
        slots = (
            self.tables[np.array(rows), where // self.block_size] * self.block_size + where % self.block_size
        )
        flat = np.array(tokens, dtype=np.int64)
        if self.deterministic:
            padding = -len(tokens) % TILE
            scratch = self.num_blocks * self.block_size + np.arange(padding) % self.block_size
            flat, where = np.pad(flat, (0, padding)), np.pad(where, (0, padding))
            slots = np.concatenate((slots, scratch))
        return flat, where, slots, last

    def _update_table(self, row: int, blocks: list[int]) -> None:
        """Brings a table line up to date; a sequence's list of blocks only grows until it is replaced."""
        known = self.table_lengths[row] if self.table_sources[row] is blocks else 0
        if known < len(blocks):
            self.tables[row, known : len(blocks)] = blocks[known:]
            self.table_lengths[row] = len(blocks)
            self.table_sources[row] = blocks

    def _attention_plan(self, batch: list[Scheduled]) -> tuple[list[Rows], list[Chunk]]:
        single: list[int] = []
        lengths: list[int] = []
        lines: list[int] = []
        groups: list[Rows] = []
        chunks: list[Chunk] = []
        start = 0
        for item in batch:
            sequence, end = item.sequence, start + item.tokens
            if item.tokens == 1:
                single.append(start)
                lengths.append(sequence.computed + 1)
                lines.append(sequence.row)
            elif self.deterministic:
                groups += self._prefill_rows(item, start)
            else:
                chunks.append(self._chunk(item, start, end))
            start = end
        if single:
            contexts, line = np.array(lengths), np.array(lines)
            padded = padded_lengths(contexts, self.block_size)
            groups += row_groups(
                np.array(single),
                contexts,
                padded if self.deterministic else merged(padded),
                lambda members, width: self.tables[line[members], : width // self.block_size],
                self.model.dtype,
                self.model.device,
            )
        return groups, chunks

    def _prefill_rows(self, item: Scheduled, start: int) -> list[Rows]:
        """A prefill as single rows over one sequence's blocks, cut where the padded context length changes."""
        context, line = item.sequence.computed, item.sequence.row
        lengths = np.arange(context + 1, context + item.tokens + 1)
        return row_groups(
            np.arange(start, start + item.tokens),
            lengths,
            padded_lengths(lengths, self.block_size),
            lambda members, width: self.tables[line : line + 1, : width // self.block_size].copy(),
            self.model.dtype,
            self.model.device,
        )

    def _chunk(self, item: Scheduled, start: int, end: int) -> Chunk:
        sequence, device = item.sequence, self.model.device
        context = sequence.computed
        mask = None
        if context:
            queries = torch.arange(context, context + item.tokens, device=device).unsqueeze(1)
            mask = torch.arange(context + item.tokens, device=device).unsqueeze(0) <= queries
        return Chunk(start, end, context, torch.tensor(sequence.blocks, device=device), mask)


def fastest_linear(model: Transformer) -> LinearOp:
    """The product for passes that may round differently from one batch to the next."""
    onednn = model.device.type == "cpu" and model.dtype == torch.float32 and prefers_onednn()
    return onednn_linear if onednn else F.linear


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in tiles of exactly TILE rows, so that a row's result does not depend on how many there are."""
    if len(x) == TILE:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(tile, weight, bias) for tile in x.split(TILE)])
