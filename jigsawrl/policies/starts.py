"""Starting a phase: at which places, and whether it fits there."""

from __future__ import annotations

from collections.abc import Sequence

from jigsawrl.errors import JigsawError
from jigsawrl.graph.fits import too_much
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.state import Phase, Pipeline, Place, Start, State


def in_engines(workers: Sequence[int], tp: int) -> tuple[Place, ...]:
    """Workers in groups that one engine spans; what does not fill a group is left out."""
    return tuple(tuple(workers[i : i + tp]) for i in range(0, len(workers) - tp + 1, tp))


def places_on(pipeline: Pipeline, workers: Sequence[int]) -> tuple[Place, ...]:
    """Where its phase would run if it had these workers: engines side by side, or one training gang."""
    if pipeline.phase == "training":
        return (tuple(workers),) if workers else ()
    return in_engines(workers, pipeline.tp)


def needs(pipeline: Pipeline, places: tuple[Place, ...]) -> float:
    """Bytes that its phase holds on each worker of these places."""
    return bytes_for(pipeline, pipeline.phase, len(places), len(places[0]))


def bytes_for(pipeline: Pipeline, phase: Phase, engines: int, width: int) -> float:
    if phase == "training":
        sizes = pipeline.outlook.memory_trained(pipeline.tp, width)
        return sizes.training_apart if pipeline.apart else sizes.training
    if pipeline.apart:
        return engine_bytes(pipeline.outlook, engines, width)
    return pipeline.outlook.memory(engines, width, len(pipeline.home)).rollout


def engine_bytes(outlook: Outlook, engines: int, width: int) -> float:
    """Of a rollout whose actors do not train: weights and cache."""
    sizes = outlook.memory(engines, width, 1)
    if not outlook.shape.whole:
        return sizes.rollout
    return sizes.rollout - sizes.host + outlook.shape.model.weight_bytes / width


def refuse_what_cannot_fit_apart(outlook: Outlook, hardware: Hardware, rollout: int, training: int) -> None:
    """A JigsawError if a phase exceeds the memory of the workers that it has for itself."""
    shape = outlook.shape
    if shape.tp > rollout:
        raise JigsawError(
            f"{shape.name}: an engine spans {shape.tp} workers, and its rollouts have {rollout}"
        )
    needs = {
        "rollout": (engine_bytes(outlook, rollout // shape.tp, shape.tp), rollout),
        "training": (outlook.memory_trained(shape.tp, training).training_apart, training),
    }
    for phase, (needed, width) in needs.items():
        if needed > hardware.device_bytes:
            raise too_much(outlook, phase, needed, f"its {width} workers", hardware)


def start_on(state: State, pipeline: Pipeline, workers: Sequence[int]) -> Start | None:
    """The start of its phase on these workers, if there are enough and their memory has room."""
    places = places_on(pipeline, [worker for worker in workers if state.alive[worker]])
    if not places:
        return None
    needed = needs(pipeline, places)
    if all(state.fits(place, needed) for place in places):
        return Start(pipeline.name, places)
    return None
