"""Whatever a policy moves or pauses, and whenever, what is learned stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixes import CALC, SUMS, Results, assert_nothing_is_left, events, result, run_here, write_mix

from jigsawrl.policies.concurrent import Concurrent
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Action, Event, Migrate, Pause, Resume, State, Wait, Woken
from jigsawrl.policies.tails import last_tails


class Gathers:
    """Everything at once, and every rollout of which only tails are left goes to one worker."""

    name = "gathers"

    def decide(self, state: State, happened: list[Event]) -> list[Action]:
        actions: list[Action] = list(Concurrent().decide(state, happened))
        for pipeline in state.unfinished():
            tails = last_tails(state, pipeline)
            if len(tails) > 1 and len(tails) == len(pipeline.lanes):
                target = tails[pipeline.step % len(tails)].workers
                actions.append(Migrate(pipeline.name, tuple(lane.id for lane in tails), (target,)))
        return actions


class Restless(Gathers):
    """Whatever happens, all stand still for a moment; what stands still is gathered too."""

    name = "restless"

    def decide(self, state: State, happened: list[Event]) -> list[Action]:
        if any(isinstance(event, Woken) for event in happened):
            return [Resume(lane.id) for lane in state.lanes.lanes.values() if lane.paused]
        actions = super().decide(state, happened)
        leaving = {key for action in actions if isinstance(action, Migrate) for key in action.lanes}
        staying = [
            lane.id for lane in state.lanes.lanes.values() if not lane.paused and lane.id not in leaving
        ]
        return [*(Pause(key) for key in staying), *actions, Wait(state.now + 0.02)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Gathers(), Restless()], ids=lambda policy: policy.name)
def test_pipelines_whose_tails_are_gathered_and_who_are_paused_learn_the_same(
    policy: Gathers, alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "concurrent", policy)
    out = tmp_path / "out"
    run_here(write_mix(tmp_path, "concurrent", a=SUMS, b=CALC), out)
    assert {name: result(out / name) for name in "ab"} == alone
    actions = {event["action"] for event in events(out, "action")}
    assert {"migrate", "pause"} & actions == (
        {"migrate", "pause"} if policy.name == "restless" else {"migrate"}
    )
    assert_nothing_is_left(tmp_path / "out")
