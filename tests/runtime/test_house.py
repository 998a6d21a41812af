"""What pipelines on one base ask of the process that they share."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from jigsawrl.config.tasks import ArithmeticTask, CalculatorTask
from jigsawrl.pipeline.actor_process import receive, send
from jigsawrl.runtime.shared_actor import DeviceStream, House, Tenant


def test_prompts_that_came_together_are_taken_in_between_the_same_two_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One by one they would be read one by one, while everybody's samples waited. What came behind them is done
    behind them, and nothing is lost when the pipeline leaves."""
    place: Any = SimpleNamespace(device="cpu")
    config: Any = SimpleNamespace(name="a")
    house, (ours, theirs) = House(place), Pipe()
    visit = house.visit
    done: list[Any] = []

    def visited() -> Any:
        done.append("visit")
        return visit()

    def performed(tenant: Tenant, method: str, args: tuple[Any, ...]) -> str:
        done.append(method)
        return f"{method} is done"

    monkeypatch.setattr(house, "visit", visited)
    monkeypatch.setattr(house, "_request", lambda tenant, request: done.append(request))
    monkeypatch.setattr(house, "_perform", performed)
    trainings = [(id, "forward_backward", ()) for id in (7, 8)]
    requests = [(None, number, ()) for number in range(4)]
    for message in (*requests[:3], trainings[0], requests[3], trainings[1]):
        send(theirs, message)
    house.tenants["a"] = tenant = Tenant(config, ours, None, DeviceStream("cpu"))
    serving = threading.Thread(target=house._serve, args=(tenant,))
    serving.start()
    assert [receive(theirs) for _ in range(2)] == [
        ("answer", id, "forward_backward is done") for id in (7, 8)
    ]
    theirs.close()
    serving.join(timeout=60)
    assert not serving.is_alive()
    taken_in = ["visit", 0, 1, 2, "forward_backward", "visit", 3, "forward_backward"]
    assert done == [*taken_in, "visit"], "and once more to leave"
    assert not house.tenants


def test_a_burst_of_decode_steps_ends_for_a_sample_whose_pipeline_has_another_turn() -> None:
    """Others' samples are handed over when it ends by itself."""
    place: Any = SimpleNamespace(device="cpu")
    house = House(place)
    members = {name: SimpleNamespace(ended=[]) for name in ("turns", "answers")}
    engine: Any = SimpleNamespace(members=members)
    house._shared = engine
    for name, task in (("turns", CalculatorTask()), ("answers", ArithmeticTask()), ("new", CalculatorTask())):
        config: Any = SimpleNamespace(name=name, task=task)
        house.tenants[name] = Tenant(config, Pipe()[0], None, DeviceStream("cpu"))
    members["answers"].ended.append("a sample")
    assert not house._is_waited_for()
    members["turns"].ended.append("a sample")
    assert house._is_waited_for()
