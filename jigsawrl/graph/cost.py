"""What sub-stages cost: forms with few coefficients, for one model on one kind of hardware.

    a pass of decoding      a + b * sequences + c * sequences * mean context
    a pass over tokens      fixed + per_token * tokens + per_token_context * tokens * mean length

Seconds, alone on whole workers. Coefficients are fitted (`fitting.py`), follow what a run measures
(`scheduler/learning.py`), carry their relative error, and are never negative. Measured at one width, they are carried
to others by a rule: what grows with tokens shrinks with the number of workers, what is fixed does not, and what moves
weights between host and device is each worker's part of them. Where a run keeps its state in host memory
(`offloaded`), the fixed part of a pass over tokens is such a move. One engine spans `tp` workers; with another `tp`
than was measured a pass costs its overhead and one reading of the weights, and the rest in proportion (a roofline).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.shape import ModelShape

ACHIEVED = 0.9
"""Part of the memory's peak bandwidth that a good kernel reaches: 4.3 of 4.8 TB/s on an H200."""
PASS_OVERHEAD = 1.3e-3
"""Seconds of a decode pass on one worker besides moving bytes: vLLM's on an H200, 1.5B and 7B alike."""
OPTIMIZER_TRAFFIC = 28
"""Bytes of device memory that the optimizer reads and writes for a parameter."""
UNKNOWN = 0.3
"""Relative error of what was derived and not measured."""


TokenPass = Literal["logprob", "ref", "grad"]
"""A pass over all tokens of a step."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one decode pass."""

    a: float
    b: float
    c: float
    error: float = UNKNOWN
    """Relative, one standard deviation."""

    def knee(self, length: float) -> int:
        """So many sequences that half of a pass is its fixed cost: with fewer, workers idle."""
        each = self.b + self.c * length
        return max(1, round(self.a / each)) if each > 0 else 1_000_000

    def scaled(self, factor: float) -> DecodeCost:
        return replace(self, a=self.a * factor, b=self.b * factor, c=self.c * factor)


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of work over tokens."""

    fixed: float
    per_token: float
    per_token_context: float
    """Attention: for each token and each token of the mean length."""
    error: float = UNKNOWN
    """Relative, one standard deviation."""

    def seconds(self, tokens: float, mean_length: float) -> float:
        return self.fixed + tokens * (self.per_token + self.per_token_context * mean_length)

    def scaled(self, factor: float, fixed: float | None = None) -> LinearCost:
        """Both parts by a factor, or the fixed one by another."""
        return replace(
            self,
            fixed=self.fixed * (factor if fixed is None else fixed),
            per_token=self.per_token * factor,
            per_token_context=self.per_token_context * factor,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """All sub-stages of one model on one kind of hardware."""

    model: ModelShape
    hardware: Hardware
    gpus: int
    """At which the coefficients hold as they are."""
    tp: int
    """At which decode and prefill hold as they are."""
    decoding: DecodeCost
    prefilling: LinearCost
    """Its fixed part is that of each admitted sequence: engines prefill a few at a time as requests come in."""
    logprob: LinearCost
    ref: LinearCost
    grad: LinearCost
    optim: float
    """Seconds of the optimizer, with what it takes to bring its state to the devices and back."""
    sync: float
    """Seconds until the engines have the new weights."""
    rollout_fixed_seconds: float = 0.0
    """Start and end of a generation that no pass explains."""
    offloaded: bool = False
    """Whether parameters and optimizer state were in host memory, and moved whenever they were needed."""
    other_seconds: float = 0.0
    """Rewards, advantages, and whatever else a step does besides."""
    kv_tokens: float | None = None
    """What the cache of one engine held where this was measured."""
    warmup: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the first step of a run takes longer, by stage: gen, old_log_prob, ref, update_actor."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative, one standard deviation: by sub-stage, and of a whole "gen" and "step"."""
    source: str = ""
    derived: bool = False
    """Whether any of it was carried over from other hardware, or is a prior."""

    def decode(self, tp: int) -> DecodeCost:
        """Of an engine on `tp` workers."""
        if tp == self.tp:
            return self.decoding
        reading = self.model.weight_bytes / (self.hardware.memory_bandwidth * ACHIEVED)
        measured = max(0.0, self.decoding.a - reading / self.tp)
        # The overhead grows with the logarithm of the width, from one worker's to the measured one.
        part = math.log(tp) / math.log(self.tp) if self.tp > 1 else 1 + math.log(tp) / 4
        overhead = PASS_OVERHEAD + part * (measured - PASS_OVERHEAD) if self.tp > 1 else measured * part
        ratio = self.tp / tp
        return DecodeCost(
            max(0.0, overhead) + reading / tp,
            self.decoding.b * ratio,
            self.decoding.c * ratio,
            math.hypot(self.decoding.error, UNKNOWN / 2),
        )

    def prefill_seconds(self, tokens: float, mean_length: float, tp: int, sequences: float) -> float:
        """Of one engine that lets in so many sequences with these tokens."""
        cost = self.prefilling
        per_token = cost.per_token + cost.per_token_context * mean_length
        return sequences * cost.fixed + tokens * per_token * self.tp / tp

    def token_pass_seconds(self, kind: TokenPass, tokens: float, mean_length: float, gpus: int) -> float:
        """Of one pass over tokens on so many workers."""
        return self._at(kind, gpus).seconds(tokens, mean_length)

    def optim_seconds(self, gpus: int) -> float:
        """Optimizer state is spread over the workers, and so is moving it."""
        return self.optim * self.gpus / gpus

    def swapped(self, kind: TokenPass | Literal["optim"], gpus: int) -> float:
        """The part of a sub-stage's seconds in which state moves between host and devices, which compute nothing."""
        if not self.offloaded:
            return 0.0
        if kind == "optim":
            bandwidth = self.hardware.memory_bandwidth * ACHIEVED * gpus
            return max(0.0, self.optim_seconds(gpus) - OPTIMIZER_TRAFFIC * self.model.parameters / bandwidth)
        return self._at(kind, gpus).fixed

    def sync_seconds(self, tp: int) -> float:
        """Every engine gets whole weights, each of its workers its part."""
        moved = self.model.weight_bytes / self.hardware.link_bandwidth
        fixed = max(0.0, self.sync - moved / self.tp)
        return fixed + moved / tp

    def on(self, hardware: Hardware) -> Costs:
        """Carried to other hardware by the roofline, and marked as derived.

        Passes over tokens go with arithmetic, decoding with memory bandwidth (each sequence not faster than its
        arithmetic), weights with the links. Overheads that move nothing stay.
        """
        if hardware == self.hardware:
            return self
        flops = self.hardware.flops / hardware.flops
        memory = self.hardware.memory_bandwidth / hardware.memory_bandwidth
        host = self.hardware.host_bandwidth / hardware.host_bandwidth
        reading = self._reading(self.model)
        arithmetic = 2 * self.model.parameters / (hardware.flops * self.tp) / 0.7
        links = 1 / hardware.link_bandwidth - 1 / self.hardware.link_bandwidth
        return self._carried(
            tokens=flops,
            attention=flops,
            fixed=host,
            decode=(
                max(0.0, self.decoding.a - reading) + reading * memory,
                max(self.decoding.b * memory, arithmetic),
                self.decoding.c * memory,
            ),
            unsure=UNKNOWN / 2,
            kv_tokens=self.kv_tokens
            and self.kv_tokens * (hardware.device_bytes / self.hardware.device_bytes),
            sync=max(0.0, self.sync + self.model.weight_bytes / self.tp * links),
            hardware=hardware,
            source=f"carried from {self.hardware.name} to {hardware.name} by the roofline",
        )

    def of(self, model: ModelShape) -> Costs:
        """Carried to another model: tokens by arithmetic, passes by bytes, fixed parts by the root of the size."""
        known = self.model
        if replace(model, name=known.name, bytes_per_parameter=known.bytes_per_parameter) == known:
            return replace(self, model=model)
        size = model.parameters / self.model.parameters
        kept = model.kv_bytes_per_token / self.model.kv_bytes_per_token
        root = math.sqrt(size)
        return self._carried(
            tokens=size,
            attention=(model.layers * model.hidden) / (self.model.layers * self.model.hidden),
            fixed=root,
            decode=(
                max(0.0, self.decoding.a - self._reading(self.model)) + self._reading(model),
                self.decoding.b * root,
                self.decoding.c * kept,
            ),
            unsure=UNKNOWN,
            kv_tokens=self.kv_tokens and self.kv_tokens / kept,
            sync=self.sync * root,
            model=model,
            source=f"carried from {self.model.name} to {model.name}",
        )

    def _reading(self, model: ModelShape) -> float:
        """Seconds in which an engine's workers read a model's weights."""
        return model.weight_bytes / (self.hardware.memory_bandwidth * ACHIEVED * self.tp)

    def _carried(
        self,
        *,
        tokens: float,
        attention: float,
        fixed: float,
        decode: tuple[float, float, float],
        unsure: float,
        source: str,
        **others: Any,
    ) -> Costs:
        """All costs by these factors; each as unsure as it was, and this much more."""

        def carried(cost: LinearCost, fixed: float) -> LinearCost:
            error = math.hypot(cost.error, unsure)
            return LinearCost(
                cost.fixed * fixed, cost.per_token * tokens, cost.per_token_context * attention, error
            )

        return replace(
            self,
            decoding=DecodeCost(*decode, math.hypot(self.decoding.error, unsure)),
            prefilling=carried(self.prefilling, 1.0),
            logprob=carried(self.logprob, fixed),
            ref=carried(self.ref, fixed),
            grad=carried(self.grad, fixed),
            optim=self.optim * fixed,
            errors={kind: math.hypot(error, unsure) for kind, error in self.errors.items()},
            source=f"{self.source}; {source}",
            derived=True,
            **others,
        )

    def _at(self, kind: TokenPass, gpus: int) -> LinearCost:
        cost: LinearCost = getattr(self, kind)
        if gpus == self.gpus:
            return cost
        return cost.scaled(self.gpus / gpus, fixed=self.gpus / gpus if self.offloaded else 1.0)
