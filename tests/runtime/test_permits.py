"""What a permit covers is written in it; a driver only follows it."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from jigsawrl.phases.ids import PhaseId
from jigsawrl.runtime import channel, multiplexed_env
from jigsawrl.runtime.channel import SchedulerChannel
from jigsawrl.runtime.messages import Gather, PhasePermit, Seats, following
from jigsawrl.runtime.multiplexed_env import MultiplexedEnv

ROLLOUT, TRAINING = Seats((0, 1), (0, 1), (1, 1)), Seats((0,), (0, 0), (2, 2))
FIRST = PhaseId("a", "rollout", 1)


def phases(count: int) -> list[PhaseId]:
    found = [FIRST]
    while len(found) < count:
        found.append(following(found[-1]))
    return found


def test_a_loop_comes_to_the_training_after_its_rollout_and_then_to_the_next_step() -> None:
    assert [str(each) for each in phases(4)] == [
        "rollout 1 of a",
        "training 1 of a",
        "rollout 2 of a",
        "training 2 of a",
    ]


def test_a_permit_that_says_no_more_covers_its_phase_alone() -> None:
    permit = PhasePermit(FIRST, ROLLOUT)
    assert [permit.seats_for(each, 0.0) for each in phases(4)] == [ROLLOUT, None, None, None]


def test_a_permit_covers_further_steps_for_as_long_as_it_says_and_ends_between_two_of_them() -> None:
    permit = PhasePermit(FIRST, ROLLOUT, training=TRAINING, covers_s=1.0)
    assert [permit.seats_for(each, 0.9) for each in phases(4)] == [ROLLOUT, TRAINING, ROLLOUT, TRAINING]
    assert [permit.seats_for(each, 1.0) for each in phases(4)] == [ROLLOUT, TRAINING, None, TRAINING]


def test_the_permit_of_a_training_covers_no_rollout() -> None:
    """Actors that train may have no engine."""
    permit = PhasePermit(following(FIRST), TRAINING, training=TRAINING, covers_s=1.0)
    assert permit.seats_for(PhaseId("a", "rollout", 2), 0.0) is None


@pytest.fixture
def ends() -> tuple[Any, Connection]:
    """A driver's environment, as far as permits are concerned, and the scheduler's end of its channel."""
    scheduler, theirs = Pipe()
    config = SimpleNamespace(steps=3)
    return SimpleNamespace(channel=SchedulerChannel(theirs), config=config), scheduler


def test_a_driver_asks_when_the_time_that_its_permit_covers_is_over(
    ends: tuple[Any, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    env, scheduler = ends
    scheduler.send(PhasePermit(FIRST, ROLLOUT, training=TRAINING, covers_s=1.0))
    clock = [10.0]
    for module in (multiplexed_env, channel):
        monkeypatch.setattr(module, "now", lambda: clock[0])
    env.channel.receive()
    assert env.channel.seats == ROLLOUT
    training = following(FIRST)
    assert [MultiplexedEnv._covered(env, each) for each in (FIRST, training)] == [TRAINING, ROLLOUT]
    clock[0] += 1.0
    assert [MultiplexedEnv._covered(env, each) for each in (FIRST, training)] == [TRAINING, None]


def test_nothing_is_covered_beyond_the_last_step(ends: tuple[Any, Connection]) -> None:
    env, scheduler = ends
    scheduler.send(PhasePermit(FIRST, ROLLOUT, training=TRAINING, covers_s=1e9))
    env.channel.receive()
    assert MultiplexedEnv._covered(env, PhaseId("a", "training", 2)) == ROLLOUT
    assert MultiplexedEnv._covered(env, PhaseId("a", "training", 3)) is None


def test_a_driver_that_has_been_told_anything_listens_before_it_goes_on(ends: tuple[Any, Connection]) -> None:
    env, scheduler = ends
    scheduler.send(PhasePermit(FIRST, ROLLOUT, training=TRAINING, covers_s=1e9))
    env.channel.receive()
    scheduler.send(Gather((0,)))
    assert MultiplexedEnv._covered(env, FIRST) is None
