"""What one process has of its worker when several pipelines are in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from jigsawrl.runtime.family import Family
from jigsawrl.runtime.shares import Cores, Units
from jigsawrl.runtime.sharing import Held, SharedActors


class Told(Cores):
    """Two workers of four cores, which remember what was given to whom."""

    given: list[tuple[Units, int, bool]] = []  # noqa: RUF012 - one test, one of these

    def give(self, units: Units, pid: int, note: Path, yields: bool) -> None:
        self.given.append((units, pid, yields))


def two_actors(tmp_path: Path) -> SharedActors:
    """Without their processes."""
    Told.given = []
    actors = SharedActors.__new__(SharedActors)
    actors.shares, actors.killed, actors.meeting = Told([(0, 1, 2, 3), (4, 5, 6, 7)], {}), False, tmp_path
    actors.processes = [SimpleNamespace(pid=pid) for pid in (100, 101)]  # type: ignore[misc]
    actors.held = [Held(), Held()]
    return actors


def pipeline(name: str, actors: SharedActors) -> Family:
    family = Family.__new__(Family)
    family.name, family.shared, family.held = name, actors, {}
    return family


def test_the_process_has_what_those_with_something_to_do_have(tmp_path):
    actors = two_actors(tmp_path)
    a, b = pipeline("a", actors), pipeline("b", actors)
    a.hold(0, (0, 1, 2, 3))
    b.hold(0, (3,))
    assert Told.given == [((0, 1, 2, 3), 100, False)] * 2
    a.keep(set())
    assert Told.given[-1] == ((3,), 100, False), "a has ended its phase, and others may have its cores now"
    a.keep(set())
    assert len(Told.given) == 3, "nothing has changed"
    a.hold(0, (0, 1))
    assert Told.given[-1] == ((0, 1, 3), 100, False), "it is told again what it had before"


def test_a_process_in_which_nobody_has_anything_to_do_stays_where_it_is(tmp_path):
    actors = two_actors(tmp_path)
    a = pipeline("a", actors)
    a.hold(0, (0, 1))
    a.hold(1, (4, 5))
    a.keep({1})
    assert Told.given == [((0, 1), 100, False), ((4, 5), 101, False)]


def test_all_leave_room_if_one_is_told_to(tmp_path):
    actors = two_actors(tmp_path)
    pipeline("a", actors).hold(0, (0, 1), yields=True)
    pipeline("b", actors).hold(0, (2,), yields=True)
    assert Told.given[-1] == ((0, 1, 2), 100, True)
