"""The same pipelines for real under several policies, one after the other, each in a folder of its own."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from jigsawrl.config.pipelines import Mix
from jigsawrl.config.runfolder import writable_part
from jigsawrl.config.started import dated
from jigsawrl.errors import JigsawError
from jigsawrl.runtime.launch import Ended, Outcome, run_mix
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.comparison import Comparison, Fate, Side
from jigsawrl.telemetry.comparison_page import comparison_page
from jigsawrl.telemetry.figures import Summary, summarize
from jigsawrl.telemetry.progress import Progress
from jigsawrl.telemetry.runlog import RunLog
from jigsawrl.telemetry.runreport import write_files
from jigsawrl.telemetry.text import duration
from jigsawrl.underway import under_way

REAL_POLICIES = ("serial", "concurrent", "rollmux", "jigsaw")
"""Compared where none are named: a real run takes its time."""
PAGE_FILE, FIGURES_FILE = "compare.html", "compare.json"
NOTHING = summarize([], 0.0)
"""The figures of a pipeline that has not begun."""


def check_comparison(mix: Mix, out: Path) -> None:
    """A JigsawError where a pipeline cannot run for real, or the folder is in use."""
    for name, entry in mix.config.pipelines.items():
        if entry.run is None:
            raise JigsawError(
                f"pipelines.{name}: a workload of a profile can only be simulated; add --simulate,\n"
                "or give it a run file (run: FILE)"
            )
    check_unused(out)


def check_unused(out: Path) -> None:
    """A JigsawError where the folder holds anything."""
    if writable_part(out) == out and any(out.glob("[!.]*")):
        what = "holds a comparison already" if (out / FIGURES_FILE).exists() else "is not empty"
        raise JigsawError(f"{out}: {what}; choose another folder with --out")


def compare_runs(
    mix: Mix, policies: Sequence[str], out: Path, progress: Callable[[], AbstractContextManager[Progress]]
) -> Comparison:
    """Runs all of them. Where one is interrupted, nothing more is run: a KeyboardInterrupt."""
    with under_way(out):
        check_unused(out)
        outcomes: dict[str, Outcome] = {}
        today = datetime.date.today()
        # One day for all policies, whenever each of them is run.
        runs = {name: dated(run, today) for name, run in mix.runs.items()}
        for number, policy in enumerate(policies, 1):
            order = mix.config.order if policy == "rollmux" else None
            under = Mix(mix.config.model_copy(update={"policy": policy, "order": order}), runs)
            with progress() as shown:
                outcomes[policy] = outcome = run_mix(under, out / policy, False, shown, out / policies[0])
                if any(each.how == "interrupted" for each in outcome.pipelines):
                    raise KeyboardInterrupt(f"interrupted under {policy}; what was run is in {out}")
                took = duration(outcome.seconds)
                shown.message(f"{policy}: {took}; {number} of {len(policies)} policies are done")
        compared = comparison_of(mix, outcomes)
        page = comparison_page(compared).encode()
        write_files(out, {PAGE_FILE: page, FIGURES_FILE: jsonl.encode(compared.as_dict())})
        return compared


def comparison_of(mix: Mix, outcomes: Mapping[str, Outcome]) -> Comparison:
    """Held against serial, or the first where that was not run."""
    first = next(iter(outcomes))
    alone = alone_seconds(outcomes["serial"].made.log) if "serial" in outcomes else {}
    rewarded = outcomes[first].made.log.summaries
    runs = {
        policy: Side(
            policy,
            outcome.made.log,
            outcome.made.report,
            {each.name: fate_of(mix, each, rewarded, alone) for each in outcome.pipelines},
        )
        for policy, outcome in outcomes.items()
    }
    baseline = runs.get("serial", runs[first])
    return Comparison(mix.config.name, mix.config.workers, baseline, list(runs.values()))


def alone_seconds(serial: RunLog) -> dict[str, float]:
    """Under serial a pipeline has all workers to itself from its first phase on."""
    return {name: serial.ended[name] - began for name, began in serial.began.items() if name in serial.ended}


def fate_of(mix: Mix, ended: Ended, first: Mapping[str, Summary], alone: Mapping[str, float]) -> Fate:
    """`first` are the figures of the first run, by pipeline."""
    name, summary = ended.name, ended.summary or NOTHING
    same = summary.rewards == first.get(name, NOTHING).rewards
    return Fate(
        ended.how,
        ended.reason,
        ended.steps,
        ended.seconds,
        alone.get(name),
        summary.tokens,
        summary.reward_first,
        summary.reward_last,
        same if mix.runs[name].deterministic else None,
        mix.config.pipelines[name].max_slowdown,
        mix.config.pipelines[name].deadline,
    )
