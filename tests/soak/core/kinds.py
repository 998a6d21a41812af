"""What is drawn from: kinds of pipelines, and what is predicted of them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from graph.planning import WORKER, job
from scheduler.graphs import asynchronous, evaluating

from jigsawrl.graph.interference import CORES, H200, Interference
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.graph import SYNCHRONOUS, PhaseGraph

GRAPHS: dict[str, PhaseGraph] = {
    "synchronous": SYNCHRONOUS,
    "fresh": asynchronous(0),
    "asynchronous": asynchronous(1),
    "stale": asynchronous(3),
    "evaluating": evaluating(),
}
TABLES: dict[str, Interference] = {"h200": H200, "cores": CORES}
PREDICTED = 40
"""Different pipelines, as they are predicted: what was computed of one is known to all worlds with it."""


@cache
def predicted(number: int, table: str) -> Outlook:
    """A small one: with tools or a deadline, whole or sharded, with a shared base, or plain."""
    draw = random.Random(number)
    turns = draw.choice([1, 1, 1, 2, 3])
    whole = draw.random() < 0.5
    made = job(
        f"kind-{number}",
        prompts=draw.choice([1, 2, 4]),
        samples=4,
        median=draw.choice([50.0, 200.0, 800.0]),
        sigma=draw.choice([0.1, 0.8, 1.5]),
        seed=number,
        tp=1 if whole else draw.choice([1, 1, 2]),
        turns=turns,
        tool_seconds=draw.choice([0.0, 2.0, 30.0]) if turns > 1 else 0.0,
        slow=draw.choice([0.2, 1.0, 5.0]),
        parameters=draw.choice([1e9, 3e9]),
        priority=draw.choice([0, 0, 0, 1]),
        max_slowdown=draw.choice([None, None, None, 1.5, 5.0]),
        deadline=draw.choice([None, None, None, 30.0, 500.0]),
        base=draw.choice(["", "", "", "shared"]),
    )
    shape = replace(
        made.shape,
        whole=whole,
        old_logprobs=draw.random() < 0.5,
        reward_seconds=draw.choice([0.0, 1.0]),
        trained=1e7 if made.shape.base else None,
    )
    costs = replace(made.costs, derived=draw.random() < 0.5)
    return Outlook(shape, costs, replace(WORKER, name="cpu" if table == "cores" else "h200"), made.forecast)
