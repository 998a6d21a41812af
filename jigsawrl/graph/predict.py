"""One step of one pipeline alone, stage by stage, from its lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jigsawrl.graph.cost import Costs
from jigsawrl.graph.rollout import rollout_seconds

STAGES = ("gen", "old_log_prob", "ref", "update_actor")
"""What a step is made of, besides weights and small things; verl's words."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step has to do."""

    lengths: NDArray[np.float64]
    prompt_tokens: float
    total_tokens: float
    """Prompts, responses, what tools added."""
    turns: float = 1.0
    tool_wait: float = 0.0
    """Seconds of the whole step."""
    max_tokens: float | None = None
    first: bool = False
    """Of its run: warm-up comes on top."""
    old_logprobs: bool = True
    reference: bool = True

    @property
    def mean_length(self) -> float:
        return self.total_tokens / max(1, len(self.lengths))


def stage_seconds(costs: Costs, work: StepWork) -> Mapping[str, float]:
    """Seconds of each stage, of the rest, and of the whole step, at the width where the costs were fitted."""
    tokens, mean = work.total_tokens, work.mean_length
    waves = max(2, round(work.turns)) if work.tool_wait > 0 else work.turns
    engines = max(1, costs.gpus // costs.tp)
    observed = max(0.0, mean - work.prompt_tokens - float(work.lengths.mean()))
    seconds = {
        "gen": rollout_seconds(
            costs,
            work.lengths,
            work.prompt_tokens,
            costs.tp,
            waves,
            work.tool_wait / (waves - 1) if work.tool_wait > 0 else 0.0,
            engines=engines,
            observation_tokens=observed,
            max_tokens=work.max_tokens,
        ),
        "old_log_prob": costs.logprob_seconds(tokens, mean, costs.gpus) if work.old_logprobs else 0.0,
        "ref": costs.ref_seconds(tokens, mean, costs.gpus) if work.reference else 0.0,
        "update_actor": costs.grad_seconds(tokens, mean, costs.gpus) + costs.optim_seconds(costs.gpus),
    }
    if work.first:
        for stage, extra in costs.warmup.items():
            if seconds.get(stage, 0.0) > 0:
                seconds[stage] += extra
    seconds["other"] = costs.sync_seconds(costs.gpus, costs.tp) + costs.other_seconds
    seconds["step"] = sum(seconds.values())
    return seconds
