"""Where the actors of a pipeline live: its ranks are fixed when it begins, the machine's workers are not. Pure.

    2 ranks on 2 workers       2 ranks on 1 worker         1 rank on 2 workers
    worker 0: rank 0, engine   worker 0: rank 0, engine    worker 0: rank 0, engine
    worker 1: rank 1, engine             rank 1            worker 1: (other pipelines)

Results depend on the number of ranks, since gradients are summed over them, and not on where they live. Ranks on one
worker take turns as the kernel or the GPU has it: each is a process of its own, so a rank that waits for the others
in a sum leaves the worker to them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jigsawrl.policies.state import Place

if TYPE_CHECKING:
    from jigsawrl.config.pipelines import Homes


@dataclass(frozen=True, slots=True)
class Layout:
    """Actors have numbers; those of a pipeline whose phases share their workers are its ranks."""

    lives: Place
    """The worker that each actor lives on."""
    gang: Place
    """The actors that train, in the order of their ranks."""
    rollout: Place
    """The workers with an engine."""

    @property
    def training(self) -> Place:
        """The workers that it trains on."""
        return tuple(sorted({self.lives[actor] for actor in self.gang}))

    @property
    def ranks_on_each(self) -> int:
        """Ranks on the worker with most of them."""
        return max(Counter(self.lives[actor] for actor in self.gang).values())

    def engine_on(self, worker: int) -> int:
        """The actor with the engine of a worker: the first that lives there."""
        return self.lives.index(worker)

    def rolls_out(self, actor: int) -> bool:
        worker = self.lives[actor]
        return worker in self.rollout and self.engine_on(worker) == actor

    def seats(self, place: Place) -> dict[int, int]:
        """The worker of each rank while the gang trains there: its own where that is among them."""
        return {
            actor: self.lives[actor] if self.lives[actor] in place else place[rank % len(place)]
            for rank, actor in enumerate(self.gang)
        }


def layout_of(ranks: int, workers: int, first: int = 0) -> Layout:
    """The layout of a pipeline that may use all workers for both phases; `first` is the worker of its first rank."""
    lives = tuple((first + rank) % workers for rank in range(ranks))
    return Layout(lives, tuple(range(ranks)), tuple(sorted(set(lives))))


def layout_in_pools(homes: Homes, workers: int) -> Layout:
    """The layout of a pipeline with an actor on each worker of its pools; more if its training pool has too few."""
    return Layout((*range(workers), *homes.more), homes.training, homes.rollout)
