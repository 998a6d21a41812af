"""A pipeline's actors where rollouts and training are in pools of their own.

    training pool: TrainingActor ... --publish--> store --take_weights--> RolloutActor ... : rollout pool

Those that train are a gang with one state, as ever, and have no engine. Those that roll out have an engine and its
weights, and neither optimizer nor gradients. After an update the first of the gang publishes the weights: they cross
from pool to pool once, however many engines read them then. The two sides sleep and wake apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from jigsawrl.engine.types import Look, Request, RolloutBackend, SampleOutput
from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.generating import Generating, awake
from jigsawrl.pipeline.residency import Residency, Swapped, size_of
from jigsawrl.store.staging import copy_into
from jigsawrl.store.store import Store

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig


def crossed_of(name: str) -> str:
    """The store's entry with what has crossed to the rollout side: what is trained, by version."""
    return f"{name}/crossed"


class RolloutActor(Generating):
    """Rolls out with the weights that it took last."""

    def __init__(self, config: RunConfig, base: Path, device: str, worker: int = 0) -> None:
        super().__init__(config, base, device, worker)
        self.engine, self.room = self._engine()
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.residency = Residency({"policy": self.model}, {}, self.device, first=worker == 0)
        self.stale = True
        """Whether its weights are not those of the engine's version."""

    @awake
    def take_weights(self, store: Path, name: str, version: int) -> int:
        """The engine samples from this version, which has crossed; bytes that were read."""
        if not self.stale and self.engine.version == version:
            return 0
        entry = Store.attach(store).get(crossed_of(name), version)
        shapes = {} if entry is None else {key: tensor.shape for key, tensor in entry.tensors.items()}
        if entry is None or any(shapes.get(key) != each.shape for key, each in self.trained.items()):
            raise JigsawError(f"{name}: version {version} of its weights is not in the store in {store}")
        copy_into((parameter.detach(), entry.tensors[key]) for key, parameter in self.trained.items())
        self.engine.update_weights(None, weight_version=version)
        self.stale = False
        return size_of(entry.tensors)

    @awake
    def sleep(self, store: Path, name: str) -> Swapped:
        """Its memory, and the cache's, goes to others: what is trained is taken again, the rest is in the store."""
        if self.engine.has_unfinished():
            raise RuntimeError("an actor whose engine has samples to finish cannot sleep: abort them first")
        began = time.perf_counter()
        written = self.residency.leave(Store.attach(store), engine_of(name))
        self.engine.sleep(level=2)
        self.residency.free()
        self.asleep = self.stale = True
        return Swapped(written, time.perf_counter() - began)

    def wake_up(self, store: Path, name: str) -> Swapped:
        """Undoes `sleep`, but for the weights: those are taken then."""
        if not self.asleep:
            raise RuntimeError("the actor does not sleep")
        began = time.perf_counter()
        read = self.residency.come_back(Store.attach(store), engine_of(name))
        self.engine.wake_up(["weights"])
        self.engine.wake_up(["kv_cache"])
        self.asleep = False
        return Swapped(read, time.perf_counter() - began)


def engine_of(name: str) -> str:
    """Under which the rollout side keeps what it never changes."""
    return f"{name}/rollout"


class TrainingActor(Actor):
    """Trains, and publishes what comes of it."""

    def _engine(self) -> tuple[RolloutBackend, int]:
        return NoEngine(), 0

    @awake
    def publish_weights(self, store: Path, name: str, version: int) -> int:
        """What is trained, as engines use it, for all of them to read; its bytes."""
        place, entry = Store.attach(store), crossed_of(name)
        weights = {key: tensor.detach() for key, tensor in self.trainer.optimizer.parameters.items()}
        for other in place.versions(entry):
            if other >= version:  # of steps that are made again
                place.drop(entry, other)
        place.put(entry, version, weights, again=self.device.type == "cuda")
        return size_of(weights)


class NoEngine:
    """A `RolloutBackend` that is never asked for anything."""

    version = 0
    yields = False

    def add_request(self, request: Request) -> None:
        raise RuntimeError("an actor that trains only has no engine")

    def has_unfinished(self) -> bool:
        return False

    def step(self, look: Look | None = None) -> list[SampleOutput]:
        return []

    def nudge(self) -> None: ...

    def abort(self, request_ids: Sequence[str] | None = None) -> list[SampleOutput]:
        return []

    def partials(self) -> list[SampleOutput]:
        return []

    def update_weights(self, weights: Iterable[tuple[str, Tensor]] | None, weight_version: int) -> None: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    def close(self) -> None: ...
