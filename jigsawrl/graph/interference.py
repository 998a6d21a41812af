"""How fast a sub-stage runs on a part of a worker, and beside others.

    time = alone on that share  x  (1 + what each kind of neighbours adds to it)

What moves data over a link feels only who else does, and they divide it; what waits for a host feels nobody. Where
rollouts are not held to their shares, all of them have what trainings leave free. Rollouts on one frozen base decode
in one batch: beside others they count as one, and hardly disturb each other.
1 is the speed alone on the whole worker. Both factors are measurements (one H200, see `H200`), interpolated. Runs put
them right: of every crowd that they have seen they know by how much it is faster or slower than that (`learned`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, product
from typing import Literal, TypeVar

from jigsawrl.graph.hardware import CPU
from jigsawrl.telemetry.events import Substage

Signature = Literal["compute", "prefill", "bulk", "tail", "link", "host"]
"""What a sub-stage is bound by: arithmetic, a rollout's arithmetic, many sequences' memory traffic, latency of few, a
link, nothing here."""

SIGNATURES: Mapping[Substage, Signature] = {
    "prefill": "prefill",
    "logprob": "compute",
    "grad": "compute",
    "optim": "bulk",
    "decode": "bulk",
    "tail": "tail",
    "sync": "link",
    "swap": "link",
    "tool": "host",
    "reward": "host",
}

LEVELS = 16
"""Shares are multiples of one sixteenth: 8 of an H200's 132 multiprocessors."""
MOST_DIVIDED = 4
"""More than so many on one worker are given equal shares: it matters little then, and the choices are many. So are
those that only divide it."""
MOST_COMPANY = 8
WORTH = 1.05
"""By so much another one on a worker must raise the total of their speeds."""
FREELY = 1.5
"""Total speed of two on one worker from which on sharing is as good as having it alone."""
AS_GOOD = 0.01
"""Part of the best total of speeds that may be lost for those who do alike to have alike: who came first has no more
than the other, and shares stay as they are where others come and go."""
NEGLIGIBLE = 0.05
"""Part of its speed that one may lose to a neighbour and be called undisturbed: no more than what runs err by."""

ROLLOUTS: tuple[Signature, ...] = ("tail", "bulk", "prefill")
"""What a rollout is bound by, as far as it takes a part of a worker."""

FUSED = 0.95
"""Speed that each more in a batch leaves to those in it: on an H200 four decodes of 16 sequences fused into one of 64
go 3.4 times as fast as one after the other, 0.85 each."""
DEMAND: Mapping[Signature, int] = {"host": 0, "link": 1, "tail": 2, "bulk": 3, "prefill": 4, "compute": 5}
"""The most demanding of a batch binds all of it."""

T = TypeVar("T")
Curve = tuple[tuple[float, float], ...]
"""Points (x, y), x rising; straight in between."""
Crowd = tuple[Signature, tuple[Signature, ...]]
"""What runs, and beside what, in the order of the alphabet."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """A sub-stage on a worker, as its neighbours feel it."""

    signature: Signature
    share: float


@dataclass(frozen=True, slots=True)
class Felt:
    """What runs have seen of a crowd: a factor of the speed that the curves give it, and how often they saw it."""

    factor: float
    times: float
    """A phase counts by the part of it that was spent in this crowd."""


@dataclass(frozen=True, slots=True)
class Interference:
    """The table. `beside[a, b]` gives what n neighbours of signature b leave of a's speed, if there are no others."""

    name: str
    source: str
    alone: Mapping[Signature, Curve]
    beside: Mapping[tuple[Signature, Signature], Curve]
    learned: Mapping[Crowd, Felt] = field(default_factory=dict)
    holds_rollouts: bool = False
    """Whether rollouts are held to their shares, as trainings are."""

    def speed(self, of: Occupant, neighbours: Sequence[Occupant] = ()) -> float:
        """Relative to running alone on the whole worker."""
        if of.signature == "host":
            return 1.0
        if of.signature == "link":
            return at(self.beside["link", "link"], sum(n.signature == "link" for n in neighbours))
        own = self.known(of.signature)
        felt = sorted([self.known(n.signature) for n in neighbours if n.signature not in ("host", "link")])
        share = of.share
        if own in ROLLOUTS and not self.holds_rollouts:
            share = max(share, 1 - sum([n.share for n in neighbours if self.known(n.signature) == "compute"]))
        time, factor = self._beside(own, felt)
        speed = at(self.alone[own], share) / time
        return speed if factor is None else min(1.0, speed * factor)

    def speeds_by_level(self, own: Signature, felt: Sequence[Signature]) -> list[float]:
        """The speeds beside these on each number of levels of a worker, from none to all."""
        time, factor = self._beside(own, sorted(felt))
        speeds = [value / time for value in _by_level(self.alone[own])]
        return speeds if factor is None else [min(1.0, speed * factor) for speed in speeds]

    def _beside(self, own: Signature, felt: list[Signature]) -> tuple[float, float | None]:
        """How many times as long it takes beside these, and the factor of its speed that runs have seen there."""
        time = 1.0
        for signature in sorted(set(felt)):
            time += 1 / at(self.beside[own, signature], felt.count(signature)) - 1
        seen = self.learned.get((own, tuple(felt))) if self.learned else None
        return time, None if seen is None else seen.factor

    def speeds(self, crowd: Sequence[Occupant]) -> tuple[float, ...]:
        """The speed of each of those on a worker beside the others."""
        return tuple([self.speed(one, [*crowd[:i], *crowd[i + 1 :]]) for i, one in enumerate(crowd)])

    def known(self, signature: Signature) -> Signature:
        """As the table has it: where prefill was not measured by itself, it is arithmetic like any other."""
        return "compute" if signature == "prefill" and "prefill" not in self.alone else signature

    def __hash__(self) -> int:
        return id(self)


def at(curve: Curve, x: float) -> float:
    """The curve's value, straight between its points and level beyond them."""
    place = bisect_right(curve, (x, float("inf")))
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@lru_cache(maxsize=65536)
def best_shares(
    table: Interference, signatures: tuple[Signature, ...], weights: tuple[float, ...]
) -> tuple[float, ...]:
    """Shares that make the weighted sum of speeds largest; whole workers for what takes no part of one."""
    sharing = [i for i, signature in enumerate(signatures) if signature not in ("host", "link")]
    held = table.holds_rollouts or any(table.known(signatures[i]) not in ROLLOUTS for i in sharing)
    few = 2 <= len(sharing) <= MOST_DIVIDED
    if not few or not held or (undisturbed(table) and len(set(weights)) == 1):
        return tuple(1 / len(sharing) if i in sharing else 1.0 for i in range(len(signatures)))
    among = [table.known(signatures[i]) for i in sharing]
    speeds = [table.speeds_by_level(own, [*among[:k], *among[k + 1 :]]) for k, own in enumerate(among)]
    freely = [own in ROLLOUTS and not table.holds_rollouts for own in among]
    trains = [k for k, own in enumerate(among) if own == "compute"]
    found: list[tuple[float, tuple[int, ...]]] = []
    for split in _splits(len(sharing)):
        left = LEVELS - sum([split[k] for k in trains])
        has = [max(part, left) if free else part for part, free in zip(split, freely, strict=True)]
        total = sum([weights[i] * each[part] for i, each, part in zip(sharing, speeds, has, strict=True)])
        found.append((total, split))
    best = max(total for total, _ in found)
    alike = [
        (j, k)
        for j, k in combinations(range(len(sharing)), 2)
        if signatures[sharing[j]] == signatures[sharing[k]]
    ]
    near = [(total, split) for total, split in found if total >= (1 - AS_GOOD) * best]
    _, chosen = min(near, key=lambda each: (sum(abs(each[1][j] - each[1][k]) for j, k in alike), -each[0]))
    parts = dict(zip(sharing, chosen, strict=True))
    return tuple(parts.get(i, LEVELS) / LEVELS for i in range(len(signatures)))


@lru_cache(maxsize=65536)
def side_by_side(table: Interference, signatures: tuple[Signature, ...]) -> tuple[float, ...]:
    """Speeds of what shares a worker, divided as well as can be."""
    order = sorted(range(len(signatures)), key=signatures.__getitem__)
    ordered = tuple(signatures[i] for i in order)
    shares = best_shares(table, ordered, (1.0,) * len(ordered))
    speeds = dict(zip(order, table.speeds(list(map(Occupant, ordered, shares))), strict=True))
    return tuple(speeds[i] for i in range(len(signatures)))


@lru_cache(maxsize=64)
def company(table: Interference) -> int:
    """How many are worth putting on one worker, a training and rollouts in their tails: each adds to their total.

    Two in any case: one may wait for its tools while the other runs. Many where they do not disturb each other.
    """
    if undisturbed(table):
        return MOST_COMPANY

    def total(tails: int) -> float:
        return sum(side_by_side(table, ("compute", *("tail",) * tails)))

    tails = 1
    while tails + 1 < MOST_COMPANY and total(tails + 1) >= WORTH * total(tails):
        tails += 1
    return tails + 1


def mix_freely(table: Interference) -> bool:
    """Whether sharing a worker costs so little that nobody needs one to himself."""
    return undisturbed(table) or sum(side_by_side(table, ("compute", "compute"))) > FREELY


@lru_cache(maxsize=64)
def undisturbed(table: Interference) -> bool:
    """Whether those on a worker divide it and lose next to nothing by that."""
    half, least = Occupant("compute", 0.5), 1 - NEGLIGIBLE
    both = table.speed(half, [half])
    return both >= least * table.speed(half) and 2 * both >= least * table.speed(Occupant("compute", 1.0))


@lru_cache(maxsize=64)
def merely_divided(table: Interference) -> bool:
    """Whether those on a worker lose nothing by dividing it, and gain nothing either."""
    half = Occupant("compute", 0.5)
    return undisturbed(table) and 2 * table.speed(half, [half]) <= table.speed(Occupant("compute", 1.0))


@lru_cache(maxsize=64)
def _by_level(curve: Curve) -> tuple[float, ...]:
    return tuple(at(curve, level / LEVELS) for level in range(LEVELS + 1))


@lru_cache(maxsize=16)
def _splits(count: int) -> tuple[tuple[int, ...], ...]:
    """Ways to hand out all levels to `count` occupants, each at least one; coarser for many."""
    step = 1 if count == 2 else 2
    parts = range(step, LEVELS, step)
    return tuple(
        (*head, LEVELS - sum(head)) for head in product(parts, repeat=count - 1) if sum(head) < LEVELS
    )


def speeds_with_fused(
    lanes: Sequence[T],
    bases: Sequence[str],
    join: Callable[[Sequence[T]], T],
    speeds: Callable[[tuple[T, ...]], Sequence[float]],
) -> tuple[float, ...]:
    """The speeds of all lanes of a worker, where those of one base (not empty) are in one batch.

    `join` makes one lane of several; `speeds` gives those of lanes that have nothing in common.
    """
    batches: dict[object, list[int]] = {}
    for number, base in enumerate(bases):
        batches.setdefault(base or number, []).append(number)
    joined = tuple(join([lanes[n] for n in batch]) for batch in batches.values())
    found = [0.0] * len(lanes)
    for batch, speed in zip(batches.values(), speeds(joined), strict=True):
        for number in batch:
            found[number] = speed * FUSED ** (len(batch) - 1)
    return tuple(found)


def most_demanding(signatures: Sequence[Signature]) -> Signature:
    """What binds a batch of these."""
    return max(signatures, key=lambda signature: DEMAND[signature])


def in_one_batch(signature: Signature, phase: str, base: str) -> str:
    """The base whose batch it is in now; empty: it is in none with others."""
    return base if phase == "rollout" and DEMAND[signature] >= DEMAND["tail"] else ""


H200 = Interference(
    name="h200",
    source="`jigsaw profile` on one NVIDIA H200 with a model of 1.5B, torch 2.11, processes under MPS of which only "
    "trainings keep to a part (a green context), and crowds of four decodes, or of three and a training, by hand; "
    "`bulk` is a decode of 64 sequences; a link is divided evenly, which was not measured",
    alone={
        "tail": ((0, 0), (0.125, 0.793), (0.25, 0.866), (0.375, 0.951), (0.5, 1), (1, 1)),
        "bulk": ((0, 0), (0.125, 0.778), (0.25, 0.875), (0.375, 0.917), (0.5, 1), (1, 1)),
        "compute": ((0, 0), (0.25, 0.4), (0.5, 0.74), (0.625, 0.82), (0.75, 0.88), (0.875, 0.88), (1, 1)),
    },
    beside={
        ("tail", "tail"): ((0, 1), (1, 0.68), (3, 0.438), (7, 0.241)),
        ("tail", "bulk"): ((0, 1), (1, 0.57), (3, 0.281), (7, 0.155)),
        ("tail", "compute"): ((0, 1), (1, 0.82), (2, 0.444)),
        ("bulk", "tail"): ((0, 1), (1, 0.74), (3, 0.48), (7, 0.264)),
        ("bulk", "bulk"): ((0, 1), (1, 0.67), (3, 0.325), (7, 0.179)),
        ("bulk", "compute"): ((0, 1), (1, 0.72), (2, 0.41)),
        ("compute", "tail"): ((0, 1), (1, 0.7)),
        ("compute", "bulk"): ((0, 1), (1, 0.689)),
        ("compute", "compute"): ((0, 1), (1, 0.716)),
        ("link", "link"): ((0, 1), (1, 1 / 2), (2, 1 / 3), (3, 1 / 4), (5, 1 / 6), (7, 1 / 8)),
    },
    learned={
        ("tail", ("bulk", "compute")): Felt(0.83, 1.0),
        ("compute", ("bulk", "tail")): Felt(1.22, 1.0),
        ("tail", ("compute", "tail", "tail")): Felt(0.87, 1.0),
    },
)
"""Checked against the measured pairs in tests/graph/test_interference.py."""

_FELT: tuple[Signature, ...] = ("tail", "bulk", "compute", "link")
CORES = Interference(
    name="cores",
    source="by construction: a share is a number of cores, and cores do not get in each other's way",
    alone=dict.fromkeys(("tail", "bulk", "compute"), ((0.0, 0.0), (1.0, 1.0))),
    beside=dict.fromkeys(product(_FELT, _FELT), ((0, 1.0), (1, 1.0))),
    holds_rollouts=True,
)
"""Shares and nothing else."""


def table_of(hardware: str) -> Interference:
    """What is known of sharing such a worker; of other accelerators, what an H200 was measured to do."""
    return CORES if hardware == CPU else H200
