"""Decode steps as CUDA graphs, launched without waiting for their results.

A graph is captured when its batch size, cut of the context and stream come up again, and replayed from then on: its
slots go to the device before it where they have changed, and it leaves its tokens and log-probs with the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jigsawrl.engine.attention import KVCache
from jigsawrl.engine.cuda.adapters import Stack
from jigsawrl.engine.cuda.cuts import Cut, cut_for
from jigsawrl.engine.cuda.graphs import Graphs
from jigsawrl.engine.cuda.prefill import Prefill
from jigsawrl.engine.cuda.step import IN_FLIGHT, PART_SLOTS, DecodeStep, Rows
from jigsawrl.engine.mixed import Adapters
from jigsawrl.engine.sampler import keyed_uniforms, sample
from jigsawrl.engine.sequence import Owner, Sequence
from jigsawrl.engine.types import SamplingParams
from jigsawrl.model.transformer import Transformer

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32))
"""Batch sizes that graphs are made for; from the last one on, its multiples."""


@dataclass(slots=True)
class Launched:
    """A step on its way: its sequences by slot, and where its results will be."""

    sequences: list[Sequence]
    results: Tensor
    done: torch.cuda.Event

    def read(self) -> tuple[list[int], list[float]]:
        """Tokens and log-probs; waits for them."""
        self.done.synchronize()
        count, results = len(self.sequences), self.results.numpy()
        tokens: list[int] = results[0, :count].tolist()
        logprobs: list[float] = results[1, :count].view(np.float32).tolist()
        return tokens, logprobs


class Decoder:
    """A model's decode steps over its cache."""

    def __init__(self, model: Transformer, cache: KVCache, max_num_seqs: int) -> None:
        self.model, self.cache = model, cache
        width = -(-model.spec.max_positions // cache.block_size) + 1
        idle_block = cache.keys.shape[1] - 1
        self.rows = Rows(max_num_seqs, width, idle_block, model.device)
        slots = rung(max_num_seqs)
        self.step = DecodeStep(model, cache, self.rows, slots)
        self.processors = torch.cuda.get_device_properties(model.device).multi_processor_count
        self.adapters: dict[int, Adapters] = {}
        """By owner, those of owners that have any."""
        self.graphs = Graphs(model)
        self.prefill = Prefill(model, cache, self.graphs)
        self.known: list[tuple[Sequence, list[int], int] | None] = [None] * max_num_seqs
        """Whose state each row holds, with which blocks, up to which token."""
        self.lengths = [0] * max_num_seqs
        """Blocks in each row's table."""
        self.slots = torch.empty((IN_FLIGHT, slots), dtype=torch.int32, pin_memory=True)
        self.sent: list[int] = []
        """The rows that the device has in its slots."""
        self.yields = False
        """Whether its steps leave room to others on the GPU: see `DecodeStep`."""
        self.launches = 0
        """The device counts them as well: its results go to places in turns."""

    def adapt(self, owner: int, adapters: Adapters) -> None:
        """From now on an owner's rows have a copy of these adapters, or none."""
        if adapters:
            self.adapters[owner] = adapters
        elif self.adapters.pop(owner, None) is None:
            return
        stack = self.step.adapters
        if stack is not None and self.adapters and stack.takes(owner, adapters):
            stack.fill(owner, adapters)
        else:
            self.step.adapt(Stack(self.adapters) if self.adapters else None)
            self.prefill.adapt(self.step.adapters)
            self.graphs.clear()
            self.known = [None] * len(self.known)

    def slot_of(self, owner: Owner) -> int:
        """Of an owner's adapters; -1: none."""
        stack = self.step.adapters
        return -1 if stack is None else stack.slots.get(owner.number, -1)

    def enter(self, sequences: list[Sequence]) -> None:
        """Brings the rows of these sequences up to date."""
        self.graphs.drop_stale()
        moved = [s for s in sequences if not self._knows(s)]
        if moved:
            self._upload(moved)
        grown = [s for s in sequences if self.lengths[s.row] < len(s.blocks)]
        if grown:
            self._extend(grown)

    def cut(self, sequences: list[Sequence], ahead: int) -> Cut:
        """Of their contexts, for the next steps, where `ahead` in flight still move them on."""
        contexts = [s.computed + ahead + 1 for s in sequences]
        most = PART_SLOTS // rung(len(sequences))
        return cut_for(contexts, self.model.spec, self.processors, most, self.step.streams_contexts)

    def _knows(self, sequence: Sequence) -> bool:
        known = self.known[sequence.row]
        return (
            known is not None
            and known[0] is sequence
            and known[1] is sequence.blocks
            and known[2] == sequence.computed
        )

    def _upload(self, sequences: list[Sequence]) -> None:
        """Everything but the blocks."""
        device, rows = self.model.device, self.rows
        index = torch.tensor([s.row for s in sequences], device=device)
        keys = np.array([s.random_key for s in sequences], dtype=np.uint64).view(np.int64)
        numbers = np.array([(s.tokens[-1], s.computed) for s in sequences], dtype=np.int32)
        rows.tokens[index], rows.positions[index] = torch.from_numpy(numbers).to(device).unbind(1)
        rows.keys[index] = torch.from_numpy(keys).to(device)
        places = [self.slot_of(s.owner) for s in sequences]
        rows.adapters[index] = torch.tensor(places, dtype=torch.int32, device=device)
        rows.temperatures[index] = torch.tensor([s.params.temperature for s in sequences], device=device)
        for sequence in sequences:
            self.known[sequence.row] = (sequence, sequence.blocks, sequence.computed)
            self.lengths[sequence.row] = 0

    def _extend(self, sequences: list[Sequence]) -> None:
        """Enters into the tables what they lack."""
        row: list[int] = []
        column: list[int] = []
        block: list[int] = []
        for sequence in sequences:
            start, end = self.lengths[sequence.row], len(sequence.blocks)
            row += [sequence.row] * (end - start)
            column += range(start, end)
            block += sequence.blocks[start:]
            self.lengths[sequence.row] = end
        entries = torch.tensor((row, column, block), device=self.model.device)
        self.rows.tables[entries[0], entries[1]] = entries[2].int()

    @torch.inference_mode()
    def launch(self, sequences: list[Sequence], ahead: int, cut: Cut) -> Launched:
        """Starts a step for sequences that `ahead` steps in flight still move on and that have blocks for it."""
        place, count = self.launches % IN_FLIGHT, len(sequences)
        self.launches += 1
        rows = [s.row for s in sequences]
        if rows != self.sent:
            slots = self.slots[place].numpy()
            slots[:count] = rows
            slots[count:] = self.rows.idle
            self.step.inputs.copy_(self.slots[place], non_blocking=True)
            self.sent = rows
        truncated = any(_is_truncated(s.params) for s in sequences)
        step = (rung(count), cut, not truncated, self.yields)
        self.graphs.run(step, lambda: self.step.launch(*step))
        results = self.step.results[place]
        if truncated:
            self._sample(sequences, ahead)
            results.copy_(self.step.outputs, non_blocking=True)
        for sequence in sequences:
            self.known[sequence.row] = (sequence, sequence.blocks, sequence.computed + ahead + 1)
        done = torch.cuda.Event()
        done.record()
        return Launched(sequences, results, done)

    def _sample(self, sequences: list[Sequence], ahead: int) -> None:
        """Draws where top-k, top-p or min-p cut the vocabulary: through torch's operators, from the same numbers."""
        keys = np.array([s.random_key for s in sequences], dtype=np.uint64)
        positions = np.array([s.computed + ahead + 1 for s in sequences], dtype=np.int64)
        uniforms = torch.from_numpy(keyed_uniforms(keys, positions))
        count = len(sequences)
        tokens, logprobs = sample(self.step.logits[:count], [s.params for s in sequences], uniforms)
        index = self.step.inputs[:count].long()
        self.step.tokens[:count] = tokens
        self.step.logprobs[:count] = logprobs
        self.rows.tokens[index] = tokens.int()
        self.rows.positions[index] += 1


def rung(count: int) -> int:
    """The batch size that `count` sequences run in."""
    last = LADDER[-1]
    return next((size for size in LADDER if size >= count), -(-count // last) * last)


def _is_truncated(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0)
