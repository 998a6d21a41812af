"""Gradients and updates of one model on one worker; its verbs are Tinker's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from jigsawrl.model.ops import PLAIN, Ops
from jigsawrl.model.transformer import Attend, Transformer
from jigsawrl.trainer.batch import Batch, counted, flat_indices, micro_batches, onto, repeated
from jigsawrl.trainer.logprobs import token_logprobs
from jigsawrl.trainer.optimizer import Optimizer, OptimizerSettings
from jigsawrl.trainer.packed import FlashAttention, PackedAttention

Metrics = dict[str, Tensor]
Objective = Callable[[Batch, Tensor], tuple[Tensor, Metrics]]
"""A micro-batch and the hidden states [t, H] that chose its trained tokens -> its part of the loss, and metrics."""


class Trainer:
    """Runs batches through a model in micro-batches of a token budget.

    Losses are sums whose weights are those of the whole batch, so gradients do not depend on how it was cut.
    """

    def __init__(
        self,
        model: Transformer,
        settings: OptimizerSettings,
        micro_batch_tokens: int,
        module: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self.optimizer = Optimizer(module or model, settings)

    def forward_backward(
        self, batch: Batch, objective: Objective, between: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Adds the batch's gradients to those already there; returns the summed metrics.

        Nothing is read back from a device before the last micro-batch. `between` is called before each of them.
        """
        sums: dict[str, Tensor] = {}
        for indices in self._cut(batch):
            between()
            for name, value in self._add_gradients(batch.select(indices), objective).items():
                sums[name] = sums.get(name, 0.0) + value.double()
        return {name: float(value) for name, value in sums.items()}

    def _add_gradients(self, micro: Batch, objective: Objective) -> Metrics:
        """Of one micro-batch; returns its metrics. Nothing of its graph, or of the stream it was on, stays."""
        loss, metrics = objective(micro, hidden_states(self.model, micro))
        loss.backward()
        self.optimizer.collect()
        return {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}

    def optim_step(self) -> dict[str, float]:
        return self.optimizer.step()

    def save_state(self) -> dict[str, Tensor]:
        return self.optimizer.state()

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer.load_state(tensors)

    def _cut(self, batch: Batch) -> list[list[int]]:
        return micro_batches([len(t) for t in batch.tokens], self.micro_batch_tokens)


@torch.no_grad()
def evaluate(
    model: Transformer,
    batch: Batch,
    budget: int,
    read: Callable[[Batch, Tensor], Tensor],
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """A flat value [T] read off the hidden states, without gradients; `between` is called before each micro-batch."""
    groups = micro_batches([len(t) for t in batch.tokens], budget)
    values: list[Tensor] = []
    for indices in groups:
        between()
        micro = batch.select(indices)
        values.append(read(micro, hidden_states(model, micro)).float())
    out = torch.zeros(sum(map(len, batch.trained)))
    for indices, value in zip(groups, values, strict=True):
        out[flat_indices(batch.lengths, indices)] = value.cpu()
    return out


def hidden_states(model: Transformer, batch: Batch) -> Tensor:
    """Hidden states [t, H] from which the trained tokens were chosen: those one position before them."""
    device = model.device
    counts = torch.tensor([len(t) for t in batch.tokens])
    tokens, positions = onto(device, torch.cat(batch.tokens)), onto(device, counted(counts))
    attend, ops = _ways(model, counts.tolist())
    hidden = model(tokens, positions, attend, ops=ops)
    rows = repeated(counts.cumsum(0) - counts, batch.lengths) + torch.cat(batch.trained) - 1
    return hidden.index_select(0, onto(device, rows))


def _ways(model: Transformer, lengths: list[int]) -> tuple[Attend, Ops]:
    """How sequences of these lengths go through the model: by kernels where there are such."""
    if _has_kernels(model):
        from jigsawrl.trainer.cuda.halves import TRAINED

        return FlashAttention(lengths, model.device), TRAINED
    return PackedAttention(lengths, model.device), PLAIN


def _has_kernels(model: Transformer) -> bool:
    """Whether flash attention takes the model; Triton compiles for any GPU that has it."""
    head, device = model.spec.head_dim, model.device
    fits = device.type == "cuda" and model.dtype == torch.bfloat16 and head % 8 == 0 and head <= 256
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def trained_tokens(batch: Batch) -> Tensor:
    """[t] ids of the trained tokens."""
    counts = torch.tensor([len(t) for t in batch.tokens])
    return torch.cat(batch.tokens)[
        repeated(counts.cumsum(0) - counts, batch.lengths) + torch.cat(batch.trained)
    ]


def policy_logprobs(model: Transformer, temperature: float) -> Callable[[Batch, Tensor], Tensor]:
    """Reads log-probs of the trained tokens off hidden states."""

    def read(batch: Batch, hidden: Tensor) -> Tensor:
        targets = onto(hidden.device, trained_tokens(batch))
        return token_logprobs(hidden, model.head, targets, temperature, entropy_gradient=False)[0]

    return read
