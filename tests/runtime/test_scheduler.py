"""What the scheduler makes of single messages, without any process."""

from __future__ import annotations

from pathlib import Path

from graph.planning import WORKER, job
from mixes import SUMS, Watching

from jigsawrl.config.runfile import checked
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.interference import CORES
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.serial import Serial
from jigsawrl.runtime.member import Member
from jigsawrl.runtime.messages import Began, Made
from jigsawrl.runtime.scheduler import Scheduler
from jigsawrl.telemetry.events import EventLog


def test_only_a_new_step_makes_up_for_deaths(tmp_path: Path) -> None:
    """Who dies after each step, before it is remembered, makes the same one again and again."""
    made = job("a")
    forecast = Forecast.from_prior(made.expected, made.shape.max_tokens)
    outlook = Outlook(made.shape, made.costs, WORKER, forecast)
    member = Member("a", checked({"name": "a", **SUMS}), tmp_path / "a", outlook, 0.0)
    log = EventLog(tmp_path / "events.jsonl")
    scheduler = Scheduler(
        {"a": member}, Serial(), [(0,)], CORES, WORKER.device_bytes, tmp_path, log, Watching(), False
    )
    deaths = []
    for message in (Made(1, {}), Began(4, 0), Made(1, {}), Made(2, {})):
        member.deaths += 1
        scheduler._hear(member, message)
        deaths.append(member.deaths)
    log.close()
    assert deaths == [0, 1, 2, 0]
