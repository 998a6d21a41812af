"""`jigsaw cluster start`: checks, the folder, and the daemon in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from jigsawrl.cluster.from_config import cluster_of
from jigsawrl.config.cluster import ClusterConfig
from jigsawrl.daemon.cores import cores_of_nodes
from jigsawrl.daemon.daemon import Daemon
from jigsawrl.daemon.ledger import FILE, Ledger
from jigsawrl.errors import JigsawError
from jigsawrl.liveness import silent_s
from jigsawrl.runtime.scheduler import interrupts
from jigsawrl.underway import under_way


def start(config: ClusterConfig, out: Path, until_done: bool, say: Callable[[str], None]) -> int:
    """Runs the cluster of this folder, a new one or one that was stopped. The exit code."""
    silent_s()  # or what is wrong with it
    cluster_of(config)
    cores = cores_of_nodes(config, sorted(os.sched_getaffinity(0)))
    check_folder(config, out)
    with under_way(out), interrupts() as pressed:
        check_folder(config, out)  # nobody else changes it from here on
        ledger = Ledger.make(out, config)
        pools = ", ".join(f"{pool.nodes} of {name}" for name, pool in config.pools.items())
        size = len(next(iter(cores.values())))
        say(
            f"{config.name}: {len(cores)} nodes ({pools}), each {size} of this machine's cores; Ctrl-C stops it"
        )
        try:
            return Daemon(ledger, cores, say).run(until_done, pressed)
        finally:
            ledger.close()


def check_folder(config: ClusterConfig, out: Path) -> None:
    """A JigsawError where it holds anything else, or a cluster with other settings."""
    if (out / FILE).exists():
        ledger = Ledger(out)
        ledger.close()
        old, new = (each.model_dump(mode="json") for each in (ledger.config, config))
        if other := [key for key in new if old.get(key) != new[key]]:
            raise JigsawError(
                f"{out}: holds a cluster with other settings: {', '.join(other)}\n"
                "start it with the settings it had, or choose another folder with --out"
            )
    elif any(out.glob("[!.]*")):
        raise JigsawError(f"{out}: is not empty, and holds no cluster; choose another folder with --out")
