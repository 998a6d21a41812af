"""Actors that share a GPU leave each other what they need for a moment only."""

from __future__ import annotations

import pytest
import torch

from jigsawrl.store.memory import spare_others

GB = 10**9


@pytest.mark.parametrize(
    ("free", "reserved", "given_back"),
    [
        pytest.param(10 * GB, 20 * GB, True, id="others are there"),
        pytest.param(60 * GB, 20 * GB, True, id="others are there who may need what is free now"),
        pytest.param(10 * GB, 88 * GB, False, id="nobody else is there"),
    ],
)
def test_what_a_training_needed_goes_back_where_others_may_miss_it(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, given_back: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    spare_others(torch.device("cpu"))
    assert not calls
    spare_others(torch.device("cuda", 0))
    assert calls == (["waited", "given back"] if given_back else [])
