"""What a driver reports while its loop runs: progress and events, which the scheduler's process shows and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jigsawrl.runtime.channel import SchedulerChannel
from jigsawrl.runtime.messages import Counted, Logged, Made, Says
from jigsawrl.scheduler.events import DriverBegan, SubstageChanged
from jigsawrl.telemetry.events import EventSink, Substage, now
from jigsawrl.telemetry.jsonl import encode

if TYPE_CHECKING:
    from jigsawrl.runtime.multiplexed_env import MultiplexedEnv

COUNTED_S = 10.0
"""Seconds between two messages that say how many samples are done."""
MOST_EVENTS = 256
"""Events that are sent together."""


class ReportedProgress:
    """Progress of a pipeline, which the scheduler's process shows."""

    def __init__(self, channel: SchedulerChannel) -> None:
        self.channel = channel
        self.counted = 0.0
        """When it was last reported how many samples are done, and in which step."""
        self.counted_step = 0

    def start(self, name: str, total_steps: int, done: int = 0) -> None:
        self.channel.send(DriverBegan(total_steps, done))

    def update(self, name: str, step: int, values: Mapping[str, float]) -> None:
        self.channel.later(Made(step, dict(values)))

    def message(self, text: str) -> None:
        self.channel.send(Says(text))

    def doing(self, name: str, step: int, what: str, done: int = 0, of: int = 0) -> None:
        """Reports how many samples are done; what the pipeline is at, the scheduler knows."""
        if of and (now() - self.counted > COUNTED_S or (done == of and step == self.counted_step)):
            self.counted, self.counted_step = now(), step
            self.channel.send(Counted(step, done, of))


class ReportedEvents(EventSink):
    """Events of a pipeline, which the scheduler's process writes. Workers have the numbers that they have there."""

    def __init__(self, channel: SchedulerChannel, env: MultiplexedEnv) -> None:
        self.channel = channel
        self.env = env
        self.kept: list[bytes] = []
        """Lines of the log that are not sent yet."""
        self.said: Substage | None = None

    @contextmanager
    def span(
        self, substage: Substage, *, pipeline: str, step: int, worker: int = 0, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Reports a sub-stage of all actors together when it begins, too."""
        if substage == "grad":
            self.env.trained = True
        if substage != self.said:
            self.said = substage
            self.channel.later(SubstageChanged(-1, substage, 0))
        with super().span(substage, pipeline=pipeline, step=step, worker=worker, **fields) as found:
            yield found

    def emit(self, event: str, **fields: Any) -> None:
        self.kept.append(encode({"t": round(now(), 6), "event": event, **fields}))
        self.close()

    def record(
        self,
        substage: Substage,
        *,
        pipeline: str,
        step: int,
        t0: float,
        t1: float,
        worker: int = 0,
        **fields: Any,
    ) -> None:
        if substage == "tool" and worker == self.env.team("rollout")[0].rank:
            self.env.waited += t1 - t0
        where = self.env.where
        if worker >= len(where):  # a worker without a rank
            return
        if "workers" in fields:
            fields["workers"] = sorted({where[each] for each in fields["workers"] if each < len(where)})
        times = {"t": round(now(), 6), "t0": round(t0, 6), "t1": round(t1, 6)}
        which = {"substage": substage, "pipeline": pipeline, "step": step, "worker": where[worker]}
        self.kept.append(encode({"event": "substage"} | which | times | fields))
        if len(self.kept) >= MOST_EVENTS:
            self.close()

    def close(self) -> None:
        if self.kept:
            self.channel.later(Logged(b"".join(self.kept)))
            self.kept.clear()
