"""Nodes that can be rented: pools of one kind each, with prices, host memory, and what they may run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jigsawrl.graph.hardware import Hardware

Runs = Literal["rollout", "training", "both"]
Pair = tuple[str, str]
"""A pool for rollouts and one for training; twice the same where phases share their nodes."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind."""

    name: str
    kind: Hardware
    gpus: int
    """In each node."""
    nodes: int | None
    """How many there are; None: as many as are asked for."""
    host_gb: float
    """Host memory of each node that resident jobs may fill."""
    price: float
    """Dollars an hour for each node."""
    runs: Runs


@dataclass(frozen=True)
class Cluster:
    """All pools."""

    pools: Mapping[str, Pool]
    link_bandwidth: float = 20e9 / 8
    """Bytes a second between pools; new weights cross it once a step."""

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Where a group may be: a pool for each phase, or one that runs both."""
        return tuple(
            (rollout.name, training.name)
            for rollout in self.pools.values()
            for training in self.pools.values()
            if rollout.runs != "training" and training.runs != "rollout"
        )
