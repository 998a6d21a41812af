"""From the runs in a verl log to traces that can be fitted, with what was believed of each and what was left out."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from jigsawrl.errors import JigsawError
from jigsawrl.graph import verl_settings as keys
from jigsawrl.graph.known_models import is_mixture, model_named
from jigsawrl.graph.log_lines import log_name
from jigsawrl.graph.reconstruct import MOST_SEQUENCES
from jigsawrl.graph.shape import ModelShape
from jigsawrl.graph.traces import LoggedStep, Trace, limit_above, logged_step, workers
from jigsawrl.graph.verl_log import NEEDED, OPTIONAL, Logged, Run, read_runs_in
from jigsawrl.graph.verl_settings import Settings

GPUS, TP, SHARE = 8, 2, 0.5
"""verl's defaults, where a log does not tell."""
AGREE = 0.02
"""Relative difference of two counts of sequences that is put down to rounding."""
MOST_FITTED = 1000
"""Steps of one run that are fitted: more take minutes and tell nothing new."""
FAR = 2.0
"""A step with so many times more or fewer sequences than its run has on the median is damaged."""


def read_verl_log(path: Path) -> tuple[Trace, ...]:
    """The runs in a log, named after it, and numbered if there are several. A JigsawError if none can be used."""
    runs, damage = read_runs_in(path)
    traces, refused = [], []
    for number, run in enumerate(runs, 1):
        where = f"{path}, run {number} of {len(runs)}" if len(runs) > 1 else str(path)
        name = log_name(path) + (f"-{number}" if len(runs) > 1 else "")
        try:
            trace = trace_of(run, name, path, where)
        except JigsawError as error:
            refused.append(str(error))
            continue
        doubts = list(trace.doubts)
        if len(runs) > 1:
            doubts.append(
                f"{path.name} holds {len(runs)} runs; this is number {number}, from line {run.line:,} on"
            )
        if damage and number == len(runs):
            doubts.append(f"{path.name} breaks off: {damage}")
        traces.append(replace(trace, doubts=tuple(doubts)))
    if not traces:
        raise JigsawError("\n".join(refused[:3]))
    if refused:
        traces[0] = replace(traces[0], doubts=(*traces[0].doubts, *(f"left out: {each}" for each in refused)))
    return tuple(traces)


def trace_of(run: Run, name: str, path: Path, where: str) -> Trace:
    """One run as a trace."""
    if run.asynchronous is not None:
        raise JigsawError(
            f"{where}: is of an asynchronous trainer ({run.asynchronous}), in which rollouts and updates overlap;\n"
            f"only logs of synchronous trainers can be fitted for now"
        )
    settings = run.settings
    model = _model(settings, path)
    measured = {
        step: [Logged(each.line, _sane(each.metrics)) for each in lines] for step, lines in run.steps.items()
    }
    measured = {
        step: lines for step, lines in sorted(measured.items()) if any(each.metrics for each in lines)
    }
    found = len(measured)
    if found > MOST_FITTED:
        kept = {round(each * (found - 1) / (MOST_FITTED - 1)) for each in range(MOST_FITTED)}
        measured = {step: lines for at, (step, lines) in enumerate(measured.items()) if at in kept}
    prompts, samples = settings.whole(keys.PROMPTS), settings.whole(keys.SAMPLES) or 1
    told = prompts * samples if prompts else None
    needed = _usual(measured.values())
    usual = _usual_sequences(measured.values(), told)
    if usual > MOST_SEQUENCES:
        raise JigsawError(f"{where}: its tokens make {usual:,.0f} sequences a step, which cannot be")
    steps: list[LoggedStep] = []
    reasons: list[str] = []
    for number, lines in measured.items():
        step, why = _first_usable(number, lines, needed, told, usual, path)
        if step is None:
            reasons.append(why)
        else:
            steps.append(replace(step, first=number in run.launches))
    if not steps:
        raise JigsawError(reasons[0] if reasons else _nothing(path, run))
    doubts = []
    if found > MOST_FITTED:
        doubts.append(f"of its {found:,} steps {len(measured):,} were used, evenly spaced")
    if reasons:
        others = f"; {len(reasons) - 1} more" if len(reasons) > 1 else ""
        doubts.append(f"left out {len(reasons)} of {len(measured)} steps: {reasons[0]}{others}")
    sequences = int(statistics.median(len(step.lengths) for step in steps))
    if told and abs(sequences - told) > AGREE * told:
        doubts.append(
            f"{keys.PROMPTS} and {keys.SAMPLES} make {told:,} sequences a step, and its tokens {sequences:,}, "
            f"which was believed"
        )
    gpus, tp, assumed = _width(settings, run, doubts)
    longest = max(float(step.lengths.max()) for step in steps)
    return Trace(
        name=name,
        model=model,
        samples=samples,
        gpus=gpus,
        tp=tp,
        max_tokens=settings.whole(keys.MOST_TOKENS) or limit_above(longest),
        steps=tuple(steps),
        memory_share=settings.share(keys.MEMORY_SHARE) or SHARE,
        offloaded=settings.flag(keys.OFFLOADED),
        found=found,
        assumed=assumed,
        doubts=tuple(doubts),
    )


def _width(settings: Settings, run: Run, doubts: list[str]) -> tuple[int, int, frozenset[str]]:
    """GPUs, and those of an engine; and which of the two nothing in the log tells."""
    assumed = set()
    each, nodes = settings.whole(keys.GPUS_PER_NODE), settings.whole(keys.NODES)
    counted = workers(line.metrics for lines in run.steps.values() for line in lines)
    if each and nodes:
        gpus = each * nodes
        if counted is not None and counted != gpus:
            doubts.append(
                f"{keys.NODES} x {keys.GPUS_PER_NODE} are {gpus} GPUs, which was believed; "
                f"perf/throughput says {counted}"
            )
    elif counted is not None:
        gpus = counted
    else:
        gpus = (each or GPUS) * (nodes or 1)
        if not each:
            assumed.add("gpus")
    tp = settings.whole(keys.TENSOR_PARALLEL)
    if tp is None:
        tp = min(TP, gpus)
        assumed.add("tp")
    elif tp > gpus:
        doubts.append(f"{keys.TENSOR_PARALLEL} is {tp}, but there are {gpus} GPUs; fitted as {gpus}")
    return gpus, min(tp, gpus), frozenset(assumed)


def _first_usable(
    number: int, lines: Sequence[Logged], needed: Sequence[str], told: int | None, usual: float, path: Path
) -> tuple[LoggedStep | None, str]:
    """The step from the first of its lines that is whole, or from all of them together; or what is wrong."""
    why = ""
    for each in _candidates(lines):
        where = f"{path}, line {each.line}"
        lacking = [key for key in needed if key not in each.metrics]
        if lacking:
            why = why or f"{where}: step {number} lacks {lacking[0]}, which others have; is the line cut off?"
            continue
        sequences = _sequences(each.metrics, told)
        if sequences is not None and not usual / FAR <= sequences <= usual * FAR:
            why = (
                why
                or f"{where}: step {number} has {sequences:,} sequences by its tokens, others {usual:,.0f}"
            )
            continue
        try:
            found = logged_step(each.metrics, number, None, sequences, None, where)
        except JigsawError as error:
            why = why or str(error)
            continue
        if found is not None:
            return found, ""
        why = why or (
            f"{where}: step {number} has no timing_s/gen or timing_s/step together with response_length/mean\n"
            f"and a number of sequences ({keys.PROMPTS} and {keys.SAMPLES}, or perf/total_num_tokens and "
            f"prompt_length/mean)"
        )
    return None, why


def _candidates(lines: Sequence[Logged]) -> Iterator[Logged]:
    yield from lines
    if len(lines) > 1:
        together: dict[str, Any] = {}
        for each in lines:
            together = {**each.metrics, **together}
        yield Logged(lines[0].line, together)


def _sequences(metrics: Mapping[str, Any], told: int | None) -> int | None:
    """Of a step: its tokens tell, and the settings where both agree or nothing else is known."""
    total, prompt, mean = (
        float(value) if _sensible(value := metrics.get(key)) else 0.0
        for key in ("perf/total_num_tokens", "prompt_length/mean", "response_length/mean")
    )
    if total <= 0 or prompt <= 0 or mean <= 0:
        return told
    counted = max(1, round(total / (prompt + mean)))
    return told if told and abs(counted - told) <= AGREE * told else counted


def _usual_sequences(steps: Iterable[Sequence[Logged]], told: int | None) -> float:
    """Of the median step; 0 where none tells."""
    counts = (_sequences(each.metrics, told) for lines in steps for each in lines)
    return statistics.median([each for each in counts if each is not None] or [0])


def _usual(steps: Iterable[Sequence[Logged]]) -> list[str]:
    """What at least half of the steps have."""
    counts, number = Counter[str](), 0
    for lines in steps:
        number += 1
        counts.update({key for each in lines for key in each.metrics if key in NEEDED})
    return [key for key in NEEDED if 2 * counts[key] >= number > 0]


def _sane(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that make no sense and are not needed."""
    return {key: value for key, value in metrics.items() if key not in OPTIONAL or _sensible(value)}


def _sensible(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _nothing(path: Path, run: Run) -> str:
    line = next(iter(run.steps.values()))[0].line
    return f"{path}, line {line}: no step has timing_s/ or response_length/"


def _model(settings: Settings, path: Path) -> ModelShape:
    """By the settings, or else by the name of the log."""
    told = settings.text(keys.MODEL)
    for part in reversed(PurePosixPath(told or "").parts):
        if is_mixture(part):
            raise JigsawError(
                f"{path}: {keys.MODEL}={told} reads like a mixture of experts; only dense models can be fitted"
            )
        try:
            return model_named(part, "")
        except JigsawError:
            continue
    try:
        return model_named(log_name(path), str(path))
    except JigsawError:
        which = (
            f"{keys.MODEL}={told} is no model known here" if told else "its settings do not tell the model"
        )
        raise JigsawError(
            f"{path}: {which}, and its name does not either;\n"
            f"put a model's name into the file's, such as {log_name(path)}_qwen3-4b{''.join(path.suffixes[-2:])}"
        ) from None
