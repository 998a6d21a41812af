"""Nodes of a local cluster: sets of this machine's cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jigsawrl.config.cluster import ClusterConfig
from jigsawrl.errors import JigsawError

ORDER = ("rollout", "both", "training")
"""Pools in whose order nodes have cores: in a group, rollout workers come before those that train."""


def cores_of_nodes(config: ClusterConfig, cores: Sequence[int]) -> Mapping[str, tuple[int, ...]]:
    """By node; a JigsawError where the machine has too few, or a pool is not made of cores."""
    for name, pool in config.pools.items():
        if not pool.is_cpu:
            raise JigsawError(
                f"pools.{name}.kind: is {pool.kind!r}; only a cluster of this machine's cores can be started "
                f"(kind: cpu), any can be planned and simulated"
            )
    sizes = {pool.size for pool in config.pools.values()}
    if len(sizes) > 1:
        raise JigsawError(
            f"pools: their nodes have {', '.join(map(str, sorted(sizes)))} cores; give all the same number"
        )
    (size,) = sizes
    pools = sorted(config.pools.items(), key=lambda pool: ORDER.index(pool[1].runs))
    names = [f"{name}-{number}" for name, pool in pools for number in range(pool.nodes or 0)]
    if len(names) * size > len(cores):
        counts = " + ".join(f"{pool.nodes} of {name}" for name, pool in pools)
        raise JigsawError(
            f"pools: {counts} are {len(names)} nodes of {size} cores, {len(names) * size} in all, and there are "
            f"{len(cores)}; lower nodes or cores"
        )
    return {name: tuple(cores[place * size : (place + 1) * size]) for place, name in enumerate(names)}
