"""Launches that are captured when they come again, and replayed for as long as the weights stay where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import torch

from jigsawrl.model.transformer import Transformer

NON_BLOCKING = 1
"""A stream that waits for nothing that the default stream does."""


class Graphs:
    """By key and stream."""

    def __init__(self, model: Transformer) -> None:
        self.parameters = list(model.parameters())
        self.weights: list[int] = []
        self.known: dict[tuple[Hashable, int], tuple[torch.cuda.CUDAGraph, Any] | None] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def clear(self) -> None:
        self.known.clear()
        self.pool = torch.cuda.graph_pool_handle()  # one that lost all its graphs takes no others

    def drop_stale(self) -> None:
        """Weights that have moved leave graphs behind that read where they were."""
        weights = [parameter.data_ptr() for parameter in self.parameters]
        if weights != self.weights:
            self.clear()
            self.weights = weights

    def run(self, key: Hashable, launch: Callable[[], Any]) -> Any:
        """What `launch` launches and returns. The first time it simply runs, so that every kernel is there, and that
        nothing is captured that does not come again; the second time it is captured."""
        stream = torch.cuda.current_stream()
        place = (key, stream.cuda_stream)
        if place not in self.known:
            self.known[place] = None
            return launch()
        captured = self.known[place]
        if captured is None:
            captured = self.known[place] = self._captured(launch, stream)
        graph, results = captured
        graph.replay()
        return results

    def _captured(
        self, launch: Callable[[], Any], stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        # The default stream cannot be captured; a graph keeps to the processors of the stream it is captured on.
        aside = self.aside if stream == torch.cuda.default_stream() else stream
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                results = launch()
            finally:
                graph.capture_end()
        return graph, results

    @cached_property
    def aside(self) -> torch.cuda.Stream:
        """Nobody else's: torch gives the streams of its pool away again, and whatever another thread launched on one
        while it is captured would become a part of the graph."""
        handle = ctypes.c_void_p()
        made = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), NON_BLOCKING)
        if made or handle.value is None:
            raise RuntimeError(f"no stream to capture graphs on: cuStreamCreate answered {made}")
        return torch.cuda.ExternalStream(handle.value, torch.cuda.current_device())
