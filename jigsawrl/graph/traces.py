"""Reads a folder of measured runs: `workloads.json`, and for each workload its lengths and single engine passes.

    workloads.json            {workload: {"steps": [{"step": 1, "timing_s/gen": 25.7, ...}], "lengths": file, ...}}
    NAME.lengths.csv[.gz]     step,response_tokens: one row for each sequence
    NAME.forwards.csv[.gz]    mode,batch_size,prefill_tokens,avg_seq_len,forward_time_ms: a sample of passes

A workload may also state `model`, `sequences_per_step`, `samples`, `gpus`, `tp`, `max_tokens`, `hardware` and
`gpu_memory_utilization`.
Whatever cannot be used is one message that names the file and the line or key.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown
from jigsawrl.graph.forecast import Floats
from jigsawrl.graph.given import bounded, json_in
from jigsawrl.graph.known_models import model_given, model_named
from jigsawrl.graph.log_lines import DAMAGED, open_text
from jigsawrl.graph.reconstruct import reconstructed_lengths
from jigsawrl.graph.shape import ModelShape

INDEX = "workloads.json"
MOST_BYTES = 256 * 2**20
"""Of one table, uncompressed."""
MOST_WHOLE = 1e15
MOST_ROWS = 5_000_000
MOST_TOKENS = 10_000_000
"""Of one sequence: whatever says more is nonsense."""
MOST_SECONDS = 30 * 86400.0
MOST_TURNS = 1000
"""Generations of one sequence: a rollout is predicted turn by turn."""

GPUS = TP = 4
"""Where a workload does not say."""
MEMORY_SHARE = 0.2
OFFLOADED = True
"""Likewise."""
SHORT_WAIT = 1.0
"""Seconds of tools under which sequences take their turns as they come, and the batch waits for nobody."""


_NUMBERS_OF_A_PASS = {
    "batch_size": 1e7,
    "prefill_tokens": 1e9,
    "avg_seq_len": MOST_TOKENS,
    "forward_time_ms": MOST_SECONDS * 1000,
}
"""Columns of a table of passes, and the most that each may hold."""
_PASS = np.dtype([("prefill", bool), *((name, float) for name in ("batch", "tokens", "length", "seconds"))])
"""A single pass of an engine; `length` is the mean context."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step as it was logged. Seconds that were not logged are None."""

    step: int
    lengths: Floats
    """Generated tokens of each sequence."""
    prompt_tokens: float
    """Mean of a prompt."""
    total_tokens: float
    """Prompts, responses and what tools added."""
    turns: float
    """Mean number of generations of a sequence: 1 without tools."""
    tool_wait: float
    """Seconds that the batch waited for tools."""
    gen: float | None
    old_log_prob: float | None
    ref: float | None
    update_actor: float | None
    update_weights: float | None
    other: float
    """Rewards, values, advantages."""
    seconds: float | None
    """Of the whole step."""
    reconstructed: bool = False
    """Whether the lengths were made up from their mean, maximum and clipped share."""
    first: bool = False
    """Whether its trainer had just started: such a step warms up."""

    @property
    def mean_length(self) -> float:
        return self.total_tokens / max(1, len(self.lengths))

    @property
    def observation_tokens(self) -> float:
        """What tools added to a sequence, on the mean."""
        added = self.mean_length - self.prompt_tokens - float(self.lengths.mean())
        return added if added >= 0.5 else 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One workload's log."""

    name: str
    model: ModelShape
    samples: int
    """For each prompt; 1 where nothing says more."""
    gpus: int
    tp: int
    max_tokens: int
    steps: tuple[LoggedStep, ...]
    forwards: NDArray[np.void] | None = None
    """Single passes of its engine: `prefill`, `batch`, prefilled `tokens`, mean context `length`, and `seconds`."""
    hardware: str | None = None
    stated_tool_seconds: float = 0.0
    """What the workload says of its tools in a step, which may be less than the batch waited."""
    memory_share: float = MEMORY_SHARE
    """Part of a device's memory that the engine got, weights included."""
    offloaded: bool = False
    """Whether parameters and optimizer state stayed in host memory between uses."""
    found: int = 0
    """Steps that were logged, with those that could not be used."""
    assumed: frozenset[str] = frozenset()
    """What nothing in the log tells: "gpus", "tp"."""
    doubts: tuple[str, ...] = ()
    """What does not add up, or was left out."""

    @property
    def sequences(self) -> int:
        """In a step, on the median."""
        return int(statistics.median(len(step.lengths) for step in self.steps))


def read_traces(folder: Path) -> tuple[Trace, ...]:
    """All workloads of a folder."""
    path = folder / INDEX
    if not path.exists():
        raise JigsawError(f"{folder}: holds no {INDEX}; it lists the workloads and their logged steps")
    index = json_in(path, "mapping of workloads", "write it anew from the logs")
    if not isinstance(index, dict) or not index:
        raise JigsawError(
            f'{path}: is no mapping of workloads, such as {{"gsm8k_qwen3-4b": {{"steps": [...]}}}}'
        )
    return tuple(_trace(path, name, entry) for name, entry in index.items())


def _trace(path: Path, name: str, entry: Any) -> Trace:
    where = f"{path}, {name}"
    if not isinstance(entry, dict):
        raise JigsawError(f'{where}: is no mapping with "steps" and "lengths"')
    model = model_given(entry["model"], f"{where}, model") if "model" in entry else model_named(name, where)
    raw = entry.get("steps")
    if not isinstance(raw, list) or not raw:
        raise JigsawError(f'{where}: "steps" is no list of logged steps; without any there is nothing to fit')
    expected = _whole(entry, "sequences_per_step", where)
    table = _table(path, name, entry, "lengths")
    lengths = _lengths(table) if table else {}
    tools = _tools(entry["tool_seconds"], where) if entry.get("tool_seconds") is not None else {}
    steps: list[LoggedStep] = []
    for position, each in enumerate(raw):
        at = f"{where}, steps[{position}]"
        if not isinstance(each, dict):
            raise JigsawError(f"{at}: is no mapping of metrics")
        stated = _whole(each, "step", at, least=0)
        number = position + 1 if stated is None else stated
        if any(number == other.step for other in steps):
            raise JigsawError(f"{at}: step {number} is there twice; keep one of them")
        found = lengths.get(number)
        if found is not None and expected is not None and len(found[0]) != expected:
            raise JigsawError(
                f"{table}, line {found[1]}: step {number} has {len(found[0])} lengths and not {expected}; "
                f"is the file torn?"
            )
        step = logged_step(each, number, found[0] if found else None, expected, tools.get(number, 0.0), at)
        if step is not None:
            steps.append(step)
    if not steps:
        raise JigsawError(f"{where}: no step has both seconds and lengths; its lengths are in {table}")
    forwards = _table(path, name, entry, "forwards")
    hardware = entry.get("hardware")
    gpus = _whole(entry, "gpus", where) or workers(raw) or GPUS
    return Trace(
        name=name,
        model=model,
        samples=_whole(entry, "samples", where) or (4 if len(steps[0].lengths) % 4 == 0 else 1),
        gpus=gpus,
        tp=_whole(entry, "tp", where) or min(TP, gpus),
        max_tokens=_whole(entry, "max_tokens", where) or limit_above(steps),
        steps=tuple(sorted(steps, key=lambda step: step.step)),
        forwards=_forwards(forwards) if forwards else None,
        hardware=hardware if isinstance(hardware, str) else None,
        stated_tool_seconds=sum(tools.values()) / max(1, len(tools)),
        memory_share=_number(entry, where, 1.0, "gpu_memory_utilization") or MEMORY_SHARE,
        offloaded=bool(entry.get("param_offload", OFFLOADED)),
        found=len(raw),
    )


def logged_step(
    metrics: Mapping[str, Any],
    number: int,
    lengths: Floats | None,
    expected: int | None,
    tool_seconds: float,
    where: str,
) -> LoggedStep | None:
    """A step from verl's metrics; None where it holds no seconds or nothing tells its lengths."""
    seconds = partial(_number, metrics, where, MOST_SECONDS)
    tokens = partial(_number, metrics, where, MOST_TOKENS)
    gen = seconds("timing_s/gen", "timing_s/generate_sequences")
    whole = seconds("timing_s/step", "perf/time_per_step")
    if gen is None and whole is None:
        return None
    mean, longest = tokens("response_length/mean"), tokens("response_length/max")
    prompt, total = tokens("prompt_length/mean"), _number(metrics, where, 1e13, "perf/total_num_tokens")
    made_up = lengths is None
    if lengths is None:
        count = expected
        if count is None and total and mean is not None and prompt is not None:
            count = max(1, round(total / max(1.0, mean + prompt)))
        if mean is None or count is None:
            return None
        lengths = reconstructed_lengths(
            count,
            mean,
            longest or 4 * mean + 1,
            tokens("response_length/min") or 1.0,
            _number(metrics, where, 1.0, "response_length/clip_ratio") or 0.0,
        )
    generated = max(float(lengths.mean()), mean or 0.0)
    if prompt is None:
        prompt = max(0.0, total / len(lengths) - generated) if total else 128.0
    waited = seconds("timing_s/agent_loop/tool_calls/mean")
    if waited is None or waited < 0.05 * tool_seconds:
        waited = tool_seconds
    return LoggedStep(
        step=number,
        lengths=lengths,
        prompt_tokens=prompt,
        total_tokens=total or len(lengths) * (prompt + generated),
        turns=max(1.0, (_number(metrics, where, 2 * MOST_TURNS, "num_turns/mean") or 2.0) / 2),
        tool_wait=waited if waited >= SHORT_WAIT else 0.0,
        gen=gen,
        old_log_prob=seconds("timing_s/old_log_prob"),
        ref=seconds("timing_s/ref", "timing_s/ref_log_prob"),
        update_actor=seconds("timing_s/update_actor"),
        update_weights=seconds("timing_s/update_weights"),
        other=sum(
            seconds(f"timing_s/{each}") or 0.0 for each in ("reward", "values", "adv", "update_critic")
        ),
        seconds=whole,
        reconstructed=made_up,
        first=number == 1,
    )


def limit_above(steps: Iterable[LoggedStep]) -> int:
    """The limit that a run probably had, where it does not say: limits are powers of two."""
    longest = max(float(step.lengths.max()) for step in steps)
    return 2 ** max(4, math.ceil(math.log2(max(longest, 1.0))))


def workers(steps: Iterable[Mapping[str, Any]]) -> int | None:
    """How many the run had: verl logs its throughput for each of them."""
    logged = [
        (
            metrics.get("perf/total_num_tokens"),
            metrics.get("perf/throughput"),
            metrics.get("timing_s/step", metrics.get("perf/time_per_step")),
        )
        for metrics in steps
    ]
    counts = [
        tokens / (rate * seconds)
        for tokens, rate, seconds in logged
        if all(isinstance(each, int | float) for each in (tokens, rate, seconds)) and rate * seconds > 0
    ]
    found = [round(count) for count in counts if 0.9 < count < 1e5]
    return statistics.mode(found) if found else None


def _number(metrics: Mapping[str, Any], where: str, most: float, *keys: str) -> float | None:
    """The first of these metrics that is there: finite, not negative, and not absurd."""
    for key in keys:
        if (value := metrics.get(key)) is not None:
            return bounded(
                value, 0, most, f"{where}: {key} is", ", which cannot be; remove this step or mend it"
            )
    return None


def _whole(entry: Mapping[str, Any], key: str, where: str, least: int = 1) -> int | None:
    """A whole number, where one is stated."""
    value = entry.get(key)
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MOST_WHOLE
    if not good or value % 1:
        raise JigsawError(f"{where}: {key} is {shown(value)}, not a whole number above 0")
    return int(value)


def _tools(value: Any, where: str) -> dict[int, float]:
    """Seconds of tools by step, all turns together."""
    if not isinstance(value, list):
        raise JigsawError(
            f'{where}, tool_seconds: is no list such as [{{"time_s": 13.4, "turn": 1, "step": 1}}]'
        )
    total: dict[int, float] = {}
    for position, each in enumerate(value):
        at = f"{where}, tool_seconds[{position}]"
        if not isinstance(each, dict):
            raise JigsawError(f"{at}: is no mapping with time_s and step")
        seconds = _number(each, at, MOST_SECONDS, "time_s")
        step = _whole(each, "step", at, least=0)
        if seconds is not None and step is not None:
            total[step] = total.get(step, 0.0) + seconds
    return total


def _table(index: Path, name: str, entry: Mapping[str, Any], kind: str) -> Path | None:
    """The file of a table; None where the workload has none. A name that leads out of the folder is refused."""
    stated = entry.get(kind)
    if stated is not None and (not isinstance(stated, str) or Path(stated).name != stated):
        raise JigsawError(
            f"{index}, {name}, {kind}: {shown(stated)} is not the name of a file in this folder"
        )
    path = index.parent / (f"{name}.{kind}.csv.gz" if stated is None else stated)
    others = Path(str(path).removesuffix(".gz")), Path(f"{path}.gz")
    found = next(filter(Path.is_file, (path, *others)), None)
    if found is None and stated is not None:
        raise JigsawError(f"{index}, {name}, {kind}: there is no file {path}")
    return found


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Line number and these columns of each row; reads no more than the bounds allow."""
    read = 0
    try:
        with open_text(path, "utf-8-sig", "strict") as file:
            lines = csv.reader(file)
            header = next(lines, None)
            if not header:
                raise JigsawError(f"{path}: is empty; its first line should be {','.join(columns)}")
            names = [each.strip() for each in header]
            missing = [each for each in columns if each not in names]
            if missing:
                raise JigsawError(
                    f"{path}, line 1: lacks the column {missing[0]}; it should be {','.join(columns)}"
                )
            at = [names.index(each) for each in columns]
            for row in filter(None, lines):
                if len(row) != len(names):
                    raise JigsawError(
                        f"{path}, line {lines.line_num}: has {len(row)} fields and not {len(names)}; is it torn?"
                    )
                read += sum(map(len, row)) + len(row)
                if lines.line_num > MOST_ROWS or read > MOST_BYTES:
                    raise JigsawError(
                        f"{path}, line {lines.line_num}: the file is too long; keep fewer steps of it"
                    )
                yield lines.line_num, [row[i].strip() for i in at]
    except DAMAGED:
        raise JigsawError(f"{path}: its compression breaks off or is damaged; copy the file again") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JigsawError(f"{path}: is not a table of text ({error})") from None
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None


def _lengths(path: Path) -> dict[int, tuple[Floats, int]]:
    """By step: the lengths, and the line of the last of them."""
    found: dict[int, list[tuple[float, int]]] = {}
    for line, (step_text, tokens_text) in _rows(path, ("step", "response_tokens")):
        step = int(_cell(path, line, "step", step_text, 1e12))
        tokens = _cell(path, line, "response_tokens", tokens_text, MOST_TOKENS)
        found.setdefault(step, []).append((tokens, line))
    if not found:
        raise JigsawError(f"{path}: holds no lengths")
    return {step: (np.array([tokens for tokens, _ in rows]), rows[-1][1]) for step, rows in found.items()}


def _forwards(path: Path) -> NDArray[np.void] | None:
    passes: list[tuple[float, ...]] = []
    for line, (mode, *cells) in _rows(path, ("mode", *_NUMBERS_OF_A_PASS)):
        if mode not in ("EXTEND", "DECODE", "PREFILL", "MIXED"):
            raise JigsawError(f"{path}, line {line}: mode is {shown(mode)}, neither EXTEND nor DECODE")
        columns = zip(_NUMBERS_OF_A_PASS.items(), cells, strict=True)
        *sizes, milliseconds = (_cell(path, line, name, cell, most) for (name, most), cell in columns)
        passes.append((mode != "DECODE", *sizes, milliseconds / 1000))
    return np.array(passes, _PASS) if passes else None


def _cell(path: Path, line: int, column: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise JigsawError(f"{path}, line {line}: {column} is {text[:40]!r}, not a number") from None
    if not 0 <= value <= most:
        raise JigsawError(
            f"{path}, line {line}: {column} is {value:g}, which cannot be; is the file damaged?"
        )
    return value
