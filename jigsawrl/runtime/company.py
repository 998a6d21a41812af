"""Who ran beside whom, and what is learned of that about sharing a worker. Pure.

While a phase runs, its seconds are counted by the crowds that it was in, with how far the interference table says
that it came in each. Where it is known what the phase takes alone, its duration then tells how far it really came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jigsawrl.graph.interference import SIGNATURES, Crowd, Felt, Interference, Occupant, Signature
from jigsawrl.graph.lanes import Lane, Lanes

LEAST_PART = 0.2
"""Of a phase that was spent in company; with less, its error says more than its neighbours."""
MOST_OFF = 1.0
"""Part of the speed that was foreseen by which a phase may be off; more is taken for this."""
LEAST = 0.1
"""Weight of what was seen last against all that was known before; of the first few, that of a mean with the prior."""
SLOWEST = 1 / 16
"""No crowd is thought to be slower than so many times what the curves say."""


@dataclass(slots=True)
class Stretch:
    seconds: float = 0.0
    progress: float = 0.0
    """Seconds alone on whole workers, as the table has it."""


@dataclass(slots=True)
class Company:
    """Of one running phase."""

    crowds: dict[Crowd, Stretch] = field(default_factory=dict)
    paused: float = 0.0
    """Seconds in which it stood still."""
    unclear: bool = False
    """Whether its time tells nothing of neighbours: more were on a worker than it has parts for, and took turns, or
    they were in one batch with it."""


def bound_by(lane: Lane) -> Signature:
    """What a lane is at. Of one that begins nothing was heard yet: it is thought to be at its first real work."""
    for segment in lane.segments[lane.index :]:
        waits = segment.kind == "swap" or (segment.kind == "reward" and lane.phase == "training")
        if not waits:
            return SIGNATURES[segment.kind]
    return "host"


def note(company: Mapping[str, Company], lanes: Lanes, elapsed: float, units: int) -> None:
    """All lanes were as they are for so long, on workers of so many parts. A phase is as fast as its slowest lane."""
    there: list[dict[int, Occupant]] = []
    for keys in lanes.on_worker:
        bound = {key: lanes.table.known(bound_by(lanes.lanes[key])) for key in keys}
        around = {key: Occupant(bound[key], lanes.lanes[key].share) for key in keys}
        there.append({key: one for key, one in around.items() if not lanes.lanes[key].paused})
    slowest: dict[str, tuple[float, Crowd]] = {}
    standing: set[str] = set()
    for key, lane in lanes.lanes.items():
        if lane.paused:
            standing.add(lane.pipeline)
        for worker in lane.workers:
            own = there[worker].get(key)
            if own is None or own.signature in ("host", "link"):
                continue
            others = [one for other, one in there[worker].items() if other != key]
            felt = sorted(one.signature for one in others if one.signature not in ("host", "link"))
            found = lanes.table.speed(own, others), (own.signature, tuple(felt))
            slowest[lane.pipeline] = min(found, slowest.get(lane.pipeline, found))
            batch = lane.base and any(
                lanes.lanes[other].base == lane.base for other in there[worker] if other != key
            )
            if batch or 1 + len(felt) > units:
                company[lane.pipeline].unclear = True
    for name in standing:
        company[name].paused += elapsed
    for name, (speed, crowd) in slowest.items():
        if crowd[1] and name not in standing:
            stretch = company[name].crowds.setdefault(crowd, Stretch())
            stretch.seconds += elapsed
            stretch.progress += speed * elapsed


def after(table: Interference, company: Company, present: float, took: float, alone: float) -> Interference:
    """The table when a phase that was there for `present` seconds has been at work for `took`, and needs `alone` of
    them by itself.

    What it did not do beside others it did apart from them, at full speed. The rest is held against how far the table
    says that it came in company. All crowds that it was in are blamed alike, each by its part.
    """
    if not (alone > 0 and took > 0 and present > 0):
        return table
    parts = {crowd: stretch.seconds / present for crowd, stretch in company.crowds.items()}
    together = min(1.0, sum(parts.values()))
    if together < LEAST_PART:
        return table
    speeds = {crowd: stretch.progress / stretch.seconds for crowd, stretch in company.crowds.items()}
    foreseen = sum(part * speeds[crowd] for crowd, part in parts.items()) / sum(parts.values())
    real = (alone / took - (1 - together)) / together
    off = min(max(real / foreseen - 1, -MOST_OFF), MOST_OFF)
    learned = dict(table.learned)
    for crowd, part in parts.items():
        known = learned.get(crowd, Felt(1.0, 0.0))
        weight = part * max(1 / (1 + known.times + part), LEAST)
        most = known.factor / speeds[crowd]  # then it is as fast as alone on the whole worker
        factor = min(max(known.factor * (1 + weight * off), SLOWEST), most)
        learned[crowd] = Felt(factor, known.times + part)
    return replace(table, learned=learned)
