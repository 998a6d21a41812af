"""Tokens per second of our engine against transformers' `generate` and its continuous batching, on a CPU.

All sides sample from the same Hugging Face folder in float32 at temperature 1, and get the same requests in the same
order: prompts of 8 to 64 tokens, each with a number of tokens to generate that is drawn from a log-normal with a mean
of about 60 and cut at 256. Only tokens that were asked for count.

`generate` takes requests in batches, in the order they come (lengths are not known beforehand, so they cannot be
sorted by it), padded on the left, and runs until the longest of a batch is done. Continuous batching and our engine
end each request at its own length. Ours returns the log-prob of every token as well.

Each side is first tried with several settings (batch size, attention, cache, threads; the largest model with fewer
of them) and is measured with its fastest. With --quick nothing is tried. Rounds alternate between the sides. Where a
venv with vLLM is found, its CPU build gets the same requests and the ratio is reported; nothing is claimed about it.

With --load N the two larger models are measured while N other processes spin on the same cores, and every side is
tuned under that load. Each side may use one thread; ours may also have as many as there are free cores, which is what
a run has by default.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common import (
    CORES,
    SHAPES,
    Settings,
    Spread,
    arguments,
    claim,
    clean_stdout,
    figure,
    natural,
    report,
    say,
    shown,
    thread_choices,
    tune,
    write_model,
)

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from jigsawrl.engine.engine import Engine
from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.model.folder import load_model
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.pipeline.threads import LoadAwareThreads, read_cpu_times

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MAX_TOKENS, PROMPT_TOKENS = 256, (8, 64)
LONGEST = MAX_TOKENS + PROMPT_TOKENS[1]
BY_LOAD = "by load"
"""As many threads as there are free cores, at any time."""
REQUESTS = {"0.3M": 192, "10M": 128, "SmolLM2-135M": 32}
ROUNDS = {"0.3M": 7, "10M": 3, "SmolLM2-135M": 2}
QUICK_REQUESTS, QUICK_ROUNDS = {"0.3M": 128, "10M": 48}, {"0.3M": 2, "10M": 1}
LOADED_REQUESTS, LOADED_ROUNDS = {"10M": 64, "SmolLM2-135M": 16}, {"10M": 5, "SmolLM2-135M": 3}
QUICK_LOADED_REQUESTS, QUICK_LOADED_ROUNDS = {"10M": 32}, {"10M": 2}
"""By model. On two cores beside four other processes everything takes five times as long."""
MEDIAN_LENGTH, SIGMA = 41, 0.9
"""Of the log-normal; its mean, cut at MAX_TOKENS, is 60."""


Axes = dict[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of one model."""

    folder: Path
    prompts: list[list[int]]
    lengths: list[int]
    threads: list[int]
    patient: bool
    """Whether a run is short enough to try many settings."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Side(Protocol):
    """Someone who generates what is asked for."""

    name: str
    axes: Axes
    """Settings to try, the likeliest first."""

    def seconds(self, settings: Settings) -> float:
        """One run over all requests."""

    def close(self) -> None: ...


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out even where it is installed")
    parser.add_argument("--only", choices=list(REQUESTS), help="measure this model alone")
    parser.add_argument(
        "--load",
        type=natural,
        default=0,
        metavar="N",
        help="beside so many spinning processes; default: none",
    )
    options = parser.parse_args()
    requests, rounds = sizes(options)
    if options.only not in (None, *requests):
        parser.error(f"--only {options.only} is not among what is measured so: {', '.join(requests)}")
    with (
        clean_stdout() as console,
        tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch,
        spinning(options.load),
    ):
        models: dict[str, Any] = {}
        for name, count in requests.items():
            if options.only not in (None, name):
                continue
            if name in SHAPES:
                folder = write_model(Path(scratch) / name, name, options.seed)
            elif SMOLLM2.is_dir():
                folder = SMOLLM2
            else:
                console.print(f"{name} is left out: no {SMOLLM2.relative_to(ROOT)} (jigsaw fetch smollm2)")
                continue
            work = make_work(folder, count, options, patient=name in SHAPES and not options.load)
            models[name] = compare(work, rounds[name], options)
        print_table(console, models, options.load)
        lowest = min(model["speedup"]["median"] for model in models.values())
        if options.load:
            claims = {"speedup_under_load": claim(lowest, at_least=1.5)}
        else:
            claims = {"speedup_vs_best_transformers": claim(lowest, at_least=2)}
        ratios = {n: m["ratio_to_vllm"] for n, m in models.items() if "ratio_to_vllm" in m}
        for name, ratio in ratios.items():
            console.print(f"{name}: {figure(ratio['median'])} times vLLM's tokens per second")
        report(
            console,
            "engine_vs_transformers",
            options.seed,
            claims,
            quick=options.quick,
            load=options.load,
            ratio_to_vllm=ratios or None,
            models=models,
        )


def sizes(options: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Requests and rounds of each model."""
    if options.load:
        quick = QUICK_LOADED_REQUESTS, QUICK_LOADED_ROUNDS
        return quick if options.quick else (LOADED_REQUESTS, LOADED_ROUNDS)
    return (QUICK_REQUESTS, QUICK_ROUNDS) if options.quick else (REQUESTS, ROUNDS)


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Other processes that are always busy, on the same cores."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def make_work(folder: Path, count: int, options: Any, patient: bool) -> Work:
    rng = random.Random(options.seed)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts, lengths = [], []
    for _ in range(count):
        prompts.append([rng.randrange(2, vocabulary) for _ in range(rng.randint(*PROMPT_TOKENS))])
        lengths.append(min(MAX_TOKENS, max(1, round(MEDIAN_LENGTH * rng.lognormvariate(0, SIGMA)))))
    threads = thread_choices(options.threads)
    return Work(folder, prompts, lengths, sorted(threads) if options.load else threads, patient)


def compare(work: Work, rounds: int, options: Any) -> dict[str, Any]:
    """Every side at its best, in alternating rounds."""
    sides: list[Side] = [Ours(work), Generate(work), ContinuousBatching(work)]
    if VLLM_PYTHON.exists() and not (options.quick or options.no_vllm or options.load):
        sides.append(Vllm(work))
    best: dict[str, Settings] = {}
    for side in sides:
        say(f"{work.folder.name}: looking for the best settings of {side.name}")
        axes = {name: values[:1] if options.quick else values for name, values in side.axes.items()}
        best[side.name], _ = tune(axes, side.seconds)
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds):
        say(f"{work.folder.name}: round {number + 1} of {rounds}")
        for side in sides:
            speeds[side.name].append(work.tokens / side.seconds(best[side.name]))
    for side in sides:
        side.close()
    opponents = [Generate.name, ContinuousBatching.name]
    strongest = max(opponents, key=lambda name: Spread.of(speeds[name]).median)
    result = {
        "requests": len(work.prompts),
        "length_mean": work.tokens / len(work.lengths),
        "length_max": max(work.lengths),
        "best_transformers": strongest,
        "speedup": ratio(speeds[Ours.name], speeds[strongest]),
        "sides": {
            name: {"tokens_per_second": Spread.of(values).as_json(), "settings": best[name]}
            for name, values in speeds.items()
        },
    }
    if Vllm.name in speeds:
        result["ratio_to_vllm"] = ratio(speeds[Ours.name], speeds[Vllm.name])
    return result


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    return Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)]).as_json()


class Ours:
    name = "ours"

    def __init__(self, work: Work) -> None:
        self.axes: Axes = {
            "max_num_seqs": (256, 64) if work.patient else (256,),
            "block_size": (16, 32) if work.patient else (16,),
            "threads": work.threads if len(work.threads) == 1 else (BY_LOAD, 1),
        }
        self.work = work
        self.model = load_model(work.folder, torch.float32)
        self.tokenizer = load_tokenizer(work.folder, trust_remote_code=False)
        self.engine: Engine | None = None
        self.settings: Settings = {}
        self.runs = 0

    def seconds(self, settings: Settings) -> float:
        by_load = settings["threads"] == BY_LOAD
        if not by_load:
            torch.set_num_threads(settings["threads"])
        if settings != self.settings or self.engine is None:
            threads = LoadAwareThreads(CORES, read_cpu_times)
            if by_load:
                torch.set_num_threads(CORES)  # as a run begins
            sequences, block = settings["max_num_seqs"], settings["block_size"]
            together = min(sequences, len(self.work.prompts))
            self.engine = Engine(
                self.model,
                self.tokenizer,
                num_blocks=together * -(-LONGEST // block),
                block_size=block,
                max_num_seqs=sequences,
                on_pass=(lambda done: threads.adapt()) if by_load else None,
            )
            self.settings = settings
        self.runs += 1
        requests = [
            Request(
                str(i),
                prompt,
                SamplingParams(max_tokens=length, ignore_eos=True),
                [SampleKey(0, "benchmark", self.runs, i, 0)],
            )
            for i, (prompt, length) in enumerate(zip(self.work.prompts, self.work.lengths, strict=True))
        ]
        started = time.perf_counter()
        self.engine.update_weights(None, self.runs)  # so that no prompt is found in the cache of the last run
        outputs = self.engine.generate(requests)
        taken = time.perf_counter() - started
        assert [len(o.generated.token_ids) for o in outputs] == self.work.lengths
        return taken

    def close(self) -> None:
        self.engine = None


class Generate:
    name = "generate"

    def __init__(self, work: Work) -> None:
        count = len(work.prompts)
        self.axes: Axes = {
            "batch": (count, *(size for size in (32, 64) if size < count)),
            "attention": ("sdpa", "eager") if work.patient else ("sdpa",),
            "cache": ("dynamic", "static") if work.patient else ("dynamic",),
            "threads": work.threads,
        }
        self.work = work
        self.model = transformers_model(work.folder)

    def seconds(self, settings: Settings) -> float:
        from transformers import GenerationConfig

        torch.set_num_threads(settings["threads"])
        self.model.set_attn_implementation(settings["attention"])
        cache = {"cache_implementation": "static"} if settings["cache"] == "static" else {}
        started = time.perf_counter()
        for start in range(0, len(self.work.prompts), settings["batch"]):
            part = slice(start, start + settings["batch"])
            prompts, longest = self.work.prompts[part], max(self.work.lengths[part])
            width = max(map(len, prompts))
            tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            config = GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                pad_token_id=0,
                disable_compile=True,
                **cache,
            )
            output = self.model.generate(tokens, attention_mask=mask, generation_config=config)
            assert output.shape[1] == width + longest
        return time.perf_counter() - started

    def close(self) -> None: ...


class ContinuousBatching:
    """The cache and the batch are sized for the work; by default they would be sized for a GPU's memory."""

    name = "continuous batching"

    def __init__(self, work: Work) -> None:
        self.axes: Axes = {
            "attention": ("sdpa", "eager") if work.patient else ("sdpa",),
            "requests": (16, 32, 64, 8) if work.patient else (32, 16),
            "page": (32, 256) if work.patient else (32,),
            "threads": work.threads,
        }
        self.work = work
        self.model = transformers_model(work.folder)
        self.settings: Settings = {}
        self.manager: Any = None

    def seconds(self, settings: Settings) -> float:
        torch.set_num_threads(settings["threads"])
        if settings != self.settings:
            self.start(settings)
        started = time.perf_counter()
        expected = {
            self.manager.add_request(prompt, max_new_tokens=length): length
            for prompt, length in zip(self.work.prompts, self.work.lengths, strict=True)
        }
        while expected:
            result = self.manager.get_result(timeout=1)
            if result is None:
                assert self.manager.is_running(), "the generation thread died"
            elif result.is_finished():
                assert result.error is None, result.error
                assert len(result.generated_tokens) == expected.pop(result.request_id)
        return time.perf_counter() - started

    def start(self, settings: Settings) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.close()
        self.model.set_attn_implementation(settings["attention"])
        requests, page = settings["requests"], settings["page"]
        self.manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=-1,
                pad_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page,
                num_blocks=requests * (-(-LONGEST // page) + 1),
                max_batch_tokens=512,
                max_requests_per_batch=requests,
                allow_block_sharing=False,
            ),
        )
        self.manager.start()
        self.settings = settings

    def close(self) -> None:
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager = None


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # the folder's would end answers and change the sampling
    return model


class Vllm:
    """In processes of its own: with the threads it chooses itself, or with one and everything in one process."""

    name = "vLLM"

    def __init__(self, work: Work) -> None:
        self.axes: Axes = {"threads": (1,) if work.threads == [1] else ("auto", 1)}
        self.work = work
        self.settings: Settings = {}
        self.process: subprocess.Popen[str] | None = None

    def seconds(self, settings: Settings) -> float:
        if settings != self.settings:
            self.close()
            self.settings = settings
            self.start(settings["threads"])
        answer = self.ask("again")
        assert answer["tokens"] == self.work.tokens
        return float(answer["seconds"])

    def start(self, threads: int | str) -> None:
        environment = dict(os.environ)
        if threads == 1:
            environment |= {
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
        self.process = subprocess.Popen(
            [VLLM_PYTHON, Path(__file__).with_name("vllm_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        work = {"prompts": self.work.prompts, "lengths": self.work.lengths, "max_model_len": LONGEST}
        self.ask({"model": str(self.work.folder), **work})

    def ask(self, message: Any) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "vLLM ended; run vllm_side.py by hand to see why"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def print_table(console: Console, models: dict[str, Any], load: int) -> None:
    beside = f", beside {load} spinning processes" if load else ""
    table = Table(
        title=f"useful tokens per second, mixed lengths, {CORES} cores{beside}",
        caption="medians over interleaved rounds, in brackets the quartiles",
    )
    for column in ("model", "requests", "lengths", "side", "tokens/s", "settings"):
        table.add_column(column, justify="right" if column in ("requests", "tokens/s") else "left")
    for name, model in models.items():
        lengths = f"{model['length_mean']:.0f}, up to {model['length_max']}"
        for i, (side, row) in enumerate(model["sides"].items()):
            first = (name, str(model["requests"]), lengths) if i == 0 else ("", "", "")
            table.add_row(*first, side, spread(row["tokens_per_second"]), shown(row["settings"]))
        table.add_row("", "", "", "speedup", spread(model["speedup"]), f"over {model['best_transformers']}")
        table.add_section()
    console.print(table)


def spread(document: dict[str, float]) -> str:
    return str(Spread(document["median"], document["quartile_1"], document["quartile_3"]))


if __name__ == "__main__":
    main()
