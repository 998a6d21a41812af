"""What the node's store keeps of a pipeline.

    NAME/weights     by step: what is trained, as an engine uses it
    NAME/optimizer   by step: the rest of what training goes on from, and what the loop says of the step
    NAME/asleep      all of that together, of a pipeline that went to sleep in a state that was not published
    NAME/frozen      what training never changes

A step's weights are put before its optimizer, and those of the step before are dropped after it. So the newest
optimizer always has its weights, whoever is killed when.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from jigsawrl.store.store import Store
from jigsawrl.trainer.checkpoint import Checkpoint

State = dict[str, dict[str, Tensor]]
"""Of each trainer, by name."""
_WEIGHT = "weight."


def publish(
    store: Store, name: str, step: int, weights: dict[str, Tensor], state: State, meta: dict[str, Any]
) -> None:
    """Makes a step's state the newest. Masters that are the weights themselves are stored once."""
    masters = {f"policy/{_WEIGHT}{key}": tensor.dtype for key, tensor in weights.items()}
    rest = {key: tensor for key, tensor in flat(state).items() if masters.get(key) != tensor.dtype}
    on_device = any(tensor.is_cuda for tensor in weights.values())
    store.put(weights_of(name), step, weights, keep=2, again=on_device)
    store.put(_optimizer_of(name), step, rest, meta, again=on_device)
    for old in store.versions(weights_of(name)):
        if old < step:
            store.drop(weights_of(name), old, again=on_device)
    store.drop(asleep_of(name))


def recall(store: Store, name: str) -> Checkpoint | None:
    """The newest step that was published, mapped and not copied; nobody publishes meanwhile.

    None where there is none, or a part of it is lost: then there are checkpoints.
    """
    optimizer = store.get(_optimizer_of(name))
    if optimizer is None:
        return None
    weights = store.get(weights_of(name), optimizer.version)
    if weights is None:
        return None
    state = by_part(optimizer.tensors)
    policy = state.setdefault("policy", {})
    for key, tensor in weights.tensors.items():
        policy.setdefault(_WEIGHT + key, tensor)
    return Checkpoint(optimizer.version, state, dict(optimizer.meta), Path(optimizer.name))


def flat(state: State) -> dict[str, Tensor]:
    return {f"{part}/{key}": tensor for part, each in state.items() for key, tensor in each.items()}


def by_part(tensors: dict[str, Tensor]) -> State:
    state: State = {}
    for name, tensor in tensors.items():
        part, _, key = name.partition("/")
        state.setdefault(part, {})[key] = tensor
    return state


def weights_of(name: str) -> str:
    return f"{name}/weights"


def _optimizer_of(name: str) -> str:
    return f"{name}/optimizer"


def asleep_of(name: str) -> str:
    return f"{name}/asleep"


def frozen_of(name: str) -> str:
    return f"{name}/frozen"
