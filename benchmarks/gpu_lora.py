"""Tokens a second of LoRA pipelines that share one frozen base on a GPU, against the same pipelines one by one.

A base of the shape of Qwen2.5 1.5B with random weights, and for each pipeline adapters of rank 16 on all matrices.
A pipeline's step is a rollout of 16 samples, as long as GSM8K's were in a trace (cut at 4,096 tokens), and a training
step on them: forward, backward and update of its adapters, through the trainer that pipelines use. Sharing a base is
for such pipelines, which leave most of the chip unused alone; steps of 64 samples have a claim of their own.

`serial` runs one pipeline after the other, each alone in the engine, rollout and training in turn, both with the
whole chip. Its adapters stay beside the base, as they do together, so that it draws the same samples; folded into the
base before each rollout they would cost a decode step nothing (see the table), and other samples would be drawn.
Together, all pipelines are members of one engine: one thread decodes for whoever has samples to draw, a
second one trains whoever has drawn them, on a stream of its own. Neither has priority, and neither keeps to a part of
the chip's processors: parts would get somewhat more done at once beside few sequences, and nothing beside many.

The samples are those that the pipelines draw alone, as the tests show; here their lengths are forced, so both sides
do the same work. All pipelines go through the same steps' lengths, each beginning with another step. So all have as
much to do, and the serial time of any is that of those measured.

Beside it: where the time goes, and what adapters cost: milliseconds of a decode step without any and with those of 1,
4 and 8 pipelines, spread over the same number of sequences.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from common import CORES, arguments, at_least_one, claim, clean_stdout, figure, report, say
from gpu_decode import NoTokenizer, copy_bandwidth, qwen_config, random_model
from rich.console import Console
from rich.table import Table
from torch import Tensor

from jigsawrl.engine.sequence import Owner, Sequence
from jigsawrl.engine.shared import Member, SharedEngine
from jigsawrl.engine.types import Generated, Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.graph.profile import LEVELS, load_profile
from jigsawrl.model.lora import TARGETS, adapters_on, add_lora, lora_state, share_base
from jigsawrl.model.transformer import Transformer
from jigsawrl.pipeline.losses import LossInputs, LossSettings, policy_loss
from jigsawrl.runtime.shared_actor import SWITCH_S
from jigsawrl.runtime.shares import without_gaps
from jigsawrl.trainer.batch import Batch, onto, repeated
from jigsawrl.trainer.logprobs import token_logprobs
from jigsawrl.trainer.optimizer import OptimizerSettings
from jigsawrl.trainer.trainer import Metrics, Trainer, trained_tokens

SHAPE, RANK, TARGET = "1.5B", 16, 3.0
TRACE, CAP, PROMPT = "gsm8k_qwen3-4b-instruct", 4096, 83
STEPS = {16: 12, 64: 3}
"""Of each pipeline, by samples of a step."""
CLAIMED = 16
"""Samples of the steps that `vs_serial_4` is about."""
MICRO_BATCH = 32_768
"""A step's samples at once: two halves keep the host twice as busy."""
LOSS = LossSettings("dapo", 0.2, 0.28)
SIZE = 16
"""Tokens of a cache block."""
ADAPTERS = (1, 4, 8)
"""Of so many pipelines, to see what they cost."""
PARTS_OF_CUTS = 4
"""Processes that compile attention."""
WARM = 400
"""Tokens at most of samples that only warm up."""


@dataclass(frozen=True, slots=True)
class Work:
    """What each pipeline has to do."""

    samples: int
    steps: int


@dataclass(slots=True)
class Spent:
    """Seconds of one run, and how many of them someone decoded, someone trained, and both at once."""

    tokens: int = 0
    total: float = 0.0
    decoding: list[tuple[float, float]] = field(default_factory=list)
    training: list[tuple[float, float]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.total

    def shares(self) -> dict[str, float]:
        decoding, training = (sum(e - s for s, e in each) for each in (self.decoding, self.training))
        both = sum(
            max(0.0, min(end, other_end) - max(start, other))
            for start, end in self.training
            for other, other_end in self.decoding
        )
        return {
            name: x / self.total for name, x in (("decode", decoding), ("train", training), ("both", both))
        }


@cache
def traced_quantiles() -> tuple[tuple[float, ...], ...]:
    """Of the trace's lengths, for each step that was logged."""
    return load_profile("h100-traces").workload(TRACE).quantiles


class Pipeline:
    """One LoRA pipeline on a base that it shares; its prompts and its samples' lengths are drawn, not read."""

    def __init__(self, base: Transformer, number: int, seed: int) -> None:
        self.number, self.seed = number, seed
        self.name = f"pipeline {number}"
        self.model = share_base(base)
        add_lora(self.model, RANK, 2.0 * RANK, set(TARGETS), seed=seed + number)
        with torch.no_grad():
            for name, tensor in lora_state(self.model).items():
                if "lora_B" in name:
                    tensor.normal_(std=0.002)
        self.trainer = Trainer(self.model, OptimizerSettings(lr=1e-5), MICRO_BATCH)

    def requests(self, work: Work, step: int, longest: int = CAP) -> list[Request]:
        """Of one of the steps, the first of which is another for each pipeline."""
        number = (step + self.number) % work.steps
        prompts = random.Random(f"{self.name} {step}")
        rng = np.random.default_rng((self.seed, number))
        quantiles = traced_quantiles()
        lengths = np.interp(rng.random(work.samples), LEVELS, quantiles[number % len(quantiles)])
        return [
            Request(
                str(i),
                [prompts.randrange(1000) for _ in range(PROMPT)],
                SamplingParams(max_tokens=max(1, min(longest, round(length))), ignore_eos=True),
                [SampleKey(self.seed, self.name, step, i, 0)],
            )
            for i, length in enumerate(lengths)
        ]

    def train(self, outputs: list[SampleOutput], requests: list[Request]) -> None:
        """One update on what was drawn; the device has done it when this returns."""
        prompts = {request.request_id: request.prompt_token_ids for request in requests}
        tokens = [torch.tensor(prompts[o.request_id] + o.generated.token_ids) for o in outputs]
        trained = [torch.arange(PROMPT, len(each)) for each in tokens]
        count = sum(map(len, trained))
        advantages = torch.tensor([random.Random(o.request_id).gauss(0, 1) for o in outputs])
        batch = Batch(
            tokens,
            trained,
            {
                "advantages": repeated(advantages, torch.tensor([len(each) for each in trained])),
                "weights": torch.full((count,), 1 / count),
                "engine_logprobs": torch.tensor([x for o in outputs for x in o.generated.logprobs]),
            },
        )
        self.trainer.forward_backward(batch, self._objective)
        self.trainer.optim_step()
        torch.cuda.current_stream().synchronize()

    def _objective(self, micro: Batch, hidden: Tensor) -> tuple[Tensor, Metrics]:
        device = hidden.device
        values = {name: onto(device, value) for name, value in micro.values.items()}
        targets = onto(device, trained_tokens(micro))
        logprobs, entropy = token_logprobs(hidden, self.model.head, targets, 1.0, entropy_gradient=False)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            advantages=values["advantages"],
            weights=values["weights"],
            sequence=onto(device, micro.sequence),
            entropy=entropy,
            engine_logprobs=values["engine_logprobs"],
        )
        return policy_loss(inputs, LOSS)


class Places:
    """Streams for decoding, and for training beside it."""

    def __init__(self) -> None:
        self.decoding, self.training = torch.cuda.Stream(), torch.cuda.Stream()


def make_engine(base: Transformer, members: int, seats: int) -> SharedEngine:
    """With room for so many members, and kernels compiled for so many sequences."""
    return SharedEngine(
        base,
        num_blocks=max(members, 4) * max(STEPS) * (PROMPT + 1200) // SIZE,
        block_size=SIZE,
        max_num_seqs=seats,
        max_num_batched_tokens=8192,
    )


def compile_kernels(sizes: tuple[int, ...], seats: int) -> None:
    """Into Triton's cache, each kind by a process of its own: one after the other takes minutes."""
    kinds = {*sizes, 0, 1, *(number for number in ADAPTERS if number <= max(sizes))}
    batches = [batch for batch in (8, 16, 32, 64, 96, 160, 288) if batch <= seats]
    tasks = [f"step {members} {batch}" for members in sorted(kinds) for batch in batches]
    tasks += [*(f"cuts {part}" for part in range(PARTS_OF_CUTS)), "train"]
    command = [sys.executable, __file__, "--seats", str(seats), "--compile"]
    with ThreadPoolExecutor(CORES) as pool:
        for done in pool.map(lambda task: subprocess.run([*command, task], capture_output=True), tasks):
            if done.returncode:
                raise RuntimeError(done.stderr.decode()[-2000:])


def compile_side(task: str, seats: int) -> None:
    """Runs one kind of step, of a single layer."""
    from jigsawrl.engine.cuda.cuts import Cut, cut_for
    from jigsawrl.engine.cuda.decoder import LADDER
    from jigsawrl.engine.cuda.step import PART_SLOTS

    base = random_model({**qwen_config(SHAPE), "num_hidden_layers": 1}).requires_grad_(False)
    kind, *numbers = task.split()
    if kind == "train":
        pipeline = Pipeline(base, 0, seed=0)
        requests = pipeline.requests(Work(max(STEPS), 1), 0, WARM)
        drawn = Generated([1] * PROMPT, [-1.0] * PROMPT, [0] * PROMPT)
        pipeline.train([SampleOutput(r.request_id, r.keys[0], drawn, "length") for r in requests], requests)
        return
    engine = make_engine(base, 1, seats)
    decoder = engine.runner.decoder
    assert decoder is not None
    if kind == "step":
        members, batch = map(int, numbers)
        steps = [(batch, Cut(64, 1, 64, 3, 2))]
        for pipeline in [Pipeline(base, number, seed=0) for number in range(members)]:
            engine.join(pipeline.name, pipeline.model, NoTokenizer())
    else:
        contexts = [
            (slots, [longest, *[longest // part] * (slots - 1)])
            for slots in (size for size in LADDER if size <= seats)
            for longest in (90, 150, 300, 600, 1200, 2000, 4000)
            for part in (1, 2, 4)
        ]
        streams = decoder.step.streams_contexts
        cuts = {
            cut_for(each, base.spec, decoder.processors, PART_SLOTS // slots, streams)
            for slots, each in contexts
        }
        steps = [(8, cut) for cut in sorted(cuts, key=str)[int(numbers[0]) :: PARTS_OF_CUTS]]
    with torch.inference_mode():
        for batch, cut in steps:
            decoder.step.launch(batch, cut, choose=True)
    torch.cuda.synchronize()


def nothing_else() -> bool:
    """Is to be seen to inside of an engine's step, as in the process that pipelines of single turns share."""
    return False


def serial(member: Member, pipeline: Pipeline, places: Places, work: Work) -> Spent:
    """One pipeline, rollout and training in turn."""
    spent = Spent()
    asked = [pipeline.requests(work, step) for step in range(work.steps)]
    torch.cuda.synchronize()
    with torch.cuda.stream(places.decoding):
        began = time.perf_counter()
        for step, requests in enumerate(asked):
            started = time.perf_counter()
            for request in requests:
                member.add_request(request)
            outputs: list[SampleOutput] = []
            while member.has_unfinished():
                outputs += member.shared.step(nothing_else).get(member.name, [])
            drawn = time.perf_counter()
            pipeline.train(outputs, requests)
            member.update_weights(None, step + 1)
            spent.tokens += sum(len(o.generated.token_ids) for o in outputs)
            spent.decoding.append((started, drawn))
            spent.training.append((drawn, time.perf_counter()))
        spent.total = time.perf_counter() - began
    return spent


@dataclass(slots=True)
class Turn:
    """A pipeline's step on its way between the two threads."""

    pipeline: Pipeline
    member: Member
    asked: list[list[Request]]
    """For in each step; drawn before, as a pipeline's driver does that beside its engine."""
    step: int = -1
    outputs: list[SampleOutput] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        return self.asked[self.step]


class Together:
    """Pipelines in one engine. This thread decodes; a second one trains and hands pipelines back."""

    def __init__(
        self, engine: SharedEngine, members: list[tuple[Pipeline, Member]], places: Places, work: Work
    ) -> None:
        self.engine, self.places, self.work = engine, places, work
        self.to_train: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self.trained: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self.failed: BaseException | None = None
        self.spent = Spent()
        self.turns = {
            pipeline.name: Turn(
                pipeline, member, [pipeline.requests(work, step) for step in range(work.steps)]
            )
            for pipeline, member in members
        }

    def run(self) -> Spent:
        torch.cuda.synchronize()
        trainer = threading.Thread(target=self._train, daemon=True)
        trainer.start()
        began = time.perf_counter()
        with torch.cuda.stream(self.places.decoding):
            for turn in self.turns.values():
                self._begin(turn)
            self._decode_until_all_are_trained()
        self.spent.total = time.perf_counter() - began
        self.to_train.put(None)
        trainer.join()
        return self.spent

    def _decode_until_all_are_trained(self) -> None:
        left = len(self.turns)
        while left:
            while left and not (self.trained.empty() and self.engine.has_unfinished()):
                turn = self.trained.get()
                if self.failed is not None:
                    raise self.failed
                if turn.step + 1 < self.work.steps:
                    self._begin(turn)
                else:
                    left -= 1
            if left:
                self._decode()

    def _begin(self, turn: Turn) -> None:
        """The next step of a pipeline, with the weights that it has now."""
        turn.step += 1
        turn.member.update_weights(None, turn.step)
        turn.outputs = []
        for request in turn.requests:
            turn.member.add_request(request)

    def _decode(self) -> None:
        started = time.perf_counter()
        for name, ended in self.engine.step(nothing_else).items():
            turn = self.turns[name]
            turn.outputs += ended
            self.spent.tokens += sum(len(o.generated.token_ids) for o in ended)
            if len(turn.outputs) == self.work.samples:
                self.to_train.put(turn)
        self.spent.decoding.append((started, time.perf_counter()))

    def _train(self) -> None:
        with torch.cuda.stream(self.places.training):
            while (turn := self.to_train.get()) is not None:
                started = time.perf_counter()
                try:
                    turn.pipeline.train(turn.outputs, turn.requests)
                except BaseException as error:
                    self.failed = error
                self.spent.training.append((started, time.perf_counter()))
                self.trained.put(turn)
                self.engine.nudge()


def adapter_cost(
    base: Transformer, pipelines: list[Pipeline], batches: list[int], seats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of a decode step by sequences and by how many pipelines' adapters they have."""
    context, each = 600, -(-800 // SIZE)
    engine = SharedEngine(base, num_blocks=max(batches) * each, max_num_seqs=seats)
    decoder = engine.runner.decoder
    assert decoder is not None
    rounds: dict[tuple[int, int], list[float]] = {}
    for number in (0, *ADAPTERS):
        if number > len(pipelines):
            continue
        for pipeline in pipelines[len(decoder.adapters) : number]:
            decoder.adapt(1 + pipeline.number, adapters_on(base, pipeline.model))
        for batch in batches:
            owners = [Owner(1 + i) for i in range(number)] or [Owner()]
            sequences = [
                Sequence(
                    "", SampleKey(0, "", 0, i, 0), SamplingParams(max_tokens=CAP), [i] * context, context,
                    Generated(), SampleKey(0, "", 0, i, 0).hashed(), i, owners[i % len(owners)],
                    computed=context - 1, blocks=list(range(i * each, (i + 1) * each)), row=i,
                )
                for i in range(batch)
            ]  # fmt: skip
            for _ in range(4):
                decoder.known = [None] * len(decoder.known)
                decoder.enter(sequences)
                cut = decoder.cut(sequences, 0)
                decoder.launch(sequences, 0, cut).read()
                launched: deque[Any] = deque()
                started = time.perf_counter()
                for _ in range(50):
                    launched.append(decoder.launch(sequences, 0, cut))
                    if len(launched) > 1:
                        launched.popleft().read()
                launched.popleft().read()
                rounds.setdefault((batch, number), []).append((time.perf_counter() - started) / 50)
    return {
        str(batch): {str(n): statistics.median(t[1:]) * 1e3 for (b, n), t in rounds.items() if b == batch}
        for batch in batches
    }


@contextmanager
def quick_to_switch() -> Iterator[None]:
    """As in the process that pipelines share."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--samples", type=at_least_one, action="append", help="of a pipeline's step; 16 and 64"
    )
    parser.add_argument("--steps", type=at_least_one, help="of each pipeline; 2 with --quick")
    parser.add_argument(
        "--only", type=at_least_one, action="append", help="measure so many pipelines together"
    )
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--seats", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_lora needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    # As in the process that pipelines share; torch reads it with the first allocation.
    os.environ.update(without_gaps())
    if options.compile:
        compile_side(options.compile, options.seats)
        return 0
    sizes = tuple(options.only or ((4,) if options.quick else (1, 2, 4, 8)))
    works = [
        Work(samples, options.steps or (2 if options.quick else STEPS.get(samples, min(STEPS.values()))))
        for samples in options.samples or STEPS
    ]
    seats = max(4, *sizes) * max(work.samples for work in works)
    torch.manual_seed(options.seed)
    with clean_stdout() as console, quick_to_switch():
        bandwidth = copy_bandwidth()
        base = random_model(qwen_config(SHAPE)).requires_grad_(False)
        pipelines = [Pipeline(base, number, options.seed) for number in range(max(sizes))]
        places = Places()
        say("compiling")
        compile_kernels(sizes, seats)
        say("what adapters cost")
        cost = adapter_cost(base, pipelines, [batch for batch in (16, 64, 256) if batch <= seats], seats)
        print_cost(console, cost)
        measured: dict[Work, Sides] = {}
        for work in works:
            measured[work] = measure(base, pipelines, places, sizes, work, seats)
            print_runs(console, work, measured[work])
        claims = {
            "vs_serial_4" + ("" if work.samples == CLAIMED else f"_of_{work.samples}"): claim(
                sides.ratios[4], at_least=TARGET
            )
            for work, sides in measured.items()
            if 4 in sides.ratios
        }
        report(
            console,
            "gpu_lora",
            options.seed,
            claims,
            quick=options.quick,
            device=torch.cuda.get_device_name(),
            copy_bandwidth=bandwidth,
            samples={str(work.samples): as_json(work, sides) for work, sides in measured.items()},
            adapter_milliseconds=cost,
        )
    return 0


@dataclass(slots=True)
class Sides:
    """Runs of pipelines alone, and of so many together."""

    alone: list[Spent] = field(default_factory=list)
    together: dict[int, Spent] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[int, float]:
        speed = sum(each.tokens for each in self.alone) / sum(each.total for each in self.alone)
        return {size: spent.speed / speed for size, spent in self.together.items()}


def measure(
    base: Transformer,
    pipelines: list[Pipeline],
    places: Places,
    sizes: tuple[int, ...],
    work: Work,
    seats: int,
) -> Sides:
    """Serial runs before and after the shared ones. Each is run twice and counts the second time: by then an engine
    has the graphs that it needs. Making them takes as long as a step, and happens once, however many steps follow."""
    sides = Sides()
    say(f"{work.samples} samples: alone")
    sides.alone.append(measured_alone(base, pipelines[0], places, work, seats))
    for size in sizes:
        say(f"{work.samples} samples: {size} together")
        engine = make_engine(base, size, seats)
        members = [(p, engine.join(p.name, p.model, NoTokenizer())) for p in pipelines[:size]]
        for _ in range(2):
            sides.together[size] = Together(engine, members, places, work).run()
        for _, member in members:
            member.close()
    say(f"{work.samples} samples: alone, again")
    sides.alone.append(measured_alone(base, pipelines[-1], places, work, seats))
    return sides


def measured_alone(base: Transformer, pipeline: Pipeline, places: Places, work: Work, seats: int) -> Spent:
    member = make_engine(base, 1, seats).join(pipeline.name, pipeline.model, NoTokenizer())
    for _ in range(2):
        spent = serial(member, pipeline, places, work)
    member.close()
    return spent


def as_json(work: Work, sides: Sides) -> dict[str, Any]:
    return {
        "steps": work.steps,
        "vs_serial": {str(size): ratio for size, ratio in sides.ratios.items()},
        "serial": [spent_json(spent) for spent in sides.alone],
        "shared": {str(size): spent_json(spent) for size, spent in sides.together.items()},
    }


def spent_json(spent: Spent) -> dict[str, float]:
    return {
        "tokens": spent.tokens,
        "seconds": spent.total,
        "tokens_per_second": spent.speed,
        **spent.shares(),
    }


def print_cost(console: Console, cost: dict[str, dict[str, float]]) -> None:
    table = Table(title="milliseconds of a decode step, 600 tokens of context")
    table.add_column("sequences", justify="right")
    for number in next(iter(cost.values())):
        table.add_column(f"adapters of {number}", justify="right")
    for batch, times in cost.items():
        table.add_row(batch, *(f"{each:.3f}" for each in times.values()))
    console.print(table)


def print_runs(console: Console, work: Work, sides: Sides) -> None:
    table = Table(
        title=f"LoRA pipelines on one {SHAPE} base, {work.steps} steps of {work.samples} samples each"
    )
    for column in ("pipelines", "tokens/s", "seconds", "decoding", "training", "both", "against serial"):
        table.add_column(column, justify="right")
    for name, spent, ratio in (
        *(("1 alone", spent, "") for spent in sides.alone),
        *((f"{size} together", spent, f"{sides.ratios[size]:.2f}") for size, spent in sides.together.items()),
    ):
        shares = (f"{share:.0%}" for share in spent.shares().values())
        table.add_row(name, figure(spent.speed), f"{spent.total:.1f}", *shares, ratio)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
