"""Gradients and updates of one model on one worker; its verbs are Tinker's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from jigsawrl.model.transformer import Transformer
from jigsawrl.trainer.batch import Batch, counted, micro_batches
from jigsawrl.trainer.logprobs import token_logprobs
from jigsawrl.trainer.optimizer import Optimizer, OptimizerSettings
from jigsawrl.trainer.packed import PackedAttention

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

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Adds the batch's gradients to those already there; returns the summed metrics."""
        sums: dict[str, float] = {}
        for indices in self._cut(batch):
            micro = batch.select(indices)
            loss, metrics = objective(micro, hidden_states(self.model, micro))
            loss.backward()
            for name, value in {"loss": loss, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        return sums

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
    model: Transformer, batch: Batch, budget: int, read: Callable[[Batch, Tensor], Tensor]
) -> Tensor:
    """A flat value [T] read off the hidden states, without gradients."""
    lengths = batch.lengths
    out = torch.zeros(int(lengths.sum()))
    starts = lengths.cumsum(0) - lengths
    for indices in micro_batches([len(t) for t in batch.tokens], budget):
        micro = batch.select(indices)
        values = read(micro, hidden_states(model, micro)).float().cpu()
        for i, piece in zip(indices, values.split(micro.lengths.tolist()), strict=True):
            out[int(starts[i]) : int(starts[i]) + len(piece)] = piece
    return out


def hidden_states(model: Transformer, batch: Batch) -> Tensor:
    """Hidden states [t, H] from which the trained tokens were chosen: those one position before them."""
    device = model.device
    counts = torch.tensor([len(t) for t in batch.tokens])
    tokens, positions = torch.cat(batch.tokens).to(device), counted(counts).to(device)
    hidden = model(tokens, positions, PackedAttention(counts.tolist(), device))
    starts = (counts.cumsum(0) - counts).repeat_interleave(batch.lengths)
    rows = starts + torch.cat(batch.trained) - 1
    return hidden.index_select(0, rows.to(device))


def trained_tokens(batch: Batch) -> Tensor:
    """[t] ids of the trained tokens."""
    counts = torch.tensor([len(t) for t in batch.tokens])
    starts = (counts.cumsum(0) - counts).repeat_interleave(batch.lengths)
    return torch.cat(batch.tokens)[starts + torch.cat(batch.trained)]


def policy_logprobs(model: Transformer, temperature: float) -> Callable[[Batch, Tensor], Tensor]:
    """Reads log-probs of the trained tokens off hidden states."""

    def read(batch: Batch, hidden: Tensor) -> Tensor:
        targets = trained_tokens(batch).to(hidden.device)
        return token_logprobs(hidden, model.head, targets, temperature, entropy_gradient=False)[0]

    return read
