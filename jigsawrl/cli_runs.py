"""Running several pipelines from the command line, and what is printed afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jigsawrl.cli_output import FAILED, INTERRUPTED
from jigsawrl.config import text
from jigsawrl.config.pipelines import load_mix
from jigsawrl.telemetry.summary import cut_off_share
from jigsawrl.telemetry.text import counted, duration, number

if TYPE_CHECKING:
    from jigsawrl.runtime.launch import Ended, Outcome


def run_several(
    file: Path, overrides: Sequence[str], out: Path | None, resume: bool, dry_run: bool, as_json: bool
) -> tuple[int, str]:
    """The exit code, and what goes to stdout with --json."""
    mix = load_mix(file, overrides)
    if dry_run:
        from jigsawrl.runtime.launch import check_all, remarks

        for line in remarks(check_all(mix).values()):
            print(f"jigsaw: {line}", file=sys.stderr)
        resolved = mix.config.model_dump(mode="json")
        if not as_json:
            print(text.dump(resolved).rstrip("\n"))
        return 0, json.dumps(resolved)
    from jigsawrl.runtime.launch import run_mix
    from jigsawrl.telemetry.progress import Progress

    try:
        with Progress(json=as_json) as progress:
            outcome = run_mix(mix, out or Path("runs", mix.config.name), resume, progress)
    except KeyboardInterrupt as interrupt:
        if str(interrupt):  # otherwise there is no more to say than is said of every interrupt
            print(f"jigsaw: {interrupt}", file=sys.stderr)
        return INTERRUPTED, ""
    if not as_json:
        Console().print(table_of(outcome))
    how = {each.how for each in outcome.pipelines}
    code = FAILED if "failed" in how else INTERRUPTED if "interrupted" in how else 0
    return code, json.dumps(as_dict(outcome))


def table_of(outcome: Outcome) -> Table:
    finished = any(each.how == "finished" for each in outcome.pipelines)
    models = f"models are in {outcome.made.folder}/NAME/model, " if finished else ""
    table = Table(
        title=f"{len(outcome.pipelines)} pipelines in {duration(outcome.seconds)}",
        caption=f"{number(outcome.tokens_per_second)} tokens/s in all\n"
        f"{models}what ran where is in {outcome.made.page}",
    )
    for column in ("pipeline", "steps", "first reward", "last", "tokens/s", "done after", "ended"):
        table.add_column(column, justify="left" if column in ("pipeline", "ended") else "right")
    for each in outcome.pipelines:
        summary = each.summary
        table.add_row(
            each.name,
            str(each.steps),
            figure(summary.reward_first if summary else None),
            figure(summary.reward_last if summary else None),
            figure(summary.tokens_per_second if summary else None),
            duration(each.seconds),
            ended(each),
        )
    return table


def ended(pipeline: Ended) -> str:
    """How it did, how many rewards it did without, and how many samples were cut off."""
    said = [": ".join(filter(None, (pipeline.how, pipeline.reason.partition("\n")[0])))]
    if (summary := pipeline.summary) is not None:
        if summary.reward_errors:
            said.append(f"{counted(summary.reward_errors, 'reward')} failed")
        if cut_off := cut_off_share(summary):
            said.append(f"{cut_off} of samples cut off")
    return "; ".join(said)


def figure(value: float | None) -> str:
    return "" if value is None else number(value)


def as_dict(outcome: Outcome) -> dict[str, object]:
    return {
        "out": str(outcome.made.folder.absolute()),
        "seconds": outcome.seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "scheduler_seconds": outcome.work.seconds,
        "scheduler_messages": outcome.work.messages,
        "pipelines": {
            each.name: {
                "ended": each.how,
                "reason": each.reason,
                "steps": each.steps,
                "seconds": each.seconds,
                "out": str(each.out.absolute()),
                "reward_first": summary.reward_first if (summary := each.summary) else None,
                "reward_last": summary.reward_last if summary else None,
                "tokens": summary.tokens if summary else 0,
                "tokens_per_second": summary.tokens_per_second if summary else None,
                "cut_off": summary.cut_off if summary else None,
            }
            for each in outcome.pipelines
        },
    }
