"""What user code has started is gone when its process is, and user code does not reach those that run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_code
import pytest
from test_sandbox import marked

import jigsawrl
from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.sandbox import Failure, Sandbox
from jigsawrl.pipeline.sandbox_keeper import SWITCH

CODE = Path(hostile_code.__file__)
PACKAGE = Path(jigsawrl.__file__).parent.parent
PATIENCE_S = 20.0


@pytest.fixture(params=["namespaces", "no namespaces"])
def namespaces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tests that use it run with PID namespaces and without."""
    wanted = request.param == "namespaces"
    monkeypatch.setenv(SWITCH, "on" if wanted else "off")
    if wanted:
        require_namespaces()
    return wanted


def require_namespaces() -> None:
    sandbox = Sandbox(f"{CODE}:do", {}, processes=1, timeout=10)
    reason = sandbox.uncontained()
    sandbox.close()
    if reason is not None:
        pytest.skip(f"this machine permits no PID namespaces: {reason}")


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def poll(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def wait_for_all_started(mark: str) -> None:
    poll(lambda: len(marked(mark)) >= hostile_code.STARTED, "not all were started")


def assert_gone(mark: str) -> None:
    poll(lambda: not marked(mark), "processes that user code started are still there")


# What user code has started


@pytest.mark.parametrize(
    ("then", "kind"),
    [("exit", "died"), ("hang", "timeout"), ("stop itself", "timeout")],
)
def test_what_a_call_has_started_is_gone_when_its_process_has_ended(
    namespaces: bool, mark: str, then: str, kind: str
) -> None:
    sandbox = Sandbox(f"{CODE}:start_processes", {}, processes=1, timeout=1)
    failure = sandbox.call(None, {"mark": mark, "then": then}).result(PATIENCE_S)
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert_gone(mark)
    sandbox.close()


def test_in_a_namespace_nothing_survives_the_keeper_however_it_ends(mark: str) -> None:
    require_namespaces()
    sandbox = Sandbox(f"{CODE}:start_processes", {}, processes=1, timeout=1000)
    call = sandbox.call(None, {"mark": mark, "then": "hang"})
    wait_for_all_started(mark)
    for each in Path("/proc/self/task").glob("*/children"):
        for child in each.read_text().split():
            if b"sandbox_keeper" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
    assert_gone(mark)
    assert call.result(PATIENCE_S).kind == "died"
    sandbox.close()


@pytest.mark.parametrize("then", ["return", "stop parent"])
def test_what_calls_have_started_is_gone_when_all_is_closed(namespaces: bool, mark: str, then: str) -> None:
    """Also where user code has stopped the process above it, which without namespaces is its keeper."""
    sandbox = Sandbox(f"{CODE}:start_processes", {}, processes=1, timeout=1)
    sandbox.call(None, {"mark": mark, "then": then}).result(PATIENCE_S)
    if then == "return":
        wait_for_all_started(mark)
    sandbox.close()
    assert_gone(mark)


@pytest.mark.parametrize("then", ["return", "stop parent", "hang"])
def test_what_calls_have_started_is_gone_when_the_driver_is_killed(
    namespaces: bool, mark: str, then: str
) -> None:
    script = f"""
        import sys
        from jigsawrl.pipeline.sandbox import Sandbox
        sandbox = Sandbox("{CODE}:start_processes", {{}}, processes=1, timeout=1000)
        call = sandbox.call(None, {{"mark": sys.stdin.readline().strip(), "then": "{then}"}})
        if "{then}" == "return":
            call.result()
        print("done", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(f"{mark}\n")
        driver.stdin.flush()
        driver.stdout.readline()
        wait_for_all_started(mark)
        driver.kill()
    assert_gone(mark)


RUN_FILE = """
name: daemons
steps: 1000
device: cpu
model: {tiny: {layers: 1, hidden: 32, heads: 2, kv_heads: 1, warmup_steps: 0}}
task: {kind: data, path: data.jsonl, reward: {path: "rewards.py:score"}}
rollout: {prompts_per_step: 2, samples: 2, max_tokens: 4}
"""
REWARD = """
import subprocess
started = []
def score(data_source, solution_str, ground_truth, extra_info=None):
    if not started:
        started.append(subprocess.Popen(["sh", "-c", "sleep 1000; true", ground_truth], start_new_session=True))
    return float(len(solution_str) % 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "end"), [(1000, "killed"), (2, "finished")])
def test_what_a_reward_has_started_is_gone_when_its_run_is(
    tmp_path: Path, mark: str, steps: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without namespaces, which the run says."""
    monkeypatch.setenv(SWITCH, "off")
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text(f'{{"prompt": "1=", "answer": "{mark}"}}\n' * 4)
    command = [sys.executable, "-m", "jigsawrl", "run", "run.yaml", f"steps={steps}", "--out", "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path) as run:
        assert run.stdout is not None
        if end == "killed":
            poll(lambda: marked(mark), "the reward was never called")
            run.kill()
        said = run.stdout.read().decode()
    assert run.returncode == (-signal.SIGKILL if end == "killed" else 0), said
    assert_gone(mark)
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "uncontained"]
    assert f"without PID namespaces ({SWITCH} is off)" in told["text"]
    assert told["text"] in " ".join(said.split())


# Whom user code reaches


def survey() -> dict[str, Any]:
    sandbox = Sandbox(f"{CODE}:survey", {}, processes=1, timeout=30)
    try:
        found: dict[str, Any] = sandbox.call(None, {"driver": os.getpid()}).result(PATIENCE_S)
        assert isinstance(found, dict), found
        return found | {"uncontained": sandbox.uncontained()}
    finally:
        sandbox.close()


def test_in_a_namespace_user_code_sees_and_reaches_nothing_but_what_it_has_started() -> None:
    require_namespaces()
    found = survey()
    assert not found["reached"]
    assert found["seen"] == [1, found["number"]]


def test_no_two_processes_of_user_code_have_the_same_number() -> None:
    sandboxes = [Sandbox(f"{CODE}:survey", {}, processes=1, timeout=30) for _ in range(4)]
    found = [sandbox.call(None, {"driver": 1}).result(PATIENCE_S)["number"] for sandbox in sandboxes]
    for sandbox in sandboxes:
        sandbox.close()
    assert len(set(found)) == 4


def test_user_and_files_are_those_of_the_driver(namespaces: bool) -> None:
    found = survey()
    assert found["user"] == [os.getuid(), os.geteuid(), os.getgid()]
    assert found["secret"] == os.access("/etc/shadow", os.R_OK)
    assert found["own"]
    assert found["files"]


def test_processes_of_user_code_work_as_elsewhere(namespaces: bool) -> None:
    sandbox = Sandbox(f"{CODE}:many_ways", {}, processes=1, timeout=60)
    assert sandbox.call(None, {}).result(PATIENCE_S) == [[0, 1, 4, 9], "42\n"]
    sandbox.close()


def test_a_reward_that_stops_or_kills_the_process_above_it_harms_itself_at_most(namespaces: bool) -> None:
    """In a namespace there is none, so that it means its own group; elsewhere it is the keeper."""
    sandbox = Sandbox(f"{CODE}:do", {}, processes=1, timeout=1)
    stopped = sandbox.call(None, {"what": "stop parent"}).result(PATIENCE_S)
    assert stopped == (Failure("timeout", "it took longer than 1 s") if namespaces else "stop parent")
    killed = sandbox.call(None, {"what": "kill parent"}).result(PATIENCE_S)
    assert killed == Failure("died", "its process was killed by SIGKILL")
    assert sandbox.call(None, {"what": "return"}).result(PATIENCE_S) == "return"
    sandbox.close()


@pytest.mark.parametrize("threads", [1, 8])
def test_a_process_that_stops_itself_is_ended_by_the_time_limit(namespaces: bool, threads: int) -> None:
    sandbox = Sandbox(f"{CODE}:do", {}, processes=1, timeout=0.5, threads=threads)
    calls = [sandbox.call(None, {"what": what}) for what in ("return", "stop itself", "return")]
    found = [call.result(PATIENCE_S) for call in calls]
    assert found == ["return", Failure("timeout", "it took longer than 0.5 s"), "return"]
    sandbox.close()


def as_nobody(script: str) -> subprocess.CompletedProcess[str] | None:
    """By a Python that every user may run, as the tests' own may be in root's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        usable = f"import sys; sys.path.append({str(PACKAGE)!r}); assert sys.version_info >= (3, 11); import jigsawrl"
        for text in (usable, usable + "\n" + script):
            try:
                done = subprocess.run(
                    [python, "-c", text],
                    capture_output=True, text=True, user=65534, group=65534, extra_groups=[], cwd="/",
                )  # fmt: skip
            except OSError:
                break
            if text != usable:
                return done
            if done.returncode:
                break
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_namespaces_too_and_gets_no_rights_by_them() -> None:
    require_namespaces()
    script = f"""
        import json, os
        from jigsawrl.pipeline.sandbox import Sandbox
        sandbox = Sandbox("{CODE}:survey", {{}}, processes=1, timeout=30)
        found = sandbox.call(None, {{"driver": os.getpid()}}).result(30)
        print(json.dumps(found | {{"uncontained": sandbox.uncontained()}}))
        sandbox.close()
    """
    done = as_nobody(textwrap.dedent(script))
    if done is None:
        pytest.skip("another user may not read Python or the package here")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["user"] == [65534] * 3
    assert int(found["capabilities"], 16) == 0
    assert not found["secret"]
    assert (found["own"], found["files"]) == (True, True)
    if found["uncontained"] is None:
        assert not found["reached"]
        assert found["seen"] == [1, found["number"]]


def test_a_process_that_may_start_no_thread_says_so(tmp_path: Path) -> None:
    program = """
    import threading
    def refuse(thread): raise RuntimeError("can't start new thread")
    threading.Thread.start = refuse
    from jigsawrl.pipeline.sandbox_host import main
    main(None)
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    paths = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(run, input='{"paths": []}\n', capture_output=True, text=True, env=paths, timeout=60)
    assert json.loads(done.stdout)["refused"].startswith("RuntimeError: can't start new thread")
    assert done.stderr == ""


def test_user_code_that_may_start_no_process_names_the_limit(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text('raise RuntimeError("can\'t start new thread")\n')
    sandbox = Sandbox(f"{tmp_path / 'code.py'}:score", {}, processes=1, timeout=10)
    with pytest.raises(JigsawError, match=r"cannot load .*: another process or thread cannot be started"):
        sandbox.check()
    sandbox.close()
