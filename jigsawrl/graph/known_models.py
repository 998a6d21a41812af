"""The numbers of well-known dense models, found by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown
from jigsawrl.graph.given import bounded
from jigsawrl.graph.shape import ModelShape

Numbers = tuple[float, int, int, int, int]
"""Parameters in billions, layers, hidden size, key-value heads, size of a head."""

_QWEN3: dict[str, Numbers] = {
    "0.6b": (0.596, 28, 1024, 8, 128),
    "1.7b": (1.72, 28, 2048, 8, 128),
    "4b": (4.02, 36, 2560, 8, 128),
    "8b": (8.19, 36, 4096, 8, 128),
    "14b": (14.77, 40, 5120, 8, 128),
    "32b": (32.76, 64, 5120, 8, 128),
}
_QWEN25: dict[str, Numbers] = {
    "0.5b": (0.494, 24, 896, 2, 64),
    "1.5b": (1.54, 28, 1536, 2, 128),
    "3b": (3.09, 36, 2048, 2, 128),
    "7b": (7.62, 28, 3584, 4, 128),
    "14b": (14.77, 48, 5120, 8, 128),
    "32b": (32.76, 64, 5120, 8, 128),
    "72b": (72.71, 80, 8192, 8, 128),
}
_LLAMA3: dict[str, Numbers] = {
    "1b": (1.236, 16, 2048, 8, 64),
    "3b": (3.21, 28, 3072, 8, 128),
    "8b": (8.03, 32, 4096, 8, 128),
    "70b": (70.55, 80, 8192, 8, 128),
}
_SMOLLM2: dict[str, Numbers] = {
    "135m": (0.1345, 30, 576, 3, 64),
    "360m": (0.362, 32, 960, 5, 64),
    "1.7b": (1.71, 24, 2048, 32, 64),
}

_FAMILIES: Sequence[tuple[str, str, dict[str, Numbers]]] = (
    # Distilled models first: their names also hold the name of the family they come from.
    (r"distill.*llama", "deepseek-r1-distill-llama", _LLAMA3),
    (r"distill", "deepseek-r1-distill-qwen", {**_QWEN25, "1.5b": (1.78, 28, 1536, 2, 128)}),
    (r"qwen-?3", "qwen3", _QWEN3),
    (r"qwen-?2(\.?5)?", "qwen2.5", _QWEN25),
    (r"llama-?3(\.\d)?", "llama3", _LLAMA3),
    (r"smollm-?2", "smollm2", _SMOLLM2),
)
"""How a family's name reads, what it is called here, and its sizes."""

_SIZE = re.compile(r"(?<![\w.])(\d{1,4}(?:\.\d+)?)(b|m)(?![a-z0-9])")
_MIXTURE = re.compile(r"-a\d+(\.\d+)?b(?![a-z0-9])|mixtral|-moe|\d+x\d+b")
_HOW = (
    'give the workload a key "model" with a known name (such as "Qwen3-4B") or with its numbers:\n'
    '{"name": "mine", "parameters": 7.6e9, "layers": 28, "hidden": 3584, "kv_heads": 4, "head_dim": 128}'
)

MOST = {
    "parameters": 10**15,
    "layers": 10_000,
    "hidden": 10_000_000,
    "kv_heads": 1_000_000,
    "head_dim": 1_000_000,
    "bytes_per_parameter": 16,
}


def model_named(name: str, where: str, how: str = _HOW) -> ModelShape:
    """The model that a name speaks of, which may be a workload's; `where` begins the message if there is none, and
    `how` says what to do.

    A family that is not known but whose size the name tells gets the shape that dense models of this size have.
    """
    text = _normal(name)
    if is_mixture(name):
        raise JigsawError(
            f"{where}: {shown(name)} reads like a mixture of experts, which has no dense shape; {how}"
        )
    for pattern, family, sizes in _FAMILIES:
        if found := re.search(pattern, text):
            for size in _sizes(text[found.end() :]) or _sizes(text):
                if size in sizes:
                    return _shape(f"{family}-{size}", sizes[size])
            break
    sizes_told = _sizes(text)
    if sizes_told and 0 < _billions(sizes_told[-1]) <= MOST["parameters"] / 1e9:
        return dense(_billions(sizes_told[-1]), f"dense-{sizes_told[-1]}")
    raise JigsawError(f"{where}: cannot tell the model's size from {shown(name)}; {how}")


def is_mixture(name: str) -> bool:
    """Whether a model's name reads like a mixture of experts."""
    return _MIXTURE.search(_normal(name)) is not None


def model_given(value: Any, where: str) -> ModelShape:
    """A model by its name or by its numbers, as the key "model" holds it."""
    if isinstance(value, str):
        return model_named(value, where)
    if not isinstance(value, Mapping):
        raise JigsawError(f"{where}: is neither a name nor numbers; {_HOW}")
    stated = {"bytes_per_parameter": 2, **value}
    parameters, *others = (
        bounded(stated.get(key), 1, most, f"{where}: {key} is", f", not a number from 1 to {most:,}; {_HOW}")
        for key, most in MOST.items()
    )
    return ModelShape(str(value.get("name", "model")), parameters, *map(int, others))


def dense(billions: float, name: str) -> ModelShape:
    """What a dense model of this size usually looks like: between its neighbours among Qwen3 and Llama."""
    known = sorted([*_QWEN3.values(), _LLAMA3["70b"], _SMOLLM2["135m"]])
    at = [math.log(each[0]) for each in known]
    x = min(max(math.log(billions), at[0]), at[-1])
    upper = next(i for i in range(1, len(at)) if x <= at[i])
    weight = (x - at[upper - 1]) / (at[upper] - at[upper - 1])

    def between(index: int) -> float:
        low, high = known[upper - 1][index], known[upper][index]
        return math.exp((1 - weight) * math.log(low) + weight * math.log(high))

    hidden = max(64, round(between(2) / 64) * 64)
    return _shape(name, (billions, round(between(1)), hidden, 8, 128 if hidden >= 1024 else 64))


def _normal(name: str) -> str:
    return re.sub(r"[_\s/]+", "-", name.lower())


def _sizes(text: str) -> list[str]:
    return [f"{float(number):g}{unit}" for number, unit in _SIZE.findall(text.replace("-", " "))]


def _billions(size: str) -> float:
    return float(size[:-1]) / (1 if size.endswith("b") else 1000)


def _shape(name: str, numbers: Numbers) -> ModelShape:
    billions, *others = numbers
    return ModelShape(name, float(round(billions * 1e9)), *others)
