"""What is predicted of a pipeline before anything was seen of it in this run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.config.settings import RunConfig
from jigsawrl.config.shapes import pipeline_shape, prior_lengths
from jigsawrl.graph.cpu import cpu_costs
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.gpu import gpu_costs
from jigsawrl.graph.hardware import CPU, Hardware
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import Workload

SEQUENCES = 256
"""Lengths by which a first step is predicted."""


def first_outlook(
    name: str,
    run: RunConfig,
    entry: PipelineConfig,
    worker: Hardware,
    workers: int,
    known: Workload | None,
    ranks_on_each: int = 1,
) -> Outlook:
    """`known` is what an earlier run learned."""
    shape = replace(pipeline_shape(name, run, entry), whole=True, ranks_on_each=ranks_on_each)
    if known is not None:
        waits = max(1, round(known.turns) - 1)
        shape = replace(shape, turns=max(1, round(known.turns)), tool_seconds=known.tool_seconds / waits)
        costs = replace(known.costs, hardware=worker)
        return Outlook(shape, costs, worker, known.forecast(shape.max_tokens))
    lengths = prior_lengths(shape.max_tokens, (np.arange(SEQUENCES) + 0.5) / SEQUENCES)
    costs = (cpu_costs if worker.name == CPU else gpu_costs)(shape.model, worker, workers)
    return Outlook(shape, costs, worker, Forecast.from_prior(lengths, shape.max_tokens))
