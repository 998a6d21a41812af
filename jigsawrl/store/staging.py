"""Copies between host and device in buckets, through two pinned buffers: one is filled while the other is emptied.

Pinning memory takes longer than many copies, so the buffers are made once in a process and kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

BUCKET_BYTES = 64 << 20


def to_host(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors, one after the other. A piece holds until the next one is asked for."""
    torch.cuda.synchronize()  # whatever stream they were made on
    ready: tuple[Tensor, torch.cuda.Event] | None = None
    for number, bucket in enumerate(_buckets((tensor,) for tensor in tensors)):
        buffer, end = _pinned()[number % 2], 0
        for (piece,) in bucket:
            start, end = end, end + len(piece)
            buffer[start:end].copy_(piece, non_blocking=True)
        copied = _recorded()
        if ready is not None:
            yield _when_there(*ready)
        ready = buffer[:end], copied
    if ready is not None:
        yield _when_there(*ready)


def copy_into(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Fills targets, on the host or on the device, from sources on the host, of the same types and shapes.

    The device reads pinned sources itself. On the host a plain copy by one thread does as well as many where others
    have work for the cores, and far better than many that wait for each other.
    """
    far: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        if not target.is_cuda:
            _bytes_of(target).numpy()[:] = _bytes_of(source).numpy()
        elif source.is_pinned():
            target.copy_(source, non_blocking=True)
        else:
            far.append((target, source))
    if far:
        _to_device(far)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def _to_device(pairs: list[tuple[Tensor, Tensor]]) -> None:
    emptied: list[torch.cuda.Event | None] = [None, None]
    for number, bucket in enumerate(_buckets(pairs)):
        which, end = number % 2, 0
        buffer, event = _pinned()[which], emptied[which]
        if event is not None:
            event.synchronize()
        for target, source in bucket:
            start, end = end, end + len(source)
            buffer[start:end].copy_(source)
            target.copy_(buffer[start:end], non_blocking=True)
        emptied[which] = _recorded()


@cache
def _pinned() -> tuple[Tensor, Tensor]:
    first, second = torch.empty(2, BUCKET_BYTES, dtype=torch.uint8, pin_memory=True)
    return first, second


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _when_there(buffer: Tensor, event: torch.cuda.Event) -> memoryview:
    event.synchronize()
    return buffer.numpy().data


def _buckets(items: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Bytes of tensors that belong together, cut alike into pieces, as many as a buffer takes."""
    bucket: list[tuple[Tensor, ...]] = []
    room = BUCKET_BYTES
    for item in items:
        parts = tuple(_bytes_of(tensor.contiguous()) for tensor in item)
        while len(parts[0]):
            bucket.append(tuple(part[:room] for part in parts))
            parts = tuple(part[room:] for part in parts)
            room -= len(bucket[-1][0])
            if room == 0:
                yield bucket
                bucket, room = [], BUCKET_BYTES
    if bucket:
        yield bucket


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
