"""The engines of a pipeline's actors, in processes of their own, as if they were one.

    Rollout --> Engines --> process 0: Actor's engine
                      +---> process 1: Actor's engine

A request goes to the engine with the fewest samples; the later turns of an episode go where its prefix is cached.
Which engine draws a token makes no difference to the token, so samples can also be taken from an engine halfway and
go on in another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from jigsawrl.engine.types import Request, SampleKey, SampleOutput
from jigsawrl.pipeline.calls import Inbox, ProcessHandle, answers

PATIENCE = 60.0
"""Seconds after which `step` returns with nothing, so that whoever waits can look around."""


class Engines:
    """A `Generation`. Requests go to the `open` ones of its engines."""

    def __init__(self, handles: Sequence[ProcessHandle], inbox: Inbox) -> None:
        self.handles = list(handles)
        self.inbox = inbox
        self.open = list(range(len(handles)))
        self.requests: list[dict[SampleKey, Request]] = [{} for _ in handles]
        """What each engine is at, by sample."""
        self.cached: dict[SampleKey, int] = {}
        """Where an episode's last turn was drawn."""
        self.woken, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.others: dict[int, Callable[[], object]] = {self.woken: lambda: os.read(self.woken, 4096)}
        """Whatever else ends a wait."""

    def add_request(self, request: Request) -> None:
        number = self.cached.get(request.keys[0])
        if number is None or number not in self.open:
            number = min(self.open, key=lambda each: (len(self.requests[each]), each))
        self._send(number, request)

    def _send(self, number: int, request: Request) -> None:
        self.handles[number].request(request)
        for key in request.keys:
            self.requests[number][key] = request
            self.cached[key] = number

    def has_unfinished(self) -> bool:
        return any(self.requests)

    def step(self) -> list[SampleOutput]:
        """Waits for samples to end in any of the engines, or for a nudge."""
        if not (outputs := self._ended()):
            self.inbox.hear(PATIENCE, self.others)
            outputs = self._ended()
        return outputs

    def _ended(self) -> list[SampleOutput]:
        outputs: list[SampleOutput] = []
        for number, handle in enumerate(self.handles):
            for output in handle.take_early():
                del self.requests[number][output.key]
                outputs.append(output)
        return outputs

    def nudge(self) -> None:
        with suppress(BlockingIOError):  # it has been nudged often enough
            os.write(self.waker, b"\0")

    def gather(self, numbers: Sequence[int]) -> list[SampleOutput]:
        """Only these engines go on: what the others are at moves to them, and only its prefix is run again.

        Returns samples that ended meanwhile.
        """
        self.open = list(numbers)
        ended: list[SampleOutput] = []
        left = [n for n, requests in enumerate(self.requests) if requests and n not in numbers]
        aborted = answers([self.handles[number].start("abort") for number in left])
        for number, outputs in zip(left, aborted, strict=True):
            asked = dict(self.requests[number])
            for output in [*self.handles[number].take_early(), *outputs]:
                del self.requests[number][output.key]
                if output.finish_reason != "abort":
                    ended.append(output)
                    continue
                request = asked[output.key]
                partial = output.generated if output.generated.token_ids else request.partial
                moved = Request(
                    request.request_id, request.prompt_token_ids, request.params, [output.key], partial
                )
                target = min(self.open, key=lambda each: (len(self.requests[each]), each))
                self._send(target, moved)
        return ended

    def forget_episodes(self) -> None:
        """A step is over: nobody comes back to its prefixes."""
        self.cached.clear()

    def close(self) -> None:
        os.close(self.woken)
        os.close(self.waker)
