"""Milliseconds per decode step on a GPU, against the bytes that a step must move.

Models of the shapes of Qwen2.5 0.5B, 1.5B and 7B with random weights in bfloat16; sequences with random tokens in
the cache, in shuffled blocks. A step is all that the engine does for one token of every sequence: the slots to the
device, the graph, sampling, tokens and log-probs back to the host. The floor is every weight and every cached key
and value read once, at the bandwidth of a large copy in the same run. `floor_fraction` is the floor's time over ours.

Beside it: uneven contexts, as samples have that began at different times (log-normal, the longest several times the
mean); transformers' `generate` with a static cache (compiled, as it does by itself) and its continuous batching with
the 1.5B shape, as many points as fit into their time; our engine over 256 requests with lengths from a log-normal,
with these kernels and without; and what vLLM 0.24 was measured to take on an H200 with about 1,000 tokens of context.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import arguments, claim, clean_stdout, figure, natural, report, say
from rich.console import Console
from rich.table import Table

from jigsawrl.engine.attention import KVCache
from jigsawrl.engine.engine import Engine
from jigsawrl.engine.sequence import Sequence
from jigsawrl.engine.types import Generated, Request, SampleKey, SamplingParams
from jigsawrl.model.folder import fill_buffers
from jigsawrl.model.spec import ModelSpec, spec_from_config
from jigsawrl.model.transformer import Transformer

SHAPES = {
    "0.5B": (896, 24, 14, 2, 4864, True),
    "1.5B": (1536, 28, 12, 2, 8960, True),
    "7B": (3584, 28, 28, 4, 18944, False),
}
"""Hidden size, layers, heads, key heads, inner size, tied embeddings."""
VOCABULARY, LONGEST = 151_936, 32_768
VLLM = {
    "1.5B": {1: 2.04, 4: 2.12, 16: 2.23, 64: 2.82, 128: 3.61, 256: 5.60},
    "7B": {1: 4.78, 4: 4.87, 16: 5.13, 64: 5.98, 128: 7.31, 256: 11.61},
}
CLAIMS = {"7B": 0.7, "1.5B": 0.6}
SIZE = 16
"""Tokens of a cache block."""
NEAR, FAR = 1_000, (4_000, 16_000)
"""Tokens of context: at every batch size, and at some."""
UNEVEN, SPREAD = (4, 16, 64, 256), 0.8
"""Sequences whose contexts differ, and the deviation of their logarithms."""
CACHE_BYTES = 90e9


@dataclass(frozen=True, slots=True)
class Point:
    """Decoding `batch` sequences of a mean and a longest context."""

    batch: int
    context: int
    longest: int
    milliseconds: float
    floor: float

    @property
    def even(self) -> bool:
        """What the claims are about; contexts that differ are shown beside them."""
        return self.context == self.longest

    @property
    def near(self) -> bool:
        """What vLLM's figures are about."""
        return self.even and self.context == NEAR

    @property
    def fraction(self) -> float:
        return self.floor / self.milliseconds


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=SHAPES, action="append", help="measure this shape alone")
    parser.add_argument(
        "--transformers-seconds",
        type=natural,
        default=240,
        help="what transformers gets for its points; 0 leaves it out",
    )
    parser.add_argument("--transformers-side", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_decode needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    if options.transformers_side:
        transformers_side(options.transformers_side)
        return 0
    from jigsawrl.engine.cuda.decoder import LADDER

    torch.manual_seed(options.seed)
    batches = (1, 16, 64) if options.quick else LADDER
    with clean_stdout() as console:
        bandwidth = copy_bandwidth()
        console.print(f"copy bandwidth: {bandwidth / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
        points: dict[str, list[Point]] = {}
        beside: dict[str, Any] = {}
        for name in options.only or SHAPES:
            model = random_model(qwen_config(name))
            cases = [[NEAR] * batch for batch in batches]
            if not options.quick:
                cases += [[context] * batch for context in FAR for batch in (1, 4, 16, 64, 256)]
            cases += [uneven(batch, options.seed) for batch in ((64,) if options.quick else UNEVEN)]
            points[name] = measure(model, cases, bandwidth, options.seed)
            print_table(console, name, points[name])
            if name == "1.5B":
                beside["requests"] = requests_per_path(model, options.seed, options.quick)
                console.print(f"256 requests, tokens/s: {shown(beside['requests'])}")
            del model
            torch.cuda.empty_cache()
        if options.transformers_seconds and not options.quick:
            beside["transformers"] = transformers_steps("1.5B", options.transformers_seconds)
            for side, steps in beside["transformers"].items():
                console.print(f"1.5B, transformers, {side}: ms per step by sequences: {shown(steps)}")
        report(
            console,
            "gpu_decode",
            options.seed,
            claims_of(points),
            quick=options.quick,
            device=torch.cuda.get_device_name(),
            copy_bandwidth=bandwidth,
            steps={name: [as_json(point) for point in each] for name, each in points.items()},
            vllm_0_24=VLLM,
            ahead_of_vllm=ahead_of_vllm(points),
            **beside,
        )
    return 0


def claims_of(points: dict[str, list[Point]]) -> dict[str, Any]:
    claims = {}
    for name, target in CLAIMS.items():
        few = [p.fraction for p in points.get(name, []) if p.even and p.batch <= 64]
        if few:
            claims[f"floor_fraction_{name.lower().replace('.', '_')}"] = claim(min(few), at_least=target)
    return claims


def ahead_of_vllm(points: dict[str, list[Point]]) -> dict[str, dict[int, float]]:
    """vLLM's time over ours."""
    return {
        name: {
            p.batch: VLLM[name][p.batch] / p.milliseconds for p in each if p.near and p.batch in VLLM[name]
        }
        for name, each in points.items()
        if name in VLLM
    }


def qwen_config(name: str) -> dict[str, Any]:
    hidden, layers, heads, kv_heads, inner, tied = SHAPES[name]
    return {
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "max_position_embeddings": LONGEST,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


def random_model(config: dict[str, Any]) -> Transformer:
    """Made on the device: nothing to load."""
    with torch.device("meta"):
        model = Transformer(spec_from_config(config, Path("benchmark")))
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    fill_buffers(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02)
            if "norm" in name:
                parameter.add_(1)
    return model


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 4 GB, the median of some."""
    source = torch.empty(4_000_000_000, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / sorted(times[2:])[5]


def uneven(batch: int, seed: int) -> list[int]:
    """Contexts of samples that began at different times, about NEAR on the average."""
    rng = random.Random(seed * 1000 + batch)
    drawn = [rng.lognormvariate(0, SPREAD) for _ in range(batch)]
    return [max(50, min(8 * NEAR, round(NEAR * x * batch / sum(drawn)))) for x in drawn]


def floor_bytes(spec: ModelSpec, cached: int) -> int:
    """Weights once and the keys and values of cached tokens once, two bytes each; of an untied embedding a step reads
    no more than its tokens' rows."""
    embedding = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    return 2 * (spec.parameters - embedding + 2 * spec.layers * spec.kv_size * cached)


def measure(model: Transformer, cases: list[list[int]], bandwidth: float, seed: int) -> list[Point]:
    """Of those whose contexts fit."""
    from jigsawrl.engine.cuda.decoder import Decoder

    spec = model.spec
    block_bytes = 4 * spec.layers * spec.kv_size * SIZE
    fitting = [case for case in cases if sum(map(blocks_of, case)) * block_bytes < CACHE_BYTES]
    most = max(sum(map(blocks_of, case)) for case in fitting)
    cache = KVCache(spec, most + 1, SIZE, torch.bfloat16, model.device)
    cache.keys.normal_()
    cache.values.normal_()
    decoder = Decoder(model, cache, max(map(len, fitting)))
    blocks = list(range(most))
    random.Random(seed).shuffle(blocks)
    points = []
    for contexts in fitting:
        mean, longest = round(sum(contexts) / len(contexts)), max(contexts)
        say(f"{spec.hidden_size} wide: {len(contexts)} sequences of {mean} tokens, at most {longest}")
        seconds = step_seconds(decoder, contexts, blocks)
        floor = floor_bytes(spec, sum(contexts)) / bandwidth
        points.append(Point(len(contexts), mean, longest, seconds * 1e3, floor * 1e3))
    return points


def blocks_of(context: int) -> int:
    """For it and the tokens that are decoded."""
    return -(-(context + 200) // SIZE)


def step_seconds(decoder: Any, contexts: list[int], blocks: list[int], steps: int = 40) -> float:
    """The median over some rounds; each step is launched before the one before it is read, as in the engine. Contexts
    grow by a token a step: they are as long as was asked for in the middle."""
    free = iter(blocks)
    begin = [max(1, context - steps // 2) for context in contexts]
    sequences = [
        Sequence(
            request_id="",
            key=SampleKey(0, "", 0, i, 0),
            params=SamplingParams(max_tokens=LONGEST),
            tokens=[i % VOCABULARY] * context,
            prompt_length=context,
            generated=Generated(),
            random_key=SampleKey(0, "", 0, i, 0).hashed(),
            arrival=i,
            computed=context - 1,
            blocks=list(islice(free, blocks_of(context))),
            row=i,
        )
        for i, context in enumerate(begin)
    ]
    rounds = []
    for number in range(4):
        decoder.enter(sequences)
        cut = decoder.cut(sequences, 0)
        launched: deque[Any] = deque()
        decoder.launch(sequences, 0, cut).read()
        started = time.perf_counter()
        for _ in range(steps):
            launched.append(decoder.launch(sequences, 0, cut))
            if len(launched) > 1:
                launched.popleft().read()
        launched.popleft().read()
        if number > 0:  # the first one captures the graph and warms up
            rounds.append((time.perf_counter() - started) / steps)
        decoder.known = [None] * len(decoder.known)  # back to the beginning
    return sorted(rounds)[1]


class NoTokenizer:
    eos_token_ids: frozenset[int] = frozenset()

    def stream(self) -> Any:
        raise NotImplementedError


def requests_per_path(model: Transformer, seed: int, quick: bool) -> dict[str, float]:
    """Tokens a second of the engine over 256 requests, with its kernels and without."""
    rng = random.Random(seed)
    lengths = [min(448, max(8, round(150 * rng.lognormvariate(0, 0.7)))) for _ in range(256)]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(64, 256))] for _ in lengths]
    engine = Engine(model, NoTokenizer(), num_blocks=256 * 1300 // SIZE, max_num_batched_tokens=8192)
    speeds: dict[str, float] = {}
    decoder = engine.runner.decoder
    for path in (
        "kernels",
        "kernels",
        *(() if quick else ("operators",)),
    ):  # the first time captures the graphs
        say(f"256 requests through {path}")
        engine.runner.decoder = decoder if path == "kernels" else None
        requests = [
            Request(
                str(i),
                prompt,
                SamplingParams(max_tokens=length, ignore_eos=True),
                [SampleKey(seed, path, 0, i, 0)],
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        engine.update_weights(None, 0)  # so that no prompt is found in the cache of the last run
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = engine.generate(requests)
        speeds[path] = sum(lengths) / (time.perf_counter() - started)
        assert [len(o.generated.token_ids) for o in outputs] == lengths
    engine.close()
    return speeds


def transformers_steps(name: str, seconds: int) -> dict[str, dict[int, float]]:
    """Milliseconds per step, from a process of its own: as many points as it gets done in time."""
    command = [sys.executable, __file__, "--transformers-side", name]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    steps: dict[str, dict[int, float]] = {}
    for line in output.decode().splitlines():
        point = json.loads(line)
        steps.setdefault(point["side"], {})[point["sequences"]] = point["milliseconds"]
    return steps


def transformers_side(name: str) -> None:
    """Prints a line of JSON for each point, the most telling first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with clean_stdout() as console:
        config = AutoConfig.for_model(**qwen_config(name))
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for side, measured, batch in (
            ("continuous batching", continuous_step, 64),
            ("static cache", generate_step, 1),
            ("continuous batching", continuous_step, 1),
            ("static cache", generate_step, 64),
            ("continuous batching", continuous_step, 16),
            ("static cache", generate_step, 16),
        ):
            say(f"transformers, {side}, {batch} sequences")
            point = {"side": side, "sequences": batch, "milliseconds": measured(model, batch)}
            print(json.dumps(point), file=console.file, flush=True)


def generate_step(model: Any, batch: int) -> float:
    """A run of 65 tokens less one of a single token; the first run compiles."""
    from transformers import GenerationConfig

    tokens = torch.randint(0, VOCABULARY, (batch, NEAR), device=model.device)
    seconds = {}
    for count in (65, 65, 1, 1):
        settings = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=count,
            eos_token_id=-1,
            pad_token_id=0,
            cache_implementation="static",
        )
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
        torch.cuda.synchronize()
        seconds[count] = time.perf_counter() - started
    return (seconds[65] - seconds[1]) / 64 * 1e3


def continuous_step(model: Any, batch: int) -> float:
    """A run of 80 tokens less one of 16, after a first one."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = torch.randint(0, VOCABULARY, (batch, NEAR)).tolist()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=80, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False),
    )
    manager.start()
    seconds = {}
    for count in (16, 16, 80):
        started = time.perf_counter()
        missing = {manager.add_request(prompt, max_new_tokens=count) for prompt in prompts}
        while missing:
            result = manager.get_result(timeout=1)
            if result is None:
                assert manager.is_running(), "the generation thread died"
            elif result.is_finished():
                assert result.error is None, result.error
                missing.discard(result.request_id)
        seconds[count] = time.perf_counter() - started
    manager.stop(block=True)
    return (seconds[80] - seconds[16]) / 64 * 1e3


def as_json(point: Point) -> dict[str, float]:
    return {
        "sequences": point.batch,
        "context": point.context,
        "longest": point.longest,
        "milliseconds": point.milliseconds,
        "floor_milliseconds": point.floor,
        "floor_fraction": point.fraction,
    }


def shown(values: dict[Any, float]) -> str:
    return ", ".join(f"{key} {figure(value)}" for key, value in values.items())


def print_table(console: Console, name: str, points: list[Point]) -> None:
    table = Table(title=f"{name}: one decode step")
    for column in (
        "context",
        "sequences",
        "ms",
        "floor ms",
        "of the floor's speed",
        "vLLM 0.24 ms",
        "tokens/s",
    ):
        table.add_column(column, justify="right")
    for point in points:
        vllm = VLLM.get(name, {}).get(point.batch) if point.near else None
        even = point.context == point.longest
        table.add_row(
            f"{point.context:,}" if even else f"{point.context:,}, up to {point.longest:,}",
            str(point.batch),
            f"{point.milliseconds:.3f}",
            f"{point.floor:.3f}",
            f"{point.fraction:.0%}",
            f"{vllm:.2f}" if vllm else "",
            f"{point.batch / point.milliseconds * 1e3:,.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
