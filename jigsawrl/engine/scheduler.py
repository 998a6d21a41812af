"""Who runs in the next pass: continuous batching with chunked prefill over a bounded cache.

    waiting --admit--> running --finish--> gone
       ^                  |
       +---- preempt -----+      (blocks given up, tokens kept; they are run again)

The oldest running sequence can always go on, because one sequence alone always fits and younger ones give way to
older ones, and those whose owner is paused to all: nothing deadlocks and nothing is lost. Age is counted by owner,
from what has started: whoever comes with a few sequences does not stand behind another one's thousands.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from itertools import chain

from jigsawrl.engine.block_manager import BlockManager
from jigsawrl.engine.sequence import Owner, Sequence


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
        self.started = -1
        """The highest arrival that has started."""

    def next_arrival(self, owner: Owner) -> int:
        return max(owner.arrivals, self.started + 1)

    def add(self, sequence: Sequence) -> None:
        place = len(self.waiting)
        while place > 0 and self.waiting[place - 1].arrival > sequence.arrival:
            place -= 1
        self.waiting.insert(place, sequence)

    def of(self, owner: Owner) -> list[Sequence]:
        """All of an owner's sequences."""
        return [s for s in (*self.running, *self.waiting) if s.owner is owner]

    def has_any(self, owner: Owner) -> bool:
        return any(s.owner is owner for s in chain(self.running, self.waiting))

    def first_waiting(self) -> Sequence | None:
        """The oldest that could start."""
        return next((s for s in self.waiting if not s.owner.waits), None)

    def is_idle(self) -> bool:
        """Whether there is nothing that a pass could move on."""
        return self.first_waiting() is None and all(s.owner.waits for s in self.running)

    def schedule(self) -> list[Scheduled]:
        """The next pass: running sequences first, oldest first, then as many waiting ones as fit."""
        budget, preemptions = self.max_num_batched_tokens, self.preemptions
        batch: list[Scheduled] = []
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence.row < 0 or sequence.owner.waits:
                continue
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
        while budget > 0 and (sequence := self.first_waiting()) is not None:
            tokens = self._enter(sequence, budget)
            if tokens > 0:
                self.waiting.remove(sequence)
                self.start(sequence)
                admitted.append(Scheduled(sequence, tokens))
                budget -= tokens
            elif (paused := self._youngest_paused()) is not None:
                self.preempt(paused)
            else:
                break
        return admitted

    def _enter(self, sequence: Sequence, budget: int) -> int:
        """Gives a waiting sequence its first blocks; returns how many of its tokens can run, 0 without room."""
        if not self.rows:
            return 0
        self.blocks.adopt_prefix(sequence)
        tokens = min(sequence.pending, budget)
        if not self.blocks.can_grow(sequence, sequence.computed + tokens):
            self.blocks.release(sequence)
            return 0
        self.blocks.grow(sequence, sequence.computed + tokens)
        return tokens

    def start(self, sequence: Sequence) -> None:
        sequence.row = self.rows.pop()
        self.started = max(self.started, sequence.arrival)
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

    def drop(self, sequence: Sequence) -> None:
        """For good, running or waiting."""
        if sequence.row >= 0:
            self.stop(sequence)
        else:
            self.waiting.remove(sequence)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Grows the sequence, taking blocks from paused and young ones; False if it had to give way itself."""
        while not self.blocks.can_grow(sequence, tokens):
            youngest = self._youngest_paused() or self.running[-1]
            self.preempt(youngest)
            if youngest is sequence:
                return False
        self.blocks.grow(sequence, tokens)
        return True

    def _youngest_paused(self) -> Sequence | None:
        return next((s for s in reversed(self.running) if s.owner.waits), None)
