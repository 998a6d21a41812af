"""A pipeline's driver: the ordinary loop, in a process of its own, multiplexed with others by a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from jigsawrl.config.pipelines import Homes
from jigsawrl.config.settings import RunConfig
from jigsawrl.errors import JigsawError
from jigsawrl.limits import cause_of
from jigsawrl.pipeline.actor_process import told
from jigsawrl.pipeline.calls import ActorDied
from jigsawrl.pipeline.loop import run
from jigsawrl.processes import die_with_parent, ignore_interrupts
from jigsawrl.runtime.channel import SchedulerChannel
from jigsawrl.runtime.messages import Ends
from jigsawrl.runtime.multiplexed_env import MultiplexedEnv, StateLost
from jigsawrl.runtime.pools import PooledEnv
from jigsawrl.runtime.reporting import ReportedProgress
from jigsawrl.store.store import Store
from jigsawrl.underway import under_way


def driver_main(
    scheduler: Connection,
    actors: Sequence[Connection],
    config: RunConfig,
    out: Path,
    resume: bool,
    store: Path,
    homes: Homes | None,
) -> None:
    """`store` is where the node's store is, `homes` where the phases run that have pools of their own."""
    die_with_parent()
    ignore_interrupts()  # the scheduler decides when to stop
    channel = SchedulerChannel(scheduler)
    try:
        given = (channel, actors, Store.attach(store), config)
        env = MultiplexedEnv(*given) if homes is None else PooledEnv(homes, *given)
        try:
            with under_way(out):
                run(config, out, resume, ReportedProgress(channel), env)
            ends = Ends("finished")
        except KeyboardInterrupt as interrupt:
            ends = Ends("interrupted", str(interrupt))
        env.forget()
    except ActorDied as error:
        ends = Ends("died", str(error))
    except StateLost as error:
        ends = Ends("failed", str(error))
    except JigsawError as error:
        ends = Ends("failed", str(error), refused=True)
    except Exception as error:
        cause = cause_of(error, out)
        ends = Ends("failed", cause or told(error), refused=cause is not None)
    channel.send(ends)
