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
    return chain(_evenly(needs, parts, count), _all(needs, parts, (0.0,) * count, 0))


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


def _all(needs: Sequence[int], parts: Sequence[float], busy: tuple[float, ...], used: int) -> Iterator[Seats]:
    """Each way once; those that differ but in the names of nodes are the same: so far unused ones come in order."""
    if not needs:
        if used == len(busy):
            yield ()
        return
    for nodes in combinations(range(min(len(busy), used + needs[0])), needs[0]):
        fresh = sum([node >= used for node in nodes])
        if nodes[-1] < used + fresh and all(busy[node] + parts[0] <= 1 + SLACK for node in nodes):
            more = tuple([part + parts[0] * (node in nodes) for node, part in enumerate(busy)])
            for rest in _all(needs[1:], parts[1:], more, used + fresh):
                yield (nodes, *rest)
