"""An actor's state, in its process while it is awake and only in the node's store while it sleeps.

All workers of a pipeline have the same state, so the first puts it into the store for all, and only what is not
there yet: what was published after the last update is not written again. All read it from there.

Waking fills the very tensors that were emptied. What training never changes is not even copied on a CPU: it becomes
the store's pages, which all workers share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline import kept
from jigsawrl.store.memory import reclaim, release, return_to_system
from jigsawrl.store.staging import copy_into
from jigsawrl.store.store import Store
from jigsawrl.trainer.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class Swapped:
    """What going to sleep or waking up took."""

    bytes: int
    """Copied to the store, or from it; those that needed no copy are not counted."""
    seconds: float


class Residency:
    """Of `modules`, and of the `optimizers` of some of them; `first` is the worker that writes.

    What is trained and has no optimizer here is left behind: somebody else has it.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        device: torch.device,
        first: bool,
    ) -> None:
        self.modules = modules
        self.optimizers = optimizers
        self.device = device
        self.first = first
        self.stored: object = None
        """Where the trained state is as it is now, if it is."""
        self.frozen_in: object = None

    def note_published(self, store: Store, name: str) -> None:
        self.stored = self._current(store, name)

    def forget(self) -> None:
        """The state is another one than it was."""
        self.stored = None

    def leave(self, store: Store, name: str) -> int:
        """Puts into the store what is not there; bytes that were written."""
        if not self.first:
            return 0
        written = 0
        if self.frozen_in != (store.root, name):
            frozen = self._frozen()
            store.put(kept.frozen_of(name), 0, frozen)
            written += size_of(frozen)
            self.frozen_in = store.root, name
        if self.optimizers and self.stored != self._current(store, name):
            state = kept.flat({part: each.state() for part, each in self.optimizers.items()})
            on_device = self.device.type == "cuda"
            if on_device:
                store.drop(kept.asleep_of(name), again=True)  # of an earlier state, and nobody's
            store.put(kept.asleep_of(name), 0, state, again=on_device)
            written += size_of(state)
            self.stored = self._current(store, name)
        return written

    def free(self) -> None:
        release(self._everything())
        return_to_system(self.device)

    def come_back(self, store: Store, name: str) -> int:
        """Everything as it was, in place; bytes that were copied."""
        frozen, state = store.get(kept.frozen_of(name)), self._state_in(store, name)
        if frozen is None or state is None or not self._is_its_own(frozen.tensors, state):
            raise JigsawError(f"{name} cannot wake up: its state is not in the store in {store.root}")
        pairs: list[tuple[Tensor, Tensor]] = []
        for part, optimizer in self.optimizers.items():
            updates = tuple(state[part]["counts"].tolist())
            if updates != optimizer.counts():
                raise JigsawError(
                    f"{name} cannot wake up: the store has its state after {updates[0]} updates, "
                    f"and it fell asleep after {optimizer.counts()[0]}"
                )
            pairs += [(tensor, state[part][key]) for key, tensor in optimizer.tensors().items()]
        for key, tensor in self._frozen().items():
            if tensor.is_cuda:
                pairs.append((tensor, frozen.tensors[key]))
            else:
                tensor.data = frozen.tensors[key]
        reclaim(self._everything())
        copy_into(pairs)
        for optimizer in self.optimizers.values():
            optimizer.weights_from_masters()
        return sum(tensor.nbytes for tensor, _ in pairs)

    def _is_its_own(self, frozen: dict[str, Tensor], state: kept.State) -> bool:
        """Whether these are the tensors that it has put there."""
        for key, tensor in self._frozen().items():
            found = frozen.get(key)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                return False
        return all(each.takes(state.get(part, {})) for part, each in self.optimizers.items())

    def _state_in(self, store: Store, name: str) -> kept.State | None:
        if not self.optimizers:
            return {}
        asleep = store.get(kept.asleep_of(name))
        if asleep is not None:
            return kept.by_part(asleep.tensors)
        published = kept.recall(store, name)
        return None if published is None else published.tensors

    def _current(self, store: Store, name: str) -> object:
        return store.root, name, [optimizer.counts() for optimizer in self.optimizers.values()]

    def _frozen(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._tensors().items() if not tensor.requires_grad}

    def _tensors(self) -> dict[str, Tensor]:
        """Of all modules."""
        return {
            f"{part}/{name}": tensor
            for part, module in self.modules.items()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }

    def _everything(self) -> list[Tensor]:
        moments = [t for optimizer in self.optimizers.values() for t in optimizer.tensors().values()]
        return [*self._tensors().values(), *moments]


def size_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
