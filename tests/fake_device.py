"""What an engine on a GPU decodes with, on a CPU: steps that are done before the engine has read the last ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from jigsawrl.engine.sampler import keyed_uniforms, sample
from jigsawrl.engine.scheduler import Scheduled
from jigsawrl.engine.sequence import Sequence
from jigsawrl.engine.shared import SharedEngine


@dataclass
class Step:
    device: FakeDevice
    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[float]

    def read(self) -> tuple[list[int], list[float]]:
        assert self.device.in_flight.popleft() is self, "steps are read in their order"
        for sequence in self.sequences:
            self.device.unread[sequence].popleft()
        return self.tokens, self.logprobs


class FakeDevice:
    """Takes the place of an engine's decoder. A step knows all tokens of its sequences, read or not."""

    def __init__(self, engine: SharedEngine) -> None:
        self.engine = engine
        self.in_flight: deque[Step] = deque()
        self.unread: dict[Sequence, deque[int]] = {}
        self.bursts: list[int] = []
        """Steps of each."""
        runner: Any = engine.runner
        runner._packed = lambda decoder, *given: runner._eager(*given)
        runner.decoder = self

    def enter(self, sequences: list[Sequence]) -> None:
        assert not self.in_flight, "the last burst is over"
        self.bursts.append(0)

    def cut(self, sequences: list[Sequence], ahead: int) -> None:
        assert ahead == len(self.in_flight)

    def launch(self, sequences: list[Sequence], ahead: int, cut: None) -> Step:
        assert ahead == len(self.in_flight) <= 1
        self.bursts[-1] += 1
        known = [self._as_known(sequence) for sequence in sequences]
        uniforms = keyed_uniforms(
            np.array([s.random_key for s in known], dtype=np.uint64),
            np.array([len(s.tokens) for s in known], dtype=np.int64),
        )
        logits = self.engine.runner.run([Scheduled(each, 1) for each in known])
        tokens, logprobs = sample(logits, [s.params for s in known], torch.from_numpy(uniforms))
        step = Step(self, sequences, tokens.tolist(), logprobs.tolist())
        for sequence, token in zip(sequences, step.tokens, strict=True):
            self.unread[sequence].append(token)
        self.in_flight.append(step)
        return step

    def _as_known(self, sequence: Sequence) -> Sequence:
        tokens = [*sequence.tokens, *self.unread.setdefault(sequence, deque())]
        place = len(tokens) - 1
        assert place < len(sequence.blocks) * self.engine.blocks.block_size, "there is a block for its token"
        return replace(sequence, tokens=tokens, computed=place, forks=[])
