"""A pipeline as the scheduler knows it."""

from __future__ import annotations

from pathlib import Path

from graph.planning import WORKER, job
from mixes import SUMS

from jigsawrl.config.runfile import checked
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.outlook import Outlook
from jigsawrl.runtime.member import Member


def test_only_a_new_step_makes_up_for_deaths(tmp_path: Path) -> None:
    """Who dies after each step, before it is remembered, makes the same one again and again."""
    made = job("a")
    forecast = Forecast.from_prior(made.expected, made.shape.max_tokens)
    outlook = Outlook(made.shape, made.costs, WORKER, forecast)
    member = Member("a", checked({"name": "a", **SUMS}), tmp_path, outlook, 0.0)
    deaths = []
    for step in (1, 1, 1, 2, 1, 2, 3):
        member.made(step)
        deaths.append(member.deaths)
        member.deaths += 1
    assert deaths == [0, 1, 2, 0, 1, 2, 0]
