"""Starting a phase: at which places, whether it fits there, and whether what follows may start without asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jigsawrl.errors import JigsawError
from jigsawrl.graph.fits import too_much
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.interference import merely_divided
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.state import Phase, Pipeline, Place, Start, State


def in_engines(workers: Sequence[int], tp: int) -> tuple[Place, ...]:
    """Workers in groups that one engine spans; what does not fill a group is left out."""
    return tuple(tuple(workers[i : i + tp]) for i in range(0, len(workers) - tp + 1, tp))


def places_on(phase: Phase, workers: Sequence[int]) -> tuple[Place, ...]:
    """Where it would run if it had these workers: engines side by side, or one training gang."""
    if not phase.generates:
        return (tuple(workers),) if workers else ()
    return in_engines(workers, phase.pipeline.tp)


def needs(phase: Phase, places: tuple[Place, ...]) -> float:
    """Bytes that the phase holds on each worker of these places."""
    pipeline, width = phase.pipeline, len(places[0])
    return (
        generating_bytes(pipeline, len(places), width) if phase.generates else training_bytes(pipeline, width)
    )


def training_bytes(pipeline: Pipeline, width: int) -> float:
    """That a gang over this many workers holds on each of them."""
    sizes = pipeline.outlook.memory_trained(pipeline.tp, width)
    return sizes.training_apart if pipeline.apart else sizes.training


def generating_bytes(pipeline: Pipeline, engines: int, width: int) -> float:
    """That engines, each over this many workers, hold on each of them."""
    if pipeline.apart:
        return engine_bytes(pipeline.outlook, engines, width)
    return pipeline.outlook.memory(engines, width, len(pipeline.rollout_home)).rollout


def covered_bytes(pipeline: Pipeline, rollout: Start) -> float:
    """Bytes that the phases hold on each worker which the permit of a rollout may cover, one after the other."""
    return max(
        generating_bytes(pipeline, len(rollout.places), pipeline.tp),
        training_bytes(pipeline, len(rollout.workers)),
    )


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


def start_on(
    state: State, phase: Phase, workers: Sequence[int], held: Sequence[float] | None = None
) -> Start | None:
    """Its start on these workers, if there are enough and each has room for it, beside the bytes `held` or else those
    in use now."""
    places = places_on(phase, workers)
    start = Start(phase.id, places)
    return start if places and state.fits(start.workers, needs(phase, places), held) else None


def going_on(state: State, starts: list[Start]) -> list[Start]:
    """The same starts; those of rollouts with leave to go on to the training, where nothing else could be decided
    anyway: all run at once, by turns, and nobody waits or is in a hurry."""
    if not starts or not merely_divided(state.table):
        return starts
    begins = {start.phase for start in starts}
    free = not (
        any(lane.paused for lane in state.lanes.lanes.values())
        or any(phase.id not in begins for phase in state.ready())
        or any(p.apart or p.due < float("inf") for p in state.unfinished())
    )
    return [
        replace(start, auto_continue=True) if free and start.phase.kind == "rollout" else start
        for start in starts
    ]
