"""Predicted against logged seconds of real RL runs, from their lengths.

For every workload in a folder of traces (format: `jigsawrl/graph/traces.py`), the seconds of generation, log-probs of
the policy and of the reference, update and whole step, predicted in two ways:

- same workload: coefficients fitted on the first half of its steps (the middle one belongs to it), judged on the
  second half. The first halves of other workloads of the same model help to fit how seconds depend on tokens.
- other workload: coefficients fitted on all other workloads of the same model; every step is judged. Where the folder
  has only one workload of a model, those of the built-in profile take their place (the median of what they foresee);
  where that has none either, it is predicted from the model nearest in size, reported apart, and not in the claim.

Given are the lengths, prompts and turns of the judged steps; of their seconds nothing is, nor are single passes of
the judged workload, which come from all of its steps. Waits for tools do not follow from lengths: in the first way
they are those of the fitted half, in the second what the workload states as its tools' seconds, and the errors with
the logged waits are given beside them. Claims are means of the absolute relative error of a step's seconds over steps
and then over workloads. It takes a quarter of a minute, with --quick too.

With `--logs` it also judges the commands on verl's console logs (`fitted_logs.py`): `jigsaw fit` on the first half of
each log, `jigsaw simulate` with the profile that this writes, and the seconds of a step held against the second half.
Logs of fewer than four steps, and those that cannot be fitted, are named and left out.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import arguments, claim, clean_stdout, figure, report
from fitted_logs import Halved, halve_logs, halves_table
from rich.table import Table

from jigsawrl.errors import JigsawError
from jigsawrl.graph.cost import Costs
from jigsawrl.graph.fit import cache_tokens, fit_level, fit_pooled, same_model
from jigsawrl.graph.hardware import Hardware, hardware_named
from jigsawrl.graph.predict import STAGES, stage_seconds
from jigsawrl.graph.profile import load_profile
from jigsawrl.graph.traces import LoggedStep, Trace, read_traces

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
BUILT_IN = "h100-traces"
SAME, OTHER = 0.10, 0.20
HALVES, WORST_HALVES = 0.08, 0.25


@dataclass(frozen=True, slots=True)
class Judged:
    """Errors of one workload, predicted in one way."""

    workload: str
    steps: int
    logged: dict[str, float]
    predicted: dict[str, float]
    errors: dict[str, float]
    """Mean absolute relative error of each stage and of the step."""
    known_waits: float
    """The step's, if the waits for tools were known."""
    fitted_on: str

    def as_json(self) -> dict[str, object]:
        return {
            "workload": self.workload,
            "steps": self.steps,
            "logged_s": rounded(self.logged),
            "predicted_s": rounded(self.predicted),
            "errors": rounded(self.errors),
            "step_error_tool_waits_known": round(self.known_waits, 4),
            "fitted_on": self.fitted_on,
        }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in values.items()}


def halves(trace: Trace) -> tuple[Trace, tuple[LoggedStep, ...]]:
    """What may be fitted on, single passes left out, and the steps to judge."""
    middle = math.ceil(len(trace.steps) / 2)
    return replace(trace, steps=trace.steps[:middle], forwards=None), trace.steps[middle:]


def judge(
    trace: Trace, steps: Sequence[LoggedStep], costs: Sequence[Costs], tool_wait: float, fitted_on: str
) -> Judged:
    """By one or several opinions on the costs; `tool_wait` is what is believed of a step's waits for tools."""
    logged: dict[str, list[float]] = {}
    predicted: dict[str, list[float]] = {}
    known = []
    for step in steps:
        guess = foreseen(costs, trace, step, tool_wait)
        told = foreseen(costs, trace, step) if step.tool_wait else guess
        for stage in (*STAGES, "step"):
            measured = step.seconds if stage == "step" else getattr(step, stage)
            if measured:
                logged.setdefault(stage, []).append(measured)
                predicted.setdefault(stage, []).append(guess[stage])
        if step.seconds:
            known.append(abs(told["step"] - step.seconds) / step.seconds)
    errors = {
        stage: statistics.fmean(abs(p - m) / m for p, m in zip(predicted[stage], logged[stage], strict=True))
        for stage in logged
    }
    return Judged(
        trace.name,
        len(steps),
        {stage: statistics.fmean(each) for stage, each in logged.items()},
        {stage: statistics.fmean(each) for stage, each in predicted.items()},
        errors,
        statistics.fmean(known) if known else 0.0,
        fitted_on,
    )


def foreseen(
    costs: Sequence[Costs], trace: Trace, step: LoggedStep, tool_wait: float | None = None
) -> dict[str, float]:
    """The median opinion on each stage, and their sum."""
    opinions = [stage_seconds(each, trace, step, tool_wait) for each in costs]
    seconds = {stage: statistics.median(each[stage] for each in opinions) for stage in (*STAGES, "other")}
    return {**seconds, "step": sum(seconds.values())}


def same_workload(traces: Sequence[Trace], hardware: Hardware) -> list[Judged]:
    found = []
    for trace in traces:
        first, second = halves(trace)
        if not second:
            continue
        alike = [other for other in traces if same_model(other, trace)]
        fitted = [
            replace(halves(other)[0], forwards=None if other is trace else other.forwards) for other in alike
        ]
        costs = fit_level(fit_pooled(fitted, hardware, "first halves"), first)
        wait = statistics.median(step.tool_wait for step in first.steps)
        found.append(
            judge(trace, second, [costs], wait, f"steps {', '.join(str(s.step) for s in first.steps)}")
        )
    return found


def other_workload(traces: Sequence[Trace], hardware: Hardware) -> tuple[list[Judged], list[Judged]]:
    """Those with others of the same model, and those without."""
    found, alone = [], []
    for trace in traces:
        others = [other for other in traces if other is not trace]
        alike = [other for other in others if same_model(other, trace)]
        if alike:
            costs = [fit_pooled(alike, hardware, "other workloads")]
            on = f"{len(alike)} workloads"
        elif costs := built_in(trace, hardware):
            on = f"{len(costs)} workloads of the built-in profile"
        elif not others:
            continue
        else:
            nearest = min(others, key=lambda other: distance(other, trace))
            nearby = [other for other in others if same_model(other, nearest)]
            costs, on = [fit_pooled(nearby, hardware, "another model").of(trace.model)], nearest.model.name
        held = cache_tokens(trace, hardware, own_passes=False)
        costs = [replace(each, kv_tokens=held) for each in costs]
        result = judge(trace, trace.steps, costs, trace.stated_tool_seconds, on)
        (alone if costs[0].derived else found).append(result)
    return found, alone


def built_in(trace: Trace, hardware: Hardware) -> list[Costs]:
    """Of workloads of the same model at the same width, the judged one left out by its name."""
    profile = load_profile(BUILT_IN)
    return [
        each.costs
        for name, each in profile.workloads.items()
        if name != trace.name
        and profile.hardware == hardware
        and replace(each.model, name="") == replace(trace.model, name="")
        and (each.gpus, each.tp) == (trace.gpus, trace.tp)
    ]


def distance(one: Trace, other: Trace) -> float:
    return abs(math.log(one.model.parameters / other.model.parameters))


def table(title: str, rows: Sequence[Judged]) -> Table:
    shown = Table(
        title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0), box=None
    )
    shown.add_column("workload", no_wrap=True)
    for name in ("n", "gen s", "step s", "gen %", "old", "ref", "upd", "step %"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.workload,
            str(row.steps),
            *(
                f"{figure(row.predicted[stage])}/{figure(row.logged[stage])}" if stage in row.logged else "-"
                for stage in ("gen", "step")
            ),
            *(
                f"{100 * row.errors[stage]:.1f}" if stage in row.errors else "-"
                for stage in (*STAGES, "step")
            ),
        )
    return shown


def has(rows: Sequence[Judged], stage: str = "step") -> bool:
    return any(stage in row.errors for row in rows)


def mean(rows: Sequence[Judged], stage: str = "step") -> float:
    return statistics.fmean(row.errors[stage] for row in rows if stage in row.errors)


def claims_of(halved: Sequence[Halved]) -> dict[str, dict[str, object]]:
    if not halved:
        return {}
    return {
        "fit_then_simulate_error": claim(statistics.fmean(row.error for row in halved), at_most=HALVES),
        "fit_then_simulate_error_worst": claim(max(row.error for row in halved), at_most=WORST_HALVES),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of traces; ../shared/traces if not given")
    parser.add_argument(
        "--logs",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="verl's console logs, or folders of them",
    )
    options = parser.parse_args()
    folder: Path = options.folder or TRACES
    with clean_stdout() as console:
        lacking = [path for path in options.logs if not path.exists()]
        if lacking:
            print(f"{lacking[0]}: there is no such log or folder", file=sys.stderr)
            return 2
        judges_traces = folder.is_dir() or options.folder is not None or not options.logs
        if judges_traces and not folder.is_dir():
            print(f"{folder}: there is no such folder; give one with traces", file=sys.stderr)
            return 2
        try:
            traces = read_traces(folder) if judges_traces else ()
            kinds = {trace.hardware or "h100" for trace in traces}
            hardware = hardware_named(min(kinds, default="h100"))
        except JigsawError as error:
            print(error, file=sys.stderr)
            return 2
        same = same_workload(traces, hardware)
        other, alone = other_workload(traces, hardware)
        if same:
            console.print(
                "Predicted/logged seconds, means over the judged steps, and mean absolute relative errors."
            )
            console.print(table("First half of the steps -> second half", same))
        if other:
            console.print(table("Other workloads of the same model -> all steps", other))
        if alone:
            console.print(
                table("Only workload of its model, predicted from another model; not in the claim", alone)
            )
        claims = {}
        if has(same):
            claims["step_error_same_workload"] = claim(mean(same), at_most=SAME)
        if has(other):
            claims["step_error_other_workload"] = claim(mean(other), at_most=OTHER)
        for name, rows in (("same", same), ("other", other)):
            if rows:
                stages = ", ".join(f"{stage} {mean(rows, stage):.1%}" for stage in STAGES if has(rows, stage))
                known = statistics.fmean(row.known_waits for row in rows)
                console.print(
                    f"{name} workload, by stage: {stages}; step with the waits for tools known {known:.1%}"
                )
        halved, left_out = halve_logs(options.logs, options.seed)
        claims |= claims_of(halved)
        if halved:
            console.print(halves_table(halved))
            constant = statistics.fmean(row.constant_error for row in halved)
            console.print(
                f"mean {statistics.fmean(row.error for row in halved):.1%}, constant {constant:.1%}"
            )
        for name, reason in left_out.items():
            console.print(f"left out: {name}: {reason}", highlight=False)
        report(
            console,
            "trace_fidelity",
            options.seed,
            claims,
            folder=folder.name if judges_traces else None,
            workloads=len(traces),
            same_workload=[row.as_json() for row in same],
            other_workload=[row.as_json() for row in other],
            other_model=[row.as_json() for row in alone],
            fit_then_simulate=[row.as_json() for row in halved],
            logs_left_out=left_out,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
