"""Profile files: workloads, and what they cost on some hardware. What every command plans with.

A profile is one JSON file. Of each workload it holds the model's numbers, the lengths of each logged step as
quantiles (close together in the tail, where stragglers are), and fitted coefficients; and where it all comes from.
It may hold an interference table of its hardware (`interference_file.py`). A profile may also stand on another one:
the same workloads, carried to other hardware.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsawrl import durable
from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown
from jigsawrl.graph.cost import Costs, DecodeCost, LinearCost
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import HARDWARE, Hardware, hardware_named
from jigsawrl.graph.interference import Interference, table_of
from jigsawrl.graph.interference_file import table_in, table_out
from jigsawrl.graph.known_models import model_given
from jigsawrl.graph.shape import ModelShape, PipelineShape
from jigsawrl.regular import read_named

FORMAT = 1
_NUMBERS = re.compile(r"\[\s+((?:-?[\d.e+-]+,\s+)*-?[\d.e+-]+)\s+\]")
MOST_BYTES = 64 * 2**20
MOST_WORKERS = 100_000
MOST_SEQUENCES = 10_000_000
MOST_TOKENS = 10_000_000
MOST_SECONDS = 30 * 86400.0
MOST_COEFFICIENT = 1e9
MOST_OF_HARDWARE = 1e21
"""Whatever says more is nonsense, and simulations with it would not end."""
LEVELS = (
    *(i / 40 for i in range(39)),
    *(1 - each for each in (0.04, 0.03, 0.02, 0.015, 0.01, 0.0075, 0.005, 0.004, 0.003, 0.002, 0.001, 0.0)),
)
"""At which lengths are kept: even in the bulk, close in the tail, the longest last."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One measured pipeline."""

    name: str
    model: ModelShape
    sequences: int
    """In a step."""
    samples: int
    prompt_tokens: float
    observation_tokens: float
    """What tools add to a sequence, on the mean."""
    max_tokens: int
    turns: float
    """Mean number of generations of a sequence."""
    tool_seconds: float
    """Wait of the whole batch for tools, in a step."""
    reference: bool
    old_logprobs: bool
    gpus: int
    tp: int
    quantiles: tuple[tuple[float, ...], ...]
    """Of the generated lengths, at LEVELS, for each logged step."""
    reconstructed: bool
    """Whether the lengths were made up from a log's means."""
    costs: Costs

    def lengths(self, step: int, count: int | None = None) -> NDArray[np.float64]:
        """Of a step (they repeat), for so many sequences, in an order that is always the same."""
        kept = self.quantiles[step % len(self.quantiles)]
        count = self.sequences if count is None else count
        at = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
        drawn: NDArray[np.float64] = np.rint(np.interp(at, LEVELS, kept))
        mixed: NDArray[np.float64] = np.random.default_rng(step).permutation(np.maximum(drawn, 1.0))
        return mixed

    def forecast(self, max_tokens: int) -> Forecast:
        """By all steps that were logged last: one alone says little of how long the longest answers are."""
        forecast = Forecast((), max_tokens)
        for step in range(len(self.quantiles)):
            forecast = forecast.after(self.lengths(step))
        return forecast

    def shape(self, steps: int = 1, name: str | None = None, tp: int | None = None) -> PipelineShape:
        """As a pipeline for planning."""
        waves = max(1, round(self.turns))
        if self.tool_seconds > 0:
            waves = max(2, waves)
        return PipelineShape(
            name=name or self.name,
            model=self.model,
            prompts=max(1, self.sequences // self.samples),
            samples=self.samples,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            steps=steps,
            tp=tp or self.tp,
            turns=waves,
            tool_seconds=self.tool_seconds / max(1, waves - 1) if waves > 1 else 0.0,
            old_logprobs=self.old_logprobs,
            reference=self.reference,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured workloads on some hardware."""

    name: str
    source: str
    hardware: Hardware
    workloads: Mapping[str, Workload]
    derived: bool = False
    """Whether its costs were carried over from other hardware."""
    decoding: Mapping[str, tuple[int, DecodeCost]] = field(default_factory=dict)
    """Decode passes measured on this very hardware, by model, with their tp: what derived costs are set by."""
    interference: Interference | None = None
    """What was measured of sharing this hardware, where anything was."""

    def workload(self, name: str) -> Workload:
        try:
            return self.workloads[name]
        except KeyError:
            known = ", ".join(self.workloads)
            raise JigsawError(f"profile {self.name} has no workload {name!r}; it has {known}") from None

    def costs(self, workload: str, hardware: Hardware | str | None = None) -> Costs:
        """On the profile's hardware, or carried to another by the roofline and marked as derived."""
        costs = self.workload(workload).costs
        target = hardware_named(hardware) if isinstance(hardware, str) else hardware or self.hardware
        return costs.on(target)


def load_profile(name_or_path: str | Path) -> Profile:
    """A built-in profile by its name, or a profile file."""
    text = str(name_or_path)
    if text in builtin_profiles():
        return _builtin(text)
    path = Path(name_or_path)
    if not path.exists():
        names = ", ".join(builtin_profiles())
        raise JigsawError(
            f"{path}: there is no such profile; built in are {names}. 'jigsaw fit FOLDER' makes one"
        )
    try:
        content = read_named(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JigsawError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None
    return _profile(_document(content, str(path)), str(path))


@lru_cache(maxsize=8)
def _builtin(name: str) -> Profile:
    resource = resources.files("jigsawrl.graph") / "profiles" / f"{name}.json"
    return _profile(_document(resource.read_text(encoding="utf-8"), name), name)


@lru_cache(maxsize=1)
def builtin_profiles() -> tuple[str, ...]:
    folder = resources.files("jigsawrl.graph") / "profiles"
    return tuple(
        sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json"))
    )


def table_on(hardware: Hardware, known: Profile | None) -> Interference:
    """How sub-stages get along on such workers: as the profile has it, if it is of the same kind."""
    if known is not None and known.interference is not None and known.hardware.name == hardware.name:
        return known.interference
    return table_of(hardware.name)


def write_profile(profile: Profile, path: Path) -> None:
    """All of it or nothing."""
    document = {
        "format": FORMAT,
        "name": profile.name,
        "source": profile.source,
        "hardware": _hardware_out(profile.hardware),
        "derived": profile.derived,
        "levels": [_short(each) for each in LEVELS],
        "workloads": {name: _workload_out(each) for name, each in profile.workloads.items()},
    }
    if profile.interference is not None:
        document["interference"] = table_out(profile.interference)
    lines = json.dumps(document, indent=1, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(path, _compact(lines).encode() + b"\n")
    except OSError as error:
        raise JigsawError(f"{path}: cannot be written ({error.strerror or error})") from None


def quantiles(lengths: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(each) for each in np.rint(np.quantile(lengths, LEVELS)))


def _compact(text: str) -> str:
    """Lists of numbers on one line each: a diff shows a step as a line."""
    return _NUMBERS.sub(lambda found: f"[{''.join(found[1].split())}]", text)


def _short(value: float) -> float:
    """Six digits that count."""
    return float(f"{value:.6g}")


def _hardware_out(hardware: Hardware) -> Any:
    return hardware.name if HARDWARE.get(hardware.name) == hardware else asdict(hardware)


def _workload_out(workload: Workload) -> dict[str, Any]:
    model, costs = workload.model, workload.costs
    return {
        "model": asdict(model),
        "sequences": workload.sequences,
        "samples": workload.samples,
        "prompt_tokens": _short(workload.prompt_tokens),
        "observation_tokens": _short(workload.observation_tokens),
        "max_tokens": workload.max_tokens,
        "turns": _short(workload.turns),
        "tool_seconds": _short(workload.tool_seconds),
        "reference": workload.reference,
        "old_logprobs": workload.old_logprobs,
        "gpus": workload.gpus,
        "tp": workload.tp,
        "reconstructed": workload.reconstructed,
        "costs": _costs_out(costs),
        "quantiles": [[int(value) for value in step] for step in workload.quantiles],
    }


def _costs_out(costs: Costs) -> dict[str, Any]:
    def form(cost: DecodeCost | LinearCost) -> dict[str, float]:
        return {each.name: _short(getattr(cost, each.name)) for each in fields(cost)}

    return {
        "decode": form(costs.decoding),
        "prefill": form(costs.prefilling),
        "logprob": form(costs.logprob),
        "ref": form(costs.ref),
        "grad": form(costs.grad),
        "optim": _short(costs.optim),
        "sync": _short(costs.sync),
        "rollout_fixed_seconds": _short(costs.rollout_fixed_seconds),
        "offloaded": costs.offloaded,
        "other_seconds": _short(costs.other_seconds),
        "kv_tokens": None if costs.kv_tokens is None else round(costs.kv_tokens),
        "warmup": {key: _short(value) for key, value in costs.warmup.items()},
        "errors": {key: _short(value) for key, value in costs.errors.items()},
        "source": costs.source,
        "derived": costs.derived,
    }


def _document(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise JigsawError(
            f"{where}, line {error.lineno}: is not JSON ({error.msg}); make it anew with 'jigsaw fit'"
        ) from None
    except (RecursionError, ValueError):
        raise JigsawError(f"{where}: is no profile; make it anew with 'jigsaw fit'") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise JigsawError(f"{where}: is no profile of format {FORMAT}; make it anew with 'jigsaw fit'")
    return document


def _profile(document: dict[str, Any], where: str) -> Profile:
    try:
        hardware = document["hardware"]
        hardware = hardware_named(hardware) if isinstance(hardware, str) else _hardware_in(hardware, where)
        if "base" in document:
            return _carried(document, hardware)
        if [*map(float, document["levels"])] != [_short(each) for each in LEVELS]:
            raise JigsawError(f"{where}: its quantiles are at other levels; make it anew with 'jigsaw fit'")
        workloads = {
            str(name): _workload(str(name), each, hardware, f"{where}, {name}")
            for name, each in document["workloads"].items()
        }
        if not workloads:
            raise JigsawError(f"{where}: holds no workload")
        table = document.get("interference")
        return Profile(
            str(document["name"]),
            str(document["source"]),
            hardware,
            workloads,
            bool(document.get("derived", False)),
            interference=table_in(table, f"{where}, interference") if table is not None else None,
        )
    except KeyError as error:
        raise JigsawError(f"{where}: lacks the key {error}; make it anew with 'jigsaw fit'") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise JigsawError(f"{where}: is damaged ({error}); make it anew with 'jigsaw fit'") from None


def _hardware_in(entry: dict[str, Any], where: str) -> Hardware:
    hardware = Hardware(**entry)
    for key, value in asdict(hardware).items():
        least = 0 if key == "price" else 1
        if key not in ("name", "source") and not least <= value <= MOST_OF_HARDWARE:
            raise JigsawError(f"{where}, hardware.{key}: is {shown(value)}, and no hardware has that")
    return hardware


def _carried(document: dict[str, Any], hardware: Hardware) -> Profile:
    """A profile that stands on a built-in one."""
    if document["base"] not in builtin_profiles():
        raise JigsawError(
            f"profile {document['name']}: stands on {document['base']!r}, which is not built in"
        )
    base = load_profile(document["base"])
    measured = {
        name: (int(each["tp"]), DecodeCost(*(float(each[key]) for key in ("a", "b", "c", "error"))))
        for name, each in document.get("decode", {}).items()
    }
    workloads = {name: replace(each, costs=each.costs.on(hardware)) for name, each in base.workloads.items()}
    return Profile(document["name"], document["source"], hardware, workloads, True, measured)


def _workload(name: str, entry: dict[str, Any], hardware: Hardware, where: str) -> Workload:
    model = model_given(entry["model"], where)

    def within(key: str, least: float, most: float) -> float:
        value = float(entry[key])
        if not least <= value <= most:
            raise JigsawError(
                f"{where}, {key}: is {shown(entry[key])}, and it lies between {least:g} and {most:g}; "
                "make the profile anew"
            )
        return value

    gpus, tp = int(within("gpus", 1, MOST_WORKERS)), int(within("tp", 1, MOST_WORKERS))
    kept = tuple(tuple(float(value) for value in step) for step in entry["quantiles"])
    if not kept or any(len(step) != len(LEVELS) for step in kept):
        raise JigsawError(f"{where}, quantiles: each step needs {len(LEVELS)} lengths; make the profile anew")
    if any(not 0 <= value <= MOST_TOKENS for step in kept for value in step):
        raise JigsawError(
            f"{where}, quantiles: a response has at most {MOST_TOKENS:,} tokens; make the profile anew"
        )
    return Workload(
        name=name,
        model=model,
        sequences=int(within("sequences", 1, MOST_SEQUENCES)),
        samples=int(within("samples", 1, MOST_SEQUENCES)),
        prompt_tokens=within("prompt_tokens", 0, MOST_TOKENS),
        observation_tokens=within("observation_tokens", 0, MOST_TOKENS),
        max_tokens=int(within("max_tokens", 1, MOST_TOKENS)),
        turns=within("turns", 0, 10_000),
        tool_seconds=within("tool_seconds", 0, MOST_SECONDS),
        reference=bool(entry["reference"]),
        old_logprobs=bool(entry["old_logprobs"]),
        gpus=gpus,
        tp=tp,
        quantiles=kept,
        reconstructed=bool(entry["reconstructed"]),
        costs=_costs(entry["costs"], model, hardware, gpus, tp, f"{where}, costs"),
    )


def _costs(
    entry: dict[str, Any], model: ModelShape, hardware: Hardware, gpus: int, tp: int, where: str
) -> Costs:
    def number(value: Any, key: str) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not 0 <= value <= MOST_COEFFICIENT
        ):
            raise JigsawError(f"{where}, {key}: is {shown(value)}; coefficients are numbers from 0 on")
        return float(value)

    def linear(key: str) -> LinearCost:
        return LinearCost(**{each: number(value, f"{key}.{each}") for each, value in entry[key].items()})

    held = entry["kv_tokens"]
    return Costs(
        model=model,
        hardware=hardware,
        gpus=gpus,
        tp=tp,
        decoding=DecodeCost(**{k: number(value, f"decode.{k}") for k, value in entry["decode"].items()}),
        prefilling=linear("prefill"),
        logprob=linear("logprob"),
        ref=linear("ref"),
        grad=linear("grad"),
        optim=number(entry["optim"], "optim"),
        sync=number(entry["sync"], "sync"),
        rollout_fixed_seconds=number(entry["rollout_fixed_seconds"], "rollout_fixed_seconds"),
        offloaded=bool(entry["offloaded"]),
        other_seconds=number(entry["other_seconds"], "other_seconds"),
        kv_tokens=None if held is None else number(held, "kv_tokens"),
        warmup={key: number(value, f"warmup.{key}") for key, value in entry["warmup"].items()},
        errors={key: number(value, f"errors.{key}") for key, value in entry["errors"].items()},
        source=str(entry["source"]),
        derived=bool(entry["derived"]),
    )
