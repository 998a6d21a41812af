"""Actors that share a GPU leave each other what they need for a moment only."""

from __future__ import annotations

import pytest
import torch

from jigsawrl.store.memory import Workspace, spare_others

GB = 10**9


@pytest.mark.parametrize(
    ("free", "reserved", "given_back"),
    [
        pytest.param(10 * GB, 20 * GB, True, id="scarce and shared"),
        pytest.param(60 * GB, 20 * GB, False, id="plenty is free"),
        pytest.param(10 * GB, 88 * GB, False, id="nobody else is there"),
    ],
)
def test_what_a_training_needed_goes_back_where_others_may_miss_it(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, given_back: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    spare_others(torch.device("cuda", 0))
    assert bool(calls) == given_back
    spare_others(torch.device("cpu"))
    assert len(calls) == given_back


class FakeGpu:
    """Torch's allocator, by its numbers: pieces that were taken from the device, and what is in use of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[int] = []
        self.in_use = self.most = 0
        self.room = 100 * GB
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.in_use)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: sum(self.taken))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch, "empty", lambda size, dtype, device: self.use(size) or self.use(-size))

    def reset(self, device: torch.device) -> None:
        self.most = self.in_use

    def use(self, size: int) -> None:
        missing = self.in_use + size - sum(self.taken)
        if missing > 0:
            if sum(self.taken) + missing > self.room:
                raise torch.OutOfMemoryError
            self.taken.append(missing)
        self.in_use += size
        self.most = max(self.most, self.in_use)

    def give_back(self) -> None:
        self.taken = [self.in_use] if self.in_use else []


def trained(gpu: FakeGpu, workspace: Workspace, moves: bool = False) -> int:
    """How often a training of four micro-batches of five pieces each had to take memory from the device."""
    before = len(gpu.taken)
    with workspace.used():
        gpu.use(GB)  # sums of gradients, until the optimizer's step
        for _ in range(4):
            if moves:
                gpu.give_back()
                before = len(gpu.taken)
            workspace.take()
            for _ in range(5):
                gpu.use(2 * GB)
            gpu.use(-10 * GB)
        gpu.use(-GB)
    return len(gpu.taken) - before


def test_memory_that_was_given_back_is_taken_again_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, workspace = FakeGpu(monkeypatch), Workspace(torch.device("cuda", 0))
    gpu.use(20 * GB)
    assert trained(gpu, workspace) == 6
    assert trained(gpu, workspace) == 0, "it is still there"
    gpu.give_back()
    assert trained(gpu, workspace) == 1
    assert trained(gpu, workspace, moves=True) == 1, "and so between micro-batches"
    assert sum(gpu.taken) == 31 * GB


def test_where_one_piece_is_too_large_memory_is_taken_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, workspace = FakeGpu(monkeypatch), Workspace(torch.device("cuda", 0))
    trained(gpu, workspace)
    gpu.give_back()
    gpu.room = 5 * GB
    with workspace.used():
        gpu.use(2 * GB)
        gpu.use(2 * GB)
    assert gpu.taken == [2 * GB, 2 * GB]


def test_on_a_cpu_there_is_nothing_to_take() -> None:
    workspace = Workspace(torch.device("cpu"))
    with workspace.used():
        workspace.take()
    assert workspace.needed == 0
