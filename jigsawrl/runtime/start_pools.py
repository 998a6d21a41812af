"""Where the processes of a pipeline begin whose phases have pools of their own; light to import, as `start`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl.processes import show_alive, show_as
from jigsawrl.runtime.alive import Alive
from jigsawrl.runtime.start import following, settle_in

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.config.pipelines import Homes
    from jigsawrl.runtime.layout import Layout


def start_driver_of_pools(
    homes: Homes,
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
    from jigsawrl.runtime.pools import InPools

    show_as(f"driver:{config.name}")
    driver_main(line, actors, Assignment(config, out, resume, store), partial(InPools, homes))


def start_pool_actor(
    homes: Homes,
    pipe: Connection,
    config: RunConfig,
    base: Path,
    device: str,
    actor: int,
    layout: Layout,
    meeting: str,
    environment: Mapping[str, str],
    note: Path,
    beat: Path,
) -> None:
    """It rolls out by itself, or is one of the gang that trains, with its place among those of its phase."""
    show_alive(beat)
    settle_in(environment, device)
    from jigsawrl.pipeline.actor_process import actor_main
    from jigsawrl.pipeline.pooled import RolloutActor, TrainingActor

    show_as(f"actor{actor}:{config.name}")
    settle, between = following(note, device, layout.lives[actor], config.thread_limit)
    given = (pipe, config, base, device)
    if actor in homes.rollout:
        number = homes.rollout.index(actor)
        actor_main(*given, number, 1, meeting, settle, says_what_runs=True, make=RolloutActor)
    else:
        number, gang = homes.training.index(actor), len(homes.training)
        alone = layout.ranks_on_each == 1
        actor_main(*given, number, gang, meeting, settle, between, make=TrainingActor, alone=alone)
