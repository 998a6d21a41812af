"""Profile files: workloads, and what they cost on some hardware. What every command plans with.

A profile is one JSON file. Of each workload it holds the model's numbers, the lengths of each logged step as
quantiles (close together in the tail, where stragglers are), and fitted coefficients; and where it all comes from.
It may hold an interference table of its hardware (`interference_file.py`). A profile may also stand on another one:
the same workloads, carried to other hardware.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from jigsawrl import durable
from jigsawrl.errors import JigsawError
from jigsawrl.graph.cost import Costs, DecodeCost, LinearCost
from jigsawrl.graph.forecast import Floats, Forecast
from jigsawrl.graph.given import bounded, json_in
from jigsawrl.graph.hardware import HARDWARE, Hardware, hardware_named
from jigsawrl.graph.interference import Interference, table_of
from jigsawrl.graph.interference_file import table_in, table_out
from jigsawrl.graph.known_models import model_given
from jigsawrl.graph.shape import ModelShape, PipelineShape, turns_with_waits

FORMAT = 1
BUILT_IN = Path(__file__).parent / "profiles"
_LIST = re.compile(r"\[\s+((?:-?[\d.e+-]+,\s+)*-?[\d.e+-]+)\s+\]")
"""Lists of numbers stand on one line each: a diff shows a step as a line."""
MOST_TOKENS = 10_000_000
MOST_COEFFICIENT = 1e9
MOST_OF_HARDWARE = 1e21
BOUNDS = {
    "sequences": (1, 10_000_000),
    "samples": (1, 10_000_000),
    "prompt_tokens": (0, MOST_TOKENS),
    "observation_tokens": (0, MOST_TOKENS),
    "max_tokens": (1, MOST_TOKENS),
    "turns": (0, 10_000),
    "tool_seconds": (0, 30 * 86400),
    "gpus": (1, 100_000),
    "tp": (1, 100_000),
}
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

    def lengths(self, step: int) -> Floats:
        """Of a step (they repeat), in an order that is always the same."""
        at = np.linspace(0, 1, self.sequences) if self.sequences > 1 else np.array([0.5])
        return np.random.default_rng(step).permutation(self.lengths_at(step, at))

    def lengths_at(self, step: int, at: Floats) -> Floats:
        """Of a step, at these quantiles."""
        logged = self.quantiles[step % len(self.quantiles)]
        return np.maximum(np.rint(np.interp(at, LEVELS, logged)), 1.0)

    def forecast(self, max_tokens: int) -> Forecast:
        """By all steps that were logged last: one alone says little of how long the longest answers are."""
        logged = map(self.lengths, range(len(self.quantiles)))
        return reduce(Forecast.after, logged, Forecast((), max_tokens))

    def shape(self, steps: int = 1, name: str | None = None, tp: int | None = None) -> PipelineShape:
        """As a pipeline for planning."""
        turns, waits = turns_with_waits(self.turns, self.tool_seconds)
        return PipelineShape(
            name=name or self.name,
            model=self.model,
            prompts=max(1, self.sequences // self.samples),
            samples=self.samples,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            steps=steps,
            tp=tp or self.tp,
            turns=turns,
            tool_seconds=waits,
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
    interference: Interference | None = None
    """What was measured of sharing this hardware, where anything was."""

    def workload(self, name: str) -> Workload:
        try:
            return self.workloads[name]
        except KeyError:
            raise JigsawError(
                f"profile {self.name} has no workload {name!r}; it has {', '.join(self.workloads)}"
            ) from None


def load_profile(name_or_path: str | Path) -> Profile:
    """A built-in profile by its name, or a profile file."""
    path = Path(name_or_path)
    if str(name_or_path) in builtin_profiles():
        return _builtin(str(name_or_path))
    if not path.exists():
        raise JigsawError(
            f"{path}: there is no such profile; built in are {', '.join(builtin_profiles())}. "
            "'jigsaw fit FOLDER' makes one"
        )
    return _profile(path, str(path))


@lru_cache(maxsize=8)
def _builtin(name: str) -> Profile:
    return _profile(BUILT_IN / f"{name}.json", name)


@lru_cache(maxsize=1)
def builtin_profiles() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in BUILT_IN.glob("*.json")))


def table_on(hardware: Hardware, known: Profile | None) -> Interference:
    """How sub-stages get along on such workers: as the profile has it, if it is of the same kind."""
    if known is not None and known.interference is not None and known.hardware.name == hardware.name:
        return known.interference
    return table_of(hardware.name)


def write_profile(profile: Profile, path: Path) -> None:
    """All of it or nothing."""
    hardware = profile.hardware
    document = {
        "format": FORMAT,
        "name": profile.name,
        "source": profile.source,
        "hardware": hardware.name if hardware in HARDWARE.values() else asdict(hardware),
        "derived": profile.derived,
        "levels": [_short(each) for each in LEVELS],
        "workloads": {name: _workload_out(each) for name, each in profile.workloads.items()},
    }
    if profile.interference is not None:
        document["interference"] = table_out(profile.interference)
    text = json.dumps(document, indent=1, allow_nan=False)
    lines = _LIST.sub(lambda found: f"[{''.join(found[1].split())}]", text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(path, lines.encode() + b"\n")
    except OSError as error:
        raise JigsawError(f"{path}: cannot be written ({error.strerror or error})") from None


def quantiles(lengths: Floats) -> tuple[float, ...]:
    return tuple(float(each) for each in np.rint(np.quantile(lengths, LEVELS)))


def _short(value: float) -> float:
    """Six digits that count."""
    return float(f"{value:.6g}")


def _shortened(values: Mapping[str, float]) -> dict[str, float]:
    return {key: _short(value) for key, value in values.items()}


def _workload_out(workload: Workload) -> dict[str, Any]:
    return {
        "model": asdict(workload.model),
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
        "costs": _costs_out(workload.costs),
        "quantiles": [[int(value) for value in step] for step in workload.quantiles],
    }


def _costs_out(costs: Costs) -> dict[str, Any]:
    return {
        "decode": _shortened(asdict(costs.decoding)),
        "prefill": _shortened(asdict(costs.prefilling)),
        "logprob": _shortened(asdict(costs.logprob)),
        "ref": _shortened(asdict(costs.ref)),
        "grad": _shortened(asdict(costs.grad)),
        "optim": _short(costs.optim),
        "sync": _short(costs.sync),
        "rollout_fixed_seconds": _short(costs.rollout_fixed_seconds),
        "offloaded": costs.offloaded,
        "other_seconds": _short(costs.other_seconds),
        "kv_tokens": None if costs.kv_tokens is None else round(costs.kv_tokens),
        "warmup": _shortened(costs.warmup),
        "errors": _shortened(costs.errors),
        "source": costs.source,
        "derived": costs.derived,
    }


def _profile(path: Path, where: str) -> Profile:
    advice = "make it anew with 'jigsaw fit'"
    document = json_in(path, "profile", advice)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise JigsawError(f"{where}: is no profile of format {FORMAT}; {advice}")
    try:
        hardware = document["hardware"]
        hardware = hardware_named(hardware) if isinstance(hardware, str) else _hardware_in(hardware, where)
        if "base" in document:
            return _carried(document, hardware)
        if [*map(float, document["levels"])] != [_short(each) for each in LEVELS]:
            raise JigsawError(f"{where}: its quantiles are at other levels; {advice}")
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
        raise JigsawError(f"{where}: lacks the key {error}; {advice}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise JigsawError(f"{where}: is damaged ({error}); {advice}") from None


def _hardware_in(entry: dict[str, Any], where: str) -> Hardware:
    hardware = Hardware(**entry)
    for key, value in asdict(hardware).items():
        if key not in ("name", "source"):
            bounded(
                value,
                0 if key == "price" else 1,
                MOST_OF_HARDWARE,
                f"{where}, hardware.{key}: is",
                ", and no hardware has that",
            )
    return hardware


def _carried(document: dict[str, Any], hardware: Hardware) -> Profile:
    """A profile that stands on a built-in one."""
    if document["base"] not in builtin_profiles():
        raise JigsawError(
            f"profile {document['name']}: stands on {document['base']!r}, which is not built in"
        )
    base = load_profile(document["base"]).workloads
    workloads = {name: replace(each, costs=each.costs.on(hardware)) for name, each in base.items()}
    return Profile(document["name"], document["source"], hardware, workloads, True)


def _workload(name: str, entry: dict[str, Any], hardware: Hardware, where: str) -> Workload:
    model = model_given(entry["model"], where)
    numbers = {
        key: bounded(
            entry[key],
            least,
            most,
            f"{where}, {key}: is",
            f", and it lies between {least:g} and {most:g}; make the profile anew",
        )
        for key, (least, most) in BOUNDS.items()
    }
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
        sequences=int(numbers["sequences"]),
        samples=int(numbers["samples"]),
        prompt_tokens=numbers["prompt_tokens"],
        observation_tokens=numbers["observation_tokens"],
        max_tokens=int(numbers["max_tokens"]),
        turns=numbers["turns"],
        tool_seconds=numbers["tool_seconds"],
        reference=bool(entry["reference"]),
        old_logprobs=bool(entry["old_logprobs"]),
        gpus=int(numbers["gpus"]),
        tp=int(numbers["tp"]),
        quantiles=kept,
        reconstructed=bool(entry["reconstructed"]),
        costs=_costs(
            entry["costs"], model, hardware, int(numbers["gpus"]), int(numbers["tp"]), f"{where}, costs"
        ),
    )


def _costs(
    entry: dict[str, Any], model: ModelShape, hardware: Hardware, gpus: int, tp: int, where: str
) -> Costs:
    def coefficient(key: str, value: Any) -> float:
        why = "; coefficients are numbers from 0 on"
        return bounded(value, 0, MOST_COEFFICIENT, f"{where}, {key}: is", why)

    def coefficients(key: str) -> dict[str, float]:
        return {each: coefficient(f"{key}.{each}", value) for each, value in entry[key].items()}

    return Costs(
        model=model,
        hardware=hardware,
        gpus=gpus,
        tp=tp,
        decoding=DecodeCost(**coefficients("decode")),
        prefilling=LinearCost(**coefficients("prefill")),
        logprob=LinearCost(**coefficients("logprob")),
        ref=LinearCost(**coefficients("ref")),
        grad=LinearCost(**coefficients("grad")),
        optim=coefficient("optim", entry["optim"]),
        sync=coefficient("sync", entry["sync"]),
        rollout_fixed_seconds=coefficient("rollout_fixed_seconds", entry["rollout_fixed_seconds"]),
        offloaded=bool(entry["offloaded"]),
        other_seconds=coefficient("other_seconds", entry["other_seconds"]),
        kv_tokens=None if entry["kv_tokens"] is None else coefficient("kv_tokens", entry["kv_tokens"]),
        warmup=coefficients("warmup"),
        errors=coefficients("errors"),
        source=str(entry["source"]),
        derived=bool(entry["derived"]),
    )
