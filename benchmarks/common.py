"""What the benchmarks share: models, the search for each side's best settings, interleaved rounds, the report.

A benchmark prints tables for people and, as the last line of stdout, one JSON object for machines. It ends with
exit code 0 whether its claims hold or not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

if find_spec("jigsawrl") is None:  # on a machine where nothing can be installed: from source
    sys.path.insert(0, str(Path(__file__).parent.parent))

from jigsawrl.processes import spin_briefly

spin_briefly()  # for all sides: threads that spin while they wait take a busy machine's cores from each other

Settings = dict[str, Any]

CORES = len(os.sched_getaffinity(0))

SHAPES = {
    "0.3M": {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2},
    "10M": {"layers": 6, "hidden": 384, "heads": 6, "kv_heads": 2},
}


def write_model(folder: Path, size: str, seed: int) -> Path:
    """A Hugging Face folder with a random Llama of one of the two sizes."""
    from jigsawrl.model.tiny import write_tiny

    return write_tiny(folder, seed=seed, **SHAPES[size])


def natural(text: str) -> int:
    """An option's value: a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def positive(text: str) -> float:
    """An option's value: a number above 0."""
    with suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def at_least_one(text: str) -> int:
    """An option's value: a whole number above 0."""
    if natural(text) == 0:
        raise argparse.ArgumentTypeError("0 is too few")
    return int(text)


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="smaller and less exact: under a minute on 2 cores"
    )
    parser.add_argument(
        "--threads", type=at_least_one, help="for every side; otherwise each side gets what suits it best"
    )
    return parser


@contextmanager
def clean_stdout() -> Iterator[Console]:
    """Yields the console of the report; whatever else is printed meanwhile goes to stderr, warnings to nowhere."""
    console = Console(file=sys.stdout, width=110, highlight=False)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    with redirect_stdout(sys.stderr):
        yield console


def say(what: str) -> None:
    """Progress, for whoever waits."""
    print(what, file=sys.stderr, flush=True)


def thread_choices(threads: int | None) -> list[int]:
    return [threads] if threads else sorted({1, CORES}, reverse=True)


def tune(
    axes: Mapping[str, Sequence[Any]], seconds: Callable[[Settings], float], repeats: int = 1
) -> tuple[Settings, int]:
    """The fastest settings found by going along one axis after the other, and how many were tried.

    The search starts at the first value of each axis, which is run once unmeasured to warm up. Of each setting the
    best of `repeats` counts.
    """
    best = {name: values[0] for name, values in axes.items()}
    tried: dict[tuple[Any, ...], float] = {}

    def measured(settings: Settings) -> float:
        key = tuple(settings.values())
        if key not in tried:
            tried[key] = min(seconds(settings) for _ in range(repeats))
        return tried[key]

    if any(len(values) > 1 for values in axes.values()):
        seconds(best)
    for name, values in axes.items():
        if len(values) > 1:
            best = min(({**best, name: value} for value in values), key=measured)
    return best, max(1, len(tried))


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and what half of the values lie between."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{figure(self.median)} ({figure(self.low)} .. {figure(self.high)})"

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "quartile_1": self.low, "quartile_3": self.high}


def figure(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.3g}"


def shown(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def claim(value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A claim with one bound."""
    if at_least is not None:
        return {"value": value, "target": f">= {at_least:g}", "holds": value >= at_least}
    assert at_most is not None
    return {"value": value, "target": f"<= {at_most:g}", "holds": value <= at_most}


def report(
    console: Console, benchmark: str, seed: int, claims: dict[str, dict[str, Any]], **fields: Any
) -> None:
    """Says for people, then for machines, which claims hold."""
    for name, each in claims.items():
        verdict = "[green]holds[/]" if each["holds"] else "[red]does not hold[/]"
        console.print(f"{name}: {figure(each['value'])}, target {each['target']}: {verdict}")
    document = {"benchmark": benchmark, "seed": seed, "claims": claims, "cores": CORES, **fields}
    print(json.dumps(document), file=console.file, flush=True)
