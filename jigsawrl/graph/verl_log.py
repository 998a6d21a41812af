"""Reads verl's console logs as they are.

A step is a line `step:7 - timing_s/gen:59.0 - response_length/mean:290.1 - ...`, behind whatever Ray or a
terminal put before it, with plain numbers or numpy's; some versions break it before each " - ". verl's own
JSON-lines log holds the same. The settings printed at the start, or the command line, tell the model and the sizes
where they are there. Single lengths are not in a log: they are made up from mean, maximum and clipped share, and
marked so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.graph.known_models import model_named
from jigsawrl.graph.shape import ModelShape
from jigsawrl.graph.traces import LoggedStep, Trace, limit_above, logged_step, workers

MOST_LINE = 2**20
MOST_STEPS = 200_000
SETTING_LINES = 20_000
"""Settings are looked for so far into the log."""

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PREFIX = re.compile(r"^\s*>?\s*(\([^()]*\bpid=\d+[^()]*\)\s*)?")
_STEP = re.compile(r"(?<![\w/.-])step:\s*(\d+)(?=\s+-\s|\s*$)")
_NUMBER = re.compile(
    r"^(?:(?:np|numpy|torch)\.)?(?:float\d*|u?int\d*|bool_?|tensor)?\(?\s*([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf(?:inity)?))"
    r"(?:,[^)]*)?\)?$",
    re.IGNORECASE,
)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_SETTING = re.compile(
    r"(?<![\w])['\"]?(?:[\w.+]*\.)?(path|n|train_batch_size|tensor_model_parallel_size|n_gpus_per_node|nnodes|"
    r"max_response_length|gpu_memory_utilization|param_offload)['\"]?\s*[:=]\s*['\"]?([^\s,'\"}\]]+)"
)


def read_verl_log(path: Path) -> Trace:
    """One run, named after its file."""
    found: dict[int, tuple[int, dict[str, Any]]] = {}
    settings: dict[str, list[str]] = {}
    current: dict[str, Any] | None = None
    last_line, ended = 0, True
    for number, line, whole in _lines(path):
        last_line, ended = number, whole
        step = _from_json(line) or _from_line(line)
        if step is not None:
            current = step[1]
            found[step[0]] = number, current
            if len(found) > MOST_STEPS:
                raise JigsawError(f"{path}, line {number}: more than {MOST_STEPS:,} steps; cut the log")
        elif current is not None and line.startswith("- "):
            current.update(_metrics(line[2:]))
        else:
            current = None
            if number <= SETTING_LINES:
                for key, value in _SETTING.findall(line):
                    if len(settings.setdefault(key, [])) < 50:
                        settings[key].append(value)
    if last_line == 0:
        raise JigsawError(f"{path}: is empty")
    if not found:
        raise JigsawError(
            f"{path}: none of its {last_line:,} lines is a step such as 'step:1 - timing_s/gen:59.0 - ...';\n"
            f"log with trainer.logger=['console']"
        )
    if not ended and len(found) > 1:  # a run that still writes, or was killed
        found = {step: each for step, each in found.items() if each[0] != last_line}
    model = _model(path, settings)
    expected = _sequences(settings)
    steps: list[LoggedStep] = []
    for step_number, (line_number, metrics) in sorted(found.items()):
        where = f"{path}, line {line_number}"
        logged = logged_step(_relevant(metrics), step_number, None, expected, None, where)
        if logged is not None:
            steps.append(logged)
    if not steps:
        line_number = next(iter(found.values()))[0]
        raise JigsawError(
            f"{path}, line {line_number}: no step has timing_s/gen or timing_s/step together with\n"
            f"response_length/mean and a number of sequences (data.train_batch_size and rollout.n, or "
            f"perf/total_num_tokens and prompt_length/mean)"
        )
    count = workers(metrics for _, metrics in found.values())
    count = count or _largest(settings, "n_gpus_per_node", 8) * _largest(settings, "nnodes", 1)
    longest = max(float(step.lengths.max()) for step in steps)
    return Trace(
        name=path.name.split(".log")[0].removesuffix(path.suffix) or path.name,
        model=model,
        samples=_largest(settings, "n", 1),
        gpus=count,
        tp=min(count, _largest(settings, "tensor_model_parallel_size", min(2, count))),
        max_tokens=_largest(settings, "max_response_length", 0) or limit_above(longest),
        steps=tuple(steps),
        memory_share=_share(settings),
        offloaded="true" in [value.lower() for value in settings.get("param_offload", [])],
    )


def _lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Number, text without colours and prefix, and whether the line has its end. Never holds more than a line."""
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MOST_LINE):
                number += 1
                whole = line.endswith(b"\n")
                while not whole and len(line) == MOST_LINE and (rest := file.readline(MOST_LINE)):
                    whole = rest.endswith(b"\n")  # the rest of an endless line is no metric
                text = line.decode("utf-8", errors="replace").rpartition("\r")
                shown = _COLOUR.sub("", (text[2].strip() or text[0]))
                yield number, _PREFIX.sub("", _REPEATED.sub("", shown), count=1).strip(), whole
    except FileNotFoundError:
        raise JigsawError(f"{path}: there is no such log") from None
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None


def _from_line(line: str) -> tuple[int, dict[str, Any]] | None:
    found = _STEP.search(line)
    if not found:
        return None
    return int(found[1]), _metrics(line[found.end() :])


def _from_json(line: str) -> tuple[int, dict[str, Any]] | None:
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    data = record.get("data", record)
    return (record["step"], dict(data)) if isinstance(data, dict) else None


def _metrics(text: str) -> dict[str, Any]:
    """Pairs `key:value` between " - "; values that are no numbers stay text."""
    metrics: dict[str, Any] = {}
    for part in re.split(r"\s+-\s+", text):
        key, colon, value = part.strip().rpartition(":")
        if colon and key:
            number = _NUMBER.match(value.strip())
            metrics[key.strip()] = float(number[1]) if number else value.strip()
    return metrics


_RELEVANT = ("timing_s/", "response_length/", "prompt_length/", "num_turns/", "perf/t")


def _relevant(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key.startswith(_RELEVANT)}


def _model(path: Path, settings: dict[str, list[str]]) -> ModelShape:
    for name in settings.get("path", []):
        try:
            return model_named(Path(name).name, "")
        except JigsawError:
            continue
    try:
        return model_named(path.stem, str(path))
    except JigsawError:
        raise JigsawError(
            f"{path}: neither its settings nor its name tell the model;\n"
            f"put the model's name into the file's, such as {path.stem}_qwen3-4b{path.suffix}"
        ) from None


def _sequences(settings: dict[str, list[str]]) -> int | None:
    prompts = _largest(settings, "train_batch_size", 0)
    return prompts * _largest(settings, "n", 1) if prompts else None


def _largest(settings: dict[str, list[str]], key: str, default: int) -> int:
    """Validation has settings of the same names, and smaller ones."""
    values = [int(value) for value in settings.get(key, []) if value.isdigit() and len(value) < 10]
    return max(values, default=default) or default


def _share(settings: dict[str, list[str]]) -> float:
    for value in settings.get("gpu_memory_utilization", []):
        if re.fullmatch(r"0?\.\d+", value) and float(value) > 0:
            return float(value)
    return 0.5
