"""Which prompts come next: every prompt once an epoch, in an order that only the seed decides."""

from __future__ import annotations

import hashlib
from functools import lru_cache


def keyed(*parts: object, bits: int = 64) -> int:
    """A number that is the same for the same parts on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


@lru_cache(maxsize=2)
def epoch_order(indices: tuple[int, ...], seed: int, epoch: int) -> list[int]:
    return sorted(indices, key=lambda index: keyed("order", seed, epoch, index))


class PromptSource:
    """Deals prompts; its whole state is `cursor`, how many it has dealt."""

    def __init__(self, indices: list[int], seed: int, cursor: int = 0) -> None:
        self.indices = tuple(indices)
        self.seed = seed
        self.cursor = cursor

    def take(self, count: int, exclude: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
        """The next `count` distinct prompts, leaving out those in `exclude`; fewer if there are no more."""
        count = min(count, len(self.indices) - len(exclude))
        taken: list[int] = []
        while len(taken) < count:
            epoch, place = divmod(self.cursor, len(self.indices))
            index = epoch_order(self.indices, self.seed, epoch)[place]
            self.cursor += 1
            if index not in exclude and index not in taken:
                taken.append(index)
        return taken
