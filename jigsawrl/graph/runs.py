"""Finds the measured runs in a folder or file: traces with a `workloads.json`, or verl's console logs."""

from __future__ import annotations

from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.graph.log_lines import SUFFIXES, is_log
from jigsawrl.graph.traces import INDEX, Trace, read_traces
from jigsawrl.graph.verl_trace import read_verl_log

MOST_LOGS = 1000


def read_runs(source: Path) -> tuple[tuple[Trace, ...], tuple[str, ...]]:
    """The runs in a folder, or in one log; and of each log in the folder that cannot be used, why.

    A JigsawError if none can.
    """
    if source.is_file():
        return read_verl_log(source), ()
    if not source.is_dir():
        raise JigsawError(f"{source}: there is no such folder or log")
    if (source / INDEX).exists():
        return read_traces(source), ()
    logs = sorted(each for each in source.iterdir() if is_log(each))
    if not logs:
        raise JigsawError(
            f"{source}: holds neither {INDEX} nor logs (files that end in {', '.join(SUFFIXES)}, or in these and "
            f".gz);\ngive a folder with measured runs, or one of verl's console logs"
        )
    if len(logs) > MOST_LOGS:
        raise JigsawError(f"{source}: holds {len(logs):,} logs; give at most {MOST_LOGS:,} at a time")
    found: dict[str, Trace] = {}
    left_out: list[str] = []
    for log in logs:
        try:
            for trace in read_verl_log(log):
                if trace.name in found:
                    left_out.append(
                        f"{log}: another run is called {trace.name} already; rename one of the logs"
                    )
                found.setdefault(trace.name, trace)
        except JigsawError as error:
            left_out.append(str(error))
    if not found:
        more = f"\nnor can any of the {len(logs) - 1} other logs in {source}" if len(logs) > 1 else ""
        raise JigsawError(f"{left_out[0]}{more}")
    return tuple(found.values()), tuple(left_out)
