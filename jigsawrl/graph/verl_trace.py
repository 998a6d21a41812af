"""From the runs in a verl log to traces that can be fitted, with what was believed of each and what was left out."""

from __future__ import annotations

import statistics
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from jigsawrl.errors import JigsawError
from jigsawrl.graph.known_models import is_mixture, model_named
from jigsawrl.graph.log_lines import log_name
from jigsawrl.graph.reconstruct import MOST_SEQUENCES
from jigsawrl.graph.shape import ModelShape
from jigsawrl.graph.traces import LoggedStep, Trace, limit_above, logged_step, workers
from jigsawrl.graph.verl_log import NEEDED, Logged, Metrics, Run, read_runs_in, sensible
from jigsawrl.graph.verl_settings import KEYS, Settings

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
        else:
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
        step: lines for step, lines in sorted(run.steps.items()) if any(each.metrics for each in lines)
    }
    found = len(measured)
    if found > MOST_FITTED:
        kept = {round(each * (found - 1) / (MOST_FITTED - 1)) for each in range(MOST_FITTED)}
        measured = {step: lines for at, (step, lines) in enumerate(measured.items()) if at in kept}
    prompts, samples = settings.whole("prompts"), settings.whole("samples") or 1
    told = prompts * samples if prompts else None
    needed = _usual(measured)
    counts = (_sequences(each.metrics, told) for lines in measured.values() for each in lines)
    usual = statistics.median([count for count in counts if count is not None] or [0])
    if usual > MOST_SEQUENCES:
        raise JigsawError(f"{where}: its tokens make {usual:,.0f} sequences a step, which cannot be")
    steps: list[LoggedStep] = []
    reasons: list[str] = []
    for number, lines in measured.items():
        try:
            step = _first_usable(number, lines, needed, told, usual, path)
            steps.append(replace(step, first=number in run.launches))
        except JigsawError as error:
            reasons.append(str(error))
    if not steps:
        line = next(iter(run.steps.values()))[0].line
        raise JigsawError(
            reasons[0] if reasons else f"{path}, line {line}: no step has timing_s/ or response_length/"
        )
    doubts = []
    if found > MOST_FITTED:
        doubts.append(f"of its {found:,} steps {len(measured):,} were used, evenly spaced")
    if reasons:
        more = f"; {len(reasons) - 1} more" if len(reasons) > 1 else ""
        doubts.append(f"left out {len(reasons)} of {len(measured)} steps: {reasons[0]}{more}")
    sequences = int(statistics.median(len(step.lengths) for step in steps))
    if told and abs(sequences - told) > AGREE * told:
        doubts.append(
            f"{KEYS['prompts']} and {KEYS['samples']} make {told:,} sequences a step, and its tokens {sequences:,}, "
            f"which was believed"
        )
    gpus, tp, assumed = _width(settings, run, doubts)
    return Trace(
        name=name,
        model=model,
        samples=samples,
        gpus=gpus,
        tp=tp,
        max_tokens=settings.whole("max_tokens") or limit_above(steps),
        steps=tuple(steps),
        memory_share=settings.share("memory_share") or SHARE,
        offloaded=settings.offloaded(),
        found=found,
        assumed=assumed,
        doubts=tuple(doubts),
    )


def _width(settings: Settings, run: Run, doubts: list[str]) -> tuple[int, int, frozenset[str]]:
    """GPUs, and those of an engine; and which of the two nothing in the log tells."""
    each, nodes = settings.whole("gpus_per_node"), settings.whole("nodes")
    counted = workers(line.metrics for lines in run.steps.values() for line in lines)
    told = each * nodes if each and nodes else None
    gpus = told or counted or (each or GPUS) * (nodes or 1)
    if told and counted not in (None, told):
        doubts.append(
            f"{KEYS['nodes']} x {KEYS['gpus_per_node']} are {gpus} GPUs, which was believed; "
            f"perf/throughput says {counted}"
        )
    tp = settings.whole("tp")
    if tp and tp > gpus:
        doubts.append(f"{KEYS['tp']} is {tp}, but there are {gpus} GPUs; fitted as {gpus}")
    known = {"gpus": told or counted or each, "tp": tp}
    return gpus, min(tp or TP, gpus), frozenset(key for key, value in known.items() if not value)


def _first_usable(
    number: int, lines: Sequence[Logged], needed: Sequence[str], told: int | None, usual: float, path: Path
) -> LoggedStep:
    """The step from the first of its lines that is whole, or from all of them together."""
    together = Logged(lines[0].line, dict(ChainMap(*(each.metrics for each in lines))))
    reasons: list[JigsawError] = []
    for each in (*lines, together):
        try:
            return _usable(number, each.metrics, needed, told, usual, f"{path}, line {each.line}")
        except JigsawError as error:
            reasons.append(error)
    raise reasons[0]


def _usable(
    number: int, metrics: Metrics, needed: Sequence[str], told: int | None, usual: float, where: str
) -> LoggedStep:
    """The step of these metrics; a JigsawError where they are not whole, or are not like those of the others."""
    lacking = [key for key in needed if key not in metrics]
    if lacking:
        raise JigsawError(
            f"{where}: step {number} lacks {lacking[0]}, which others have; is the line cut off?"
        )
    sequences = _sequences(metrics, told)
    if sequences is not None and not usual / FAR <= sequences <= usual * FAR:
        raise JigsawError(
            f"{where}: step {number} has {sequences:,} sequences by its tokens, others {usual:,.0f}"
        )
    step = logged_step(metrics, number, None, sequences, 0.0, where)
    if step is None:
        raise JigsawError(
            f"{where}: step {number} has no timing_s/gen or timing_s/step together with response_length/mean\n"
            f"and a number of sequences ({KEYS['prompts']} and {KEYS['samples']}, or perf/total_num_tokens and "
            f"prompt_length/mean)"
        )
    return step


def _sequences(metrics: Metrics, told: int | None) -> int | None:
    """Of a step: its tokens tell, and the settings where both agree or nothing else is known."""
    total, prompt, mean = (
        float(value) if sensible(value := metrics.get(key)) else 0.0
        for key in ("perf/total_num_tokens", "prompt_length/mean", "response_length/mean")
    )
    if total <= 0 or prompt <= 0 or mean <= 0:
        return told
    counted = max(1, round(total / (prompt + mean)))
    return told if told and abs(counted - told) <= AGREE * told else counted


def _usual(steps: Mapping[int, Sequence[Logged]]) -> list[str]:
    """What at least half of the steps have."""
    counts = Counter(
        key for lines in steps.values() for key in {key for each in lines for key in each.metrics}
    )
    return [key for key in NEEDED if 2 * counts[key] >= len(steps)]


def _model(settings: Settings, path: Path) -> ModelShape:
    """By the settings, or else by the name of the log."""
    told = settings.text("model")
    for part in reversed(PurePosixPath(told or "").parts):
        if is_mixture(part):
            raise JigsawError(
                f"{path}: {KEYS['model']}={told} reads like a mixture of experts; only dense models can be fitted"
            )
        try:
            return model_named(part, "")
        except JigsawError:
            continue
    try:
        return model_named(log_name(path), str(path))
    except JigsawError:
        which = (
            f"{KEYS['model']}={told} is no model known here" if told else "its settings do not tell the model"
        )
        raise JigsawError(
            f"{path}: {which}, and its name does not either;\n"
            f"put a model's name into the file's, such as {log_name(path)}_qwen3-4b{''.join(path.suffixes[-2:])}"
        ) from None
