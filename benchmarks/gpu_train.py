"""Milliseconds of forward and backward per 8,192 tokens on a GPU, and what part of the chip's dense rate that is.

Models of the shapes of Qwen2.5 0.5B and 1.5B with random weights in bfloat16 and float32 masters. Sequences are a
prompt of 100 to 300 tokens, which is not trained, and an answer as long as GSM8K's and MATH's were in traces, half
each, cut at 8,192 in all. The loss is the clipped surrogate with entropies measured, through the trainer as pipelines
use it: micro-batches of a token budget, gradients summed in float32, metrics read at the end. Only logits are
computed a second time on the way back.

Model FLOPs: six for each weight of a layer and token, six for each weight of the head and trained token, and twelve
for each pair of tokens that see each other and each number of a query. They do not depend on who computes them.

Beside it, on the same sequences in the same run: the same trainer by torch's operators (attention padded inside
groups of like length, logits in small chunks), and transformers with SDPA and sequences padded to the longest of a
micro-batch.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, at_least_one, claim, clean_stdout, report, say
from gpu_decode import VOCABULARY, qwen_config, random_model
from rich.console import Console
from rich.table import Table
from torch import Tensor

from jigsawrl.graph.profile import LEVELS, load_profile
from jigsawrl.model.spec import ModelSpec, spec_from_config
from jigsawrl.model.transformer import Transformer
from jigsawrl.pipeline.losses import LossInputs, LossSettings, policy_loss
from jigsawrl.trainer.batch import Batch, counted, micro_batches, onto
from jigsawrl.trainer.logprobs import chunked_logprobs, token_logprobs
from jigsawrl.trainer.optimizer import OptimizerSettings
from jigsawrl.trainer.packed import PackedAttention
from jigsawrl.trainer.trainer import Metrics, Trainer, trained_tokens

TRACES = ("gsm8k_qwen3-0.6b", "math_qwen3-4b-instruct")
LONGEST = 8192
BUDGETS = (8192, 32768)
"""Tokens of a micro-batch."""
TOKENS = 65_536
"""Of all sequences together, about."""
LOSS = LossSettings("dapo", 0.2, 0.28)


@dataclass(frozen=True, slots=True)
class Point:
    """One way through all sequences."""

    way: str
    shape: str
    budget: int
    milliseconds: float
    """Per 8,192 tokens."""
    teraflops: float
    peak_bytes: int
    first_seconds: float
    """The first time, kernels compiled."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=at_least_one, default=3, help="of which the median counts")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_train needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    torch.manual_seed(options.seed)
    shapes = ("0.5B",) if options.quick else ("0.5B", "1.5B")
    batch = trace_like(options.seed, TOKENS // 4 if options.quick else TOKENS)
    with clean_stdout() as console:
        dense = dense_rate()
        console.print(f"dense bfloat16: {dense / 1e12:.0f} TFLOP/s on {torch.cuda.get_device_name()}")
        lengths = [len(tokens) for tokens in batch.tokens]
        console.print(
            f"{len(batch):,} sequences, {sum(lengths):,} tokens, median {statistics.median(lengths):,.0f}, "
            f"longest {max(lengths):,}"
        )
        points, updates = [], {}
        for shape in shapes:
            found, updates[shape] = measure(shape, batch, options.repeats, options.quick)
            points += found
            if not options.quick:
                torch.cuda.empty_cache()
                points.append(transformers_point(shape, batch, options.repeats))
                torch.cuda.empty_cache()
        print_table(console, points, dense)
        console.print("milliseconds of an update: " + ", ".join(f"{k} {v:.1f}" for k, v in updates.items()))
        report(
            console,
            "gpu_train",
            options.seed,
            claims_of(points, dense),
            quick=options.quick,
            device=torch.cuda.get_device_name(),
            dense_rate=dense,
            sequences=lengths,
            points=[as_json(point, dense) for point in points],
            update_milliseconds=updates,
        )
    return 0


def claims_of(points: list[Point], dense: float) -> dict[str, Any]:
    """Of the largest shape, with micro-batches of 8,192 tokens."""
    at = {p.way: p for p in points if p.shape == points[-1].shape and p.budget == BUDGETS[0]}
    name = points[-1].shape.lower().replace(".", "_")
    return {
        f"vs_operators_{name}": claim(
            at["operators"].milliseconds / at["kernels"].milliseconds, at_least=1.5
        ),
        f"dense_fraction_{name}": claim(at["kernels"].teraflops * 1e12 / dense, at_least=0.55),
    }


def trace_like(seed: int, tokens: int) -> Batch:
    """Sequences with lengths from the quantiles of traces until there are so many tokens."""
    rng = random.Random(seed)
    profile = load_profile("h100-traces")
    quantiles = [np.mean(profile.workload(trace).quantiles, axis=0) for trace in TRACES]
    sequences: list[Tensor] = []
    trained: list[Tensor] = []
    while sum(map(len, sequences)) < tokens:
        prompt = rng.randint(100, 300)
        answer = round(float(np.interp(rng.random(), LEVELS, quantiles[len(sequences) % 2])))
        length = min(prompt + answer, LONGEST)
        sequences.append(torch.tensor([rng.randrange(VOCABULARY) for _ in range(length)]))
        trained.append(torch.arange(prompt, length))
    count = sum(map(len, trained))
    values = {
        "advantages": torch.tensor([rng.gauss(0, 1) for _ in range(count)], dtype=torch.float64),
        "weights": torch.full((count,), 1 / count, dtype=torch.float64),
    }
    return Batch(sequences, trained, values)


def model_flops(spec: ModelSpec, batch: Batch) -> float:
    head = spec.vocab_size * spec.hidden_size
    layers = spec.parameters - head * (1 if spec.tied else 2)
    tokens, trained = sum(map(len, batch.tokens)), sum(map(len, batch.trained))
    pairs = sum(len(each) ** 2 / 2 for each in batch.tokens)
    return 6.0 * (layers * tokens + head * trained) + 12.0 * spec.layers * spec.q_size * pairs


def dense_rate() -> float:
    """Of a large product of random numbers, the median of some."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / statistics.median(times[5:])


def measure(shape: str, batch: Batch, repeats: int, quick: bool) -> tuple[list[Point], float]:
    """With the trainer; and the milliseconds of an update."""
    model = random_model(qwen_config(shape))
    flops = model_flops(model.spec, batch)
    points = []
    trainer = Trainer(model, OptimizerSettings(lr=1e-6), BUDGETS[0])
    for budget in BUDGETS[: 1 if quick else 2]:
        trainer.micro_batch_tokens = budget
        for way, once in (
            ("kernels", lambda: trainer.forward_backward(batch, objective_of(model))),
            ("operators", lambda: by_operators(trainer, batch)),
        ):
            say(f"{shape}, micro-batches of {budget:,} tokens, {way}")
            try:
                points.append(timed(way, shape, budget, batch, flops, once, repeats))
            except torch.OutOfMemoryError:
                say("does not fit")
            for master in trainer.optimizer.masters.values():
                master.grad = None
            torch.cuda.empty_cache()
    trainer.forward_backward(batch.select([0]), objective_of(model))
    trainer.optim_step()
    times = []
    for _ in range(3):
        trainer.forward_backward(batch.select([0]), objective_of(model))
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.optim_step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return points, statistics.median(times)


def timed(
    way: str,
    shape: str,
    budget: int,
    batch: Batch,
    flops: float,
    once: Callable[[], Any],
    repeats: int,
) -> Point:
    seconds = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    tokens = sum(map(len, batch.tokens))
    peak = torch.cuda.max_memory_allocated()
    return Point(way, shape, budget, median / tokens * 8192e3, flops / median / 1e12, peak, seconds[0])


def objective_of(model: Transformer) -> Callable[[Batch, Tensor], tuple[Tensor, Metrics]]:
    def objective(micro: Batch, hidden: Tensor) -> tuple[Tensor, Metrics]:
        targets = onto(hidden.device, trained_tokens(micro))
        logprobs, entropy = token_logprobs(hidden, model.head, targets, 1.0, entropy_gradient=False)
        return loss_of(micro, logprobs, entropy)

    return objective


def loss_of(micro: Batch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
    values = {name: onto(logprobs.device, value) for name, value in micro.values.items()}
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=values["advantages"],
        weights=values["weights"],
        sequence=onto(logprobs.device, micro.sequence),
        entropy=entropy,
    )
    return policy_loss(inputs, LOSS)


def by_operators(trainer: Trainer, batch: Batch) -> None:
    model = trainer.model
    for indices in micro_batches([len(t) for t in batch.tokens], trainer.micro_batch_tokens):
        micro = batch.select(indices)
        counts = torch.tensor([len(t) for t in micro.tokens])
        tokens, positions = torch.cat(micro.tokens).cuda(), counted(counts).cuda()
        hidden = model(tokens, positions, PackedAttention(counts.tolist(), model.device))
        starts = (counts.cumsum(0) - counts).repeat_interleave(micro.lengths)
        hidden = hidden.index_select(0, (starts + torch.cat(micro.trained) - 1).cuda())
        targets = trained_tokens(micro).cuda()
        logprobs, entropy = chunked_logprobs(hidden, model.head, targets, 1.0, entropy_gradient=False)
        loss, metrics = loss_of(micro, logprobs, entropy)
        loss.backward()
        trainer.optimizer.collect()
        for value in metrics.values():
            float(value)


def transformers_point(shape: str, batch: Batch, repeats: int) -> Point:
    """Padded to 8,192 tokens a micro-batch, longest first; logits of the trained tokens alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    say(f"{shape}, transformers")
    config = AutoConfig.for_model(**qwen_config(shape))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    order = sorted(range(len(batch)), key=lambda i: -len(batch.tokens[i]))
    groups: list[list[int]] = []
    for i in order:
        if groups and len(batch.tokens[groups[-1][0]]) * (len(groups[-1]) + 1) <= BUDGETS[0]:
            groups[-1].append(i)
        else:
            groups.append([i])

    def once() -> None:
        model.zero_grad()
        for group in groups:
            micro = batch.select(group)
            width = max(map(len, micro.tokens))
            tokens, mask = torch.zeros(2, len(group), width, dtype=torch.int64)
            rows = []
            for row, (sequence, trained) in enumerate(zip(micro.tokens, micro.trained, strict=True)):
                tokens[row, : len(sequence)] = sequence
                mask[row, : len(sequence)] = 1
                rows.append(row * width + trained - 1)
            states = model.model(tokens.cuda(), attention_mask=mask.cuda()).last_hidden_state
            hidden = states.flatten(0, 1).index_select(0, torch.cat(rows).cuda())
            logprobs = model.lm_head(hidden).float().log_softmax(-1)
            with torch.no_grad():
                entropy = -(logprobs.exp() * logprobs).sum(-1)
            chosen = logprobs.gather(1, trained_tokens(micro).cuda().unsqueeze(1)).squeeze(1)
            loss, metrics = loss_of(micro, chosen, entropy)
            loss.backward()
            for value in metrics.values():
                float(value)

    flops = model_flops(spec_from_config(qwen_config(shape), Path("benchmark")), batch)
    return timed("transformers", shape, BUDGETS[0], batch, flops, once, max(1, repeats - 1))


def as_json(point: Point, dense: float) -> dict[str, Any]:
    return {
        "way": point.way,
        "shape": point.shape,
        "micro_batch_tokens": point.budget,
        "milliseconds_per_8192": point.milliseconds,
        "tokens_per_second": 8192e3 / point.milliseconds,
        "model_teraflops": point.teraflops,
        "dense_fraction": point.teraflops * 1e12 / dense,
        "peak_gigabytes": point.peak_bytes / 1e9,
        "first_seconds": point.first_seconds,
    }


def print_table(console: Console, points: list[Point], dense: float) -> None:
    table = Table(title="forward and backward")
    for column in (
        "shape",
        "micro-batch",
        "way",
        "ms per 8,192",
        "tokens/s",
        "model TFLOP/s",
        "of dense",
        "peak GB",
        "first s",
    ):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            point.shape,
            f"{point.budget:,}",
            point.way,
            f"{point.milliseconds:.1f}",
            f"{8192e3 / point.milliseconds:,.0f}",
            f"{point.teraflops:.0f}",
            f"{point.teraflops * 1e12 / dense:.0%}",
            f"{point.peak_bytes / 1e9:.1f}",
            f"{point.first_seconds:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
