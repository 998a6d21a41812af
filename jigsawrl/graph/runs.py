"""Finds the measured runs in a folder or file: traces with a `workloads.json`, or verl's console logs."""

from __future__ import annotations

from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.graph.log_lines import SUFFIXES, is_log
from jigsawrl.graph.traces import INDEX, Trace, read_traces
from jigsawrl.graph.verl_trace import read_verl_log

MOST_LOGS = 1000


def read_runs(*sources: Path) -> tuple[tuple[Trace, ...], tuple[str, ...]]:
    """The runs in folders and logs; and of each that cannot be used, why. A JigsawError if none can."""
    found: dict[str, Trace] = {}
    left_out: list[str] = []
    logs: list[Path] = []
    for source in sources:
        try:
            if (source / INDEX).exists():
                _take(read_traces(source), source / INDEX, found, left_out)
            else:
                logs += _logs_in(source)
        except JigsawError as error:
            left_out.append(str(error))
    if len(logs) > MOST_LOGS:
        raise JigsawError(f"{sources[0]}: there are {len(logs):,} logs; give at most {MOST_LOGS:,} at a time")
    for log in logs:
        try:
            _take(read_verl_log(log), log, found, left_out)
        except JigsawError as error:
            left_out.append(str(error))
    if not found:
        others = len(left_out) - 1
        more = f"\nnor can {others} other log{'s' * (others > 1)} be fitted" if others else ""
        raise JigsawError(f"{left_out[0]}{more}")
    return tuple(found.values()), tuple(left_out)


def _take(traces: tuple[Trace, ...], source: Path, found: dict[str, Trace], left_out: list[str]) -> None:
    for trace in traces:
        if found.setdefault(trace.name, trace) is not trace:
            left_out.append(f"{source}: another run is called {trace.name} already; rename one of the logs")


def _logs_in(source: Path) -> list[Path]:
    """A log, or the logs in a folder."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise JigsawError(f"{source}: there is no such folder or log")
    logs = sorted(each for each in source.iterdir() if is_log(each))
    if not logs:
        raise JigsawError(
            f"{source}: holds neither {INDEX} nor logs (files that end in {', '.join(SUFFIXES)}, or in these and "
            f".gz);\ngive a folder with measured runs, or one of verl's console logs"
        )
    return logs
