"""Rollouts of which only a tail is left, and what it is to gather it elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jigsawrl.graph.batch import Batch
from jigsawrl.graph.lanes import Lane, Segment
from jigsawrl.policies.state import Migrate, Phase, Place, State


def last_tails(state: State, phase: Phase) -> list[Lane]:
    """The lanes of a phase all of which are in the tail of their last turn: they can be gathered elsewhere."""
    return state.lanes_of(phase) if all(key in state.survivors for key in phase.lanes) else []


def gatherings(
    state: State, tails: Sequence[Lane], places: Sequence[Place], counts: Iterable[int]
) -> list[Migrate]:
    """Moves of a rollout's tails onto so many of the first of these places, which are theirs; onto fewer than they
    have, each of which gets a sample."""
    left = sum(state.survivors[lane.id].sequences for lane in tails)
    ids = tuple(lane.id for lane in tails)
    fewer = [count for count in counts if 0 < count <= left and count < len(tails)]
    return [Migrate(tails[0].pipeline, ids, tuple(places[:count])) for count in fewer]


def moved_bytes(state: State, move: Migrate) -> float:
    """What a gathered tail holds on each of its workers besides what is there of it already: nothing, where every
    worker keeps all of the pipeline's state."""
    samples = sum(state.survivors[key].sequences for key in move.lanes)
    outlook = state.pipelines[move.pipeline].outlook
    if outlook.shape.whole:
        return 0.0
    return outlook.memory_moved(samples / len(move.places), len(move.places[0]))


def moved_segments(state: State, move: Migrate) -> tuple[Segment, ...]:
    """The lane that a gathered tail is foreseen to be."""
    outlook = state.pipelines[move.pipeline].outlook
    survivors = [state.survivors[key] for key in move.lanes]
    count = sum(each.sequences for each in survivors)
    context = sum(each.sequences * each.context for each in survivors) / count
    remaining = outlook.forecast.beyond(context - outlook.shape.prompt_tokens, count)
    part = Batch(remaining, np.full(count, context)).split(len(move.places))[0]
    return outlook.moved(part, len(move.places[0])).segments
