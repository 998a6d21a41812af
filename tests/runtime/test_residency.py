"""Pipelines that do not fit beside each other take turns in memory, and learn the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixes import CALC, STEPS, SUMS, Results, events, result, run_here, start, stores_of, write_mix

from jigsawrl.config.pipelines import load_mix
from jigsawrl.errors import JigsawError
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.hardware import HARDWARE
from jigsawrl.runtime.launch import member_of, own_config
from jigsawrl.runtime.replay import replayed
from jigsawrl.scheduler.memory import Memory

LIMITS = st.dictionaries(st.sampled_from("abcdef"), st.floats(1, 100), min_size=1)


@given(LIMITS, st.floats(1, 300), st.floats(0, 100), st.data())
def test_whoever_is_left_awake_fits(
    states: dict[str, float], limit: float, needed: float, data: st.DataObject
) -> None:
    memory = Memory(limit, (0,), None, states)
    for name in data.draw(st.permutations(sorted(states))):
        memory.wakes(name)
    running = data.draw(st.sets(st.sampled_from(sorted(states))))
    held = sum(states[name] for name in running)
    idle = [name for name in memory.awake if name not in running]
    chosen = memory.to_sleep(running, held, needed)
    if chosen is None:
        assert held + needed > limit
        return
    assert chosen == idle[: len(chosen)], "the longest idle go first"
    left = sum(states[name] for name in idle[len(chosen) :])
    assert held + needed + left <= limit + 1e-9
    if chosen:
        assert held + needed + left + states[chosen[-1]] > limit - 1e-9, "and no more than must"


def write_tight_mix(folder: Path, policy: str, spare: float) -> Path:
    """Two pipelines on workers that hold what one needs when it runs, and `spare` times the state of another."""
    file = write_mix(folder, policy, a=SUMS, b=CALC)
    mix = load_mix(file)
    worker = cpu_worker(1, 2)
    sizes = [
        member_of(mix, name, own_config(mix, name, "cpu"), folder, worker, None).outlook.memory(2, 1, 2)
        for name in ("a", "b")
    ]
    needed = max(max(size.rollout, size.training) for size in sizes)
    limit = needed + spare * min(size.host for size in sizes)
    file.write_text(json.dumps({**json.loads(file.read_text()), "memory": limit / 1e9}))
    return file


def test_actors_train_on_as_many_tokens_at_once_as_were_planned_with(tmp_path):
    mix = load_mix(write_mix(tmp_path, "jigsaw", a=SUMS))
    told = {
        name: member_of(mix, "a", own_config(mix, "a", "cpu"), tmp_path, worker, None)
        for name, worker in (("cores", cpu_worker(1, 2)), ("gpu", HARDWARE["h200"]))
    }
    tokens = {name: member.config.trainer.micro_batch_tokens for name, member in told.items()}
    assert tokens == {"cores": 4096, "gpu": 8192}
    assert tokens == {name: member.outlook.shape.micro_batch_tokens for name, member in told.items()}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["jigsaw", "concurrent"])
def test_one_sleeps_while_the_other_runs_and_both_learn_the_same(
    policy: str, alone: Results, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    outcome = run_here(write_tight_mix(tmp_path, policy, 0.5), out)
    assert [(each.how, each.steps) for each in outcome.pipelines] == [("finished", STEPS)] * 2
    assert {name: result(out / name) for name in ("a", "b")} == alone
    swaps = [event for event in events(out, "substage") if event["substage"] == "swap"]
    assert {(swap["pipeline"], swap["verb"]) for swap in swaps} >= {("a", "sleep"), ("a", "wake_up")}
    assert all(swap["t1"] > swap["t0"] for swap in swaps)
    assert any(swap["bytes"] > 0 for swap in swaps if swap["verb"] == "wake_up")
    assert all(each.same for each in replayed(out))


@pytest.mark.slow
def test_who_cannot_wake_up_for_its_state_is_torn_goes_on_from_what_is_left(
    alone: Results, tmp_path: Path
) -> None:
    run = start(write_tight_mix(tmp_path, "concurrent", 0.5), tmp_path / "out")

    def tear() -> int:
        torn = [path for root in stores_of(run.out) for path in root.glob("?+frozen@*")]
        for path in torn:
            path.write_bytes(b"torn")
        return len(torn)

    run.wait_for(tear, "a state in the store")
    assert run.end()[0] == 0, run.said()
    assert {name: result(run.out / name) for name in ("a", "b")} == alone
    assert "cannot wake up: its state is not in the store" in run.said()
    run.assert_nothing_is_left()


def test_what_never_fits_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    file = write_tight_mix(tmp_path, "jigsaw", -1.5)
    with pytest.raises(JigsawError, match=r"needs 0\.0\d+ GB on each of 2 workers, and a cpu has 0\.0\d+ GB"):
        run_here(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
