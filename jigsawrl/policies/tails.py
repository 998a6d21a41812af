"""Rollouts of which only a tail is left."""

from __future__ import annotations

from jigsawrl.graph.lanes import Lane
from jigsawrl.policies.state import Pipeline, State


def last_tails(state: State, pipeline: Pipeline) -> list[Lane]:
    """Its lanes that are in the tail of their last turn: they can be gathered elsewhere."""
    if pipeline.status != "running" or pipeline.phase != "rollout":
        return []
    return [lane for lane in state.running(pipeline) if lane.id in state.survivors]
