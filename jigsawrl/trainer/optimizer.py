"""AdamW on float32 masters, gradient clipping, learning-rate schedules, and the sum of gradients over workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

BUCKET_BYTES = 64 * 1024**2
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Of matrices only; norms and biases are left alone."""
    max_grad_norm: float | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of update `step` (from 0): linear warm-up, then constant, linear or cosine to zero."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    left = max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / left)
    match settings.schedule:
        case "constant":
            return settings.lr
        case "linear":
            return settings.lr * (1 - done)
        case "cosine":
            return settings.lr * 0.5 * (1 + math.cos(math.pi * done))


class Optimizer:
    """Holds what an update needs beside the model: masters (where weights are bf16), moments, the update count.

    Gradients of all micro-batches of all workers are summed, in float32, before anything is done with them. Updates
    are torch's fused AdamW as a function: its class would import `torch._dynamo`, a second in every process.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.steps = 0
        self.skipped = 0
        self.group: dist.ProcessGroup | None = None
        """Workers that sum their gradients; None: all there are."""
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = named
        self.masters: dict[str, Tensor] = {}
        for name, parameter in named.items():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                self.masters[name] = nn.Parameter(parameter.detach().float())
            else:
                self.masters[name] = parameter
        self.moments: dict[str, dict[str, Tensor]] = {}
        """None before the first update."""

    @torch.no_grad()
    def collect(self) -> None:
        """Adds the gradients of weights to those of their masters, and lets go of them: after every backward pass."""
        by_kernel: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
        """Totals and what is added to them; True: they are nothing yet."""
        for name, parameter in self.parameters.items():
            master, part = self.masters[name], parameter.grad
            if master is parameter or part is None:
                continue
            first = master.grad is None
            fits = part.is_contiguous() and master.is_contiguous() and part.data_ptr() % 16 == 0
            if fits and parameter.is_cuda and part.dtype == torch.bfloat16:
                total = torch.empty_like(master) if master.grad is None else master.grad
                by_kernel[first].append((total, part))
            else:
                total = part.float() if master.grad is None else master.grad.add_(part)
            master.grad = total
            parameter.grad = None
        for first, pairs in by_kernel.items():
            if pairs:
                from jigsawrl.trainer.cuda.accumulate import accumulate

                accumulate(pairs, first)

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """One update from the gradients there are; one with a NaN or an infinity is left out and counted."""
        self.collect()
        masters = list(self.masters.values())
        for master in masters:
            if master.grad is None:  # a worker without sequences takes part all the same
                master.grad = torch.zeros_like(master)
        if dist.is_initialized():
            _sum_over_workers([master.grad for master in masters if master.grad is not None], self.group)
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self.settings.max_grad_norm or math.inf))
        rate = learning_rate(self.settings, self.steps)
        if math.isfinite(norm):
            self._update(rate)
            self.weights_from_masters()
        else:
            self.skipped += 1
        for master in masters:
            master.grad = None
        self.steps += 1
        return {"grad_norm": norm, "lr": rate, "skipped_updates": float(self.skipped)}

    def _update(self, rate: float) -> None:
        """All masters, by their gradients; weights decay in matrices only."""
        settings = self.settings
        matrices = [name for name, master in self.masters.items() if master.dim() >= 2]
        others = [name for name, master in self.masters.items() if master.dim() < 2]
        for names, decay in ((matrices, settings.weight_decay), (others, 0.0)):
            masters = [self.masters[name] for name in names]
            steps, firsts, seconds = ([self._moments(name)[key] for name in names] for key in MOMENTS)
            adamw(
                masters,
                [master.grad for master in masters if master.grad is not None],
                firsts,
                seconds,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                lr=rate,
                weight_decay=decay,
                eps=settings.eps,
                maximize=False,
            )

    def _moments(self, name: str) -> dict[str, Tensor]:
        """By their names in torch; zeros at first."""
        if name not in self.moments:
            master = self.masters[name]
            zeros = (
                torch.zeros((), device=master.device),
                torch.zeros_like(master),
                torch.zeros_like(master),
            )
            self.moments[name] = dict(zip(MOMENTS, zeros, strict=True))
        return self.moments[name]

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments themselves, by kind and parameter name."""
        found: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            found[f"weight.{name}"] = master.detach()
            for key, value in self.moments.get(name, {}).items():
                found[f"{key}.{name}"] = value
        return found

    def counts(self) -> tuple[int, int]:
        """Updates, and how many of them were skipped."""
        return self.steps, self.skipped

    def has_gradients(self) -> bool:
        return any(master.grad is not None for master in self.masters.values())

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on."""
        return {**self.tensors(), "counts": torch.tensor(self.counts())}

    def takes(self, tensors: dict[str, Tensor]) -> bool:
        """Whether `load_state` can load this: of every parameter a master, and either all moments or none."""
        counts = tensors.get("counts")
        if counts is None or counts.shape != (2,) or counts.dtype != torch.int64 or int(counts.min()) < 0:
            return False
        for name, master in self.masters.items():
            count = torch.zeros(())
            wanted = {f"weight.{name}": master}
            if f"step.{name}" in tensors:
                wanted |= {
                    f"{key}.{name}": each for key, each in zip(MOMENTS, (count, master, master), strict=True)
                }
            for key, like in wanted.items():
                found = tensors.get(key)
                if found is None or found.shape != like.shape or found.dtype != like.dtype:
                    return False
        return True

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(tensors[f"weight.{name}"])
            if f"step.{name}" in tensors:
                self.moments[name] = {
                    key: tensors[f"{key}.{name}"].clone().to(master.device) for key in MOMENTS
                }
        self.weights_from_masters()
        self.steps, self.skipped = (int(n) for n in tensors["counts"])

    @torch.no_grad()
    def weights_from_masters(self) -> None:
        rounded = {name: p for name, p in self.parameters.items() if self.masters[name] is not p}
        if rounded:
            torch._foreach_copy_(list(rounded.values()), [self.masters[name] for name in rounded])


def _sum_over_workers(gradients: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """All-reduce in buckets, so that few large messages are sent."""
    bucket: list[Tensor] = []
    for i, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(g.nbytes for g in bucket) >= BUCKET_BYTES or i == len(gradients) - 1:
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat, group=group)
            for g, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(part.view_as(g))
            bucket = []
