"""What an actor on a GPU does before anything of it is measured: a little of everything, and graphs of all its steps.

Which steps these are is written down while a run that does not count does the work for the first time: the shape of
every decode step, by the pipelines of a process. The actors of later runs have a graph of each, as alone, as in
company and as in company on half of the GPU, before they begin. What is captured all the same is written down too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jigsawrl.engine.shared import Member
from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.pipeline.actor import Actor
from jigsawrl.trainer.batch import Batch

if TYPE_CHECKING:
    from jigsawrl.engine.cuda.cuts import Cut
    from jigsawrl.engine.cuda.decoder import Decoder
    from jigsawrl.engine.sequence import Sequence

LONG = (700, 2000, 5000)
"""Tokens of prompts that an actor warms up with."""
ROUNDS = itertools.count()
"""Numbers of what an actor warms up with, so that no prompt comes twice: what is cached would not be read again."""
CAPTURED = "captured"
"""The file in which a line stands for each graph that was captured after the warm-up."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Of the decode steps of a process, in a file: sequences, and how their contexts are cut."""

    path: Path

    def add(self, slots: int, cut: Cut) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([slots, asdict(cut)]) + "\n")

    def known(self) -> list[tuple[int, Cut]]:
        from jigsawrl.engine.cuda.cuts import Cut

        if not self.path.exists():
            return []
        lines = map(json.loads, self.path.read_text().splitlines())
        return [(slots, Cut(**cut)) for slots, cut in lines]


def warm_up(
    actor: Actor,
    samples: int,
    training: AbstractContextManager[None],
    shapes: Shapes,
    first: bool,
    confined: bool,
) -> None:
    """`training`: what it is done within; `first`: this run does not count; `confined`: rollouts may come to be."""
    if first:
        take_turns(shapes)
    roll_out(actor, [*batches(actor, samples), *prompts(actor)], (False, True))
    make_graphs(actor, shapes, (False, True))
    if confined and (part := half_of(actor.device)) is not None:
        with part:
            roll_out(actor, prompts(actor), (True, True))
            make_graphs(actor, shapes, (True,))
    with training:
        train_a_little(actor)
    actor.end_rollout()
    count_captures(shapes.path.with_name(CAPTURED))


def take_turns(shapes: Shapes) -> None:
    """From now on, every decode step of this process leaves room to others if the one before it did not, and is
    written down if it is the first of its shape."""
    from jigsawrl.engine.cuda.decoder import Decoder, rung

    seen: set[tuple[int, Cut]] = set()

    def launched(self: Decoder, sequences: list[Sequence], ahead: int, cut: Cut) -> Any:
        self.yields = not self.yields
        shape = rung(len(sequences)), cut
        if shape not in seen:
            seen.add(shape)
            shapes.add(*shape)
        return launch(self, sequences, ahead, cut)

    launch = Decoder.launch
    Decoder.launch = launched  # type: ignore[method-assign]


def half_of(device: torch.device) -> AbstractContextManager[None] | None:
    """That confined rollouts keep to; None where a GPU cannot be divided."""
    from jigsawrl.runtime.green import NoParts, parts_of
    from jigsawrl.runtime.shares import half

    try:
        parts = parts_of(device.index or 0)
    except NoParts:
        return None
    return parts.on(half(tuple(range(parts.units))))


Round = list[tuple[int, int]]
"""Requests at once: tokens of the prompt, and of the answer."""


def batches(actor: Actor, samples: int) -> list[Round]:
    """Of every size, and few sequences with long contexts."""
    rounds = [[(64, 8 + 2 * each) for each in range(samples)]]
    return rounds + [
        [(length, 4 * each) for each in range(1, 9)] for length in LONG if length < actor.room // 2
    ]


def prompts(actor: Actor) -> list[Round]:
    """Of every size that has a graph."""
    from jigsawrl.engine.cuda.prefill import LADDER

    return [[(length, 1)] for length in LADDER if length < actor.room // 2]


def roll_out(actor: Actor, rounds: list[Round], ways: tuple[bool, bool]) -> None:
    """Each of them twice, in both ways to yield or not."""
    for asked, yields in itertools.product(rounds, ways):
        number = next(ROUNDS)
        actor.engine.yields = yields
        for each, (prompt, length) in enumerate(asked):
            key = SampleKey(0, "warm-up", number, each, 0)
            tokens = [number + 2, *((each * 13 + place) % 499 + 2 for place in range(prompt - 1))]
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            actor.engine.add_request(Request(f"{number}/{each}", tokens, params, [key]))
        while actor.engine.has_unfinished():
            actor.engine.step()


@torch.inference_mode()
def make_graphs(actor: Actor, shapes: Shapes, ways: tuple[bool, ...]) -> None:
    """Of all steps that are known, without any sequence. The first of a shape runs, the second is captured."""
    engine = actor.engine
    decoder = engine.shared.runner.decoder if isinstance(engine, Member) else None
    if decoder is None:
        return
    decoder.step.inputs.fill_(decoder.rows.idle)
    decoder.sent = []
    for (slots, cut), yields, _ in itertools.product(shapes.known(), ways, range(2)):
        step = slots, cut, True, yields
        decoder.launches += 1
        decoder.graphs.run(step, lambda step=step: decoder.step.launch(*step))
    torch.cuda.synchronize()


def train_a_little(actor: Actor) -> None:
    """With weights of zero nothing changes."""
    lengths = [actor.micro_batch_tokens // part for part in (1, 2, 4, 8, 16, 32, 64)]
    tokens = [torch.arange(length) % 499 + 2 for length in lengths]
    trained = [torch.arange(1, length) for length in lengths]
    flat = torch.zeros(sum(map(len, trained)))
    values = {"advantages": flat, "weights": flat, "engine_logprobs": flat}
    for _ in range(2):
        actor.forward_backward(Batch(tokens, trained, values))
        actor.optim_step()


def count_captures(path: Path) -> None:
    """From now on."""
    from jigsawrl.engine.cuda.graphs import Graphs

    def noted(self: Graphs, launch: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        with path.open("a") as file:
            file.write("\n")
        return captured(self, launch, stream)

    captured = Graphs._captured
    Graphs._captured = noted  # type: ignore[method-assign]


def captured_graphs(folder: Path) -> int:
    """So far, after warm-ups."""
    path = folder / CAPTURED
    return path.read_text().count("\n") if path.exists() else 0
