"""Lanes remember what they have reckoned; nobody may notice."""

from __future__ import annotations

import random

import pytest

from jigsawrl.graph.interference import CORES, H200, Interference
from jigsawrl.graph.lanes import Lane, Lanes, Segment
from jigsawrl.telemetry.events import Substage

WORKERS = 4
KINDS: tuple[Substage, ...] = ("swap", "prefill", "decode", "tail", "tool", "grad", "sync")


def some_lane(draw: random.Random, key: int) -> Lane:
    workers = tuple(sorted(draw.sample(range(WORKERS), draw.randint(1, WORKERS))))
    segments = tuple(Segment(draw.choice(KINDS), draw.uniform(1, 9)) for _ in range(draw.randint(1, 4)))
    return Lane(key, "a", 1, "rollout", workers, draw.choice([0.25, 0.5, 1.0]), segments)


def something_happens(draw: random.Random, lanes: Lanes, key: int) -> None:
    if not lanes.lanes or draw.random() < 0.3:
        lanes.add(some_lane(draw, key))
        return
    lane = lanes.lanes[draw.choice(list(lanes.lanes))]
    match draw.choice(["remove", "resize", "pause", "proceed", "replan", "advance"]):
        case "remove":
            lanes.remove(lane.id)
        case "resize":
            lanes.resize(lane.id, draw.choice([0.25, 0.5, 1.0]))
        case "pause":
            lanes.pause(lane.id, draw.random() < 0.5)
        case "proceed":
            lanes.proceed(lane)
        case "replan":
            lanes.replan(lane, some_lane(draw, key).segments)
        case "advance":
            lanes.advance(lanes.now + draw.uniform(0, 1))


def made_anew(lanes: Lanes) -> Lanes:
    fresh = Lanes(lanes.table, WORKERS, lanes.now)
    for lane in lanes.lanes.values():
        fresh.add(lane.copy())
    fresh.next_end()
    return fresh


@pytest.mark.parametrize("table", [H200, CORES], ids=lambda table: table.name)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happened_before_speeds_are_those_of_what_runs_now(table: Interference, seed: int) -> None:
    draw, lanes = random.Random(seed), Lanes(table, WORKERS)
    for key in range(120):
        something_happens(draw, lanes, key)
        if draw.random() < 0.5:
            lanes.next_end()
            fresh = made_anew(lanes)
            assert {k: lane.speed for k, lane in lanes.lanes.items()} == {
                k: lane.speed for k, lane in fresh.lanes.items()
            }
        for worker in range(WORKERS):
            assert lanes.crowd(worker) == made_anew(lanes).crowd(worker)
