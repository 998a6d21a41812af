"""Where forked processes begin: light to import, so that whoever starts them needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl.processes import show_alive, show_as
from jigsawrl.runtime.alive import Alive

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.runtime.layout import Layout
    from jigsawrl.runtime.messages import Place


def start_driver(
    line: Connection,
    actors: Sequence[Connection],
    config: RunConfig,
    out: Path,
    resume: bool,
    store: Path,
    alive: Alive,
) -> None:
    alive.begin()
    from jigsawrl.runtime.driver import Assignment, driver_main

    show_as(f"driver:{config.name}")
    driver_main(line, actors, Assignment(config, out, resume, store))


def start_actor(
    pipe: Connection,
    config: RunConfig,
    base: Path,
    device: str,
    rank: int,
    layout: Layout,
    meeting: str,
    environment: Mapping[str, str],
    note: Path,
    beat: Path,
) -> None:
    show_alive(beat)
    settle_in(environment, device)
    from jigsawrl.pipeline.actor import Actor
    from jigsawrl.pipeline.actor_process import actor_main
    from jigsawrl.pipeline.pooled import TrainingActor

    show_as(f"actor{rank}:{config.name}")
    ways = following(note, device, layout.lives[rank], config.thread_limit)
    make, alone = Actor if layout.rolls_out(rank) else TrainingActor, layout.ranks_on_each == 1
    place = (device, rank, len(layout.gang), meeting)
    actor_main(pipe, config, base, *place, *ways, says_what_runs=True, make=make, alone=alone)


def start_shared_actor(
    control: Connection, place: Place, environment: Mapping[str, str], note: Path, beat: Path
) -> None:
    show_alive(beat)
    settle_in(environment, place.device)
    from jigsawrl.runtime.shared_actor import shared_actor_main

    show_as(f"actor{place.rank}:{place.base.name}")
    settle, _ = following(note, place.device, place.layout.lives[place.rank], place.configs[0].thread_limit)
    shared_actor_main(control, place, settle)


def settle_in(environment: Mapping[str, str], device: str) -> None:
    """Before an actor first uses its device."""
    os.environ.update(environment)
    if device.startswith("cuda"):
        from jigsawrl.runtime.mps import wait_to_be_taken

        wait_to_be_taken()


def following(
    note: Path, device: str, worker: int, threads: int | None
) -> tuple[Callable[[], bool], Callable[[], None]]:
    """What an actor calls before each thing it does, and inside of those that take long, to be where it should; the
    first says whether its engine is to leave room to others. `threads`: on a CPU, at most."""
    if not device.startswith("cuda"):
        from jigsawrl.runtime.cores import Threads

        own = Threads(threads or 1)
        return own, own.adapt
    from jigsawrl.runtime.shares import Follower

    follow = Follower(note, worker)
    return follow, follow.where_it_pays
