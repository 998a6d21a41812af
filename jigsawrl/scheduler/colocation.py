"""Which phases were co-located, and what that teaches about sharing a worker. Pure.

While a phase runs, its seconds are counted by crowd: by the kind of work that it did and the kinds that were done
beside it on a worker. Counted too is the progress that the interference table predicts in each. Where it is known
what the phase takes alone, its duration then tells its real progress.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from jigsawrl.graph.interference import SIGNATURES, Crowd, Felt, Interference, Occupant, Signature
from jigsawrl.graph.lanes import Lane, Lanes, Mix
from jigsawrl.phases.ids import PhaseId

LEAST_PART = 0.2
"""Least co-located part of a phase to learn from: with less, its own prediction's error outweighs its neighbours."""
MOST_OFF = 1.0
"""Part of the predicted speed by which a phase may be off; larger errors count as this."""
LEAST = 0.1
"""Least weight of what was seen last against all that was known before; the first few count as in a mean with the
prior."""
SLOWEST = 1 / 16
"""Least factor of the curves' speed that is learned for a crowd."""


@dataclass(slots=True)
class Colocation:
    """The crowds that one running phase was in, and for how long."""

    crowds: dict[Crowd, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in each crowd."""
    progress: dict[Crowd, float] = field(default_factory=lambda: defaultdict(float))
    """What the table says was done in each: seconds alone on whole workers."""
    paused: float = 0.0
    """Seconds in which it stood still."""
    unclear: bool = False
    """Whether its time tells nothing of neighbours: more were on a worker than it has parts for, and took turns, or
    they were in one batch with it."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A phase by which its pipeline's outlook was corrected."""

    colocation: Colocation
    present: float
    """Seconds in which it was not paused and did not wait for tools."""
    took: float
    """Seconds of those in which it was at work."""
    alone: float | None
    """Seconds of work that it is predicted to take alone; None where that was never measured."""


def bound_by(lane: Lane) -> Signature:
    """The signature of what a lane is at. One that begins is believed to be at its first real work: nothing was heard
    of it yet."""
    for segment in lane.segments[lane.index :]:
        if segment.kind != "swap" and (segment.kind != "reward" or lane.phase != "training"):
            return SIGNATURES[segment.kind]
    return "host"


def note(colocations: Mapping[PhaseId, Colocation], lanes: Lanes, elapsed: float, units: int) -> None:
    """Counts `elapsed` seconds in which all lanes were as they are, on workers of `units` parts. A phase is as fast
    as its slowest lane."""
    bound = {key: lanes.table.known(bound_by(lane)) for key, lane in lanes.lanes.items()}
    phases = {key: PhaseId(lane.pipeline, lane.phase, lane.step) for key, lane in lanes.lanes.items()}
    slowest: dict[PhaseId, tuple[float, Crowd]] = {}
    crowded = any(len(keys) > 1 for keys in lanes.on_worker)  # else there is nothing to learn
    for keys in set(lanes.on_worker) if crowded else ():
        there = [lane for key in keys if not (lane := lanes.lanes[key]).paused]
        mix = tuple([(bound[lane.id], lane.share) for lane in there])
        bases = [lane.base for lane in there if lane.base]
        for lane, found in zip(there, _slowed(lanes.table, mix), strict=True):
            if found is not None:
                phase = phases[lane.id]
                slowest[phase] = min(found, slowest.get(phase, found))
                if bases.count(lane.base) > 1 or 1 + len(found[1][1]) > units:
                    colocations[phase].unclear = True
    standing = {phases[key] for key, lane in lanes.lanes.items() if lane.paused}
    for phase in standing:
        colocations[phase].paused += elapsed
    for phase, (speed, crowd) in slowest.items():
        if crowd[1] and phase not in standing:
            colocations[phase].crowds[crowd] += elapsed
            colocations[phase].progress[crowd] += speed * elapsed


@lru_cache(maxsize=65536)
def _slowed(table: Interference, mix: Mix) -> tuple[tuple[float, Crowd] | None, ...]:
    """Speed of each lane of a mix beside the others, and its crowd; None for one that takes no part of the worker."""
    occupants = [Occupant(signature, share) for signature, share in mix]
    found: list[tuple[float, Crowd] | None] = []
    for place, own in enumerate(occupants):
        others = occupants[:place] + occupants[place + 1 :]
        felt = sorted(one.signature for one in others if one.signature not in ("host", "link"))
        takes = own.signature not in ("host", "link")
        found.append((table.speed(own, others), (own.signature, tuple(felt))) if takes else None)
    return tuple(found)


def after(table: Interference, phase: Followed) -> Interference:
    """The table when a phase is over.

    What it did not do beside others it did apart from them, at full speed. The rest is compared with the progress
    that the table predicts beside them. All crowds that it was in are corrected alike, each by its part.
    """
    if not (phase.alone and phase.alone > 0 and phase.took > 0 and phase.present > 0):
        return table
    crowds = phase.colocation.crowds
    parts = {crowd: seconds / phase.present for crowd, seconds in crowds.items()}
    together = min(1.0, sum(parts.values()))
    if together < LEAST_PART:
        return table
    speeds = {crowd: phase.colocation.progress[crowd] / seconds for crowd, seconds in crowds.items()}
    foreseen = sum(part * speeds[crowd] for crowd, part in parts.items()) / sum(parts.values())
    real = (phase.alone / phase.took - (1 - together)) / together
    off = min(max(real / foreseen - 1, -MOST_OFF), MOST_OFF)
    learned = dict(table.learned)
    for crowd, part in parts.items():
        known = learned.get(crowd, Felt(1.0, 0.0))
        weight = part * max(1 / (1 + known.times + part), LEAST)
        most = known.factor / speeds[crowd]  # then it is as fast as alone on the whole worker
        factor = min(max(known.factor * (1 + weight * off), SLOWEST), most)
        learned[crowd] = Felt(factor, known.times + part)
    return replace(table, learned=learned)
