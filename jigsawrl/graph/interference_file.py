"""An interference table as it stands in a profile: curves as lists of points, crowds by their names.

"holds_rollouts": false
"alone":   {"tail": [[0, 0], [0.5, 0.92], [1, 1]], ...}
"beside":  {"tail beside compute": [[0, 1], [1, 0.8], [3, 0.6]], ...}
"learned": {"tail beside bulk, compute": {"factor": 0.9, "times": 4.2}, ...}
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any, get_args

from jigsawrl.errors import JigsawError
from jigsawrl.graph.given import bounded
from jigsawrl.graph.interference import CORES, Crowd, Curve, Felt, Interference, Signature

SHARING: tuple[Signature, ...] = ("tail", "bulk", "compute")
"""What takes a part of a worker, in every table."""
PREFILL: Signature = "prefill"
"""Likewise in tables that were measured with it."""
MOST_SPEED = 1e12
_BESIDE = " beside "
_SIGNATURES: dict[str, Signature] = {name: name for name in get_args(Signature)}


def table_out(table: Interference) -> dict[str, Any]:
    sharing, pairs = _held(PREFILL in table.alone)
    return {
        "name": table.name,
        "source": table.source,
        "holds_rollouts": table.holds_rollouts,
        "alone": {signature: [*map(list, table.alone[signature])] for signature in sharing},
        "beside": {_name((of, (other,))): [*map(list, table.beside[of, other])] for of, other in pairs},
        "learned": {
            _name(crowd): {"factor": round(felt.factor, 4), "times": round(felt.times, 2)}
            for crowd, felt in sorted(table.learned.items())
        },
    }


def table_in(entry: dict[str, Any], where: str) -> Interference:
    """A JigsawError where it is not a whole table, or no speed comes of it."""
    sharing, pairs = _held(PREFILL in entry["alone"])
    alone = {signature: _curve(entry["alone"], signature, where) for signature in sharing}
    beside = {(of, other): _curve(entry["beside"], _name((of, (other,))), where) for of, other in pairs}
    if any(y <= 0 for curve in beside.values() for _, y in curve):
        raise JigsawError(f"{where}, beside: neighbours bring nobody to a stand, so no speed is 0")
    if any(y > 1 for curve in alone.values() for _, y in curve):
        raise JigsawError(f"{where}, alone: nothing is faster on a part of a worker than on all of it")
    learned = {
        _crowd(name, where): Felt(_speed(felt["factor"], where, least=1e-6), _speed(felt["times"], where))
        for name, felt in entry.get("learned", {}).items()
    }
    holds_rollouts = bool(entry.get("holds_rollouts", entry["name"] == CORES.name))
    return Interference(str(entry["name"]), str(entry["source"]), alone, beside, learned, holds_rollouts)


def _held(with_prefill: bool) -> tuple[tuple[Signature, ...], list[tuple[Signature, Signature]]]:
    """What a table has curves of: alone, and beside what."""
    sharing = (*SHARING, PREFILL) if with_prefill else SHARING
    return sharing, [*product(sharing, sharing), ("link", "link")]


def _name(crowd: Crowd) -> str:
    return f"{crowd[0]}{_BESIDE}{', '.join(crowd[1])}"


def _crowd(name: str, where: str) -> Crowd:
    of, _, others = name.partition(_BESIDE)
    try:
        return _SIGNATURES[of], tuple(sorted(_SIGNATURES[each] for each in others.split(", ")))
    except KeyError as error:
        raise JigsawError(
            f"{where}, {name!r}: {error} binds no sub-stage; there are {', '.join((*SHARING, PREFILL))}"
        ) from None


def _curve(entry: dict[str, Any], name: str, where: str) -> Curve:
    points = tuple((_speed(x, f"{where}, {name}"), _speed(y, f"{where}, {name}")) for x, y in entry[name])
    if not points or any(a >= b for (a, _), (b, _) in pairwise(points)):
        raise JigsawError(f"{where}, {name}: needs points from left to right")
    return points


def _speed(value: Any, where: str, least: float = 0.0) -> float:
    return bounded(value, least, MOST_SPEED, f"{where}:", " is no speed, and no count")
