"""A pipeline as the scheduler knows it."""

from __future__ import annotations

from pathlib import Path

from graph.planning import WORKER, job
from mixes import SUMS

from jigsawrl.config.runfile import checked
from jigsawrl.graph.outlook import Outlook
from jigsawrl.runtime.member import Member
from jigsawrl.scheduler.layout import layout_of


def member_in(folder: Path) -> Member:
    made = job("a")
    outlook = Outlook(made.shape, made.costs, WORKER, made.forecast)
    return Member("a", checked({"name": "a", **SUMS}), folder, outlook, 0.0, layout_of(1, 1))


def test_only_a_new_step_makes_up_for_deaths(tmp_path: Path) -> None:
    """Who dies after each step, before it is remembered, makes the same one again and again."""
    member = member_in(tmp_path)
    deaths = []
    for step in (1, 1, 1, 2, 1, 2, 3):
        member.made(step)
        deaths.append(member.deaths)
        member.deaths += 1
    assert deaths == [0, 1, 2, 0, 1, 2, 0]


def test_a_step_that_nobody_was_told_of_makes_up_for_deaths_when_its_pipeline_goes_on_from_there(
    tmp_path: Path,
) -> None:
    member = member_in(tmp_path)
    deaths = []
    for remembered in (0, 1, 1, 3, 3, 3, 4):
        member.goes_on(remembered)
        deaths.append(member.deaths)
        member.deaths += 1
    assert deaths == [0, 0, 1, 0, 1, 2, 0]
