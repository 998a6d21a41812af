"""Processes that are stopped for ever: they are ended and count as dead, and nothing waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from mixes import (
    CALC,
    PATIENCE_S,
    STEPS,
    SUMS,
    Command,
    Results,
    assert_nothing_is_left,
    events,
    poll,
    result,
    run_here,
    start,
    write_mix,
)
from test_failures import data_task, kill_once

from jigsawrl import liveness
from jigsawrl.errors import JigsawError
from jigsawrl.liveness import SETTING, silent_s
from jigsawrl.pipeline.sandbox_keeper import SWITCH
from jigsawrl.runtime import start as children
from jigsawrl.runtime.family import stop_outside_of
from jigsawrl.runtime.member import RETRIES
from jigsawrl.store.locks import holders, locked

pytestmark = pytest.mark.slow

LIMIT_S = 6


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, str(LIMIT_S))


@pytest.mark.parametrize("victim", ["driver:a", pytest.param("actor1:a", marks=pytest.mark.long)])
def test_who_is_stopped_for_ever_is_ended_and_its_pipeline_learns_the_same(
    victim: str, alone: Results, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stop = kill_once(victim, "a", 1, (signal.SIGSTOP,))
    outcome = run_here(write_mix(tmp_path, "jigsaw", prompt=True, a=SUMS, b=CALC), out, stop)
    assert [(each.how, each.steps) for each in outcome.pipelines] == [("finished", STEPS)] * 2
    assert {name: result(out / name) for name in "ab"} == alone
    (died,) = events(out, "died")
    process = "a/driver" if victim == "driver:a" else "a/actor/1"
    said = f"{process} did not show that it was alive for {LIMIT_S} s, and was ended"
    assert (died["pipeline"], died["reason"]) == ("a", said)
    assert_nothing_is_left(out)


def without_end(tmp_path: Path) -> Command:
    """A run of two that makes steps until it is ended."""
    rarely = {"checkpoint": {"every": 1000}, "steps": 100_000}
    mix = write_mix(tmp_path, "jigsaw", prompt=True, a={**SUMS, **rarely}, b={**CALC, **rarely})
    command = start(mix, tmp_path / "out")
    command.wait_for_step("b", 1)
    return command


def test_a_scheduler_that_is_stopped_for_ever_is_ended_with_all_that_is_its(tmp_path: Path) -> None:
    command = without_end(tmp_path)
    command.signal(signal.SIGSTOP)
    code, _, said = command.end()
    assert code == -signal.SIGKILL
    assert f"the scheduler (process {command.process.pid}) did not show that it was alive for 6 s" in said
    assert "go on with --resume" in said
    poll(lambda: not command.alive(), lambda: f"left behind: {command.alive()}")


@pytest.mark.long
def test_one_ctrl_c_ends_a_run_whose_driver_is_stopped_within_a_bound(tmp_path: Path) -> None:
    command = without_end(tmp_path)
    os.kill(command.named("driver:a")[0], signal.SIGSTOP)
    command.signal(signal.SIGTERM)
    code, pipelines = command.answer()
    assert (code, {each["ended"] for each in pipelines.values()}) == (130, {"interrupted"})
    command.assert_nothing_is_left()


def signal_all(command: Command, number: int) -> None:
    """The command first; what it has started afterwards, for as long as there is anything."""
    command.signal(number)
    for pid in command.alive():
        with suppress(ProcessLookupError):  # a reward's process that has ended since
            os.kill(pid, number)


@pytest.mark.long
def test_what_is_stopped_as_a_whole_for_longer_than_the_limit_goes_on_and_nobody_has_died(
    alone: Results, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = start(write_mix(tmp_path, "jigsaw", prompt=True, a=SUMS, b=CALC), out)
    command.wait_for_step("b", 1)
    signal_all(command, signal.SIGSTOP)
    time.sleep(2 * LIMIT_S)
    signal_all(command, signal.SIGCONT)
    code, pipelines = command.answer()
    assert (code, {each["ended"] for each in pipelines.values()}) == (0, {"finished"})
    assert events(out, "died") == []
    assert {name: result(out / name) for name in "ab"} == alone


@pytest.mark.long
def test_a_scheduler_that_is_stopped_for_less_than_the_limit_goes_on_and_nobody_has_died(
    alone: Results, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = start(write_mix(tmp_path, "jigsaw", prompt=True, a=SUMS, b=CALC), out)
    command.wait_for_step("b", 1)
    command.signal(signal.SIGSTOP)
    time.sleep(LIMIT_S / 2)
    command.signal(signal.SIGCONT)
    code, _ = command.answer()
    assert (code, events(out, "died")) == (0, [])
    assert {name: result(out / name) for name in "ab"} == alone


@pytest.mark.long
def test_a_reward_that_takes_longer_than_the_limit_is_waited_for(alone: Results, tmp_path: Path) -> None:
    slow = data_task(tmp_path / "data", f"import time; time.sleep({LIMIT_S + 1})")
    out = tmp_path / "out"
    slow["steps"] = 1
    slow["rollout"] = {**SUMS["rollout"], "samples": 2}
    a, b = run_here(write_mix(tmp_path, "jigsaw", a=SUMS, slow=slow), out).pipelines
    assert (a.how, b.how, events(out, "died")) == ("finished", "finished", [])
    assert result(out / "a") == alone["a"]


@pytest.mark.long
def test_a_reward_that_stops_its_driver_again_and_again_costs_its_own_pipeline_only(
    alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "off")  # else its driver is not to be seen
    stop = "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 19)"
    out = tmp_path / "out"
    command = start(write_mix(tmp_path, a=SUMS, bad=data_task(tmp_path / "data", stop)), out)
    code, pipelines = command.answer(3 * PATIENCE_S)
    assert code == 1
    assert (pipelines["a"]["ended"], pipelines["bad"]["ended"]) == ("finished", "failed")
    silent = f"bad/driver did not show that it was alive for {LIMIT_S} s, and was ended"
    assert pipelines["bad"]["reason"] == f"it died {RETRIES + 1} times in a row; last, {silent}"
    assert result(out / "a") == alone["a"]
    command.assert_nothing_is_left()


@pytest.mark.long
def test_a_stopped_fork_server_ends_with_all_that_came_of_it_and_what_ran_goes_on(tmp_path: Path) -> None:
    command = without_end(tmp_path)
    driver = command.named("driver:a")[0]
    stat = Path(f"/proc/{driver}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGSTOP)
    log = command.out / "events.jsonl"
    command.wait_for(lambda: log.read_text().count('"event":"recovered"') == 2, "that both go on")
    command.signal(signal.SIGINT)
    assert command.end()[0] == 130
    command.assert_nothing_is_left()


# A gang that does not form

started = children.start_actor


def start_actor_that_fails(*arguments: object) -> None:
    from jigsawrl.pipeline import actor_process

    def cannot(*place: object) -> None:
        raise OSError("a thread could not be started")

    if arguments[4] == 1:
        actor_process.join_the_others = cannot  # type: ignore[assignment]
    started(*arguments)  # type: ignore[arg-type]


def test_a_worker_that_fails_while_a_gang_forms_is_a_failure_of_its_pipeline_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "start_actor", start_actor_that_fails)
    (a,) = run_here(write_mix(tmp_path, a=SUMS), tmp_path / "out").pipelines
    assert a.how == "failed"
    what = "worker 1 failed: OSError: a thread could not be started"
    assert a.reason.startswith(f"it died {RETRIES + 1} times in a row; last, ")
    assert what in a.reason
    assert_nothing_is_left(tmp_path / "out")


# Pauses


def test_nobody_is_paused_where_it_holds_a_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom jigsawrl.store.locks import locked\n"
        "while True:\n    with locked(Path(sys.argv[1]), 60):\n        time.sleep(0.004)\n    time.sleep(0.004)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(lock)]) as process:
        try:
            poll(lambda: process.pid in holders(lock), "it locks nothing")
            for _ in range(20):
                stop_outside_of([lock], process.pid)
                with locked(lock, 10.0):  # whoever wants it gets it
                    pass
                os.kill(process.pid, signal.SIGCONT)
        finally:
            process.kill()


@pytest.mark.parametrize("text", ["", "soon", "2", "-5", "inf", "nan"])
def test_a_limit_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(JigsawError, match=f"{SETTING}: .* set it to 3 seconds or more"):
        silent_s()
    monkeypatch.delenv(SETTING)
    assert silent_s() == liveness.SILENT_S
