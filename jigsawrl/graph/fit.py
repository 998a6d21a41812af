"""Fits a profile to measured runs.

All runs of one model at one width are fitted together, outliers weighed down and the first step of a run apart
(it warms up), with the hardware's arithmetic and bandwidth as prior. Each run then gets a level of its own for
each stage: machines, settings and micro-batches differ from run to run by more than tokens explain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jigsawrl.errors import JigsawError
from jigsawrl.graph.cost import ACHIEVED, PASS_OVERHEAD, UNKNOWN, Costs, DecodeCost, LinearCost
from jigsawrl.graph.fitting import Floats, fit_decode, fit_linear, linear_prior, robust
from jigsawrl.graph.hardware import Hardware, hardware_named
from jigsawrl.graph.predict import STAGES, StepWork, stage_seconds
from jigsawrl.graph.profile import Profile, Workload, quantiles
from jigsawrl.graph.rollout import rollout_passes
from jigsawrl.graph.runs import read_runs
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


def fit_folder(
    folder: str | Path, hardware: str | None = None, name: str | None = None, source: str | None = None
) -> Profile:
    """A profile of the runs in a folder: traces with a `workloads.json`, or verl's console logs; or of one log.

    The hardware is what the runs say, if not told; name and source of the profile are the folder's.
    """
    folder = Path(folder)
    traces, _ = read_runs(folder)
    called = folder.stem if folder.is_file() else folder.absolute().name
    return fit_traces(traces, name or called, source or f"measured runs in {called}", hardware)


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


def work_of(trace: Trace, step: LoggedStep, tool_wait: float | None = None) -> StepWork:
    """What a logged step had to do; no seconds of it except the wait for tools, if another is not given."""
    return StepWork(
        lengths=step.lengths,
        prompt_tokens=step.prompt_tokens,
        total_tokens=step.total_tokens,
        turns=step.turns,
        tool_wait=step.tool_wait if tool_wait is None else tool_wait,
        max_tokens=trace.max_tokens,
        first=step.first,
        old_logprobs=step.old_log_prob is not None,
        reference=step.ref is not None,
    )


def fit_pooled(
    traces: Sequence[Trace],
    hardware: Hardware,
    source: str,
    forwards: Callable[[Trace], bool] = lambda trace: True,
) -> Costs:
    """Of runs of one model at one width, each counting alike. `forwards` says whose single passes may be used."""
    first = traces[0]
    model, gpus, tp = first.model, first.gpus, first.tp
    shown = [trace for trace in traces if forwards(trace)]
    decoding, prefilling = _passes(shown, model, hardware, tp)
    billions = model.parameters / 1e9
    stages = {
        "old_log_prob": linear_prior(model, hardware, gpus, 1, 0.35, 3 + 0.7 * billions),
        "ref": linear_prior(model, hardware, gpus, 1, 0.35, 3 + 1.2 * billions),
        "update_actor": linear_prior(model, hardware, gpus, 4, 0.35, 8 + 3 * billions),
    }
    errors: dict[str, float] = {}
    for stage, prior in stages.items():
        tokens, lengths, seconds, weights = _samples(traces, stage)
        stages[stage] = fit_linear(tokens, lengths, seconds, prior, 1.0, weights)
        errors[stage] = stages[stage].error
    syncs = _typical(traces, lambda step: step.update_weights)
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
        sync=model.weight_bytes / hardware.link_bandwidth + 1.0 if syncs is None else syncs,
        rollout_fixed_seconds=GENERATION_FIXED,
        offloaded=first.offloaded,
        other_seconds=_typical(traces, _besides) or 0.0,
        kv_tokens=cache_tokens(first, hardware),
        errors=errors,
        source=source,
    )
    costs = _with_overheads(costs, traces)
    return _with_warmup(costs, traces)


def fit_level(pooled: Costs, trace: Trace, own_passes: bool = True) -> Costs:
    """The same costs at the level of one run: each stage by one factor, drawn a little towards 1."""
    held = cache_tokens(trace, pooled.hardware, own_passes)
    costs = replace(pooled, kv_tokens=held)
    factors = dict.fromkeys(STAGES, 1.0)
    errors = dict(costs.errors)
    steps = _settled(trace)
    predicted = [stage_seconds(costs, work_of(trace, step)) for step in steps]
    for stage in STAGES:
        logs = []
        for step, seconds in zip(steps, predicted, strict=True):
            measured: float | None = getattr(step, stage)
            waited = step.tool_wait if stage == "gen" else 0.0
            if measured is not None and measured > waited and seconds[stage] > waited:
                logs.append(math.log((measured - waited) / (seconds[stage] - waited)))
        if not logs:
            continue
        middle = statistics.median(logs)
        factors[stage] = math.exp(min(max(middle * len(logs) / (len(logs) + SHRINK), -4.6), 4.6))
        spread = statistics.fmean(abs(each - middle) for each in logs) * 1.25
        errors[stage] = max(0.02, spread) if len(logs) > 1 else max(0.1, spread)
    syncs = _typical([trace], lambda step: step.update_weights)
    besides = _typical([trace], _besides)
    gen, update = factors["gen"], factors["update_actor"]
    costs = replace(
        costs,
        decoding=replace(costs.decoding.scaled(gen), error=max(costs.decoding.error, errors.get("gen", 0.0))),
        prefilling=costs.prefilling.scaled(gen),
        rollout_fixed_seconds=costs.rollout_fixed_seconds * gen,
        logprob=_levelled(costs.logprob, factors["old_log_prob"], errors.get("old_log_prob")),
        ref=_levelled(costs.ref, factors["ref"], errors.get("ref")),
        grad=_levelled(costs.grad, update, errors.get("update_actor")),
        optim=costs.optim * update,
        sync=costs.sync if syncs is None else syncs,
        other_seconds=costs.other_seconds if besides is None else besides,
        errors=errors,
    )
    return _with_warmup(costs, [trace])


def cache_tokens(trace: Trace, hardware: Hardware, own_passes: bool = True) -> float:
    """What an engine's cache holds: its part of the memory without the weights, or more if more was seen in it."""
    room = 0.95 * trace.memory_share * hardware.device_bytes * trace.tp - trace.model.weight_bytes
    held = max(room, 0.05 * hardware.device_bytes * trace.tp) / trace.model.kv_bytes_per_token
    if own_passes and trace.forwards is not None and not trace.forwards.prefill.all():
        decode = ~trace.forwards.prefill
        held = max(held, float((trace.forwards.batch * trace.forwards.length)[decode].max()))
    return held


def _levelled(cost: LinearCost, factor: float, error: float | None) -> LinearCost:
    return replace(cost.scaled(factor), error=cost.error if error is None else error)


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
    known = [trace.forwards for trace in traces if trace.forwards is not None]
    decodes = [(each, ~each.prefill) for each in known if not each.prefill.all()]
    if decodes:
        decoding = fit_decode(
            np.concatenate([each.batch[kept] for each, kept in decodes]),
            np.concatenate([each.length[kept] for each, kept in decodes]),
            np.concatenate([each.seconds[kept] for each, kept in decodes]),
            decoding,
        )
    extends = [(each, each.prefill & (each.seconds > 0)) for each in known]
    extends = [(each, kept) for each, kept in extends if kept.sum() >= 3]
    if extends:
        prefilling = fit_linear(
            np.concatenate([each.prefill_tokens[kept] for each, kept in extends]),
            np.concatenate([each.length[kept] for each, kept in extends]),
            np.concatenate([each.seconds[kept] for each, kept in extends]),
            prefilling,
            1.0,
        )
    return decoding, replace(prefilling, fixed=ADMISSION)


def _with_overheads(costs: Costs, traces: Sequence[Trace]) -> Costs:
    """Adds what single passes do not show: the host between passes and for each token, and letting sequences in."""
    rows, seconds, weights = [], [], []
    for trace in traces:
        held = cache_tokens(trace, costs.hardware)
        steps = [step for step in _settled(trace) if step.gen is not None]
        for step in steps:
            assert step.gen is not None
            waves = max(2, round(step.turns)) if step.tool_wait > 0 else 1
            engines = max(1, trace.gpus // trace.tp)
            mine = step.lengths[::engines]
            passes = rollout_passes(
                costs,
                mine,
                step.prompt_tokens,
                trace.tp,
                waves,
                step.observation_tokens,
                held,
                trace.max_tokens,
            )
            context = step.prompt_tokens + step.observation_tokens
            known = passes.seconds + costs.prefill_seconds(
                len(mine) * context, context, trace.tp, sequences=0
            )
            known += costs.rollout_fixed_seconds
            again = max(0.0, passes.entered - waves * len(mine))
            admitted = len(mine) * max(step.turns, waves) + again
            rows.append([admitted, passes.count, float(mine.sum()), known])
            seconds.append(max(step.gen - step.tool_wait, 1e-3))
            weights.append(1 / len(steps))
    if not rows:
        return replace(costs, errors={**costs.errors, "gen": UNKNOWN})
    fit = robust(
        np.array(rows),
        np.array(seconds),
        np.array([ADMISSION, BETWEEN_PASSES, PER_TOKEN, 1.0]),
        np.array([1.0, 1.0, 1.0, 0.1]),
        np.array(weights) * len(weights) / sum(weights),
    )
    admission, between, token, known = (float(each) for each in fit.coefficients)
    return replace(
        costs,
        decoding=replace(
            costs.decoding,
            a=costs.decoding.a * known + between,
            b=costs.decoding.b * known + token,
            c=costs.decoding.c * known,
        ),
        prefilling=replace(costs.prefilling.scaled(known), fixed=admission),
        errors={**costs.errors, "gen": fit.error},
    )


def _with_warmup(costs: Costs, traces: Sequence[Trace]) -> Costs:
    """What first steps took longer, by stage; what the costs say already, where no first step was logged."""
    extra: dict[str, list[float]] = {}
    for trace in traces:
        for step in trace.steps:
            if not step.first or len(trace.steps) < 2:
                continue
            predicted = stage_seconds(costs, replace(work_of(trace, step), first=False))
            for stage in STAGES:
                measured: float | None = getattr(step, stage)
                if measured is not None:
                    extra.setdefault(stage, []).append(max(0.0, measured - predicted[stage]))
    found: Mapping[str, float] = {stage: statistics.median(each) for stage, each in extra.items()}
    return replace(costs, warmup={**costs.warmup, **found})


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


def _typical(traces: Sequence[Trace], value: Callable[[LoggedStep], float | None]) -> float | None:
    """The median over runs of their medians."""
    each = []
    for trace in traces:
        found = [seconds for step in _settled(trace) if (seconds := value(step)) is not None]
        if found:
            each.append(statistics.median(found))
    return statistics.median(each) if each else None


def _besides(step: LoggedStep) -> float | None:
    """Seconds of a step that belong to none of its stages."""
    if step.seconds is None:
        return step.other
    known = sum(getattr(step, stage) or 0.0 for stage in (*STAGES, "update_weights"))
    return max(0.0, step.seconds - known)


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
