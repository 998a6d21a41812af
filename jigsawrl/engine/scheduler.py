"""Who runs in the next pass: continuous batching with chunked prefill over a bounded cache.

    waiting --admit--> running --finish--> gone
       ^                  |
       +---- preempt -----+      (blocks given up, tokens kept; they are run again)

The oldest running sequence can always go on, because one sequence alone always fits and younger ones give way to
older ones: nothing deadlocks and nothing is lost.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from jigsawrl.engine.block_manager import BlockManager
from jigsawrl.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence and how many of its pending tokens go into this pass."""

    sequence: Sequence
    tokens: int

    @property
    def decodes(self) -> bool:
        """Whether this is a sample's next token and nothing else: no prompt, and nobody who shares its logits."""
        sequence = self.sequence
        return sequence.pending == 1 and sequence.computed > 0 and not sequence.forks


class Scheduler:
    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Oldest first."""
        self.rows = list(range(max_num_seqs - 1, -1, -1))
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next pass: running sequences first, oldest first, then as many waiting ones as fit."""
        budget, preemptions = self.max_num_batched_tokens, self.preemptions
        batch: list[Scheduled] = []
        for sequence in list(self.running):
            if budget == 0 or sequence.row < 0:
                break
            tokens = min(sequence.pending, budget)
            needed = sequence.computed + tokens
            if needed <= len(sequence.blocks) * self.blocks.block_size or self._make_room(sequence, needed):
                batch.append(Scheduled(sequence, tokens))
                budget -= tokens
        if preemptions == self.preemptions:  # otherwise newcomers would take the blocks just given up
            batch += self._admit(budget)
        return batch

    def _admit(self, budget: int) -> list[Scheduled]:
        admitted: list[Scheduled] = []
        while self.waiting and budget > 0 and self.rows:
            sequence = self.waiting[0]
            self.blocks.adopt_prefix(sequence)
            tokens = min(sequence.pending, budget)
            if not self.blocks.can_grow(sequence, sequence.computed + tokens):
                self.blocks.release(sequence)
                break
            self.blocks.grow(sequence, sequence.computed + tokens)
            self.waiting.popleft()
            self.start(sequence)
            admitted.append(Scheduled(sequence, tokens))
            budget -= tokens
        return admitted

    def start(self, sequence: Sequence) -> None:
        sequence.row = self.rows.pop()
        insort(self.running, sequence, key=lambda s: s.arrival)

    def can_fork(self, parent: Sequence) -> bool:
        needed = 1 if parent.computed % self.blocks.block_size else 0
        return bool(self.rows) and len(self.blocks.free) >= needed

    def preempt(self, sequence: Sequence) -> None:
        """Back into the queue, by age."""
        self.stop(sequence)
        self.preemptions += 1
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        place = 0
        while place < len(self.waiting) and self.waiting[place].arrival < sequence.arrival:
            place += 1
        self.waiting.insert(place, sequence)

    def stop(self, sequence: Sequence) -> None:
        """Out of the running, blocks and row given back."""
        self.running.remove(sequence)
        self.rows.append(sequence.row)
        sequence.row = -1
        self.blocks.release(sequence)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Grows the sequence, taking blocks from the youngest; False if it had to give way itself."""
        while not self.blocks.can_grow(sequence, tokens):
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is sequence:
                return False
        self.blocks.grow(sequence, tokens)
        return True
