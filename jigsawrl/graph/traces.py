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
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown
from jigsawrl.graph.known_models import model_given, model_named
from jigsawrl.graph.reconstruct import reconstructed_lengths
from jigsawrl.graph.shape import ModelShape
from jigsawrl.regular import read_named

INDEX = "workloads.json"
MOST_INDEX_BYTES = 64 * 2**20
MOST_BYTES = 256 * 2**20
"""Of one table, uncompressed."""
MOST_WHOLE = 1e15
MOST_ROWS = 5_000_000
MOST_TOKENS = 10_000_000
"""Of one sequence: whatever says more is nonsense."""
MOST_SECONDS = 30 * 86400.0

GPUS = TP = 4
"""Where a workload does not say."""
MEMORY_SHARE = 0.2
OFFLOADED = True
"""Likewise."""
SHORT_WAIT = 1.0
"""Seconds of tools under which sequences take their turns as they come, and the batch waits for nobody."""

Floats = NDArray[np.float64]


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
class Forwards:
    """Single passes of an engine, by column."""

    prefill: NDArray[np.bool_]
    batch: Floats
    prefill_tokens: Floats
    length: Floats
    """Mean context."""
    seconds: Floats


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
    forwards: Forwards | None = None
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
        return int(median(len(step.lengths) for step in self.steps))


def read_traces(folder: Path) -> tuple[Trace, ...]:
    """All workloads of a folder."""
    path = folder / INDEX
    index = _read_index(path)
    return tuple(_trace(folder, path, name, entry) for name, entry in index.items())


def _read_index(path: Path) -> Mapping[str, Any]:
    try:
        text = read_named(path, MOST_INDEX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise JigsawError(
            f"{path.parent}: holds no {INDEX}; it lists the workloads and their logged steps"
        ) from None
    except UnicodeDecodeError as error:
        raise JigsawError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not text.strip():
        raise JigsawError(f"{path}: is empty; write it anew from the logs")
    try:
        index = json.loads(text)
    except json.JSONDecodeError as error:
        raise JigsawError(
            f"{path}, line {error.lineno}: is not JSON ({error.msg}); is the file torn?"
        ) from None
    except (RecursionError, ValueError):
        raise JigsawError(f"{path}: is not a mapping of workloads") from None
    if not isinstance(index, dict) or not index:
        raise JigsawError(
            f'{path}: is no mapping of workloads, such as {{"gsm8k_qwen3-4b": {{"steps": [...]}}}}'
        )
    return index


def _trace(folder: Path, path: Path, name: str, entry: Any) -> Trace:
    where = f"{path}, {name}"
    if not isinstance(entry, dict):
        raise JigsawError(f'{where}: is no mapping with "steps" and "lengths"')
    model = model_given(entry["model"], f"{where}, model") if "model" in entry else model_named(name, where)
    raw = entry.get("steps")
    if not isinstance(raw, list) or not raw:
        raise JigsawError(f'{where}: "steps" is no list of logged steps; without any there is nothing to fit')
    expected = _whole(entry, "sequences_per_step", where, None)
    table = _table(folder, path, name, entry, "lengths")
    lengths = _lengths(table) if table else {}
    tools = _tools(entry.get("tool_seconds"), where)
    steps: list[LoggedStep] = []
    for position, each in enumerate(raw):
        at = f"{where}, steps[{position}]"
        if not isinstance(each, dict):
            raise JigsawError(f"{at}: is no mapping of metrics")
        number = _whole(each, "step", at, position + 1)
        assert number is not None
        if any(number == other.step for other in steps):
            raise JigsawError(f"{at}: step {number} is there twice; keep one of them")
        found = lengths.get(number)
        if found is not None and expected is not None and len(found[0]) != expected:
            raise JigsawError(
                f"{table}, line {found[1]}: step {number} has {len(found[0])} lengths and not {expected}; "
                f"is the file torn?"
            )
        step = logged_step(each, number, found[0] if found else None, expected, tools.get(number), at)
        if step is not None:
            steps.append(step)
    if not steps:
        raise JigsawError(f"{where}: no step has both seconds and lengths; its lengths are in {table}")
    forwards = _table(folder, path, name, entry, "forwards")
    hardware = entry.get("hardware")
    gpus = _whole(entry, "gpus", where, None) or workers(raw) or GPUS
    longest = max(float(step.lengths.max()) for step in steps)
    samples = _whole(entry, "samples", where, None) or (4 if len(steps[0].lengths) % 4 == 0 else 1)
    return Trace(
        name=name,
        model=model,
        samples=samples,
        gpus=gpus,
        tp=_whole(entry, "tp", where, None) or min(TP, gpus),
        max_tokens=_whole(entry, "max_tokens", where, None) or limit_above(longest),
        steps=tuple(sorted(steps, key=lambda step: step.step)),
        forwards=_forwards(forwards) if forwards else None,
        hardware=hardware if isinstance(hardware, str) else None,
        stated_tool_seconds=sum(tools.values()) / max(1, len(tools)),
        memory_share=_number(entry, "gpu_memory_utilization", where, 1.0) or MEMORY_SHARE,
        offloaded=bool(entry.get("param_offload", OFFLOADED)),
        found=len(raw),
    )


def logged_step(
    metrics: Mapping[str, Any],
    number: int,
    lengths: Floats | None,
    expected: int | None,
    tool_seconds: float | None,
    where: str,
) -> LoggedStep | None:
    """A step from verl's metrics; None where it holds no seconds or nothing tells its lengths."""

    def seconds(key: str) -> float | None:
        return _number(metrics, f"timing_s/{key}", where, MOST_SECONDS)

    def tokens(key: str) -> float | None:
        return _number(metrics, key, where, MOST_TOKENS)

    gen, whole = seconds("gen"), seconds("step")
    if whole is None:
        whole = _number(metrics, "perf/time_per_step", where, MOST_SECONDS)
    if gen is None:
        gen = seconds("generate_sequences")
    if gen is None and whole is None:
        return None
    mean, longest = tokens("response_length/mean"), tokens("response_length/max")
    prompt, total = tokens("prompt_length/mean"), _number(metrics, "perf/total_num_tokens", where, 1e13)
    made_up = lengths is None
    if lengths is None:
        count = expected
        if count is None and total and mean is not None and prompt is not None:
            count = max(1, round(total / max(1.0, mean + prompt)))
        if mean is None or count is None or count <= 0:
            return None
        clipped = _number(metrics, "response_length/clip_ratio", where, 1.0) or 0.0
        shortest = tokens("response_length/min") or 1.0
        lengths = reconstructed_lengths(count, mean, longest or 4 * mean + 1, shortest, clipped)
    generated = float(lengths.mean())
    if prompt is None:
        prompt = max(0.0, total / len(lengths) - max(generated, mean or 0.0)) if total else 128.0
    if not total:
        total = len(lengths) * (prompt + max(generated, mean or 0.0))
    turns = _number(metrics, "num_turns/mean", where, 1e6)
    waited = seconds("agent_loop/tool_calls/mean")
    if waited is None or waited < 0.05 * (tool_seconds or 0.0):
        waited = tool_seconds or 0.0
    rest = [seconds(key) for key in ("reward", "values", "adv", "update_critic")]
    return LoggedStep(
        step=number,
        lengths=lengths,
        prompt_tokens=prompt,
        total_tokens=total,
        turns=max(1.0, (turns or 2.0) / 2),
        tool_wait=waited if waited >= SHORT_WAIT else 0.0,
        gen=gen,
        old_log_prob=seconds("old_log_prob"),
        ref=seconds("ref") if "timing_s/ref" in metrics else seconds("ref_log_prob"),
        update_actor=seconds("update_actor"),
        update_weights=seconds("update_weights"),
        other=sum(each for each in rest if each is not None),
        seconds=whole,
        reconstructed=made_up,
        first=number == 1,
    )


def limit_above(longest: float) -> int:
    """The limit that a run probably had, where it does not say: limits are powers of two."""
    return 2 ** max(4, math.ceil(math.log2(max(longest, 1.0))))


def workers(steps: Iterable[Mapping[str, Any]]) -> int | None:
    """How many the run had: verl logs its throughput for each of them."""
    found = Counter[int]()
    for metrics in steps:
        tokens, rate = metrics.get("perf/total_num_tokens"), metrics.get("perf/throughput")
        seconds = metrics.get("timing_s/step", metrics.get("perf/time_per_step"))
        if all(isinstance(each, int | float) for each in (tokens, rate, seconds)) and rate * seconds > 0:
            count = tokens / (rate * seconds)
            found.update([round(count)] if 0.9 < count < 1e5 else [])
    return found.most_common(1)[0][0] if found else None


def _number(metrics: Mapping[str, Any], key: str, where: str, most: float) -> float | None:
    """A metric that must be finite, not negative, and not absurd; None where it is missing."""
    value = metrics.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JigsawError(f"{where}: {key} is {shown(value)}, not a number")
    if not 0 <= value <= most:
        raise JigsawError(f"{where}: {key} is {shown(value)}, which cannot be; remove this step or mend it")
    return float(value)


def _whole(entry: Mapping[str, Any], key: str, where: str, default: int | None) -> int | None:
    value = entry.get(key)
    if value is None:
        return default
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_WHOLE
    if not good or value != int(value) or value < (0 if key == "step" else 1):
        raise JigsawError(f"{where}: {key} is {shown(value)}, not a whole number above 0")
    return int(value)


def _tools(value: Any, where: str) -> dict[int, float]:
    """Seconds of tools by step, all turns together."""
    if value is None:
        return {}
    if not isinstance(value, list):
        raise JigsawError(
            f'{where}, tool_seconds: is no list such as [{{"time_s": 13.4, "turn": 1, "step": 1}}]'
        )
    total: dict[int, float] = {}
    for position, each in enumerate(value):
        at = f"{where}, tool_seconds[{position}]"
        if not isinstance(each, dict):
            raise JigsawError(f"{at}: is no mapping with time_s and step")
        seconds = _number(each, "time_s", at, MOST_SECONDS)
        step = _whole(each, "step", at, None)
        if seconds is not None and step is not None:
            total[step] = total.get(step, 0.0) + seconds
    return total


def _table(folder: Path, index: Path, name: str, entry: Mapping[str, Any], kind: str) -> Path | None:
    """The file of a table; None where the workload has none. A name that leads out of the folder is refused."""
    stated = entry.get(kind)
    if stated is None:
        named = (folder / f"{name}.{kind}.csv{suffix}" for suffix in (".gz", ""))
        return next((path for path in named if path.is_file()), None)
    if not isinstance(stated, str) or Path(stated).name != stated:
        raise JigsawError(
            f"{index}, {name}, {kind}: {shown(stated)} is not the name of a file in this folder"
        )
    for path in (folder / stated, folder / stated.removesuffix(".gz"), folder / f"{stated}.gz"):
        if path.is_file():
            return path
    raise JigsawError(f"{index}, {name}, {kind}: there is no file {folder / stated}")


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Line number and these columns of each row; reads no more than the bounds allow."""
    read = 0
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            opened = gzip.GzipFile(fileobj=raw) if zipped else raw
            lines = csv.reader(io.TextIOWrapper(opened, encoding="utf-8-sig", newline=""))
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
            for row in lines:
                if not row:
                    continue
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
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise JigsawError(f"{path}: its compression breaks off or is damaged; copy the file again") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JigsawError(f"{path}: is not a table of text ({error})") from None
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None


def _lengths(path: Path) -> dict[int, tuple[Floats, int]]:
    """By step: the lengths, and the line of the last of them."""
    found: dict[int, list[float]] = {}
    last: dict[int, int] = {}
    for line, (step_text, tokens_text) in _rows(path, ("step", "response_tokens")):
        step = _cell(path, line, "step", step_text, 1e12)
        tokens = _cell(path, line, "response_tokens", tokens_text, MOST_TOKENS)
        found.setdefault(int(step), []).append(tokens)
        last[int(step)] = line
    if not found:
        raise JigsawError(f"{path}: holds no lengths")
    return {step: (np.array(each), last[step]) for step, each in found.items()}


_COLUMNS = ("mode", "batch_size", "prefill_tokens", "avg_seq_len", "forward_time_ms")


def _forwards(path: Path) -> Forwards | None:
    prefill: list[bool] = []
    numbers: list[list[float]] = []
    most = (1e7, 1e9, MOST_TOKENS, MOST_SECONDS * 1000)
    for line, (mode, *cells) in _rows(path, _COLUMNS):
        if mode not in ("EXTEND", "DECODE", "PREFILL", "MIXED"):
            raise JigsawError(f"{path}, line {line}: mode is {shown(mode)}, neither EXTEND nor DECODE")
        numbers.append(
            [
                _cell(path, line, name, cell, bound)
                for name, cell, bound in zip(_COLUMNS[1:], cells, most, strict=True)
            ]
        )
        prefill.append(mode != "DECODE")
    if not numbers:
        return None
    table = np.array(numbers)
    return Forwards(np.array(prefill), table[:, 0], table[:, 1], table[:, 2], table[:, 3] / 1000)


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
