"""What a pipeline's engines are at, as the scheduler is told."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.pipeline.calls import Inbox
from jigsawrl.runtime import watched_engines
from jigsawrl.scheduler.events import SubstageChanged

SAMPLES = 32


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[SubstageChanged]:
    """Everything, a second after the other."""
    seconds: Iterator[float] = iter(range(1000))
    monkeypatch.setattr(watched_engines, "now", lambda: next(seconds))
    return []


def engine_with_samples(said: list[SubstageChanged], counts: list[int]) -> None:
    """An engine that has so many samples, one number after the other."""
    channel: Any = SimpleNamespace(pipe=Pipe()[0], send=said.append, later=said.append)
    handle: Any = SimpleNamespace()
    journal: Any = SimpleNamespace(begin=lambda: None)
    engines = watched_engines.WatchedEngines([handle], Inbox(), channel, returning=True, journal=journal)
    engines.begin([0], prompt=True)
    request = Request("r", [1], SamplingParams(max_tokens=1), [])
    for count in counts:
        engines.requests[0] = {SampleKey(0, "p", 0, 0, sample): request for sample in range(count)}
        engines._say()
    engines.close()


def test_a_rollout_is_in_its_tail_when_few_are_left_and_in_its_tools_when_none_is(
    said: list[SubstageChanged],
) -> None:
    engine_with_samples(said, [SAMPLES, 20, 5, 4, 3, 0])
    assert [(at.substage, at.samples) for at in said] == [("decode", SAMPLES), ("tail", 4), ("tool", 0)]


def test_single_episodes_that_come_and_go_are_no_news(said: list[SubstageChanged]) -> None:
    engine_with_samples(said, [SAMPLES, 4, 5, 3, 6, 4, 8, 2, 9, 8, 4])
    assert [(at.substage, at.samples) for at in said] == [
        ("decode", SAMPLES),
        ("tail", 4),
        ("decode", 9),
        ("tail", 4),
    ]
