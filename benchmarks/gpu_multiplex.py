"""Pipelines that share one GPU: how much more is done than by one after the other.

Full fine-tuning of models of the shapes of Qwen2.5 0.5B and 1.5B with random weights; where `--only` asks for them,
four pipelines that train LoRA adapters on one base of 1.5B, which they share (`gpu_lora.py` measures that without the
runtime). Every sample is as long as a trace of GSM8K or MATH says (the same lengths under every policy, at most 8,192
tokens); one pipeline in four calls a tool in between. All run for real: drivers, actors, scheduler, shares, MPS
(`traced.py` says what little differs).

`serial` gives every pipeline the whole GPU, alone, with the same engine and trainer. Throughput is tokens generated
and trained on over the time from the first phase to the end of the last; setting processes up is not in it. What the
pipelines of the chosen sides do is done once before anything counts, with the kernels that decode alone and those of
company, so that nobody waits for any to be compiled; and every actor has the graphs of its decode steps before it
begins (`warm_up.py`). Kernels that were compiled all the same, while a side was set up or later, and graphs that were
captured later, are counted.
Beside it: the part of the GPU's bandwidth, that of a large copy in the same run, which decoding alone needs for
weights and cached keys and values. Every policy knows what the serial run measured of the four (`profile:`), as users
have it from `jigsaw profile`, and learns of others as they run; what sharing costs is the built-in table of an H200.
The ablation leaves one lever of `jigsaw` out at a time. With a limit of time the sides are run in the order of the
table until it is over.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from common import arguments, at_least_one, claim, clean_stdout, figure, positive, report, say
from gpu_decode import qwen_config
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from warm_up import captured_graphs

from jigsawrl.config.pipelines import load_mix
from jigsawrl.errors import JigsawError
from jigsawrl.graph.cost import DecodeCost
from jigsawrl.graph.decode import DecodeCurve
from jigsawrl.graph.profile import load_profile
from jigsawrl.model.folder import places
from jigsawrl.model.spec import spec_from_config
from jigsawrl.model.transformer import Transformer
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime import family
from jigsawrl.runtime.launch import PROFILE, run_mix
from jigsawrl.runtime.measure import add_table
from jigsawrl.telemetry.progress import Progress

HERE = Path(__file__).parent
LEVERS = {
    "no shares": Jigsaw(shares=False),
    "no look-ahead": Jigsaw(lookahead=False),
    "no fill": Jigsaw(fill=False),
    "no merge": Jigsaw(merge=False),
}
"""On one GPU there is nothing to merge: what that changes is what runs differ by."""
TARGET = 1.85


@dataclass(frozen=True, slots=True)
class Traced:
    """A pipeline: a model's shape, whose trace gives its lengths, and how much it does."""

    shape: str
    trace: str
    prompts: int
    steps: int
    turns: int = 1
    latency: float = 0.0
    """Seconds that a tool takes at least; up to twice as many."""
    cached: float = 0.5
    """Part of what its sequences would take at their longest that is cached at once."""
    samples: int = 8
    rank: int = 0
    """Of LoRA adapters; 0: all weights are trained."""
    micro_batch_tokens: int | None = None
    """None: as many as suit the GPU."""
    recomputed: bool = False
    """Whether activations are computed again on the way back, for want of memory."""


Pipelines = Mapping[str, Traced]
"""By name."""
FOUR = {
    "gsm8k-small": Traced("0.5B", "gsm8k_qwen3-0.6b", prompts=8, steps=3),
    "math-small": Traced("0.5B", "math_qwen3-0.6b", prompts=4, steps=2, cached=1.0),
    "gsm8k-large": Traced("1.5B", "gsm8k_qwen3-4b-instruct", prompts=16, steps=5, cached=0.25),
    "tools-large": Traced("1.5B", "gsm8k_qwen3-4b-instruct", prompts=4, steps=3, turns=3, latency=1.5),
}
"""With so many steps each takes about as long alone as the others (20 to 24 s with seed 0, where a step took 7.1,
11.8, 4.5 and 6.7 s): what is compared is how they share, and not how one of them ends alone."""
OTHERS = {
    "gsm8k-small-2": Traced("0.5B", "gsm8k_qwen3-4b", prompts=8, steps=2),
    "gsm8k-small-3": Traced("0.5B", "gsm8k_qwen3-4b-instruct", prompts=16, steps=3, cached=0.25),
    "math-small-2": Traced("0.5B", "math_qwen3-4b-instruct", prompts=8, steps=1),
    "math-small-3": Traced("0.5B", "math_llama3.1-8b", prompts=16, steps=2, cached=0.25),
    "tools-small": Traced("0.5B", "gsm8k_qwen3-0.6b", prompts=4, steps=2, turns=3, latency=1.5),
}
TWO = {name: FOUR[name] for name in ("gsm8k-small", "gsm8k-large")}
EIGHT = {
    name: replace(each, recomputed=True) for name, each in (FOUR | OTHERS).items() if name != "gsm8k-large"
}
"""What fits into the memory of one H200: beside the state of eight there is little left to train with."""
LORA = {
    f"lora-{number}": Traced(
        "1.5B", "gsm8k_qwen3-4b-instruct", prompts=8, steps=4, rank=16, micro_batch_tokens=16_384
    )
    for number in range(1, 5)
}
"""Samples as in `gpu_lora.py`. Smaller micro-batches would keep the device waiting for the host."""


@dataclass(frozen=True, slots=True)
class Run:
    """One mix under one policy."""

    seconds: float
    tokens: int
    each: Mapping[str, float]
    """Seconds of each pipeline from its first phase to the end of its last."""
    setup: float
    compiled: int
    """Kernels that were not there before, those of setting up among them."""
    captured: int
    """Graphs, after setting up."""
    out: Path

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Results:
    """Of the sides so far."""

    bandwidth: float | None
    """Of a large copy."""
    runs: dict[str, Run] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    """Seconds of each pipeline."""
    floors: dict[str, float] = field(default_factory=dict)
    """See `decode_floors`."""
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, side: str, run: Run, pipelines: Pipelines, policy: str) -> None:
        self.runs[side] = run
        if policy == "serial":
            self.alone |= run.each
            self.floors |= decode_floors(pipelines, run.out / PROFILE, self.bandwidth)

    @property
    def ratios(self) -> dict[str, float]:
        """Times the throughput of the same pipelines one after the other."""
        known = {side: run for side, run in self.runs.items() if set(run.each) <= set(self.alone)}
        return {side: sum(self.alone[n] for n in run.each) / run.seconds for side, run in known.items()}

    @property
    def used(self) -> dict[str, float]:
        """The part of the bandwidth that decoding alone needs."""
        known = {side: run for side, run in self.runs.items() if set(run.each) <= set(self.floors)}
        return {side: sum(self.floors[n] for n in run.each) / run.seconds for side, run in known.items()}

    def as_json(self) -> dict[str, Any]:
        runs, ratios, everybody = self.runs, self.ratios, FOUR | OTHERS | LORA
        sizes = {"2": "jigsaw, two", "8": "jigsaw, eight", "lora": "jigsaw, LoRA"}
        return {
            "over_serial": ratios,
            "failed": self.failed,
            **{f"vs_serial_{size}": ratios.get(side) for size, side in sizes.items()},
            "alone_seconds": self.alone,
            "pipelines": {name: asdict(each) for name, each in everybody.items() if name in self.alone},
            "eight": {name: asdict(each) for name, each in EIGHT.items()},
            "seconds": {side: run.seconds for side, run in runs.items()},
            "tokens": {side: run.tokens for side, run in runs.items()},
            "setup_seconds": {side: run.setup for side, run in runs.items()},
            "compiled_kernels": {side: run.compiled for side, run in runs.items()},
            "captured_graphs": {side: run.captured for side, run in runs.items()},
            "copy_bandwidth": self.bandwidth,
            "decode_floor_seconds": self.floors,
            "bandwidth_used": self.used,
        }


class Bench:
    """Models in a folder, and runs of pipelines that have them."""

    def __init__(
        self, folder: Path, shapes: set[str], seed: int, tiny: bool, part: float, longest: int, device: str
    ) -> None:
        self.folder, self.seed, self.part = folder, seed, part
        self.longest, self.device = longest, device
        self.count = 0
        for shape in sorted(shapes):
            say(f"writing a random model of {'a few' if tiny else shape} parameters")
            write_model(folder / shape, shape, tiny, seed)
        rows = [{"prompt": words(90 + number % 60, number)} for number in range(512)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(
        self, pipelines: Pipelines, policy: str, profile: Path | None = None, first_time: bool = False
    ) -> Run:
        """`first_time`: it does not count, and compiles and notes what those that do will need (`warm_up.py`)."""
        self.count += 1
        out = self.folder / f"{self.count}-{policy}"
        entries: dict[str, dict[str, Any]] = {}
        for name, each in pipelines.items():
            given = self.folder, self.seed, self.longest, self.part, self.device
            content = run_file(each, *given, first_time, confined=policy == "jigsaw")
            (self.folder / f"{self.count}-{name}.yaml").write_text(yaml.safe_dump(content))
            entries[name] = {"run": f"{self.count}-{name}.yaml"}
        mix: dict[str, Any] = {"workers": 1, "policy": policy, "pipelines": entries}
        if profile is not None:
            mix["profile"] = str(profile)
        path = out.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(mix))
        started, kernels, graphs = time.perf_counter(), compiled_kernels(), captured_graphs(self.folder)
        with Progress(json=True) as progress:
            outcome = run_mix(load_mix(path), out, False, progress)
        took = time.perf_counter() - started
        for each in outcome.pipelines:
            if each.how != "finished":
                raise RuntimeError(f"{policy}, {each.name}: {each.how}, {each.reason}")
            if (each.out / "model").exists():
                raise RuntimeError("lengths were not those of a trace: nobody imported traced.py")
        phases = [json.loads(line) for line in (out / "events.jsonl").open() if '"phase"' in line]
        phases = [each for each in phases if each["event"] == "phase"]
        began = {name: min(p["t0"] for p in phases if p["pipeline"] == name) for name in pipelines}
        ended = {name: max(p["t1"] for p in phases if p["pipeline"] == name) for name in pipelines}
        seconds = max(ended.values()) - min(began.values())
        tokens = outcome.made.report.tokens
        spans = {name: ended[name] - began[name] for name in pipelines}
        kernels, graphs = compiled_kernels() - kernels, captured_graphs(self.folder) - graphs
        return Run(seconds, tokens, spans, took - seconds, kernels, graphs, out)


def run_file(
    each: Traced,
    folder: Path,
    seed: int,
    longest: int,
    part: float,
    device: str,
    first_time: bool,
    confined: bool,
) -> dict[str, Any]:
    user = HERE / "traced_user.py"
    params = {"trace": each.trace, "turns": each.turns, "first": first_time, "confined": confined}
    task: dict[str, Any] = {
        "kind": "data",
        "path": "prompts.jsonl",
        "reward": {"path": f"{user}:score", "params": params, "processes": 1},
    }
    if each.turns > 1:
        tool = params | {"latency": each.latency, "prompt": words(120, seed)}
        task = {"kind": "environment", "path": f"{user}:Tool", "params": tool, "processes": 1}
        task |= {"size": 512, "max_turns": each.turns}
    sequences = each.prompts * each.samples
    trained = {"lora": {"rank": each.rank, "alpha": 2 * each.rank}} if each.rank else {}
    return {
        "seed": seed,
        "steps": max(1, round(part * each.steps)),
        "device": device,
        "model": {"path": str(folder / each.shape), "gradient_checkpointing": each.recomputed, **trained},
        "task": task,
        "rollout": {
            "prompts_per_step": each.prompts,
            "samples": each.samples,
            "max_tokens": longest,
            "max_prompt_tokens": 512,
            "max_num_batched_tokens": 8192,
            "kv_cache_tokens": int(each.cached * sequences * (longest + 512)),
        },
        "trainer": {"lr": 1e-6, "micro_batch_tokens": each.micro_batch_tokens},
        "telemetry": {"tensorboard": False},
    }


def words(count: int, number: int) -> str:
    return " ".join(str((number * 7919 + i * 104729) % 1000) for i in range(count))


def write_model(folder: Path, shape: str, tiny: bool, seed: int) -> None:
    """A Hugging Face folder; its tokens are numbers."""
    folder.mkdir(parents=True)
    config = qwen_config(shape)
    if tiny:
        small = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        config |= small | {"intermediate_size": 128, "vocab_size": 1200}
    eos = config["vocab_size"] - 1
    vocabulary = {str(number): number for number in range(config["vocab_size"])}
    config |= {"eos_token_id": eos, "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(eos)}
    for name, content in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": eos},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
    }.items():
        (folder / name).write_text(json.dumps(content))
    with torch.device("meta"):
        model = Transformer(spec_from_config(config, folder))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    pool = (0.02 * torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The same numbers again and again: to draw all of them takes a minute.
            for piece in parameter.view(-1).split(len(pool)):
                piece.copy_(pool[: len(piece)])
            if "norm" in name:
                parameter.add_(1)
    save_file({name: view.contiguous() for name, view in places(model).items()}, folder / "model.safetensors")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and lengths, on a CPU: a check of this file"
    )
    parser.add_argument("--longest", type=at_least_one, default=8192, help="tokens of a sample at most")
    parser.add_argument("--part", type=positive, default=1.0, help="of the steps")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the interference table, as `jigsaw profile` does (60 s)",
    )
    parser.add_argument(
        "--limit", type=positive, default=math.inf, help="seconds after which no side is begun"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for the profile, every run's events and the results so far",
    )
    parser.add_argument(
        "--only", action="append", help="these sides alone, and serial for those that are compared with it"
    )
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("gpu_multiplex needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    if options.keep is not None:
        try:  # now, and not after the first minutes
            options.keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"--keep {options.keep}: {error.strerror}; name another folder", file=sys.stderr)
            return 2
    began = time.perf_counter()
    preload_traced()
    part, longest = options.part * (0.4 if options.quick else 1.0), 48 if options.tiny else options.longest
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        sides: dict[str, tuple[Pipelines, str, Jigsaw | None]] = {
            "jigsaw": (FOUR, "jigsaw", None),
            "concurrent": (FOUR, "concurrent", None),
            "no shares": (FOUR, "jigsaw", LEVERS["no shares"]),
            "rollmux": (FOUR, "rollmux", None),
            "rlix": (FOUR, "rlix", None),
            **{name: (FOUR, "jigsaw", policy) for name, policy in LEVERS.items() if name != "no shares"},
            "jigsaw, two": (TWO, "jigsaw", None),
            "serial, others": (OTHERS, "serial", None),
            "jigsaw, eight": (EIGHT, "jigsaw", None),
            "serial, LoRA": (LORA, "serial", None),
            "jigsaw, LoRA": (LORA, "jigsaw", None),
        }
        usual = ["jigsaw", "concurrent"] if options.quick else [side for side in sides if "LoRA" not in side]
        chosen = options.only or usual
        if unknown := [side for side in chosen if side not in sides]:
            print(f"--only {unknown[0]!r} is none of {', '.join(map(repr, sides))}", file=sys.stderr)
            return 2
        mixes = [sides[side][0] for side in chosen]
        names = {name for mix in mixes for name in mix}
        first = [each for each in (FOUR, OTHERS, LORA) if not names.isdisjoint(each)]
        shapes = {each.shape for mix in (*first, *mixes) for each in mix.values()}
        device = "cpu" if options.tiny else "cuda"
        bench = Bench(Path(scratch), shapes, options.seed, options.tiny, part, longest, device)
        results = Results(None if options.tiny else copy_bandwidth_aside())
        profile: Path | None = None
        for mix in first:
            fits = {name: EIGHT.get(name, each) if mix is OTHERS else each for name, each in mix.items()}
            shown("not counted: it compiles kernels", bench.run(fits, "concurrent", first_time=True))
        if FOUR in first:
            serial = shown("serial", bench.run(FOUR, "serial"))
            results.add("serial", serial, FOUR, "serial")
            profile = serial.out / PROFILE
            if options.measure:
                add_table(load_mix(serial.out.with_suffix(".yaml")), serial.out, profile, say)
        keep(options.keep, results)
        for side in chosen:
            if time.perf_counter() - began > options.limit:
                say(f"no time for {side}")
                continue
            mix, policy, levers = sides[side]
            try:
                results.add(side, shown(side, run_with(bench, mix, policy, profile, levers)), mix, policy)
            except (JigsawError, RuntimeError) as error:
                results.failed[side] = str(error)
                say(f"{side}: {error}")
            keep(options.keep, results)
        print_table(console, results)
        claims = {}
        if "jigsaw" in results.ratios and not options.tiny:
            claims["vs_serial_4"] = claim(results.ratios["jigsaw"], at_least=TARGET)
        report(
            console,
            "gpu_multiplex",
            options.seed,
            claims,
            quick=options.quick,
            device="cpu" if options.tiny else torch.cuda.get_device_name(),
            longest=longest,
            **results.as_json(),
        )
    return 0


def preload_traced() -> None:
    """By the process that drivers and actors are forked from, which takes over this one's environment alone."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    family.PRELOADED.append("traced")


def run_with(bench: Bench, mix: Pipelines, policy: str, profile: Path | None, levers: Jigsaw | None) -> Run:
    """Under a policy of this name, or this one instead of it."""
    whole = POLICIES[policy]
    try:
        POLICIES[policy] = levers or whole
        return bench.run(mix, policy, profile)
    finally:
        POLICIES[policy] = whole


def compiled_kernels() -> int:
    """By Triton, on this machine so far."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for _ in cache.rglob("*.cubin"))


def copy_bandwidth_aside() -> float:
    """In a process that leaves the GPU again: this one must not hold on to it."""
    code = "import gpu_decode; print(gpu_decode.copy_bandwidth())"
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, stdout=subprocess.PIPE, check=True, timeout=300
    )
    return float(done.stdout.split()[-1])


def decode_floors(pipelines: Pipelines, profile: Path, bandwidth: float | None) -> dict[str, float]:
    """Seconds of each one's decode steps if nothing counted but what they must read: the weights, and what is cached,
    for all samples of a step at once. Not of those that share a base, which is read once for all."""
    floors = {}
    known = load_profile(profile)
    for name, each in pipelines.items():
        if bandwidth is not None and not each.rank:
            workload = known.workload(name)
            model = workload.model
            cost = DecodeCost(model.weight_bytes / bandwidth, 0.0, model.kv_bytes_per_token / bandwidth)
            prompts = np.full(workload.sequences, workload.prompt_tokens)
            steps = range(len(workload.quantiles))
            floors[name] = sum(DecodeCurve.of(workload.lengths(step), prompts, cost).total for step in steps)
    return floors


def shown(side: str, run: Run) -> Run:
    say(
        f"{side}: {run.seconds:.1f} s, {figure(run.speed)} tokens/s, {run.setup:.1f} s to set up, "
        f"{run.compiled} kernels compiled, {run.captured} graphs captured; "
        + str({name: round(seconds, 1) for name, seconds in run.each.items()})
    )
    return run


def keep(folder: Path | None, results: Results) -> None:
    """After every side: who is cut off has what there was."""
    if folder is None:
        return
    if "serial" in results.runs:
        shutil.copy(results.runs["serial"].out / PROFILE, folder / PROFILE)
    for side, run in results.runs.items():
        shutil.copy(run.out / "events.jsonl", folder / f"{side.replace(', ', '-').replace(' ', '-')}.jsonl")
    (folder / "results.json").write_text(json.dumps(results.as_json(), indent=1) + "\n")


def print_table(console: Console, results: Results) -> None:
    table = Table(title="pipelines on one GPU")
    for column in ("policy", "pipelines", "seconds", "tokens/s", "over serial", "of bandwidth, by decoding"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    ratios, used = results.ratios, results.used
    for side, run in results.runs.items():
        ratio = figure(ratios[side]) if side in ratios else "1"
        part = figure(used[side]) if side in used else ""
        table.add_row(side, str(len(run.each)), figure(run.seconds), figure(run.speed), ratio, part)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
