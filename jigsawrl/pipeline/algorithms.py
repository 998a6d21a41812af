"""Names and defaults of the algorithms, for run files and tensors alike. Does not import torch."""

from typing import Literal

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
Loss = Literal["ppo", "dapo", "gspo", "cispo"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
OldLogprobs = Literal["recompute", "engine"]

_CLIPS: dict[Loss, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),  # no lower bound as in MiniMax-M1, weights up to 5 as in ScaleRL
}


def default_clip(loss: Loss) -> tuple[float, float]:
    """The published (low, high) of a loss; its ratio is clipped to [1 - low, 1 + high]."""
    return _CLIPS[loss]


def default_aggregation(loss: Loss, advantage: Advantage) -> Aggregation:
    """How the papers of this pair of algorithms weigh tokens against sequences."""
    if loss == "gspo":
        return "sequence_mean"
    if advantage == "dr_grpo":
        return "constant"
    if loss == "ppo" and advantage == "grpo":
        return "sequence_mean"
    return "token_mean"
