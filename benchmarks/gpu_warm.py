"""Switching a pipeline between host and device: seconds to sleep and to wake up, against the link and a cold start.

A 1.5B pipeline (the shape of Qwen2.5 1.5B, random weights) with its optimizer's state after some updates, in a real
actor. It sleeps: all state goes to the node's store in shared memory, where it outlives the actor, and the device's
memory is free. It wakes up: all of it is back, bit for bit (compared with a copy), and the first token is sampled.
Between any two sleeps there is an update, so everything must be written again. The first sleep makes the pages of the
store and tells the device of them; the rates are medians of those after it.

Of 14 bytes a parameter (bfloat16 weights, float32 masters, two moments; the 2 or 4 of a gradient are gone after an
update) 12 are moved, since weights are masters rounded. `link_fraction` is the moved bytes over the whole time of
`sleep` or `wake_up`, over the bandwidth of copies between pinned memory and the device in the same run; the lower of
the two counts.

The cold start is a new process that loads the model's folder and the checkpoint, until it has sampled a token. Both
are in shared memory, as if a disk took no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import arguments, claim, clean_stdout, report, say
from gpu_decode import qwen_config, random_model
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from jigsawrl.config import RunConfig
from jigsawrl.config.runfile import checked
from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.model.folder import places
from jigsawrl.model.tiny import write_tiny
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.residency import Swapped
from jigsawrl.store.folders import SHARED_MEMORY
from jigsawrl.store.store import Store
from jigsawrl.trainer.batch import Batch
from jigsawrl.trainer.checkpoint import CheckpointStore

NAME = "warm"
SWITCHES = 5
BUDGET_PER_PARAMETER = 20
LINK_BYTES = 2 << 30


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cold-side", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_warm needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    if options.cold_side:
        cold_side(options.cold_side)
        return 0
    torch.manual_seed(options.seed)
    shape = "0.5B" if options.quick else "1.5B"
    scratch = tempfile.TemporaryDirectory(prefix="jigsawrl-bench-", dir=SHARED_MEMORY)
    with clean_stdout() as console, scratch as place:
        folder = Path(place)
        link = link_bandwidth()
        say(f"a folder with a {shape} model")
        write_folder(folder / "model", shape)
        actor = Actor(settings(folder / "model"), folder / "model", "cuda")
        parameters = sum(parameter.numel() for parameter in actor.model.parameters())
        store = Store.create(folder / "spill", BUDGET_PER_PARAMETER * parameters)
        try:
            switches = [switch(actor, store, number) for number in range(1 + SWITCHES)]
            usage = store.usage()
        finally:
            store.destroy()
        assert usage.spilled_bytes == 0, f"{SHARED_MEMORY} is too small: the state was on a disk"
        cold = cold_start(actor, folder)
        show(console, shape, switches, link, cold)
        report(
            console,
            "gpu_warm",
            options.seed,
            {"link_fraction": claim(min(fractions(switches, link).values()), at_least=0.8)},
            quick=options.quick,
            device=torch.cuda.get_device_name(),
            shape=shape,
            parameters=parameters,
            bytes_per_parameter=switches[-1]["wake_up"].bytes / parameters,
            link_gigabytes_per_second=link,
            fractions=fractions(switches, link),
            seconds=[{verb: swapped.seconds for verb, swapped in each.items()} for each in switches],
            seconds_to_first_token=first_token_seconds(switches),
            cold_seconds=cold,
            cold_over_warm=sum(cold.values()) / first_token_seconds(switches),
        )
    return 0


def link_bandwidth() -> dict[str, float]:
    """GB/s between pinned memory and the device, each way, medians."""
    device = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda").random_()
    host = torch.empty_like(device, device="cpu", pin_memory=True)
    found = {}
    for way, target, source in (("sleep", host, device), ("wake_up", device, host)):
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        found[way] = LINK_BYTES / statistics.median(times) / 1e9
    return found


def write_folder(folder: Path, shape: str) -> None:
    """A Hugging Face folder with random weights, and a tokenizer that knows some of its tokens."""
    write_tiny(folder, layers=1, hidden=16, heads=2, kv_heads=2, seed=0)
    config = qwen_config(shape) | {"eos_token_id": 1, "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: view.cpu() for name, view in places(random_model(config)).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.cuda.empty_cache()


def settings(model: Path) -> RunConfig:
    return checked(
        {
            "name": NAME,
            "steps": 100,
            "device": "cuda",
            "model": {"path": str(model)},
            "task": {"kind": "arithmetic", "max_number": 6, "size": 49},
            "rollout": {"prompts_per_step": 8, "samples": 4, "max_tokens": 64, "kv_cache_tokens": 65_536},
            "trainer": {"lr": 1e-6},
        }
    )


def switch(actor: Actor, store: Store, number: int) -> dict[str, Swapped]:
    """An update, a sleep and a waking up; with the time from there to the first token."""
    say(f"switch {number}")
    update(actor)
    before = {name: tensor.clone() for name, tensor in actor.trainer.optimizer.tensors().items()}
    weights = {name: tensor.clone() for name, tensor in actor.trainer.optimizer.parameters.items()}
    free = torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    slept = actor.sleep(store.root, NAME)
    assert torch.cuda.mem_get_info()[0] - free > slept.bytes, "its memory is not free"
    torch.cuda.synchronize()
    started = time.perf_counter()
    woke = actor.wake_up(store.root, NAME)
    torch.cuda.synchronize()
    first_token(actor)
    seconds = time.perf_counter() - started
    after = actor.trainer.optimizer.tensors()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "not as it was"
    now = actor.trainer.optimizer.parameters
    assert all(torch.equal(tensor, now[name]) for name, tensor in weights.items()), "not as it was"
    return {"sleep": slept, "wake_up": woke, "first_token": Swapped(0, seconds)}


def update(actor: Actor) -> None:
    values = dict.fromkeys(("advantages", "weights", "engine_logprobs"), torch.linspace(-1, 1, 15))
    actor.forward_backward(Batch([torch.arange(2, 22)], [torch.arange(5, 20)], values))
    actor.optim_step()


def first_token(actor: Actor) -> None:
    request = Request("0", [5, 6, 7], SamplingParams(max_tokens=1), [SampleKey(0, NAME, 0, 0, 0)])
    (output,) = actor.engine.generate([request])
    assert len(output.generated.token_ids) == 1


def first_token_seconds(switches: list[dict[str, Swapped]]) -> float:
    return statistics.median(each["first_token"].seconds for each in switches[1:])


def fractions(switches: list[dict[str, Swapped]], link: dict[str, float]) -> dict[str, float]:
    """Of the link's bandwidth, each way."""
    return {
        verb: statistics.median(each[verb].bytes / each[verb].seconds / 1e9 for each in switches[1:]) / rate
        for verb, rate in link.items()
    }


def cold_start(actor: Actor, folder: Path) -> dict[str, float]:
    """Seconds of its parts, from the start of a process to the first token."""
    say("a checkpoint, for the cold start")
    state = {
        part: {name: tensor.cpu() for name, tensor in each.items()}
        for part, each in actor.save_state().items()
    }
    CheckpointStore(folder / "checkpoints", 1, {}).save(1, state, {})
    actor.close()
    actor.residency.free()
    say("the cold start")
    started = time.time()
    output = subprocess.run(
        [sys.executable, __file__, "--cold-side", str(folder)], stdout=subprocess.PIPE, check=True
    ).stdout
    marks = json.loads(output.splitlines()[-1])
    ends = list(marks.values())
    return {name: end - begin for name, begin, end in zip(marks, [started, *ends[:-1]], ends, strict=True)}


def cold_side(folder: Path) -> None:
    """Prints at what time each part was done."""
    marks = {"process": time.time()}
    with clean_stdout() as console:
        actor = Actor(settings(folder / "model"), folder / "model", "cuda")
        marks["model"] = time.time()
        checkpoint = CheckpointStore(folder / "checkpoints", 1, {}).load_latest(say)
        assert checkpoint is not None
        actor.load_state(checkpoint.tensors)
        torch.cuda.synchronize()
        marks["optimizer"] = time.time()
        first_token(actor)
        marks["first token"] = time.time()
        print(json.dumps(marks), file=console.file, flush=True)


def show(
    console: Console,
    shape: str,
    switches: list[dict[str, Swapped]],
    link: dict[str, float],
    cold: dict[str, float],
) -> None:
    table = Table(title=f"{shape}: {switches[-1]['wake_up'].bytes / 1e9:.2f} GB between host and device")
    for column in ("", "first s", "then s", "GB/s", "link GB/s", "of the link"):
        table.add_column(column, justify="right")
    for verb, fraction in fractions(switches, link).items():
        seconds = statistics.median(each[verb].seconds for each in switches[1:])
        rate = fraction * link[verb]
        table.add_row(
            verb,
            f"{switches[0][verb].seconds:.2f}",
            f"{seconds:.3f}",
            f"{rate:.1f}",
            f"{link[verb]:.1f}",
            f"{fraction:.0%}",
        )
    console.print(table)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in cold.items())
    warm = first_token_seconds(switches)
    console.print(f"to the first token: warm {warm:.2f} s, cold {sum(cold.values()):.1f} s ({parts})")


if __name__ == "__main__":
    sys.exit(main())
