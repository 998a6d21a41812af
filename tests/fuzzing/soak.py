"""Runs every fuzz target for some minutes: `PYTHONPATH=tests python -m fuzzing.soak --minutes 10 --seed 7`.

It prints how many cases each target had, how many were accepted and refused, and every failure once, with the folder
of the first case that shows it. Exit code 1 where something failed. `--target NAME --case SEED` runs one case again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

import fuzzing
from fuzzing.check import Target, Verdict, judge

MEMORY = 3 << 30
"""Bytes of address space that cases may take beyond what is there when they begin."""


@dataclass
class Tally:
    """What the cases of one target came to."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: dict[str, tuple[str, str, Path]] = field(default_factory=dict)
    """By what is the same in failures of one cause: the first one's seed, reason and folder."""
    slowest: float = 0.0


def all_targets() -> dict[str, Target]:
    """Those of every module beside this one that has a list TARGETS."""
    found: dict[str, Target] = {}
    for module in pkgutil.iter_modules(fuzzing.__path__):
        if module.name in ("soak",) or module.name.startswith("test_"):
            continue
        for target in getattr(importlib.import_module(f"fuzzing.{module.name}"), "TARGETS", ()):
            found[target.__name__] = target
    return found


def soak(
    targets: dict[str, Target], seed: str, until: float, most: int, kept: Path, part: int, parts: int
) -> dict[str, Tally]:
    """Cases of all targets in turn, until a point of `time.monotonic()` or a number of cases."""
    tallies = {name: Tally() for name in targets}
    for number in itertools.count(part, parts):
        if time.monotonic() >= until or number * len(targets) >= most:
            return tallies
        for name, target in targets.items():
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=kept))
            begun, case_seed = time.thread_time(), f"{seed}-{number}"
            (kept / f"current-{part}").write_text(f"--target {name} --case {case_seed}")
            verdict = judge(target, case_seed, folder)
            tally = tallies[name]
            tally.slowest = max(tally.slowest, time.thread_time() - begun)
            tally.ended[verdict.ended] += 1
            cause = _cause(verdict)
            if verdict.ended == "failed" and cause not in tally.failures:
                tally.failures[cause] = (case_seed, verdict.why, folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return tallies


def _cause(verdict: Verdict) -> str:
    """The last line of a traceback without what differs from case to case, and where it was raised."""
    lines = verdict.why.strip().split("\n")
    frames = [line for line in lines if line.lstrip().startswith("File ")]
    own = [line for line in frames if "jigsawrl" in line] or frames
    last = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", lines[-1])[:80]
    return f"{own[-1].strip() if own else ''} {last}"


def _child(queue, *arguments) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        queue.put(soak(*arguments))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument("--cases", type=int, default=10**12, help="stop after so many cases in all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--case", help="run one case again, by the seed that was printed")
    options = parser.parse_args()
    found = all_targets()
    targets = {name: found[name] for name in options.target or found}
    kept = Path(tempfile.mkdtemp(prefix="jigsawrl-fuzz-"))
    if options.case:
        for target in targets.values():
            verdict = judge(target, options.case, kept)
            print(f"{verdict.ended}: {verdict.why}\nfiles: {kept}")
        return 0
    print(f"seed {options.seed}, folders of failures in {kept}", flush=True)
    until = time.monotonic() + 60 * options.minutes
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    arguments = (targets, options.seed, until, options.cases, kept)
    children = [
        context.Process(target=_child, args=(queue, *arguments, part, options.processes))
        for part in range(options.processes)
    ]
    for child in children:
        child.start()
    parts: list[dict[str, Tally]] = []
    while len(parts) < len(children):
        try:
            parts.append(queue.get(timeout=1))
        except Empty:
            ended = [part for part, child in enumerate(children) if child.exitcode not in (None, 0)]
            late = time.monotonic() > until + 300
            for part in ended or (range(len(children)) if late else ()):
                case = (kept / f"current-{part}").read_text()
                print(f"{'ended' if ended else 'does not end'} ({children[part].exitcode}) at {case}")
            if ended or late:
                for child in children:
                    child.kill()
                return 1
    for child in children:
        child.join()
    return _print(targets, parts)


def _print(targets: dict[str, Target], parts: list[dict[str, Tally]]) -> int:
    failures = 0
    print(
        f"{'target':24}{'cases':>10}{'accepted':>10}{'refused':>10}{'failed':>8}{'causes':>8}{'slowest':>9}"
    )
    for name in targets:
        ended = sum((part[name].ended for part in parts), Counter())
        causes = {cause: each for part in parts for cause, each in part[name].failures.items()}
        numbers = (
            f"{ended.total():10}{ended['accepted']:10}{ended['refused']:10}{ended['failed']:8}{len(causes):8}"
        )
        print(f"{name:24}{numbers}{max(part[name].slowest for part in parts):8.1f}s")
        failures += ended["failed"]
    for name in targets:
        for cause, (seed, why, folder) in {c: e for p in parts for c, e in p[name].failures.items()}.items():
            print(f"\n{name}, case {seed}, {folder}\n{cause}\n{why[-1500:]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
