"""Fits a profile to measured runs.

All runs of one model at one width are fitted together, outliers weighed down and the first step of a run apart
(it warms up), with the hardware's arithmetic and bandwidth as prior. Each run then gets a level of its own for
each stage: machines, settings and micro-batches differ from run to run by more than tokens explain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jigsawrl.errors import JigsawError
from jigsawrl.graph.cost import ACHIEVED, PASS_OVERHEAD, UNKNOWN, Costs, DecodeCost, LinearCost
from jigsawrl.graph.fitting import fit_decode, fit_linear, linear_prior, robust
from jigsawrl.graph.forecast import Floats
from jigsawrl.graph.hardware import Hardware, hardware_named
from jigsawrl.graph.predict import STAGES, outlook_of, stage_seconds
from jigsawrl.graph.profile import Profile, Workload, quantiles
from jigsawrl.graph.shape import ModelShape
from jigsawrl.graph.traces import LoggedStep, Trace

GENERATION_FIXED = 1.2
"""Seconds at a generation's start and end: what verl's log has besides its slowest sequence."""
ADMISSION = 8e-3
"""Prior: seconds for each sequence let in, as engines prefill requests a few at a time."""
BETWEEN_PASSES = 0.6e-3
"""Prior: seconds between two passes in which the device waits for its host."""
PER_TOKEN = 8e-6
"""Prior: the host's seconds for each generated token."""
SHRINK = 0.02
"""How few steps draw a run's level towards its model's: steps of a run differ by 3 %, runs of a model by 25 %."""
UNLABELLED = "h100"
"""Hardware of runs that do not say."""


def fit_traces(traces: Sequence[Trace], name: str, source: str, hardware: str | None = None) -> Profile:
    """A profile of these runs."""
    kinds = {trace.hardware for trace in traces if trace.hardware} if hardware is None else {hardware}
    if len(kinds) > 1:
        raise JigsawError(
            f"the runs were measured on {' and '.join(sorted(kinds))}; a profile is of one, so fit them apart"
        )
    machine = hardware_named(next(iter(kinds), UNLABELLED))
    workloads: dict[str, Workload] = {}
    pools: list[tuple[Trace, Costs]] = []
    for trace in traces:
        if trace.name in workloads:
            raise JigsawError(f"two runs are called {trace.name}; rename one of their logs")
        pooled = next((costs for one, costs in pools if same_model(one, trace)), None)
        if pooled is None:
            pooled = fit_pooled([other for other in traces if same_model(other, trace)], machine, source)
            pools.append((trace, pooled))
        workloads[trace.name] = _workload(trace, fit_level(pooled, trace))
    return Profile(name, source, machine, workloads)


def same_model(one: Trace, other: Trace) -> bool:
    """Whether two runs have a model of the same numbers at the same width: their coefficients are the same."""
    return replace(one.model, name="") == replace(other.model, name="") and (one.gpus, one.tp) == (
        other.gpus,
        other.tp,
    )


def fit_pooled(traces: Sequence[Trace], hardware: Hardware, source: str) -> Costs:
    """Of runs of one model at one width, each counting alike."""
    first = traces[0]
    model, gpus, tp = first.model, first.gpus, first.tp
    decoding, prefilling = _passes(traces, model, hardware, tp)
    billions = model.parameters / 1e9
    stages = {
        "old_log_prob": linear_prior(model, hardware, gpus, 1, 0.35, 3 + 0.7 * billions),
        "ref": linear_prior(model, hardware, gpus, 1, 0.35, 3 + 1.2 * billions),
        "update_actor": linear_prior(model, hardware, gpus, 4, 0.35, 8 + 3 * billions),
    }
    stages = {stage: fit_linear(prior, *_samples(traces, stage)) for stage, prior in stages.items()}
    update = stages["update_actor"]
    costs = Costs(
        model=model,
        hardware=hardware,
        gpus=gpus,
        tp=tp,
        decoding=decoding,
        prefilling=prefilling,
        logprob=stages["old_log_prob"],
        ref=stages["ref"],
        grad=replace(update, fixed=0.0),
        optim=update.fixed,
        sync=_typical(
            traces, lambda step: step.update_weights, model.weight_bytes / hardware.link_bandwidth + 1.0
        ),
        rollout_fixed_seconds=GENERATION_FIXED,
        offloaded=first.offloaded,
        other_seconds=_typical(traces, _besides, 0.0),
        kv_tokens=cache_tokens(first, hardware),
        errors={stage: cost.error for stage, cost in stages.items()},
        source=source,
    )
    return _with_warmup(_with_overheads(costs, traces), traces)


def fit_level(pooled: Costs, trace: Trace) -> Costs:
    """The same costs at the level of one run: each stage by one factor, drawn a little towards 1."""
    costs = replace(pooled, kv_tokens=cache_tokens(trace, pooled.hardware))
    factors = dict.fromkeys(STAGES, 1.0)
    errors = dict(costs.errors)
    predicted = [(step, stage_seconds(costs, trace, step)) for step in _settled(trace)]
    for stage in STAGES:
        pairs = (
            (getattr(step, stage), seconds[stage], step.tool_wait if stage == "gen" else 0.0)
            for step, seconds in predicted
        )
        logs = [
            math.log((measured - waited) / (expected - waited))
            for measured, expected, waited in pairs
            if measured is not None and measured > waited and expected > waited
        ]
        if logs:
            middle = statistics.median(logs)
            factors[stage] = math.exp(min(max(middle * len(logs) / (len(logs) + SHRINK), -4.6), 4.6))
            spread = statistics.fmean(abs(each - middle) for each in logs) * 1.25
            errors[stage] = max(0.02 if len(logs) > 1 else 0.1, spread)
    gen, update = factors["gen"], factors["update_actor"]
    levelled = replace(
        costs,
        decoding=replace(costs.decoding.scaled(gen), error=max(costs.decoding.error, errors["gen"])),
        prefilling=costs.prefilling.scaled(gen),
        rollout_fixed_seconds=costs.rollout_fixed_seconds * gen,
        logprob=replace(costs.logprob.scaled(factors["old_log_prob"]), error=errors["old_log_prob"]),
        ref=replace(costs.ref.scaled(factors["ref"]), error=errors["ref"]),
        grad=replace(costs.grad.scaled(update), error=errors["update_actor"]),
        optim=costs.optim * update,
        sync=_typical([trace], lambda step: step.update_weights, costs.sync),
        other_seconds=_typical([trace], _besides, costs.other_seconds),
        errors=errors,
    )
    return _with_warmup(levelled, [trace])


def cache_tokens(trace: Trace, hardware: Hardware, own_passes: bool = True) -> float:
    """What an engine's cache holds: its part of the memory without the weights, or more if more was seen in it."""
    room = 0.95 * trace.memory_share * hardware.device_bytes * trace.tp - trace.model.weight_bytes
    held = max(room, 0.05 * hardware.device_bytes * trace.tp) / trace.model.kv_bytes_per_token
    if own_passes and trace.forwards is not None:
        decodes = trace.forwards[~trace.forwards["prefill"]]
        held = max(held, float((decodes["batch"] * decodes["length"]).max(initial=0.0)))
    return held


def _passes(
    traces: Sequence[Trace], model: ModelShape, hardware: Hardware, tp: int
) -> tuple[DecodeCost, LinearCost]:
    """Decode and prefill from single passes, or from the roofline where there are none."""
    bandwidth = hardware.memory_bandwidth * ACHIEVED * tp
    overhead = PASS_OVERHEAD * (1 + 0.5 * math.log2(tp))
    decoding = DecodeCost(
        overhead + model.weight_bytes / bandwidth,
        2 * model.parameters / (hardware.flops * tp) + 3e-6,
        model.kv_bytes_per_token / bandwidth,
    )
    prefilling = linear_prior(model, hardware, tp, 1, 0.4, 16e-3)
    if known := [trace.forwards for trace in traces if trace.forwards is not None]:
        passes = np.concatenate(known)
        decodes = passes[~passes["prefill"]]
        decoding = fit_decode(decodes["batch"], decodes["length"], decodes["seconds"], decoding)
        extends = passes[passes["prefill"] & (passes["seconds"] > 0)]
        if len(extends) >= 3:
            prefilling = fit_linear(prefilling, extends["tokens"], extends["length"], extends["seconds"])
    return decoding, replace(prefilling, fixed=ADMISSION)


def _with_overheads(costs: Costs, traces: Sequence[Trace]) -> Costs:
    """Adds what single passes do not show: the host between passes and for each token, and letting sequences in.

    A rollout's seconds are linear in its costs: where only one of them is a second, they count how often it occurs.
    """
    nothing = replace(
        costs, decoding=DecodeCost(0, 0, 0), prefilling=LinearCost(0, 0, 0), rollout_fixed_seconds=0.0
    )
    columns = (
        replace(nothing, prefilling=LinearCost(1, 0, 0)),
        replace(nothing, decoding=DecodeCost(1, 0, 0)),
        replace(nothing, decoding=DecodeCost(0, 1, 0)),
        replace(costs, prefilling=replace(costs.prefilling, fixed=0.0)),
    )
    rows, seconds, weights = [], [], []
    for trace in traces:
        held = cache_tokens(trace, costs.hardware)
        steps = [step for step in _settled(trace) if step.gen is not None]
        for step in steps:
            rows.append([_engine_seconds(replace(each, kv_tokens=held), trace, step) for each in columns])
            seconds.append(max((step.gen or 0.0) - step.tool_wait, 1e-3))
            weights.append(1 / len(steps))
    if not rows:
        return replace(costs, errors={**costs.errors, "gen": UNKNOWN})
    coefficients, error = robust(
        np.array(rows),
        np.array(seconds),
        np.array([ADMISSION, BETWEEN_PASSES, PER_TOKEN, 1.0]),
        np.array([1.0, 1.0, 1.0, 0.1]),
        np.array(weights) * len(weights) / sum(weights),
    )
    admission, between, token, known = map(float, coefficients)
    return replace(
        costs,
        decoding=replace(
            costs.decoding,
            a=costs.decoding.a * known + between,
            b=costs.decoding.b * known + token,
            c=costs.decoding.c * known,
        ),
        prefilling=replace(costs.prefilling.scaled(known), fixed=admission),
        errors={**costs.errors, "gen": error},
    )


def _engine_seconds(costs: Costs, trace: Trace, step: LoggedStep) -> float:
    """Seconds of an engine that gets its part of the sequences, without its waits for tools."""
    engines = outlook_of(trace, step, costs).engines(step.lengths, max(1, trace.gpus // trace.tp), trace.tp)
    return sum(segment.seconds for segment in engines[0].segments if segment.kind != "tool")


def _with_warmup(costs: Costs, traces: Sequence[Trace]) -> Costs:
    """What first steps took longer, by stage; what the costs say already, where no first step was logged."""
    extra: dict[str, list[float]] = {}
    firsts = (
        (trace, step) for trace in traces for step in trace.steps if step.first and len(trace.steps) > 1
    )
    for trace, step in firsts:
        predicted = stage_seconds(costs, trace, replace(step, first=False))
        for stage in STAGES:
            measured: float | None = getattr(step, stage)
            if measured is not None:
                extra.setdefault(stage, []).append(max(0.0, measured - predicted[stage]))
    return replace(
        costs, warmup={**costs.warmup, **{stage: statistics.median(each) for stage, each in extra.items()}}
    )


def _settled(trace: Trace) -> list[LoggedStep]:
    """Steps that do not warm up, if there are any."""
    return [step for step in trace.steps if not step.first] or list(trace.steps)


def _samples(traces: Sequence[Trace], stage: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Tokens, mean length, seconds, and a weight by which runs count alike."""
    rows = []
    for trace in traces:
        steps = [step for step in _settled(trace) if (getattr(step, stage) or 0.0) > 0]
        rows += [
            (step.total_tokens, step.mean_length, getattr(step, stage), 1 / len(steps)) for step in steps
        ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    weights = table[:, 3] * len(table) / max(float(table[:, 3].sum()), 1e-9)
    return table[:, 0], table[:, 1], table[:, 2], weights


def _typical(traces: Sequence[Trace], value: Callable[[LoggedStep], float | None], otherwise: float) -> float:
    """The median over runs of their medians."""
    logged = ([each for step in _settled(trace) if (each := value(step)) is not None] for trace in traces)
    medians = [statistics.median(each) for each in logged if each]
    return statistics.median(medians) if medians else otherwise


def _besides(step: LoggedStep) -> float:
    """Seconds of a step that belong to none of its stages."""
    known = sum(getattr(step, stage) or 0.0 for stage in (*STAGES, "update_weights"))
    return step.other if step.seconds is None else max(0.0, step.seconds - known)


def _workload(trace: Trace, costs: Costs) -> Workload:
    """What the run goes on to do: what its steps did, apart from the first, before which nothing was trained."""
    steps = _settled(trace)

    def mean(value: Callable[[LoggedStep], float]) -> float:
        return statistics.fmean(map(value, steps))

    return Workload(
        name=trace.name,
        model=trace.model,
        sequences=trace.sequences,
        samples=trace.samples,
        prompt_tokens=mean(lambda step: step.prompt_tokens),
        observation_tokens=mean(lambda step: step.observation_tokens),
        max_tokens=trace.max_tokens,
        turns=mean(lambda step: step.turns),
        tool_seconds=statistics.median(step.tool_wait for step in steps),
        reference=any(step.ref for step in steps),
        old_logprobs=any(step.old_log_prob for step in steps),
        gpus=trace.gpus,
        tp=trace.tp,
        quantiles=tuple(quantiles(step.lengths) for step in steps),
        reconstructed=any(step.reconstructed for step in steps),
        costs=costs,
    )
