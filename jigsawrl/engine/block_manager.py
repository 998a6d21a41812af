"""Which cache block belongs to which sequence.

Blocks are counted by reference: samples of one prompt share its full blocks. A full block that nobody refers to
any more keeps its content until the space is needed, and is found again by the tokens it stands for (a next turn,
a resumed partial, a preempted sequence). Each owner of sequences finds only what was computed with its weights.
"""

from __future__ import annotations

from collections import OrderedDict

from jigsawrl.engine.sequence import Owner, Sequence

Prefix = tuple[int, tuple[int, ...]]
"""Id of the cached block before this one and the tokens of this block; the first has its owner's root before it."""


def root(owner: Owner) -> int:
    return -1 - owner.number


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[Prefix, int] = {}
        self.prefix_of: dict[int, Prefix] = {}
        self.following: dict[int, set[int]] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def can_grow(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence can hold `tokens` in all."""
        return self.blocks_for(tokens) - len(sequence.blocks) <= len(self.free)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        while len(sequence.blocks) * self.block_size < tokens:
            sequence.blocks.append(self._take())

    def adopt_prefix(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks every cached block its tokens start with; one token is left to run."""
        size, parent = self.block_size, root(sequence.owner)
        for start in range(0, (len(sequence.tokens) - 1) // size * size, size):
            block = self.cached.get((parent, tuple(sequence.tokens[start : start + size])))
            if block is None:
                return
            if self.references[block] == 0:
                del self.free[block]
            self.references[block] += 1
            sequence.blocks.append(block)
            sequence.computed = start + size
            parent = block

    def remember(self, sequence: Sequence, before: int) -> None:
        """Makes the blocks that were filled since `before` tokens findable."""
        size = self.block_size
        for index in range(before // size, sequence.computed // size):
            block = sequence.blocks[index]
            if block in self.prefix_of:
                continue
            parent = sequence.blocks[index - 1] if index else root(sequence.owner)
            if parent >= 0 and parent not in self.prefix_of:
                return  # an equal block is known under another id; the chain behind this one is not findable
            prefix = (parent, tuple(sequence.tokens[index * size : (index + 1) * size]))
            if prefix not in self.cached:
                self.cached[prefix] = block
                self.prefix_of[block] = prefix
                self.following.setdefault(parent, set()).add(block)

    def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Shares the parent's computed tokens; returns (from, to) if a half-filled block must be copied."""
        full = parent.computed // self.block_size
        child.blocks = parent.blocks[:full]
        for block in child.blocks:
            self.references[block] += 1
        child.computed = parent.computed
        if parent.computed % self.block_size == 0:
            return None
        child.blocks.append(self._take())
        return parent.blocks[full], child.blocks[full]

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks back, the last ones to be reused first."""
        for block in reversed(sequence.blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None
                if block not in self.prefix_of:
                    self.free.move_to_end(block, last=False)
        sequence.blocks = []
        sequence.computed = 0

    def forget(self, owner: Owner) -> None:
        """None of the owner's blocks is findable any more: its weights are out of date."""
        for block in list(self.following.get(root(owner), ())):
            self._forget(block)
        self.following.pop(root(owner), None)

    def _take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self._forget(block)
        self.references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        """Drops a block from the cache, and with it those that could only be found through it."""
        if block not in self.prefix_of:
            return
        self.following[self.prefix_of[block][0]].discard(block)
        stack = [block]
        while stack:
            current = stack.pop()
            del self.cached[self.prefix_of.pop(current)]
            stack.extend(self.following.pop(current, ()))
