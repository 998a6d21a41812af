"""Pipelines that share an actor train one at a time on a GPU, and side by side on a CPU's cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from jigsawrl.runtime.shared_actor import DeviceStream


class Stream:
    def __init__(self, device: str) -> None:
        self.ended = 0

    def synchronize(self) -> None:
        self.ended += 1


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceStream:
    """As far as streams go."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return DeviceStream("cuda:0")


def met(stream: DeviceStream, patience_s: float) -> bool:
    """Whether two threads are ever inside at once, if each waits there so long for the other."""
    both, found = threading.Barrier(2), []

    def train() -> None:
        with stream.used():
            try:
                both.wait(patience_s)
                found.append(True)
            except threading.BrokenBarrierError:
                found.append(False)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return any(found)


def test_on_a_gpu_they_take_turns_and_leave_when_the_device_is_done(gpu):
    assert not met(gpu, patience_s=0.5)
    assert gpu.stream.ended == 2


def test_on_cores_they_do_not():
    assert met(DeviceStream("cpu"), patience_s=60)


def test_whoever_fails_leaves_the_turn_to_the_others(gpu):
    with pytest.raises(ValueError, match="a loss"), gpu.used():
        raise ValueError("a loss")
    with gpu.used():
        pass
