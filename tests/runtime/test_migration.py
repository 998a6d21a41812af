"""Samples that are taken from an engine halfway go on in another as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mixes import CALC, SUMS, assert_nothing_is_left

from jigsawrl.config import RunConfig
from jigsawrl.config.runfile import checked
from jigsawrl.engine.types import Request, SampleKey, SampleOutput
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.pipeline.calls import Inbox, ProcessHandle
from jigsawrl.pipeline.engines import Engines
from jigsawrl.pipeline.rollout import rollout_of
from jigsawrl.pipeline.trajectory import Trajectory
from jigsawrl.pipeline.warmup import prepare_base
from jigsawrl.runtime.family import fork_server
from jigsawrl.runtime.start import start_actor
from jigsawrl.scheduler.layout import Layout

pytestmark = pytest.mark.slow

UNTRAINED = {"model": {"tiny": {**SUMS["model"]["tiny"], "warmup_steps": 0}}}
RUNS: dict[str, dict[str, Any]] = {
    "single turn": {**SUMS, **UNTRAINED, "rollout": {**SUMS["rollout"], "max_tokens": 96}},
    "several turns": {**CALC, "rollout": {**CALC["rollout"], "max_tokens": 48}},
}
MOMENTS = {"at once": [0], "early": [4], "halfway": [16], "to and fro": [2, 8, 14, 20]}
"""Samples that have ended before each time that the rollout is gathered."""
TRIES = 10
"""The engines do not wait for us: on a busy machine all samples may have ended before a moment is heard of."""


class Gathering(Engines):
    """The engine with more to do is emptied at given moments. Knows what was sent where."""

    def __init__(self, handles: Sequence[ProcessHandle]) -> None:
        super().__init__(handles, handles[0].inbox)
        self.moments: list[int] = []
        self.ended = 0
        self.moved: dict[SampleKey, list[int]] = {}
        """The tokens that each sample had when it was taken elsewhere in the middle of a turn."""
        self.prefixes = 0
        """Tokens of everything that goes on where it is not cached."""

    def step(self) -> list[SampleOutput]:
        outputs = super().step()
        self.ended += len(outputs)
        while self.moments and self.moments[0] <= self.ended and self.has_unfinished():
            del self.moments[0]
            meanwhile = self.gather([0 if len(self.requests[1]) > len(self.requests[0]) else 1])
            self.ended += len(meanwhile)
            outputs += meanwhile
        return outputs

    @property
    def in_time(self) -> bool:
        """Whether each moment came before all samples had ended, and found some halfway."""
        return not self.moments and self.prefixes > 0

    def _send(self, number: int, request: Request) -> None:
        partial = request.partial.token_ids if request.partial else []
        if partial:
            self.moved[request.keys[0]] = list(partial)
        if self.cached.get(request.keys[0], number) != number:
            self.prefixes += len(request.prompt_token_ids) + len(partial)
        super()._send(number, request)


@dataclass(frozen=True)
class Made:
    trajectories: list[Trajectory]
    tokens: int
    """Through any of the engines."""
    engines: Gathering


@dataclass(frozen=True)
class Actors:
    config: RunConfig
    base: Path
    handles: list[ProcessHandle]

    def roll_out(self, moments: Sequence[int]) -> Made:
        for handle in self.handles:
            handle.call("sync_weights", 0)  # forgets what is cached
        engines = Gathering(self.handles)
        engines.moments = list(moments)
        tokenizer = load_tokenizer(self.base, False)
        with closing(engines), closing(rollout_of(self.config, tokenizer, engines, 512)) as rollout:
            trajectories = rollout.run(range(8), 0)
        spans = [span for handle in self.handles for span in handle.call("end_rollout")]
        assert not engines.has_unfinished()
        return Made(trajectories, sum(span.tokens for span in spans), engines)


@pytest.fixture(scope="module", params=RUNS)
def actors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    """Two of one pipeline, each in a process of its own."""
    config = checked({"name": "moved", "threads": 1, "device": "cpu", **RUNS[request.param]})
    base = prepare_base(config, tmp_path_factory.mktemp("actors"), lambda _: None)
    context = fork_server()
    handles, inbox, alone = [], Inbox(), Layout(lives=(0,), gang=(0,), rollout=(0,))
    for rank in range(2):
        ours, theirs = context.Pipe()
        arguments = (theirs, config, base, "cpu", 0, alone, "", {}, base / "share", base / f"beat{rank}")
        process = context.Process(target=start_actor, args=arguments, daemon=True)
        process.start()
        theirs.close()
        handles.append(ProcessHandle(ours, process, rank, inbox))
    for handle in handles:
        handle.call("ready")
    yield Actors(config, base, handles)
    for handle in handles:
        handle.close()
    assert_nothing_is_left(base)


def what_was_drawn(made: Made) -> list[tuple[list[int], list[float], list[int], float]]:
    return [(t.tokens, t.logprobs, t.versions, t.reward) for t in made.trajectories]


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_gathered_rollout_draws_the_same_tokens(moments: str, actors: Actors) -> None:
    stayed = actors.roll_out([])
    for _ in range(TRIES):
        moved = actors.roll_out(MOMENTS[moments])
        assert what_was_drawn(moved) == what_was_drawn(stayed)
        if moved.engines.in_time:
            break
    assert moved.engines.in_time
    for key, tokens in moved.engines.moved.items():
        (trajectory,) = [t for t in moved.trajectories if (t.prompt, t.sample) == (key.prompt, key.sample)]
        assert json.dumps(tokens)[1:-1] in json.dumps(trajectory.tokens)  # none of them was drawn anew
    assert moved.tokens - stayed.tokens <= moved.engines.prefixes
