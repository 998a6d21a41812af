"""Parts of a GPU: streams whose work stays on some of its multiprocessors (SMs), by green contexts.

A device is cut into units of 8 SMs, the same ones in every process; what is left over is a unit as well, or goes with
the last. A part is some units in a row. Work of two processes on parts without a common unit runs side by side under
MPS.
Streams of torch's own pool belong to no part, so all that is to keep to one has to run on the stream of this module.
A CUDA graph belongs to the part on which it was captured, wherever it is replayed.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from jigsawrl.store.memory import return_to_gpu

UNIT_SMS = 8
"""What an H200's driver divides by; older GPUs can be divided more finely."""
FEWEST = 4
"""Units of a device that is worth dividing."""
CLEARLY = 2.0
"""Times as long as on all SMs that products take on a quarter of them, at least, if the quarter is obeyed."""
SIDE, PRODUCTS, TIMES = 4096, 8, 5
MUCH = 1 << 30
"""Bytes of free memory that it pays to give back for: until that is done, nothing runs."""


class NoParts(Exception):
    """This device, its driver or its Python packages know no green contexts; the reason, in one line."""


class Parts:
    """Those of one device, in this process. A stream is made when it is first asked for, and kept.

    There are no more of them than runs of units: 135 on an H200, at 5 MiB each, and 28 more for the workspace of
    matrix products once some ran on it.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        try:
            self.driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            raise NoParts("the package cuda-bindings is not installed") from None
        torch.cuda.init()
        torch.cuda.synchronize(device)  # the device's own context has to be there
        self.handle = self._call("cuDeviceGet", device)
        kind = self.driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._call("cuDeviceGetDevResource", self.handle, kind)
        _, count, _ = self._call("cuDevSmResourceSplitByCount", 0, whole, 0, UNIT_SMS)
        groups, _, left = self._call("cuDevSmResourceSplitByCount", count, whole, 0, UNIT_SMS)
        self.cut: list[list[Any]] = [[group] for group in groups]
        """The resources of each unit."""
        if left.sm.smCount >= UNIT_SMS:
            self.cut.append([left])
        elif left.sm.smCount:
            self.cut[-1].append(left)
        if self.units < FEWEST:
            raise NoParts(f"its {whole.sm.smCount} multiprocessors are too few to divide")
        self.streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    @property
    def units(self) -> int:
        return len(self.cut)

    def stream(self, units: Sequence[int]) -> torch.cuda.Stream:
        """The one whose work stays on these units, which follow each other. All of them: torch's default stream."""
        if len(units) == self.units:
            return torch.cuda.default_stream(self.device)
        key = units[0], len(units)
        if key not in self.streams:
            resources = [resource for unit in units for resource in self.cut[unit]]
            described = self._call("cuDevResourceGenerateDesc", resources, len(resources))
            flag = self.driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = self._call("cuGreenCtxCreate", described, self.handle, flag)
            alone = self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            made = self._call("cuGreenCtxStreamCreate", context, alone, 0)
            self.streams[key] = torch.cuda.ExternalStream(int(made), self.device)
        return self.streams[key]

    def move_to(self, units: Sequence[int]) -> None:
        """From here on, torch's work of this thread runs on these units, after all that it was given before."""
        self._switch(self.stream(units))

    @contextmanager
    def on(self, units: Sequence[int]) -> Iterator[None]:
        """Inside, torch's work of this thread runs on these units: after what came before, before what follows."""
        before = torch.cuda.current_stream(self.device)
        self.move_to(units)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, to: torch.cuda.Stream) -> None:
        """Each stream waits for the last one, so memory that one frees and another takes is never in use by both."""
        now = torch.cuda.current_stream(self.device)
        if now.cuda_stream == to.cuda_stream:
            return
        to.wait_stream(now)
        torch.cuda.set_stream(to)
        # Torch keeps free memory for the stream that had it, and for no other.
        free = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if free > MUCH:
            return_to_gpu(self.device)

    def _call(self, name: str, *args: Any) -> Any:
        function = getattr(self.driver, name, None)
        if function is None:
            raise NoParts(f"the package cuda-bindings is too old: it has no {name}")
        try:
            status, *values = function(*args)
        except RuntimeError:
            raise NoParts(f"the driver is too old: it has no {name}") from None
        if int(status):
            raise NoParts(f"{name} answered {status.name}")
        return values[0] if len(values) == 1 else values


@lru_cache(maxsize=64)
def parts_of(device: int) -> Parts:
    """This process's only ones, so that whoever moves to the same units finds the graphs that were captured there."""
    return Parts(device)


def quarter_ratio(parts: Parts) -> float:
    """Times as long as on the whole device that matrix products take on a quarter of its units."""
    whole = tuple(range(parts.units))
    factor = torch.randn(SIDE, SIDE, device=f"cuda:{parts.device}", dtype=torch.bfloat16)
    out = torch.empty_like(factor)
    return _seconds(parts, whole[: parts.units // 4], factor, out) / _seconds(parts, whole, factor, out)


def _seconds(parts: Parts, units: Sequence[int], factor: torch.Tensor, out: torch.Tensor) -> float:
    """Of some products on these units, at best; the first time is for what is only done once."""
    taken: list[float] = []
    with parts.on(units):
        stream = torch.cuda.current_stream(parts.device)
        for _ in range(1 + TIMES):
            stream.synchronize()
            start = time.perf_counter()
            for _ in range(PRODUCTS):
                torch.mm(factor, factor, out=out)
            stream.synchronize()
            taken.append(time.perf_counter() - start)
    return min(taken[1:])
