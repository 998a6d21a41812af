"""Deterministic pipelines with different numbers of threads: whether they learn the same, and what one thread costs.

With `deterministic: true` a worker computes with one CPU thread. The first part trains two small pipelines, one with
full weights and one with LoRA, alone with `threads` from 1 to 16 and beside each other in one run, on a CPU and on a
GPU where there is one, and compares every learned figure and the exported weights bit for bit.

The second part measures what the one thread costs on a CPU: tokens per second of a rollout with the deterministic
kernels and of a training step, with one thread and with more of them, up to the number of cores. The numbers of
threads take turns within each round. Ordinary decoding, without the deterministic kernels, stands beside them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import CORES, SHAPES, Spread, arguments, claim, clean_stdout, figure, report, say
from rich.console import Console
from rich.table import Table

from jigsawrl.engine.engine import Engine
from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.model.folder import load_model
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.pipeline.warmup import imitate
from jigsawrl.trainer.batch import Batch
from jigsawrl.trainer.optimizer import OptimizerSettings
from jigsawrl.trainer.trainer import Trainer

THREADS = (1, 2, 3, 4, 8, 16)
TIMEOUT = 300.0
"""Seconds after which a run is taken to hang."""
ALL_SHAPES = {**SHAPES, "100M": {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3}}
"""The last one has the layers of SmolLM2-135M and a small vocabulary."""
ROUNDS = {"0.3M": 5, "10M": 3, "100M": 2}
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 32

FULL: dict[str, Any] = {
    "steps": 4,
    "deterministic": True,
    "model": {"tiny": {"layers": 2, "hidden": 192, "heads": 4, "kv_heads": 2, "warmup_steps": 40}},
    "task": {"kind": "arithmetic", "max_number": 6, "size": 49},
    "rollout": {"prompts_per_step": 16, "samples": 8, "max_tokens": 8},
    "trainer": {"lr": 1e-3},
    "telemetry": {"tensorboard": False},
}
PIPELINES = {"full": FULL, "adapters": {**FULL, "model": {**FULL["model"], "lora": {"rank": 4}}}}


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        counts = (1, 8) if options.quick else THREADS
        found = [
            each
            for device in devices()
            for each in learned(Path(scratch) / device, device, counts, options.seed)
        ]
        print_results(console, found)
        sizes = ["0.3M", "10M"] if options.quick else list(ALL_SHAPES)
        costs = {size: cost(Path(scratch), size, options) for size in sizes}
        print_costs(console, costs)
        different = len([each for each in found if not each.equal])
        report(
            console,
            "deterministic_threads",
            options.seed,
            {"different_results": claim(different, at_most=0)},
            quick=options.quick,
            compared=[each.as_json() for each in found],
            one_thread={size: [each.as_json() for each in rows] for size, rows in costs.items()},
        )


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True, slots=True)
class Compared:
    """What one pipeline learned in one way, against what it learned alone with one thread."""

    device: str
    pipeline: str
    how: str
    equal: bool

    def as_json(self) -> dict[str, Any]:
        return {"device": self.device, "pipeline": self.pipeline, "how": self.how, "equal": self.equal}


def learned(folder: Path, device: str, counts: tuple[int, ...], seed: int) -> list[Compared]:
    """Every pipeline alone with each number of threads, then all of them in one run."""
    folder.mkdir(parents=True)
    for name, run in PIPELINES.items():
        (folder / f"{name}.yaml").write_text(json.dumps({**run, "seed": seed, "device": device}))
    found: dict[str, dict[str, object]] = {name: {} for name in PIPELINES}
    for name in PIPELINES:
        for count in counts:
            say(f"{device}: {name} alone, threads: {count}")
            out = folder / f"{name}-{count}"
            jigsaw(["run", f"{name}.yaml", f"threads={count}"], folder, out)
            found[name][f"alone, threads: {count}"] = outcome(out)
    say(f"{device}: all in one run")
    entries = {name: {"run": f"{name}.yaml"} for name in PIPELINES}
    (folder / "mix.yaml").write_text(json.dumps({"workers": 1, "pipelines": entries}))
    jigsaw(["run", "mix.yaml"], folder, folder / "mix")
    for name in PIPELINES:
        found[name]["beside the other"] = outcome(folder / "mix" / name)
    return [
        Compared(device, name, how, what == next(iter(ways.values())))
        for name, ways in found.items()
        for how, what in ways.items()
    ]


def jigsaw(command: list[str], folder: Path, out: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "jigsawrl", *command, "--out", str(out), "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=TIMEOUT,
    )


def outcome(out: Path) -> object:
    """Everything that was learned: the figures of each step, and the weights."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figures = [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows]
    weights = [path.read_bytes() for path in sorted((out / "model").glob("*.safetensors"))]
    if not figures or not weights:
        raise RuntimeError(f"{out} holds no result")
    return figures, weights


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens per second with each number of threads, in one kind of work."""

    work: str
    rates: dict[int, Spread]

    @property
    def best(self) -> int:
        return max(self.rates, key=lambda count: self.rates[count].median)

    @property
    def slower(self) -> float:
        """How many times as long the work takes with one thread as with the best number of them."""
        return self.rates[self.best].median / self.rates[1].median

    def as_json(self) -> dict[str, Any]:
        rates = {count: rate.as_json() for count, rate in self.rates.items()}
        return {"work": self.work, "slower": self.slower, "best": self.best, "tokens_per_s": rates}


def cost(scratch: Path, size: str, options: Any) -> list[Cost]:
    folder = write_tiny(scratch / size, seed=options.seed, **ALL_SHAPES[size])
    # One number of threads measures nothing; where --threads asks for one, it stands beside a single thread.
    counts = sorted({1, options.threads}) if options.threads else [n for n in THREADS if n <= CORES]
    rounds = 1 if options.quick else ROUNDS[size]
    sequences = SEQUENCES // 4 if options.quick else SEQUENCES
    works = {
        "deterministic rollout": rollout_of(folder, sequences, True, options.seed),
        "ordinary rollout": rollout_of(folder, sequences, False, options.seed),
        "training step": training_of(folder, sequences, options.seed),
    }
    found = []
    for name, work in works.items():
        say(f"{size}: {name} with {', '.join(map(str, counts))} threads")
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for number in range(rounds + 1):
            for count in counts:
                rate = with_threads(count, work)
                if number:  # the first round warms up
                    rates[count].append(rate)
        found.append(Cost(name, {count: Spread.of(each) for count, each in rates.items()}))
    return found


def with_threads(count: int, work: Callable[[], int]) -> float:
    """Tokens per second."""
    torch.set_num_threads(count)
    began = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - began)


def prompts(folder: Path, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]


def rollout_of(folder: Path, sequences: int, deterministic: bool, seed: int) -> Callable[[], int]:
    model, tokenizer = load_model(folder, torch.float32), load_tokenizer(folder, trust_remote_code=False)
    blocks = sequences * (PROMPT_TOKENS + NEW_TOKENS + 16) // 16
    engine = Engine(model, tokenizer, num_blocks=blocks, deterministic=deterministic)
    texts = prompts(folder, sequences, PROMPT_TOKENS, seed)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)

    def work() -> int:
        requests = [
            Request(str(i), text, params, [SampleKey(seed, "bench", 0, i, 0)]) for i, text in enumerate(texts)
        ]
        return sum(len(output.generated.token_ids) for output in engine.generate(requests))

    return work


def training_of(folder: Path, sequences: int, seed: int) -> Callable[[], int]:
    model = load_model(folder, torch.float32)
    trainer = Trainer(model, OptimizerSettings(1e-6), micro_batch_tokens=4096)
    length = PROMPT_TOKENS + NEW_TOKENS
    tokens = [torch.tensor(text) for text in prompts(folder, sequences, length, seed)]
    batch = Batch(tokens, [torch.arange(PROMPT_TOKENS, length)] * sequences)

    def work() -> int:
        trainer.forward_backward(batch, imitate(model.head))
        trainer.optim_step()
        return sequences * length

    return work


def print_results(console: Console, found: list[Compared]) -> None:
    table = Table(title="Deterministic pipelines: learned bit for bit the same as alone with one thread?")
    for name in ("device", "pipeline", "how", "the same"):
        table.add_column(name)
    for each in found:
        table.add_row(each.device, each.pipeline, each.how, "yes" if each.equal else "[red]no[/]")
    console.print(table)


def print_costs(console: Console, costs: dict[str, list[Cost]]) -> None:
    table = Table(title="Tokens per second by CPU threads: median of the rounds")
    counts = list(next(iter(costs.values()))[0].rates)
    for name in ("model", "work", *map(str, counts), "best / one thread"):
        table.add_column(name, justify="left" if name in ("model", "work") else "right")
    for size, rows in costs.items():
        for each in rows:
            rates = [figure(each.rates[count].median) for count in counts]
            table.add_row(size, each.work, *rates, f"{each.slower:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
