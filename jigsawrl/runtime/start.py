"""Where forked processes begin: light to import, so that whoever starts them needs no torch.

They show that they are alive from the start. The scheduler guards drivers and actors (`liveness.Guard`). Each driver
watches the scheduler: where that stands still for ever, nothing else would end the run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from jigsawrl.config.pipelines import Homes
from jigsawrl.config.settings import RunConfig
from jigsawrl.liveness import Watched, was_silent
from jigsawrl.processes import show_alive, show_as
from jigsawrl.runtime.messages import Place
from jigsawrl.scheduler.layout import Layout

SCHEDULER = "the scheduler"
"""What begins the line with which a driver ends it."""


def show_alive_and_watch(beat: Path, scheduler: int, scheduler_beat: Path, limit_s: float) -> None:
    """A driver beats from now on, and watches the scheduler, a process with this pid and this heartbeat."""
    try:
        handle = os.pidfd_open(scheduler)
    except ProcessLookupError:
        os._exit(1)
    watched = Watched(scheduler_beat, limit_s, pid=scheduler)

    def look() -> None:
        if watched.is_silent():
            said = was_silent(f"{SCHEDULER} (process {scheduler})", limit_s)
            with suppress(OSError, ValueError):
                print(f"jigsaw: {said}; go on with --resume", file=sys.stderr, flush=True)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os._exit(1)

    show_alive(beat, look)


def start_driver(
    beat: Path,
    scheduler: int,
    scheduler_beat: Path,
    limit_s: float,
    line: Connection,
    actors: Sequence[Connection],
    config: RunConfig,
    out: Path,
    resume: bool,
    store: Path,
    homes: Homes | None,
) -> None:
    show_alive_and_watch(beat, scheduler, scheduler_beat, limit_s)
    from jigsawrl.runtime.driver import driver_main

    show_as(f"driver:{config.name}")
    driver_main(line, actors, config, out, resume, store, homes)


def start_actor(
    pipe: Connection,
    config: RunConfig,
    base: Path,
    device: str,
    number: int,
    layout: Layout,
    meeting: str,
    environment: Mapping[str, str],
    note: Path,
    beat: Path,
) -> None:
    """An actor that trains is one of a gang and has its rank there; one that only rolls out is by itself."""
    settle_in(beat, environment, device)
    from jigsawrl.pipeline.actor import Actor
    from jigsawrl.pipeline.actor_process import actor_main
    from jigsawrl.pipeline.pooled import RolloutActor, TrainingActor

    show_as(f"actor{number}:{config.name}")
    ways = following(note, device, layout.lives[number], config.thread_limit)
    if number in layout.gang:
        make = Actor if layout.rolls_out(number) else TrainingActor
        place = (device, layout.gang.index(number), len(layout.gang), meeting)
        alone = layout.ranks_on_each == 1
        actor_main(pipe, config, base, *place, *ways, says_what_runs=True, make=make, alone=alone)
    else:
        place = (device, layout.rollout.index(number), 1, meeting)
        actor_main(pipe, config, base, *place, *ways, says_what_runs=True, make=RolloutActor)


def start_shared_actor(
    control: Connection, place: Place, environment: Mapping[str, str], note: Path, beat: Path
) -> None:
    settle_in(beat, environment, place.device)
    from jigsawrl.runtime.shared_actor import shared_actor_main

    show_as(f"actor{place.rank}:{place.base.name}")
    settle, _ = following(note, place.device, place.layout.lives[place.rank], place.configs[0].thread_limit)
    shared_actor_main(control, place, settle)


def settle_in(beat: Path, environment: Mapping[str, str], device: str) -> None:
    """An actor shows from now on that it is alive, and may use its device."""
    show_alive(beat)
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
