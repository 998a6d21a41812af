"""What one process has of its worker when several pipelines are in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jigsawrl.runtime.family import Family
from jigsawrl.runtime.shares import Units
from jigsawrl.runtime.sharing import SharedActors

Given = list[tuple[Units, int, bool]]
"""Units, whom they were given, and whether he is to leave room."""


def two_actors(tmp_path: Path) -> tuple[SharedActors, Given]:
    """Without their processes, and what they are given."""
    given: Given = []
    actors: Any = SharedActors.__new__(SharedActors)
    actors.shares = SimpleNamespace(give=lambda units, pid, note, yields: given.append((units, pid, yields)))
    actors.actors = {rank: SimpleNamespace(pid=100 + rank) for rank in (0, 1)}
    actors.died, actors.meeting, actors.held = None, tmp_path, {}
    return actors, given


def pipeline(name: str, actors: SharedActors) -> Family:
    family = Family.__new__(Family)
    family.name, family.shared, family.held = name, actors, actors.held.setdefault(name, {})
    return family


def test_the_process_has_what_those_with_something_to_do_have(tmp_path):
    actors, given = two_actors(tmp_path)
    a, b = pipeline("a", actors), pipeline("b", actors)
    a.hold(0, (0, 1, 2, 3))
    b.hold(0, (3,))
    assert given == [((0, 1, 2, 3), 100, False)] * 2
    a.keep(set())
    assert given[-1] == ((3,), 100, False), "a has ended its phase, and others may have its cores now"
    a.keep(set())
    assert len(given) == 3, "nothing has changed"
    a.hold(0, (0, 1))
    assert given[-1] == ((0, 1, 3), 100, False), "it is told again what it had before"


def test_a_process_in_which_nobody_has_anything_to_do_stays_where_it_is(tmp_path):
    actors, given = two_actors(tmp_path)
    a = pipeline("a", actors)
    a.hold(0, (0, 1))
    a.hold(1, (4, 5))
    a.keep({1})
    assert given == [((0, 1), 100, False), ((4, 5), 101, False)]


def test_all_leave_room_if_one_is_told_to(tmp_path):
    actors, given = two_actors(tmp_path)
    pipeline("a", actors).hold(0, (0, 1), yields=True)
    pipeline("b", actors).hold(0, (2,), yields=True)
    assert given[-1] == ((0, 1, 2), 100, True)
