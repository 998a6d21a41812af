"""What in a fitted log cannot be, or says too little to plan with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.predict import STAGES
from jigsawrl.graph.traces import LoggedStep, Trace

FEW_STEPS = 3
"""With fewer, one of which warms up, nothing tells how much steps differ."""
FAR_OFF = 0.25
"""Mean relative error of a stage from which on its fit is doubted."""
OVERLAP, UNKNOWN_PART = 0.05, 0.25
"""Part of a step by which its stages may exceed it, and which may belong to none of them."""
PASSES = {"old_log_prob": 1, "ref": 1, "update_actor": 3}
"""How often a stage computes a forward pass over all tokens, at least; training is one forward and two more back."""


def doubts(trace: Trace, hardware: Hardware, errors: Mapping[str, float]) -> tuple[str, ...]:
    """One sentence for each thing that is hard to believe; `errors` are those of the fit, by stage."""
    return (
        *trace.doubts,
        *_few(trace),
        *(
            f"the fit of {stage} is {error:.0%} off on average; do not plan with it"
            for stage, error in errors.items()
            if error > FAR_OFF
        ),
        *_too_fast(trace, hardware),
        *_not_a_sum(trace),
    )


def _few(trace: Trace) -> Iterator[str]:
    count = len(trace.steps)
    if count < FEW_STEPS:
        yield f"it has only {count} usable step{'s' * (count > 1)}; fit at least {FEW_STEPS}"


def _too_fast(trace: Trace, hardware: Hardware) -> Iterator[str]:
    """What took less time than the hardware needs at its peak."""
    model, width = trace.model, f"{trace.gpus} {hardware.name}"
    for name in ("gen", *PASSES):
        known = [each for step in trace.steps if (each := _took_and_least(name, step, trace, hardware))]
        if known and (took := median(each for each, _ in known)) < (
            least := median(each for _, each in known)
        ):
            what = "their memory can be read" if name == "gen" else "they can compute"
            yield (
                f"timing_s/{name} is {took:.3g} s, but {width} with {model.name} need {least:.3g} s, as fast as "
                f"{what}; is it another model or hardware (--hardware)?"
            )


def _took_and_least(
    name: str, step: LoggedStep, trace: Trace, hardware: Hardware
) -> tuple[float, float] | None:
    """Seconds that a stage took, and that the hardware needs for it at its peak; None: it was not logged."""
    took: float | None = getattr(step, name)
    if took is None:
        return None
    if name == "gen":
        read = trace.model.weight_bytes / (hardware.memory_bandwidth * trace.tp)
        return took - step.tool_wait, float(step.lengths.max()) * read
    return took, PASSES[name] * trace.model.flops(step.total_tokens, 0) / (hardware.flops * trace.gpus)


def _not_a_sum(trace: Trace) -> Iterator[str]:
    """Where the stages of a step do not make up the step."""
    rows = [
        (sum(getattr(step, name) or 0.0 for name in (*STAGES, "update_weights")) + step.other, step.seconds)
        for step in trace.steps
        if step.seconds
    ]
    if not rows:
        return
    part = median(known / seconds for known, seconds in rows if seconds)
    if part > 1 + OVERLAP:
        yield f"its stages take {part:.0%} of timing_s/step; do they overlap? Only one after the other can be fitted"
    elif part < 1 - UNKNOWN_PART:
        yield f"{1 - part:.0%} of timing_s/step belong to no stage that is known; they count as time besides"
