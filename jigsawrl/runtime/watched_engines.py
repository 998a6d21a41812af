"""A pipeline's engines under a scheduler, which hears how far they are and may move their samples."""

from __future__ import annotations

from collections.abc import Sequence

from jigsawrl.engine.types import Request, SampleKey, SampleOutput
from jigsawrl.pipeline.calls import Inbox, ProcessHandle
from jigsawrl.pipeline.engines import Engines
from jigsawrl.pipeline.generating import TAIL_FRACTION
from jigsawrl.runtime.channel import SchedulerChannel
from jigsawrl.runtime.messages import Gather
from jigsawrl.runtime.sample_journal import SampleJournal
from jigsawrl.scheduler.events import SubstageChanged
from jigsawrl.telemetry.events import Substage, now

BRIEF_S = 0.2
"""Seconds at one sub-stage after which the next one is reported: nobody makes use of less."""
BACK = 2
"""Times as many samples as the tail had at most with which an engine is back in the bulk: episodes come and go."""


class WatchedEngines(Engines):
    """Engines that report how far they are, and that listen to the scheduler while they generate."""

    def __init__(
        self,
        handles: Sequence[ProcessHandle],
        inbox: Inbox,
        channel: SchedulerChannel,
        returning: bool,
        journal: SampleJournal,
    ) -> None:
        super().__init__(handles, inbox)
        self.channel = channel
        self.journal = journal
        self.asked: dict[SampleKey, Request] = {}
        """What is to be sampled, by sample."""
        self.known: list[SampleOutput] = []
        """Samples that ended before this process began."""
        self.reports = 0
        """Reports of the engines that the journal has heard of."""
        self.returning = returning
        """Whether an engine without samples may get some again: episodes come back from their tools."""
        self.others[channel.pipe.fileno()] = lambda: None  # it is read below
        self.begin(self.open, prompt=True)

    def begin(self, engines: Sequence[int], prompt: bool) -> None:
        """A phase begins on these engines."""
        self.open = list(engines)
        self.tell = self.channel.send if prompt else self.channel.later
        """Reports sub-stages, at once or with other messages."""
        self.lengths: dict[SampleKey, int] = {}
        """Tokens of every sample of the phase, all turns together."""
        self.turns = 0
        """Turns of all samples of the phase."""
        self.most = [0] * len(self.handles)
        """Samples that each engine had at once, at most."""
        self.said: list[Substage | None] = [None] * len(self.handles)
        self.since = [now()] * len(self.handles)
        """When each of these was reported."""
        self.journal.begin()

    def add_request(self, request: Request) -> None:
        known, requests = self.journal.answered(request)
        self.known += known
        for each in requests:
            self.asked.update(dict.fromkeys(each.keys, each))
            super().add_request(each)

    def has_unfinished(self) -> bool:
        return bool(self.known) or super().has_unfinished()

    def step(self) -> list[SampleOutput]:
        self._say()
        self.channel.catch_up()
        outputs, self.known = self.known, []
        outputs = outputs or self._sampled()
        self.turns += len(outputs)
        for output in outputs:
            made = self.lengths.get(output.key, 0)
            self.lengths[output.key] = made + len(output.generated.token_ids)
        self._say()
        return outputs

    def _sampled(self) -> list[SampleOutput]:
        """By the engines, at last."""
        outputs = super().step()
        while self.channel.waiting():
            message = self.channel.receive()
            if isinstance(message, Gather):
                outputs += self.gather(message.engines)
        for output in outputs:
            self.journal.note(self.asked.pop(output.key), output)
        if self.journal.is_due():
            self._keep()
        return outputs

    def _keep(self) -> None:
        """What ended since the last time, and what is under way if anything was said of it since."""
        reports = sum(handle.reports for handle in self.handles)
        said = [each for handle in self.handles for each in handle.running if each.key in self.asked]
        news, self.reports = reports > self.reports, reports
        self.journal.keep([(self.asked[each.key], each) for each in said] if news else [])

    def _say(self) -> None:
        for engine, requests in enumerate(self.requests):
            samples = len(requests)
            self.most[engine] = max(self.most[engine], samples)
            few = self.most[engine] * TAIL_FRACTION * (BACK if self.said[engine] == "tail" else 1)
            at: Substage | None = "decode" if samples > few else "tail"
            if samples == 0:
                at = "tool" if self.returning and engine in self.open else None
            brief = now() - self.since[engine] < BRIEF_S
            if at != self.said[engine] and self.most[engine] and not brief:
                self.said[engine], self.since[engine] = at, now()
                self.tell(SubstageChanged(engine, at, samples))
