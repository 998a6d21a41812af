"""The critic of PPO: the policy's architecture with a value instead of a vocabulary at its end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jigsawrl.model.transformer import Transformer
from jigsawrl.trainer.batch import Batch


class Critic(nn.Module):
    """Starts from the policy's weights; every value is zero at first."""

    def __init__(self, transformer: Transformer) -> None:
        super().__init__()
        self.transformer = transformer
        if transformer.lm_head is not None:
            transformer.lm_head.requires_grad_(False)
        zeros = torch.zeros(
            1, transformer.spec.hidden_size, dtype=transformer.dtype, device=transformer.device
        )
        self.value_head = nn.Parameter(zeros)

    def read(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Values [t] of the states in which the trained tokens were chosen."""
        return F.linear(hidden, self.value_head).squeeze(-1).float()
