"""One process for the actors that several pipelines on one frozen base have on a worker.

    control ------> joins, pauses
    pipe of a ----> thread a: gradients, optimizer steps, ... of a's adapters
    pipe of b ----> thread b: ...                                  of b's
    main thread --> the engine: everybody's sequences in one batch

Whoever asks something of the engine has it between two of its passes. Training does not: one pipeline's gradients
are computed while others decode.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jigsawrl.config.settings import RunConfig
from jigsawrl.config.tasks import EpisodeTask
from jigsawrl.engine.memory import shared_cache_blocks
from jigsawrl.engine.shared import Member, SharedEngine
from jigsawrl.engine.types import RolloutBackend, SampleOutput
from jigsawrl.model.folder import load_model
from jigsawrl.model.lora import linears, share_base
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.model.transformer import Transformer
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.actor_process import Reply, Reports, answer_to, join_the_others, receive, send, told
from jigsawrl.pipeline.generating import compute_dtype
from jigsawrl.pipeline.pooled import NoEngine
from jigsawrl.pipeline.residency import Residency
from jigsawrl.pipeline.workers import set_up_torch
from jigsawrl.processes import die_with_parent, ignore_interrupts
from jigsawrl.runtime.messages import Join, Place, Stand, ToSharedActor

OF_THE_ENGINE = frozenset(("ready", "abort", "end_rollout", "sync_weights", "sleep", "wake_up"))
"""Methods of an actor that need the engine to stand still."""
OF_TRAINING = frozenset(
    ("logprobs", "reference_logprobs", "values", "forward_backward", "critic_forward_backward")
)
"""Those that take a device's time and memory, and wait for no other worker."""
SWITCH_S = 2e-4
"""For which a thread may keep Python's lock while others want it: a step of the engine takes a few milliseconds, and
is not to wait as long for a thread that trains."""


def shared_actor_main(control: Connection, place: Place, settle: Callable[[], bool]) -> None:
    """Ends with its parent, or when its engine fails: then all its pipelines start again from their last steps."""
    die_with_parent()
    ignore_interrupts()
    sys.setswitchinterval(SWITCH_S)
    set_up_torch(place.configs[0], place.device)
    if place.device.startswith("cuda"):
        torch.cuda.set_device(place.device)
    if (ranks := len(place.layout.gang)) > 1:
        join_the_others(place.device, place.rank, ranks, place.meeting, alone=place.layout.ranks_on_each == 1)
    house = House(place)
    threading.Thread(target=house.listen, args=(control,), daemon=True).start()
    house.generate(settle)


class SharingActor(Actor):
    """A pipeline's actor in somebody else's process, with its own adapters on their base."""

    def __init__(self, config: RunConfig, house: House, group: dist.ProcessGroup | None) -> None:
        self.house = house
        super().__init__(config, house.place.base, house.place.device, house.place.rank)
        for optimizer in self.residency.optimizers.values():
            optimizer.group = group

    def _model(self) -> Transformer:
        return share_base(self.house.base)

    def _engine(self) -> tuple[RolloutBackend, int]:
        if not self.house.place.layout.rolls_out(self.house.place.rank):
            return NoEngine(), 0
        engine = self.house.engine()
        tokenizer = load_tokenizer(self.base, self.config.model.trust_remote_code)
        room = min(self.model.spec.max_positions, engine.blocks.num_blocks * engine.blocks.block_size)
        return engine.join(self.config.name, self.model, tokenizer, self._passed), room

    def _residency(self) -> Residency:
        """Of what is its own: the base stays for the others."""
        residency = super()._residency()
        adapters = [linear.lora for _, linear in linears(self.model) if linear.lora is not None]
        residency.modules = {**residency.modules, "policy": nn.ModuleList(adapters)}
        return residency

    def busy_seconds(self, threads: int | None = None) -> float:
        """Its part of the engine's time, and its own thread's."""
        if self.device.type != "cpu":
            return super().busy_seconds(threads)
        return self.house.tenants[self.config.name].engine_seconds + time.thread_time()


@dataclass(slots=True, eq=False)
class Tenant:
    """A pipeline, as long as its pipe lasts."""

    config: RunConfig
    pipe: Connection
    group: dist.ProcessGroup | None
    stream: DeviceStream
    """For what is brief, or waits for other workers."""
    actor: SharingActor | None = None
    running: int = 0
    """Samples that it waits for."""
    engine_seconds: float = 0.0
    reports: Reports = field(default_factory=Reports)
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Reply) -> None:
        """From any thread. Where the pipeline is gone, its thread notices."""
        with suppress(OSError), self.sending:
            send(self.pipe, message)

    def close(self) -> None:
        """Its actor gives back what it has."""
        if self.actor is not None:
            self.actor.close()
            self.actor = None


class House:
    """What the pipelines share, and who they are."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.tenants: dict[str, Tenant] = {}
        self.turn = threading.Condition()
        """Held by whoever uses the engine."""
        self.wanting: set[int] = set()
        """Threads that wait for the engine."""
        self._shared: SharedEngine | None = None
        self.training = DeviceStream(place.device)
        """Of all pipelines, in turns: memory that one's gradients took is there for the next one's."""

    @cached_property
    def base(self) -> Transformer:
        """Loaded when the first pipeline has its permit to come."""
        device = torch.device(self.place.device)
        dtype = compute_dtype(self.place.configs[0], device)
        return load_model(self.place.base, dtype, device).requires_grad_(False)

    def engine(self) -> SharedEngine:
        if self._shared is None:
            configs, base = self.place.configs, self.base
            rollouts = [config.rollout for config in configs]
            self._shared = SharedEngine(
                base,
                num_blocks=shared_cache_blocks(configs, base.spec, base.dtype, base.device),
                block_size=rollouts[0].block_size,
                max_num_seqs=sum(rollout.max_num_seqs for rollout in rollouts),
                max_num_batched_tokens=max(rollout.max_num_batched_tokens for rollout in rollouts),
                deterministic=configs[0].deterministic,
            )
        return self._shared

    # Who comes and goes

    def listen(self, control: Connection) -> None:
        """All workers hear the same in the same order, so groups for the sum of gradients are made together."""
        try:
            while True:
                self._hear(control.recv(), control)
        except EOFError:
            os._exit(1)
        except BaseException:  # who came now would wait for ever
            traceback.print_exc()
            os._exit(1)

    def _hear(self, message: ToSharedActor, control: Connection) -> None:
        match message:
            case Join(config):
                pipe = Connection(recv_handle(control))
                group = dist.new_group() if len(self.place.layout.gang) > 1 else None
                tenant = Tenant(config, pipe, group, DeviceStream(self.place.device))
                threading.Thread(target=self._serve, args=(tenant,), daemon=True).start()
            case Stand(pipeline, still):
                with self.visit():
                    match self.tenants.get(pipeline):
                        case Tenant(actor=SharingActor(engine=Member() as engine)):
                            engine.pause() if still else engine.go_on()

    def _serve(self, tenant: Tenant) -> None:
        """A pipeline's thread: does as it is told until the pipe closes."""
        with tenant.pipe:
            with suppress(EOFError, ConnectionResetError):
                while True:
                    id, what, args = receive(tenant.pipe)
                    if id is None:
                        id, what, args = self._take_in(tenant, what)
                    if id is not None:
                        turn = self.visit() if what in OF_THE_ENGINE else nullcontext()
                        stream = self.training if what in OF_TRAINING else tenant.stream
                        with turn, stream.used():
                            answer = answer_to(partial(self._perform, tenant), id, what, args)
                        tenant.send(answer)
            with self.visit():
                if self.tenants.get(tenant.config.name) is tenant:
                    del self.tenants[tenant.config.name]
                tenant.close()
            if tenant.group is not None and dist.get_backend(tenant.group) == "gloo":
                dist.destroy_process_group(tenant.group)  # else its sockets and threads stay
                tenant.group = None
            gc.collect()  # the actor is part of cycles, and has the group and its own memory until they are found

    def _take_in(self, tenant: Tenant, request: Any) -> tuple[int | None, Any, Any]:
        """A request, and all that have come behind it, between the same two passes: prompts that came in one by one
        would be read one by one, and everybody's samples would wait for each. Returns the message after them, if one
        is there."""
        with self.visit():
            self._request(tenant, request)
            while tenant.pipe.poll():
                id, what, args = receive(tenant.pipe)
                if id is not None:
                    return id, what, args
                self._request(tenant, what)
        return None, None, ()

    def _perform(self, tenant: Tenant, method: str, args: tuple[Any, ...]) -> Any:
        if method == "ready":
            if tenant.config.name in self.tenants:  # whoever it was before it came back
                self.tenants.pop(tenant.config.name).close()
            self.tenants[tenant.config.name] = tenant
            tenant.actor = SharingActor(tenant.config, self, tenant.group)
            return None
        if method == "abort":
            tenant.running = 0
        return getattr(tenant.actor, method)(*args)

    def _request(self, tenant: Tenant, request: Any) -> None:
        assert tenant.actor is not None
        try:
            tenant.actor.engine.add_request(request)
            tenant.running += len(request.keys)
        except Exception as error:
            tenant.send(("failed", None, told(error)))

    # The engine

    @contextmanager
    def visit(self) -> Iterator[None]:
        """The engine's turn ends soon, and whoever is inside has it."""
        thread = threading.get_ident()
        self.wanting.add(thread)
        if self._shared is not None:
            self._shared.nudge()
        with self.turn:
            self.wanting.discard(thread)
            try:
                yield
            finally:
                self.turn.notify_all()

    def generate(self, settle: Callable[[], bool]) -> None:
        """For ever: passes of the engine, whenever there is something to generate and nobody wants it first."""
        while True:
            with self.turn:
                while self.wanting or self._shared is None or not self._shared.has_unfinished():
                    self.turn.wait()
                self._shared.yields = settle()
                try:
                    ended = self._pass(self._shared)
                except Exception as error:
                    for tenant in self.tenants.values():
                        tenant.send(("failed", None, told(error)))
                    os._exit(1)
                tenants = list(self.tenants.values())
            for tenant in tenants:
                self._tell(tenant, ended.get(tenant.config.name, []))

    def _pass(self, engine: SharedEngine) -> dict[str, list[SampleOutput]]:
        """One of them. Its time is everybody's, by the samples that they have."""
        began = time.thread_time()
        ended = engine.step(look=self._is_waited_for)
        took = time.thread_time() - began
        samples = sum(tenant.running for tenant in self.tenants.values())
        for name, tenant in self.tenants.items():
            tenant.engine_seconds += took * tenant.running / max(1, samples)
            tenant.running -= len(ended.get(name, []))
        return ended

    def _is_waited_for(self) -> bool:
        """Whether somebody's next turn hangs on a sample that has ended. Rewards can wait until the others of a burst
        are drawn, and the last of a pipeline's samples ends it."""
        assert self._shared is not None
        members = self._shared.members
        episodes = (n for n, tenant in self.tenants.items() if isinstance(tenant.config.task, EpisodeTask))
        return any(members[name].ended for name in episodes if name in members)

    def _tell(self, tenant: Tenant, ended: list[SampleOutput]) -> None:
        if ended:
            tenant.send(("outputs", None, ended))
        actor = tenant.actor
        if tenant.running and actor is not None and time.monotonic() >= tenant.reports.due:
            tenant.reports.make(tenant.send, actor.engine)


class DeviceStream:
    """On a GPU, a stream beside the engine's that one thread at a time uses; elsewhere, nothing."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device) if device.startswith("cuda") else None
        self.turn = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[None]:
        """What a thread gives the device to do inside is done when it leaves: others use what came of it.

        Pipelines that train take turns. On one stream they would be done no sooner side by side; they would keep each
        other and the engine waiting for Python's lock, and need the memory of all their activations at once.
        """
        if self.stream is None:
            yield
            return
        with self.turn, torch.cuda.stream(self.stream):
            yield
            self.stream.synchronize()
