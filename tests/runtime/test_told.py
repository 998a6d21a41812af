"""What a pipeline's processes were told to run is not what those after a death were told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from jigsawrl.runtime.messages import Over
from jigsawrl.runtime.mind import Lost
from jigsawrl.runtime.scheduler import Scheduler


def test_last_words_of_a_dead_driver_that_went_on_by_itself_do_not_count_for_the_next() -> None:
    member: Any = SimpleNamespace(told=None, paused=set())
    scheduler = MagicMock(members={"a": member})
    scheduler.mind.runs.return_value = object()
    scheduler.mind.loading, scheduler.mind.events = set(), []
    over = Over("training", 2, (0.1,), 1, (), 0.0, 0.0, 5.0, False)
    scheduler.news = [("a", over)]
    Scheduler._think(scheduler)
    assert member.told is scheduler.mind.runs("a")
    scheduler.news = [("a", over), ("a", Lost())]
    Scheduler._think(scheduler)
    assert member.told is None
