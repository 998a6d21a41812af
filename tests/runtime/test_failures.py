"""Rule 5: one failing pipeline is one failing pipeline."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mixes import (
    CALC,
    STEPS,
    SUMS,
    Results,
    assert_figures_agree,
    assert_nothing_is_left,
    events,
    learned,
    named,
    result,
    run_here,
    start,
    write_mix,
)

from jigsawrl.cli_runs import as_dict, run_several, table_of
from jigsawrl.pipeline.sandbox_keeper import SWITCH
from jigsawrl.runtime.member import RETRIES
from jigsawrl.runtime.shares import Cores
from jigsawrl.telemetry.logreader import read_run

pytestmark = pytest.mark.slow


def kill_once(victim: str, name: str, step: int, signals: tuple[int, ...]) -> Callable[[str, int], None]:
    """As soon as a pipeline has made this step for the first time."""
    left = list(signals)

    def on_step(made_by: str, made: int) -> None:
        if (made_by, made) == (name, step) and left:
            for number in left:
                os.kill(named(victim), number)
            left.clear()

    return on_step


@pytest.mark.parametrize("victim", ["driver:a", "actor1:b"])
def test_who_is_killed_goes_on_from_its_last_step_and_learns_the_same(
    victim: str, alone: Results, tmp_path: Path
) -> None:
    pipeline, out = victim[-1], tmp_path / "out"
    kill = kill_once(victim, pipeline, 2, (signal.SIGKILL,))
    outcome = run_here(write_mix(tmp_path, "jigsaw", prompt=True, a=SUMS, b=CALC), out, kill)
    assert [(each.how, each.steps) for each in outcome.pipelines] == [("finished", STEPS)] * 2
    assert {name: result(out / name) for name in "ab"} == alone
    (died,) = events(out, "died")
    assert (died["pipeline"], died["deaths"]) == (pipeline, 1)
    (recovered,) = events(out, "recovered")
    assert recovered["pipeline"] == pipeline
    assert recovered["step"] in (1, 2)  # 2 was made, but it may not have been remembered yet
    assert_nothing_is_left(out)


def test_where_one_death_leaves_a_worker_useless_all_begin_anew_there_and_learn_the_same(
    alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a client of MPS that reads memory which is not its own. Here the others could well go on."""
    out = tmp_path / "out"
    monkeypatch.setattr(Cores, "broken", lambda shares: True)
    kill = kill_once("actor1:a", "a", 1, (signal.SIGKILL,))
    outcome = run_here(write_mix(tmp_path, "jigsaw", prompt=True, a=SUMS, b=CALC), out, kill)
    assert [(each.how, each.steps) for each in outcome.pipelines] == [("finished", STEPS)] * 2
    assert {name: result(out / name) for name in "ab"} == alone
    died = {each["pipeline"]: (each["deaths"], each["reason"]) for each in events(out, "died")}
    assert died["a"][0] == 1
    assert died["b"] == (0, "it could not go on after a had died")
    assert_nothing_is_left(out)


def test_an_actor_that_stands_still_is_killed_like_any_other(alone: Results, tmp_path: Path) -> None:
    """As one of a paused lane does."""
    kill = kill_once("actor0:b", "b", 2, (signal.SIGSTOP, signal.SIGKILL))
    run_here(write_mix(tmp_path, "rlix", a=SUMS, b=CALC), tmp_path / "out", kill)
    assert {name: result(tmp_path / "out" / name) for name in "ab"} == alone
    assert_nothing_is_left(tmp_path / "out")


def data_task(folder: Path, body: str, **reward: Any) -> dict[str, Any]:
    """Prompts with a reward of the user's own, which does `body` for one of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(
        "import ctypes, os\n\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    if ground_truth == '3':\n        {body}\n    return float(len(solution_str) % 2)\n"
    )
    lines = [json.dumps({"prompt": f"{n}=", "answer": str(n)}) for n in range(8)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    target = {"path": f"{folder / 'rewards.py'}:score", **reward}
    tiny = {**SUMS["model"]["tiny"], "warmup_steps": 0}
    task = {"kind": "data", "path": str(folder / "data.jsonl"), "reward": target}
    return {**SUMS, "model": {"tiny": tiny}, "task": task}


def test_a_reward_that_segfaults_costs_its_pipeline_the_reward_and_the_others_nothing(
    alone: Results, tmp_path: Path
) -> None:
    bad = data_task(tmp_path / "data", "ctypes.string_at(0)")
    out = tmp_path / "out"
    outcome = run_here(write_mix(tmp_path, "jigsaw", a=SUMS, bad=bad), out)
    assert [each.how for each in outcome.pipelines] == ["finished"] * 2
    assert [row["reward/errors"] for row in learned(out / "bad")] == [4.0] * STEPS
    fine, without = map(str, table_of(outcome).columns[-1].cells)
    assert fine == "finished"
    assert without.startswith(f"finished; {4 * STEPS} rewards failed")
    assert result(out / "a") == alone["a"]
    assert_nothing_is_left(tmp_path / "out")


def test_who_dies_again_and_again_without_a_step_is_given_up_and_the_others_go_on(
    alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "off")  # else its driver is not to be seen
    bad = data_task(
        tmp_path / "data", "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9)"
    )
    out = tmp_path / "out"
    command = start(write_mix(tmp_path, a=SUMS, bad=bad), out)
    code, pipelines = command.answer()
    assert code == 1
    assert (pipelines["a"]["ended"], pipelines["bad"]["ended"]) == ("finished", "failed")
    reason = f"it died {RETRIES + 1} times in a row; last, bad/driver was ended by SIGKILL"
    assert pipelines["bad"]["reason"] == reason
    assert [event["deaths"] for event in events(out, "died")] == list(range(1, RETRIES + 2))
    assert result(out / "a") == alone["a"]
    command.assert_nothing_is_left()


def test_a_driver_that_has_much_to_read_when_its_actors_have_ended_is_not_taken_for_dead(
    tmp_path: Path,
) -> None:
    mix, out = write_mix(tmp_path, a=SUMS), tmp_path / "out"
    run_here(mix, out)
    log = out / "a" / "metrics.jsonl"
    first, *others = log.read_text().splitlines(keepends=True)
    log.write_text(first * 40_000 + "".join(others))  # as after as many steps
    (a,) = run_here(write_mix(tmp_path, a={**SUMS, "steps": STEPS + 1}), out, resume=True).pipelines
    assert (a.how, events(out, "died")) == ("finished", [])


def test_a_reward_that_may_not_fail_ends_its_pipeline_with_the_reason(alone: Results, tmp_path: Path) -> None:
    bad = data_task(tmp_path / "data", "raise ValueError('no such answer')", on_error="stop")
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "jigsaw", a=SUMS, bad=bad)
    code, answer = run_several(mix, [], out, resume=False, dry_run=False, as_json=True)
    pipelines = json.loads(answer)["pipelines"]
    assert code == 1
    assert (pipelines["a"]["ended"], pipelines["bad"]["ended"]) == ("finished", "failed")
    assert "no such answer" in pipelines["bad"]["reason"]
    assert "Traceback" not in pipelines["bad"]["reason"].partition("no such answer")[0]
    assert pipelines["bad"]["steps"] == 0
    assert result(out / "a") == alone["a"]
    assert events(out, "died") == []
    assert_nothing_is_left(out)


@pytest.mark.usefixtures("own_stores")
def test_the_scheduler_is_killed_and_resume_goes_on_with_all(alone: Results, tmp_path: Path) -> None:
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "rlix", a=SUMS, b={**CALC, "checkpoint": {"every": 1000}})
    command = start(mix, out)
    command.wait_for_step("b", 2)  # the first is in the store then, and nowhere else
    command.signal(signal.SIGKILL)
    command.end()
    command.assert_nothing_is_left(store=False)
    assert_figures_agree(out, as_dict(run_here(mix, out, resume=True)))
    assert [one.event for one in read_run(out).incidents] == ["killed"]
    assert {name: result(out / name) for name in "ab"} == alone
    assert max(event["step"] for event in events(out, "arrived") if event["pipeline"] == "b") > 0
    assert_nothing_is_left(out)  # that of the killed one is gone too
