"""A logged step as the policies would have predicted it, from its lengths: what `jigsaw fit` fits and judges."""

from __future__ import annotations

from jigsawrl.graph.cost import Costs
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.shape import PipelineShape, turns_with_waits
from jigsawrl.graph.traces import LoggedStep, Trace

STAGES = ("gen", "old_log_prob", "ref", "update_actor")
"""What a step is made of, besides weights and small things; verl's words."""


def outlook_of(trace: Trace, step: LoggedStep, costs: Costs, tool_wait: float | None = None) -> Outlook:
    """The run as a pipeline that does this step; it waits for tools as logged, if nothing else is said."""
    turns, waits = turns_with_waits(step.turns, step.tool_wait if tool_wait is None else tool_wait)
    shape = PipelineShape(
        name=trace.name,
        model=trace.model,
        prompts=len(step.lengths),
        samples=1,
        prompt_tokens=step.prompt_tokens,
        max_tokens=trace.max_tokens,
        tp=costs.tp,
        turns=turns,
        tool_seconds=waits,
        reward_seconds=costs.other_seconds,
        old_logprobs=step.old_log_prob is not None,
        reference=step.ref is not None,
    )
    return Outlook(shape, costs, costs.hardware, Forecast((), trace.max_tokens))


def stage_seconds(
    costs: Costs, trace: Trace, step: LoggedStep, tool_wait: float | None = None
) -> dict[str, float]:
    """Seconds of each stage, of the rest, and of the whole step, at the width where the costs were fitted.

    Training is over the tokens that were logged, with what tools added to them. What the first step of a run takes
    longer comes on top: no policy plans with it.
    """
    outlook = outlook_of(trace, step, costs, tool_wait)
    engines = outlook.engines(step.lengths, max(1, costs.gpus // costs.tp), costs.tp)
    training = outlook.training_stages(costs.gpus, step.total_tokens)
    seconds = {
        "gen": max(engine.seconds for engine in engines),
        "old_log_prob": training["old_log_prob"],
        "ref": training["ref"],
        "update_actor": training["grad"] + training["optim"],
    }
    warmup = costs.warmup if step.first else {}
    seconds = {stage: each + warmup.get(stage, 0.0) if each > 0 else each for stage, each in seconds.items()}
    seconds["other"] = training["sync"] + outlook.shape.reward_seconds
    seconds["step"] = sum(seconds.values())
    return seconds
