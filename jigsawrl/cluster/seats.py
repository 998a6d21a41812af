"""Which rollout nodes of a group its jobs could have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, combinations

SLACK = 1e-9
Seats = tuple[tuple[int, ...], ...]
"""Of each job: its rollout nodes."""


def apart(needs: Sequence[int]) -> Seats:
    """Everyone on nodes of its own."""
    return tuple(tuple(range(end - need, end)) for need, end in zip(needs, accumulate(needs), strict=True))


def seatings(needs: Sequence[int], parts: Sequence[float], count: int) -> Iterator[Seats]:
    """Ways to put jobs onto so many nodes that are not busy for more than all of the time; the most even one first.

    `parts`: of the time that each job needs its nodes.
    """
    return chain(_evenly(needs, parts, count), _all(needs, parts, count))


def _evenly(needs: Sequence[int], parts: Sequence[float], count: int) -> Iterator[Seats]:
    """The busiest jobs first, onto the nodes that are least busy so far."""
    busy = [0.0] * count
    seats: list[tuple[int, ...]] = [()] * len(needs)
    for k in sorted(range(len(needs)), key=lambda k: -parts[k]):
        seats[k] = tuple(sorted(range(count), key=busy.__getitem__)[: needs[k]])
        for node in seats[k]:
            busy[node] += parts[k]
    if max(busy) <= 1 + SLACK:
        yield tuple(seats)


def _all(needs: Sequence[int], parts: Sequence[float], count: int) -> Iterator[Seats]:
    """Each way once; those that differ but in the names of nodes are the same."""
    busy = [0.0] * count

    def place(number: int, used: int) -> Iterator[Seats]:
        if number == len(needs):
            if used == count:
                yield ()
            return
        need, part = needs[number], parts[number]
        for nodes in combinations(range(min(count, used + need)), need):
            fresh = [node for node in nodes if node >= used]
            if fresh != list(range(used, used + len(fresh))):
                continue
            if any(busy[node] + part > 1 + SLACK for node in nodes):
                continue
            for node in nodes:
                busy[node] += part
            for rest in place(number + 1, used + len(fresh)):
                yield (nodes, *rest)
            for node in nodes:
                busy[node] -= part

    yield from place(0, 0)
