"""Tasks of the reasoning-gym package by name, scored by the package itself."""

import dataclasses
import difflib
import os
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.tasks.base import JSON, Prompt, RewardSpec

# Generators that walk through sets: their puzzles change with Python's hash seed, which is random by default.
_HASH_ORDERED = {
    "codeio",
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
}


class ReasoningGymTask:
    """Puzzles made on demand, each a function of (name, params, seed, index)."""

    environment = None

    def __init__(self, dataset: Any, data_source: str, system_prompt: str | None, reward: RewardSpec) -> None:
        self._dataset = dataset
        self._data_source = data_source
        self._system_prompt = system_prompt
        self.reward = reward

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Prompt:
        entry = self._entry(index)
        messages = [{"role": "user", "content": str(entry["question"])}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        packed = {"entry": pack(entry)}
        return Prompt(index, None, messages, pack(entry["answer"]), self._data_source, packed)

    def demonstration(self, index: int) -> str | None:
        answer = self._entry(index)["answer"]
        return answer if isinstance(answer, str) else None

    def _entry(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry: dict[str, Any] = self._dataset[index]
        return entry


def load(config: Any, seed: int) -> ReasoningGymTask:
    name, params = config.name, config.params
    dataset = create(name, params, config.size, seed)
    if name in _HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise JigsawError(
            f"task.name: the puzzles of {name} depend on Python's hash seed, so a resumed run would see others\n"
            "Start with PYTHONHASHSEED=0 in the environment, or choose another dataset."
        )
    spec = RewardSpec(
        target="jigsawrl.pipeline.tasks.reasoning_gym_reward:score",
        params={"name": name, "params": params},
        timeout=config.env_timeout,
        on_error=config.on_error,
        processes=config.processes,
    )
    return ReasoningGymTask(dataset, f"reasoning_gym/{name}", config.system_prompt, spec)


def create(name: str, params: dict[str, JSON], size: int, seed: int) -> Any:
    """The package's dataset, of which at least the first puzzle can be made."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise JigsawError("task.kind: reasoning_gym needs a package: pip install 'jigsawrl[envs]'") from error

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"near it: {', '.join(near)}" if near else f"there are: {', '.join(sorted(DATASETS))}"
        raise JigsawError(f"task.name: reasoning-gym has no dataset {name!r}; {hint}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size", "seed"}
    if unknown := sorted(params.keys() - known):
        raise JigsawError(
            f"task.params: {name} has no parameter {', '.join(unknown)}\n"
            f"It has: {', '.join(sorted(known)) or 'none'} (size is task.size, and the seed is the run's)"
        )
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
        dataset[0]
    except Exception as error:  # each dataset refuses in its own way what the user has set
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise JigsawError(f"task.params: {name} does not work with {params}: {reason}") from error
    return dataset


def pack(value: Any) -> JSON:
    """An entry as JSON that `unpack` restores exactly: some scores depend on tuples, or on keys that are numbers."""
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        value = value.tolist()
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [pack(item) for item in value]
        case tuple():
            return {"tuple": [pack(item) for item in value]}
        case dict():
            return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    return str(value)


def unpack(value: JSON) -> Any:
    match value:
        case list():
            return [unpack(item) for item in value]
        case {"tuple": items}:
            return tuple(unpack(item) for item in items)
        case {"dict": items}:
            return {unpack(key): unpack(item) for key, item in items}
    return value
