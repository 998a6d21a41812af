"""Measures how fast sub-stages are beside each other on this machine's GPU, as they really run.

A few processes as a run has them (under MPS, an actor in each) do one thing each at the same time: read prompts,
decode few sequences, decode many, or make gradients, trainings held to parts of the GPU as a run holds them, and
rollouts that are not alone leaving room as there. What each gets done is held against what it gets done alone; over
several batch sizes of decoding it is the mean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jigsawrl.config.pipelines import Mix
from jigsawrl.config.settings import RunConfig
from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import DEVICE_PART
from jigsawrl.graph.interference import LEVELS, Interference, Signature
from jigsawrl.graph.measured import ALL, Side, crowds, sizes, table_from
from jigsawrl.graph.profile import load_profile, write_profile
from jigsawrl.pipeline.base import base_folder
from jigsawrl.runtime.launch import own_config, wanted_device
from jigsawrl.runtime.shares import Gpus, Units, aside, divided, shares_here

MOST = 4
"""Processes."""
SEQUENCES: Mapping[Signature, Sequence[int]] = {"tail": (1, 4, 8), "bulk": (16, 64, 256)}
"""That are decoded at once."""
CONTEXT, LONGEST = 512, 2048
"""Tokens of a sequence when it is begun, and at most; less where that many would not fit into the cache."""
CACHED = 160 << 10
"""Tokens."""
TRAINED = 8192
"""Tokens of a training's micro-batch, and of prompts that are read at once."""
SECONDS = 0.6
"""Of a measurement, at least."""
LIMIT_S = 150.0
"""For all of it; what is not measured by then is left out, where the table can do without."""
PATIENCE_S = 120.0
"""For a process to be ready: its first kernels may have to be compiled."""
STATE, BESIDE = 18, 6e9
"""Bytes of a parameter and what belongs to it, and of the rest of a process on a GPU."""


def add_table(mix: Mix, run: Path, path: Path, say: Callable[[str], None]) -> None:
    """Measures how GPU 0 is shared, with the smallest model of a run's pipelines, and enters it into its profile.

    On a CPU nothing is to be measured: cores do not get in each other's way.
    """
    with shares_here(mix.config.workers, wanted_device(mix)) as shares:
        if not isinstance(shares, Gpus):
            return
        profile = load_profile(path)
        name, workload = min(profile.workloads.items(), key=lambda each: each[1].model.parameters)
        config = own_config(mix, name, "cuda")
        room = int(DEVICE_PART * shares.found[0].memory / (STATE * workload.model.parameters + BESIDE))
        why = f"no MPS: {shares.without_mps}" if shares.without_mps else ""
        if why or room < 2:
            why = why or f"no two models as large as {name}'s fit on the GPU"
            say(f"not measured: how much sub-stages slow each other down side by side ({why})")
            return
        say("measuring how much sub-stages slow each other down side by side")
        table = measured_table(config, base_folder(config, run / name), shares, min(MOST, room), say)
        write_profile(replace(profile, interference=table), path)


def measured_table(
    config: RunConfig, base: Path, shares: Gpus, most: int, say: Callable[[str], None]
) -> Interference:
    """Of GPU 0, by up to so many processes."""
    began = time.monotonic()
    with ExitStack() as ending:
        bench = Bench(config, base, shares, most, ending)
        todo = crowds(most, divisible=len(shares.workers[0]) > 1)
        found: dict[tuple[Side, ...], tuple[float, ...]] = {}
        for number, crowd in enumerate(todo, start=1):
            if len(crowd) > 2 and time.monotonic() - began > LIMIT_S:
                break
            found[crowd] = bench.speeds(crowd)
            told = " + ".join(
                kind if level == ALL else f"{kind} on {level} of {LEVELS}" for kind, level in crowd
            )
            speeds = ", ".join(f"{speed:.2f}" for speed in found[crowd])
            say(f"{number} of {len(todo)}: {told}: {speeds}")
    say(f"measured {len(found)} of {len(todo)} in {time.monotonic() - began:.0f} s")
    batches = "; ".join(f"{kind}: {', '.join(map(str, counts))}" for kind, counts in SEQUENCES.items())
    where = f"one {shares.found[0].name} with the model of {config.name}"
    source = f"measured on {where}, {len(found)} crowds ({batches})"
    return table_from(found, shares.hardware().name, source)


class Bench:
    """Processes that do as they are told, and what each kind of work gets done alone."""

    def __init__(self, config: RunConfig, base: Path, shares: Gpus, count: int, ending: ExitStack) -> None:
        self.units = shares.workers[0]
        self.alone: dict[tuple[Signature, int], float] = {}
        """By kind and size."""
        told = (work_as_told, config, base, shares.device(0), dict(shares.environment))
        self.pipes = [ending.enter_context(aside(*told, name=f"measures{number}")) for number in range(count)]
        for pipe in self.pipes:
            heard(pipe)

    def speeds(self, crowd: Sequence[Side]) -> tuple[float, ...]:
        """Of each, relative to alone on the whole GPU: the mean over sizes."""
        found = [self._speeds(crowd, size) for size in sizes(tuple(crowd))]
        return tuple(sum(each) / len(found) for each in zip(*found, strict=True))

    def _speeds(self, crowd: Sequence[Side], size: int) -> list[float]:
        rates = self._rates(crowd, size)
        kinds = [(kind, size if kind in SEQUENCES else 0) for kind, _ in crowd]
        if len(crowd) == 1 and crowd[0][1] == ALL:
            self.alone[kinds[0]] = rates[0]
        return [rate / self.alone[kind] for kind, rate in zip(kinds, rates, strict=True)]

    def _rates(self, crowd: Sequence[Side], size: int) -> list[float]:
        """All begin when all are ready, and go on until all have measured."""
        pipes = self.pipes[-len(crowd) :]
        for pipe, (kind, level) in zip(pipes, crowd, strict=True):
            # A training has the last units, beside others that have the first.
            part = () if level == ALL else divided(self.units, [1 - level / LEVELS, level / LEVELS])[1]
            pipe.send((kind, size, part, len(crowd) > 1))
        for pipe in pipes:
            heard(pipe)
        for pipe in pipes:
            pipe.send("go")
        rates = [heard(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send("stop")
        return rates


def heard(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise JigsawError("measuring: a process does not answer")
    try:
        said = pipe.recv()
    except EOFError:
        raise JigsawError("measuring: a process died; see above") from None
    if isinstance(said, str):
        raise JigsawError(f"measuring: {said}")
    return said


def work_as_told(
    pipe: Connection, config: RunConfig, base: Path, device: str, environment: Mapping[str, str]
) -> None:
    """The process."""
    from jigsawrl.processes import die_with_parent

    die_with_parent()
    os.environ.update(environment)
    try:
        worker = Worker(config, base, device)
        pipe.send(None)
        while True:
            kind, size, units, in_company = pipe.recv()
            with worker.held_to(units):
                work = worker.begin(kind, size, in_company)
                work()
                pipe.send(None)
                pipe.recv()
                pipe.send(rate_of(work))
                while not pipe.poll(0):
                    work()
                pipe.recv()
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def rate_of(work: Callable[[], None]) -> float:
    """How often it is done in a second."""
    started, times = time.perf_counter(), 0
    while (took := time.perf_counter() - started) < SECONDS or times < 2:
        work()
        times += 1
    return times / took


class Worker:
    """An actor that does one kind of work over and over."""

    def __init__(self, config: RunConfig, base: Path, device: str) -> None:
        from jigsawrl.pipeline.actor import Actor

        rollout = config.rollout.model_copy(
            update={
                "kv_cache_tokens": CACHED,
                "max_num_seqs": max(max(counts) for counts in SEQUENCES.values()),
                "max_num_batched_tokens": TRAINED,
            }
        )
        trainer = config.trainer.model_copy(update={"micro_batch_tokens": TRAINED})
        self.actor = Actor(config.model_copy(update={"rollout": rollout, "trainer": trainer}), base, device)
        self.rounds = 0

    def held_to(self, units: Units) -> AbstractContextManager[None]:
        """Inside, all that it does stays on these units of its GPU; without any it has all of them."""
        if not units:
            return nullcontext()
        from jigsawrl.runtime.green import parts_of

        return parts_of(self.actor.device.index or 0).on(units)

    def begin(self, kind: Signature, size: int, in_company: bool) -> Callable[[], None]:
        """Work of a kind, with the batch of this size where there are several."""
        self.actor.engine.abort()
        self.actor.engine.yields = in_company
        if kind == "compute":
            return self._training()
        return self._reading() if kind == "prefill" else self._decoding(SEQUENCES[kind][size])

    def _decoding(self, count: int) -> Callable[[], None]:
        """A step of the engine; sequences that have come to their end are begun anew."""
        engine, longest = self.actor.engine, min(LONGEST, self.actor.room, CACHED // count)
        length = min(CONTEXT, longest // 2)

        def step() -> None:
            if not engine.has_unfinished():
                self._add(count, length, longest - length, begin=0)
                for _ in range(1 + count * length // TRAINED):
                    engine.step()
            engine.step()

        return step

    def _reading(self) -> Callable[[], None]:
        """Prompts that nobody has read before, as many as are read at once; of each one token is drawn."""
        engine, length = self.actor.engine, min(CONTEXT, self.actor.room // 2)

        def step() -> None:
            self._add(max(1, TRAINED // length), length, 1, begin=self.rounds)
            while engine.has_unfinished():
                engine.step()

        return step

    def _add(self, count: int, length: int, new: int, begin: int) -> None:
        """Requests for so many new tokens; prompts that begin alike are known to the engine's cache."""
        from jigsawrl.engine.types import Request, SampleKey, SamplingParams

        self.rounds += 1
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        for number in range(count):
            first = [each % 64 + 2 for each in (begin // 64, begin, number // 64, number)]
            tokens = (first + [place % 64 + 2 for place in range(length)])[:length]
            key = SampleKey(0, "measured", self.rounds, number, 0)
            self.actor.engine.add_request(Request(str(number), tokens, params, [key]))

    def _training(self) -> Callable[[], None]:
        import torch

        from jigsawrl.trainer.batch import Batch

        length = min(1024, self.actor.room)
        count = max(1, TRAINED // length)
        tokens = [(torch.arange(length) * 7 + number) % 64 + 2 for number in range(count)]
        trained = [torch.arange(length // 2, length) for _ in range(count)]
        flat = torch.ones(sum(map(len, trained)))
        values = {"advantages": flat, "weights": flat / len(flat), "engine_logprobs": -flat}
        batch = Batch(tokens, trained, values | {"old_logprobs": -flat, "ref_logprobs": -flat})

        def step() -> None:
            self.actor.forward_backward(batch)

        return step
